"""Every way to read answers in every state of a vbucket as the table in docs/reading.md says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

import mirror
from cli import export as command
from mirror.errors import MirrorError
from mirror.feed.read.reader import ReadEnded
from mirror.feed.read.snapshot import Position, Snapshot
from mirror.inspection.verify import Verifier
from mirror.serve.http import problems
from mirror.spark.source import changes as spark_changes
from mirror.spark.source.columns import DOCUMENTS
from mirror.spark.source.local import plan, read
from mirror.spark.source.options import parse
from mirror.typed.rows import Shape
from mirror.wire import frame as fr
from mirror.wire.constants import Opcode, Status, StreamEndReason
from storage import errors
from storage.admin import backup
from storage.env import directory
from storage.format import keys, records
from storage.model import Collection, FailoverLog, Identity, Manifest, Seqno
from storage.read import scan
from storage.read.reading import BoundaryRead
from storage.read.view import open_view
from tests.serve.dcp_rig import DcpEndpoint
from tests.serve.http_site import IDENTITY, VBUUID, Source, events, running
from tests.serve.kv_rig import Endpoint, Hosted
from tests.serve.test_kv_scans import between, create, go_on

VBID = 2
ELSEWHERE = Identity("cluster", "bucket", "uuid", 8, 2, held=(4, 7))
ORDERS, ORDERS_ID = "shop.orders", 9
READING = (Path(__file__).parents[2] / "docs" / "reading.md").read_text()


@dataclass
class World:
    """A mirror whose vbucket `VBID` is in one of the states."""

    source: Source
    collection: str = "_default._default"
    collection_id: int = 0
    by_id: bool = False
    """True to name the collection by its id, for ways to read that can."""
    as_of: int | None = None
    """The boundary to read at, for ways to read that can."""
    is_served: bool = True
    """True if a server listens while the body runs."""
    happens: Callable[[], None] = lambda: None
    """Happens in the middle of a read."""
    keys: list[bytes] = field(default_factory=list)

    @property
    def path(self) -> str:
        return self.source.path

    @property
    def named(self) -> str | int:
        return self.collection_id if self.by_id else self.collection

    def seen(self, found: Iterable[bytes | None]) -> str:
        """Say if these are the documents that the vbucket had when the read began."""
        those = {key for key in found if key is not None and keys.vbid_of(key, 8) == VBID}
        if those == set(self.keys):
            return "answers"
        if self.source.rolled_back and those == set(self.keys[:4]):
            return "present state"
        return "nothing" if not those else f"other documents: {those}"


# -- states -----------------------------------------------------------------------------------------------------------


def fill(world: World) -> None:
    for part in (world.keys[:4], world.keys[4:]):
        world.source.snapshot(VBID, *((key, b'{"a":1}') for key in part), datatype=1)


def unfilled(world: World) -> None:
    """The first snapshot is staged."""
    world.source.writer(VBID).vbuckets[VBID].begin_resync()
    world.source.writer(VBID).vbuckets[VBID].save(failover_log=FailoverLog.of([(VBUUID, 0)]))
    world.source.snapshot(VBID, (world.keys[0], b"{}"), publish=False)


def resynced(world: World, resync_reads: str) -> None:
    fill(world)
    world.source.resync_reads(resync_reads)
    world.source.writer(VBID).vbuckets[VBID].begin_resync()


def damaged(world: World) -> None:
    fill(world)
    environment = world.source.writer(VBID).environment
    with environment.env.begin(write=True) as txn:
        rows = environment.db(keys.rows_db(VBID))
        for seqno in (1, 5):
            key = keys.ROW.pack(1, seqno)
            stored = bytes(txn.get(key, b"", rows))
            txn.put(key, stored[:-6] + bytes([stored[-6] ^ 1]) + stored[-5:], db=rows)


def dropped(world: World, *, by_id: bool = False) -> None:
    world.source.collections(VBID, Collection(ORDERS_ID, 8, "orders", Seqno(1)))
    world.source.snapshot(VBID, *((key, b"{}") for key in world.keys), datatype=1, collection_id=ORDERS_ID)
    world.source.collections(VBID)
    world.collection, world.collection_id, world.by_id = ORDERS, ORDERS_ID, by_id


def unknown(world: World, *, by_id: bool = False) -> None:
    dropped(world, by_id=by_id)
    world.collection, world.collection_id = "shop.others", 99


def purged_meanwhile(world: World) -> None:
    fill(world)
    world.as_of = 6

    def happens() -> None:
        other = world.source.key_of(VBID, 9)
        world.source.snapshot(VBID, (other, b"{}"), *((key, b'{"a":2}') for key in world.keys), datatype=1)
        world.source.snapshot(VBID, (other, None))
        world.source.snapshot(VBID, (world.source.key_of(VBID, 10), b"{}"))
        world.source.purge(boundaries=1, time_ms=0)

    world.happens = happens


def rolled_back_meanwhile(world: World) -> None:
    fill(world)

    def happens() -> None:
        world.source.rollback(VBID, 4)
        world.source.writer(VBID).vbuckets[VBID].save(failover_log=FailoverLog.of([(VBUUID + 1, 4), (VBUUID, 0)]))
        world.source.writer(VBID).commit()

    world.happens = happens


def gone(world: World) -> None:
    fill(world)
    world.is_served = False


STATES: dict[str, Callable[[World], None]] = {
    "not filled": unfilled,
    "resynced, old copy served": lambda world: resynced(world, "stale"),
    "resynced, withheld": lambda world: resynced(world, "unavailable"),
    "damaged": damaged,
    "held by another mirror": fill,
    "collection dropped": dropped,
    "collection dropped, by id": lambda world: dropped(world, by_id=True),
    "collection unknown": unknown,
    "collection unknown, by id": lambda world: unknown(world, by_id=True),
    "boundary purged": purged_meanwhile,
    "rolled back meanwhile": rolled_back_meanwhile,
    "service gone": gone,
}


# -- doors ------------------------------------------------------------------------------------------------------------


def by_key(world: World) -> str:
    with open_view(world.path) as view:
        world.happens()
        found = view.get(world.keys[4], world.named, as_of=world.as_of)
        return "`None`" if found is None else "answers"


def by_keys(world: World) -> str:
    with open_view(world.path) as view:
        world.happens()
        return world.seen(view.get_many(world.keys, world.named, as_of=world.as_of))


def _in_steps(world: World, steps: Iterator[Any], key_of: Callable[[Any], bytes | None]) -> str:
    found = [key_of(next(steps))] if world.keys else []
    world.happens()
    return world.seen([*found, *map(key_of, steps)])


def by_scan(world: World) -> str:
    with open_view(world.path) as view:
        steps = view.scan(VBID, collection=world.named)
        return _in_steps(world, steps, lambda each: each.key)


def by_changes(world: World) -> str:
    with open_view(world.path) as view:
        return _in_steps(world, view.changes(VBID), lambda each: each.document and each.document.key)


def by_export(world: World) -> str:
    file = Path(world.path).with_name("out.jsonl")
    with after_hold(world):
        command.export(to=str(file), data=Path(world.path), vbid=VBID, collection=str(world.named))
    return world.seen(json.loads(line)["key"].encode() for line in file.read_text().splitlines())


def by_sql(world: World) -> str:
    table = ".".join(f'"{part}"' for part in world.collection.split("."))
    with mirror.open_view(world.path) as view, after_hold(world):
        return world.seen(each["_key"].encode() for each in view.sql(f"SELECT _key FROM {table}").to_pylist())


def by_arrow(world: World) -> str:
    with mirror.open_view(world.path) as view, after_hold(world):
        return world.seen(each["key"].encode() for each in view.arrow(world.collection).read_all().to_pylist())


def by_spark(world: World) -> str:
    options = parse({"path": world.path, "collection": world.collection, "vbuckets": str(VBID)})
    job, shares = plan(options)
    world.happens()
    shape = Shape(DOCUMENTS, (False,) * len(DOCUMENTS))
    batches = (batch for share in shares for batch in read(job, share, shape))
    return world.seen(row["key"].encode() for batch in batches for row in batch.to_pylist())


def by_spark_stream(world: World) -> str:
    driver = spark_changes.LocalChanges(parse({"path": world.path, "table": "changes", "vbuckets": str(VBID)}))
    with closing(driver):
        start = driver.beginning()
        end = driver.latest(start, limited=False)
        world.happens()
        rows = [row for task in driver.plan(start, end) for row in spark_changes.read(world.path, task)]
    return world.seen(cell if isinstance(cell, bytes) else None for row in rows for cell in row[:8])


def by_backup(world: World) -> str:
    parts: list[backup.BackupPart] = []
    sink = cast(Any, SimpleNamespace(put=parts.append))
    moment = world.source.now_ms if world.as_of else None
    world.happens()
    backup.create(world.path, sink, time_ms=1, as_of_ms=moment)
    target = str(Path(world.path).with_name("restored"))
    backup.restore(parts, target, clock_ms=world.source.clock)
    with open_view(target, stale_reads=True, partial=True) as view:
        if VBID in view.unfilled():
            return "copies it"
        return world.seen(each.key for each in (view.scan(VBID) if VBID in view.vbids else ()))


def by_verify(world: World) -> str:
    with open_view(world.path, stale_reads=True, partial=True) as view, after_hold(world):
        verifier = Verifier(world.path, view, cast(Any, TheSource(world)), service=False)
        return f"`{verifier.run([VBID])[0].state}`"


class TheSource:
    """The source of `verify`: the documents that the vbucket had when the read began."""

    def __init__(self, world: World) -> None:
        there = [] if world.collection_id else list(enumerate(world.keys, 1))
        frames = [records.encode_mutation(key, b'{"a":1}', n, cas=n << 16, datatype=1) for n, key in there]
        spool = cast(Any, SimpleNamespace(frames=lambda: frames, frame_count=len(frames)))
        self._snapshot = Snapshot(VBID, VBUUID, 0, world.source.seqnos.get(VBID, 6), spool, Manifest.initial())

    def high_seqnos(self) -> dict[int, int]:
        return {VBID: self._snapshot.end_seqno}

    def failover_log(self, _: int) -> FailoverLog:
        return FailoverLog.of([(VBUUID, 0)])

    def read(self, since: dict[int, Position], _until: object) -> Iterator[Any]:
        for vbid, position in since.items():
            if not position.seqno:
                yield self._snapshot
            yield ReadEnded(vbid, self._snapshot.position)


@contextmanager
def after_hold(world: World) -> Iterator[None]:
    """It happens once the read has chosen its boundaries."""
    hold, left = BoundaryRead.hold, [world.happens]

    def held(self: BoundaryRead) -> Any:
        pins = hold(self)
        if left:
            left.pop()()
        return pins

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundaryRead, "hold", held)
        yield


@contextmanager
def http(world: World) -> Iterator[httpx.Client]:
    with ExitStack() as stack:
        site = stack.enter_context(running(Path(world.path), world.source))
        client = stack.enter_context(httpx.Client(base_url=site.url, timeout=30))
        if not world.is_served:
            stack.pop_all().close()
            client = httpx.Client(base_url=site.url, timeout=30)
        yield client


def _status(answer: httpx.Response, found: Callable[[], str]) -> str:
    if answer.status_code == 200:
        return found()
    return f"{answer.status_code} `{answer.json()['type'].removeprefix(problems.TYPE_PREFIX)}`"


def by_http(world: World) -> str:
    with http(world) as client:
        world.happens()
        at = {} if world.as_of is None else {"as_of": world.as_of}
        answer = client.get(f"/v1/collections/{world.named}/documents/{world.keys[4].decode()}", params=at)
        return _status(answer, lambda: "answers")


def by_http_keys(world: World) -> str:
    with http(world) as client:
        world.happens()
        at = {} if world.as_of is None else {"as_of": world.as_of}
        body = {"keys": [key.decode() for key in world.keys]}
        answer = client.post(f"/v1/collections/{world.named}/multi-get", json=body, params=at)
        return _status(answer, lambda: world.seen(each["key"].encode() for each in answer.json()["documents"]))


def by_pages(world: World) -> str:
    found: list[bytes] = []
    with http(world) as client:
        params: dict[str, Any] = {"vbid": VBID, "limit": 2}
        while True:
            answer = client.get(f"/v1/collections/{world.named}/documents", params=params)
            if answer.status_code != 200:
                return _status(answer, str)
            found += [each["key"].encode() for each in answer.json()["documents"]]
            if answer.json()["next"] is None:
                return world.seen(found)
            if "page" not in params:
                world.happens()
            params = {"limit": 2, "page": answer.json()["next"]}


def by_sse(world: World) -> str:
    with http(world) as client:
        params = {"vbid": str(VBID), "follow": "false"}
        first = client.get("/v1/changes", params=params)
        if first.status_code != 200:
            return _status(first, str)
        sent = [each for each in events(first.text) if "event" in each]
        if sent[-1]["event"] != "end":
            return f"event `{sent[-1]['event']}`: `{sent[-1]['data']['type'].removeprefix(problems.TYPE_PREFIX)}`"
        world.happens()
        again = client.get("/v1/changes", params=params | {"since": sent[-1]["data"]["position"]})
        if again.status_code != 200 or world.source.rolled_back:
            more = [each["event"] for each in events(again.text) if "event" in each]
            return _status(again, lambda: f"event `{more[0]}`")
        return world.seen(each["data"].get("document", {}).get("key", "").encode() for each in sent)


def _answered_by(world: World, kind: type[Hosted[Any, Any]], answer_of: Callable[[Any], Any]) -> str:
    """Ask a server in a loop of its own."""

    async def run() -> str:
        async with kind.serving(world.path) as endpoint:
            if world.is_served:
                return cast(str, await answer_of(endpoint))
        await endpoint.connect()
        return "it was still served"

    return asyncio.run(run())


def by_kv(world: World) -> str:
    async def answer_of(endpoint: Endpoint) -> str:
        client = await endpoint.sdk()
        world.happens()
        key = bytes([world.collection_id]) + world.keys[4]
        answer = await client.ask(fr.request(Opcode.GET, vbucket=VBID, key=key))
        return "answers" if not answer.status else f"`{Status(answer.status).name}`"

    return _answered_by(world, Endpoint, answer_of)


def by_kv_path(world: World) -> str:
    async def answer_of(endpoint: Endpoint) -> str:
        client = await endpoint.sdk()
        world.happens()
        key = bytes([world.collection_id]) + world.keys[4]
        answer = await client.ask(fr.request(Opcode.SUBDOC_GET, vbucket=VBID, key=key, extras=b"\0\x01\0", value=b"a"))
        return "answers" if not answer.status else f"`{Status(answer.status).name}`"

    return _answered_by(world, Endpoint, answer_of)


def by_kv_scan(world: World) -> str:
    async def answer_of(endpoint: Endpoint) -> str:
        client = await endpoint.sdk()
        body = between() | ({"collection": f"{world.collection_id:x}"} if world.collection_id else {})
        made = await client.ask(create(body, vbid=VBID))
        if made.status:
            return f"`{Status(made.status).name}`"
        world.happens()
        answer = await client.ask(go_on(made.value, vbid=VBID))
        return "answers" if answer.status == Status.RANGE_SCAN_COMPLETE else f"`{Status(answer.status).name}`"

    return _answered_by(world, Endpoint, answer_of)


def by_dcp(world: World) -> str:
    async def answer_of(endpoint: DcpEndpoint) -> str:
        client = await endpoint.client()
        value = json.dumps({"collections": [f"{world.collection_id:x}"]}).encode() if world.collection_id else b""
        answer = await client.stream(VBID, end=6, value=value)
        if answer.status:
            return f"`{Status(answer.status).name}`"
        rows: list[Any] = []
        while type(event := await client.event()).__name__ != "StreamEnd":
            rows.append(event)
        if reason := cast(Any, event).reason:
            return f"stream end `{StreamEndReason(reason).name}`"
        world.happens()
        again = await client.stream(VBID, 6, vbuuid=VBUUID)
        if again.status:
            return f"`{Status(again.status).name}`"
        return world.seen(getattr(each, "key", b"")[1:] for each in rows)

    return _answered_by(world, DcpEndpoint, answer_of)


DOORS: dict[str, Callable[[World], str]] = {
    "get": by_key,
    "multi-get": by_keys,
    "scan": by_scan,
    "export": by_export,
    "changes": by_changes,
    "HTTP document": by_http,
    "HTTP multi-get": by_http_keys,
    "HTTP pages": by_pages,
    "HTTP changes": by_sse,
    "KV get": by_kv,
    "KV sub-document": by_kv_path,
    "KV range scan": by_kv_scan,
    "DCP": by_dcp,
    "SQL": by_sql,
    "Arrow": by_arrow,
    "Spark batch": by_spark,
    "Spark stream": by_spark_stream,
    "backup": by_backup,
    "verify": by_verify,
}


UNKNOWN = "collection dropped or unknown"
NO_COPY = "not filled, withheld"


def table() -> dict[tuple[str, str], str]:
    """The table in the document, and the two rules above it: the answer, by door and state."""
    head, _, *lines = READING.split("<!-- doors -->\n")[1].split("\n\n")[0].strip().split("\n")
    states = [cell.strip() for cell in head.strip("|").split("|")][1:]
    found: dict[tuple[str, str], str] = {}
    for line in lines:
        named, *answers = [cell.strip() for cell in line.strip("|").split("|")]
        for door in [named] if named in DOORS else ["KV get", "KV sub-document"]:
            found |= {(door, state): answer for state, answer in zip(states, answers, strict=True)}
            unknown = found.pop((door, UNKNOWN))
            found |= {(door, state): unknown for state in STATES if state.startswith("collection")}
            no_copy = found.pop((door, NO_COPY)).split(" / ")
            found |= {(door, "not filled"): no_copy[0], (door, "resynced, withheld"): no_copy[-1]}
            served = "`equal`" if door == "verify" else "answers"
            found[door, "resynced, old copy served"] = "`NOT_MY_VBUCKET`" if door == "DCP" else served
            is_port = door.startswith(("HTTP", "KV", "DCP"))
            found[door, "service gone"] = "connection refused" if is_port else served
    return found


def test_the_table_lists_every_way_to_read_in_every_state() -> None:
    assert set(table()) == {(door, state) for door in DOORS for state in STATES}


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    state = request.param
    directory.create(str(tmp_path / "data"), IDENTITY)
    source = Source(str(tmp_path / "data"))
    source.open()
    made = World(source, keys=[source.key_of(VBID, number) for number in range(6)])
    STATES[state](made)
    source.writer(VBID).commit()
    if state == "held by another mirror":
        source.close()
        hold_others(Path(source.path))
    yield made
    source.close()


def hold_others(path: Path) -> None:
    """Make it a mirror of other vbuckets."""
    path.rename(path.with_name("whole"))
    directory.create(str(path), ELSEWHERE)
    source = Source(str(path), ELSEWHERE)
    source.open()
    source.close()


@pytest.mark.parametrize("world", STATES, indirect=True)
@pytest.mark.parametrize("door", DOORS)
def test_every_way_to_read_answers_in_every_state_as_documented(
    world: World, door: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "CHUNK_ROWS", 1)
    state = request.node.callspec.params["world"]
    try:
        found = DOORS[door](world)
    except (errors.StorageError, MirrorError) as error:
        found = "`{}`".format(next(each.__name__ for each in type(error).__mro__ if each.__name__[0] != "_"))
    except (ConnectionRefusedError, httpx.ConnectError):
        found = "connection refused"
    assert found == table().get((door, state)), f"{door}, {state}: {found}"
