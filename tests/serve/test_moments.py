"""Every way to read shows as of a time what a reader saw then: the newest boundary, without what had expired."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import pytest

import mirror
from cli import export as export_command
from cli import get as get_command
from cli.exits import Absent
from cli.options import collection_from
from cli.tasks import collections_from
from mirror.errors import ConfigError, QueryFailed
from mirror.spark.source.columns import DOCUMENTS
from mirror.spark.source.local import plan, read
from mirror.spark.source.options import parse
from mirror.typed.rows import Shape
from mirror.view import QueryView
from storage.model import Collection, Seqno
from storage.read.scan import KeySelection
from storage.read.view import AsOf, Time
from tests.serve.http_site import Site, Source, made, running

HOUR_MS = 3_600_000
KEYS = [b"key-%d" % number for number in range(16)]


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    """A source that published hours ago: in a quiet vbucket the newest boundary is old."""
    with made(tmp_path) as source:
        source.now_ms = int(time.time()) * 1000 - 10 * HOUR_MS
        yield source


@pytest.fixture
def site(source: Source, tmp_path: Path) -> Iterator[Site]:
    with running(tmp_path / "data", source) as site:
        yield site


def text_of(as_of: AsOf) -> str:
    return str(as_of) if isinstance(as_of, int) else str(as_of and datetime.fromtimestamp(as_of.ms / 1000, UTC))


Found = Iterable[bytes]
Door = Callable[[Site, QueryView, AsOf], Found]


def by_page(site: Site, view: QueryView, as_of: AsOf) -> Found:
    for vbid in view.vbids:
        for document in view.reading(as_of=as_of).page(vbid, 0, KeySelection())[0]:
            yield document.key


def by_export(site: Site, view: QueryView, as_of: AsOf) -> Found:
    file = Path(view.path).with_name("out.jsonl")
    export_command.export(to=str(file), data=Path(view.path), as_of=None if as_of is None else text_of(as_of))
    return [json.loads(line)["key"].encode() for line in file.read_text().splitlines()]


def by_command(site: Site, view: QueryView, as_of: AsOf) -> Found:
    for key in KEYS:
        with suppress(Absent):
            get_command.get(key.decode(), data=Path(view.path), as_of=None if as_of is None else text_of(as_of))
            yield key


def by_spark(site: Site, view: QueryView, as_of: AsOf) -> Found:
    job, shares = plan(parse({"path": view.path} | ({} if as_of is None else {"asOf": text_of(as_of)})))
    batches = (batch for share in shares for batch in read(job, share, Shape(DOCUMENTS, (False,) * len(DOCUMENTS))))
    return [row["key"].encode() for batch in batches for row in batch.to_pylist()]


DOORS: dict[str, Door] = {
    "page": by_page,
    "export": by_export,
    "get at the command line": by_command,
    "SQL": lambda site, view, as_of: [
        each["_key"].encode() for each in view.sql("SELECT _key FROM documents", as_of=as_of).to_pylist()
    ],
    "Arrow": lambda site, view, as_of: [
        each["key"].encode() for each in view.arrow(as_of=as_of).read_all().to_pylist()
    ],
    "Spark": by_spark,
}


@pytest.mark.parametrize("door", DOORS)
def test_a_read_shows_what_a_reader_at_that_time_saw(site: Site, door: str) -> None:
    """Expiry was judged at the time of the boundary, in a quiet vbucket hours before the time that was asked for."""
    rng, source, view = Random(door), site.source, mirror.open_view(site.source.path)
    versions: dict[bytes, list[tuple[int, int]]] = {key: [] for key in KEYS}

    def put(key: bytes, expiry: int | None) -> None:
        source.put(key, **({"value": None} if expiry is None else {"expiry": expiry}))
        versions[key].append((view.boundaries(view.vbid_of(key))[0].time_ms, 1 if expiry is None else expiry))

    def alive(ms: int) -> set[bytes]:
        newest = {key: [each for each in versions[key] if each[0] <= ms][-1][1] for key in KEYS}
        return {key for key, expiry in newest.items() if not expiry or expiry * 1000 > ms}

    for key in KEYS:
        put(key, 0)
    begin_ms = source.now_ms
    for _ in range(40):
        source.now_ms += rng.choice((0, 400, HOUR_MS // 10))
        ttl_s = rng.choice((None, 0, 1, 3600, 5 * 3600))
        put(rng.choice(KEYS), ttl_s and source.now_ms // 1000 + ttl_s)
    edges = [each for of_key in versions.values() for time_ms, expiry in of_key for each in (time_ms, expiry * 1000)]
    chosen = [edge + rng.choice((-1, 0, 1, 700)) for edge in edges if edge > begin_ms]
    now_ms = int(time.time() * 1000)
    with view:
        for ms in rng.sample(chosen, 12):
            assert set(DOORS[door](site, view, Time(ms))) == alive(ms), ms - begin_ms
        for later in (None, Time(now_ms + 10 * HOUR_MS)):
            assert set(DOORS[door](site, view, later)) == alive(now_ms)


def test_a_seqno_of_several_vbuckets_is_refused_by_every_way_to_read(site: Site) -> None:
    """A multi-get once read key by key, each at this seqno of its own vbucket; pages refused."""
    keys = [site.source.key_of(vbid) for vbid in (1, 2)]
    for key in keys:
        site.source.put(key)
    with mirror.open_view(site.source.path) as view:
        calls: list[Callable[[], object]] = [
            lambda: view.get_many(keys, as_of=1),
            lambda: list(view.scan(as_of=1)),
            lambda: view.reading(as_of=1),
            lambda: view.sql("SELECT 1", as_of=1),
            lambda: view.arrow(as_of=1).read_all(),
            lambda: get_command.scan(data=Path(view.path), as_of="1"),
        ]
        for call in calls:
            with pytest.raises(mirror.SeveralVbuckets, match="seqnos count in one vbucket"):
                call()
        assert [*view.get_many(keys[:1], as_of=1)] == keys[:1]
        assert [each.key for each in view.scan(1, as_of=1)] == keys[:1]
    for refused in (site.multi_get(keys, 400, params={"as_of": 1}), site.scan(400, as_of=1)):
        assert (refused["type"], refused["detail"][:14]) == ("urn:dcp-mirror:bad-request", "as of seqno 1 ")
    assert [row["key"].encode() for row in site.multi_get(keys[:1], params={"as_of": 1})["documents"]] == keys[:1]
    assert [row["key"].encode() for row in site.scan(as_of=1, vbid=1)["documents"]] == keys[:1]


def test_digits_alone_are_the_id_of_a_collection_in_every_text(site: Site) -> None:
    numbered, orders = Collection(8, 0, "9", Seqno(0)), Collection(9, 8, "orders", Seqno(0))
    for vbid in range(8):
        site.source.collections(vbid, numbered, orders)
    site.source.put("numbered", collection_id=8)
    site.source.put("order", collection_id=9)
    with mirror.open_view(site.source.path) as view:
        for text, key in (("9", b"order"), ("_default.9", b"numbered"), ("shop.orders", b"order")):
            named = parse({"path": view.path, "collection": text}).collections
            assert collections_from(text) == named == (collection_from(text),)
            assert [each.key for each in view.scan(collection=text)] == [key]
            assert view.arrow(text).read_all()["key"].to_pylist() == [key.decode()]
            assert [row["key"].encode() for row in site.scan(collection=text)["documents"]] == [key]
            assert [each["event"] for each in site.changes(collection=text)].count("mutation") == 1
            job, shares = plan(parse({"path": view.path, "collection": text}))
            rows = (batch for part in shares for batch in read(job, part, Shape(DOCUMENTS, (False,) * len(DOCUMENTS))))
            assert [row["key"].encode() for batch in rows for row in batch.to_pylist()] == [key]
        assert view.sql('SELECT _key FROM "_default.9"').to_pylist() == [{"_key": "numbered"}]
        with pytest.raises(QueryFailed, match=r'id \(the collection named so is "_default.9"'):
            view.sql('SELECT _key FROM "9"')
    with pytest.raises(ConfigError, match="changes have no ids of collections"):
        parse({"path": site.source.path, "table": "changes", "collection": "9"})
