"""A mirror of a mirror of a mirror, as processes: whichever is killed under load, all agree with the source."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mirror.feed.read.reader import Position, Snapshot, SourceReader, SourceRolledBack
from mirror.sandbox import SandboxCluster, SandboxThread
from mirror.wire import codec_dcp, frame
from mirror.wire import events as ev
from mirror.wire.keys import encode_leb128
from mirror.wire.system_events import decode_system_event
from storage.admin.check import check
from storage.read.view import View, open_view
from tests.cli.conftest import call
from tests.crash.judge import published_seqnos
from tests.crash.load import Load
from tests.crash.service import Service, until
from tests.ports import free_port
from tests.sandbox.past import state_at

VBUCKETS, RATE, KEYS, SEED = 16, 150, 1000, 11
LINKS = ("first", "second", "third")
KILLS = tuple(
    (link, what)
    for link in range(len(LINKS))
    for what in ("worker", "server", "service")
    if (LINKS[link], what) != ("third", "server")  # no mirror reads from it by DCP
)


def has_news(service: Service, before: dict[int, int]) -> bool:
    return published_seqnos(service.data) != before


def documents(view: View, vbid: int) -> dict[bytes, tuple[Any, ...]]:
    return {
        encode_leb128(each.collection_id) + each.key: (
            each.seqno, each.cas, each.rev_seqno, each.flags, each.expiry, each.value,
        )
        for each in view.scan(vbid, now=0, raw=True)
    }  # fmt: skip


@dataclass
class Wanderer:
    """A DCP client that reads now here, now there, and goes on at its positions wherever that is."""

    positions: dict[int, Position] = field(default_factory=lambda: {vbid: Position() for vbid in range(VBUCKETS)})
    held: dict[int, dict[bytes, int]] = field(default_factory=lambda: {vbid: {} for vbid in range(VBUCKETS)})

    def read(self, url: str) -> set[int]:
        """Read up to now. Returns the vbuckets that were rolled back; those it reads from 0 again."""
        rolled_back = set()
        with SourceReader(url, password="demo") as reader:
            until_seqnos = reader.high_seqnos()
            for item in reader.read(self.positions, until_seqnos):
                if isinstance(item, SourceRolledBack):
                    rolled_back.add(item.vbid)
                elif isinstance(item, Snapshot):
                    self._take(item)
            for vbid in rolled_back:
                self.positions[vbid], self.held[vbid] = Position(), {}
            if rolled_back:
                for item in reader.read({vbid: Position() for vbid in rolled_back}, until_seqnos):
                    assert not isinstance(item, SourceRolledBack), item
                    if isinstance(item, Snapshot):
                        self._take(item)
        return rolled_back

    def _take(self, snapshot: Snapshot) -> None:
        held = self.held[snapshot.vbid]
        for stored in snapshot.frames():
            event = codec_dcp.decode(frame.decode(stored)[0])
            if isinstance(event, ev.Mutation):
                held[event.key] = event.seqno
            elif isinstance(event, (ev.Deletion, ev.Expiration)):
                held.pop(event.key, None)
            elif isinstance(event, ev.SystemEvent):
                content = decode_system_event(event)
                if isinstance(content, (ev.CollectionCreated, ev.CollectionDropped)):
                    prefix = encode_leb128(content.collection_id)
                    for key in [key for key in held if key.startswith(prefix)]:
                        del held[key]
        self.positions[snapshot.vbid] = snapshot.position


@dataclass
class Chain:
    """The source under load, its three links, and what was done to them so far."""

    source: SandboxThread
    load: Load
    links: list[Service]
    urls: list[str]
    """The source and the links that serve DCP, nearest first."""
    rng: Random
    wanderer: Wanderer = field(default_factory=Wanderer)
    kills: Counter[str] = field(default_factory=Counter)
    failovers: int = 0
    failed_over: set[int] = field(default_factory=set)
    """Vbuckets that lost something since the wanderer last read."""

    @property
    def cluster(self) -> SandboxCluster:
        return self.source.cluster

    def kill(self, number: int, what: str) -> None:
        """SIGKILL of a process of a link, or of a whole one, which is started again."""
        link = self.links[number]
        self.kills[f"{LINKS[number]} {what}"] += 1
        if what == "service":
            link.kill_supervisor(*link.workers_alive())
            link.start()
            return

        def pid() -> int | None:
            rows = (link.status() or {}).get(f"{what}s") or ()
            return next((row["pid"] for row in rows if row["phase"] == "running" and row["pid"]), None)

        link.kill(until(f"a {what} of the {LINKS[number]}", pid))

    def fail_over(self, vbids: list[int]) -> None:
        """Each with the loss of some changes, in whose place others come."""

        def each(vbid: int, lose: int) -> None:
            self.cluster.failover(vbid, lose=lose)
            self.cluster.set("instead", {"of": "what was lost"}, vbid=vbid)

        for vbid in vbids:
            self.source.call(each, vbid, self.rng.randrange(1, 5))
        self.failovers += len(vbids)
        self.failed_over.update(vbids)

    def wait_news(self) -> None:
        """Return when all links have published something new."""
        before = [published_seqnos(each.data) for each in self.links]
        for link, seen, name in zip(self.links, before, LINKS, strict=True):
            until(f"news in the {name}", partial(has_news, link, seen))

    def wait_level(self) -> dict[int, int]:
        """Stop writing; return vbid -> seqno once every link has all of the source's newest history."""
        self.load.rate = 0
        expected, logs = self.source.call(
            lambda: (
                {vbid: self.cluster.vbucket(vbid).high_seqno for vbid in range(VBUCKETS)},
                {vbid: self.cluster.vbucket(vbid).vbuuid for vbid in range(VBUCKETS)},
            )
        )

        def level(link: Service) -> bool:
            if published_seqnos(link.data) != expected:
                return False
            with open_view(str(link.data), partial=True) as view:
                return {vbid: view.state(vbid).failover_log[0].vbuuid for vbid in range(VBUCKETS)} == logs

        for link, name in zip(self.links, LINKS, strict=True):
            until(f"the {name} to be level", partial(level, link))
        return expected

    def move_the_wanderer(self) -> None:
        """Point the reader at another mirror. It sees a rollback there only for changes that the source lost."""
        self.wait_level()
        rolled_back = self.wanderer.read(self.rng.choice(self.urls))
        assert rolled_back <= self.failed_over, "a change of place costs nothing"
        self.failed_over.clear()
        assert self.wanderer.held == self.source_seqnos()
        self.load.rate = RATE

    def source_seqnos(self) -> dict[int, dict[bytes, int]]:
        """vbid -> key -> seqno of its newest version."""

        def found() -> dict[int, dict[bytes, int]]:
            cluster = self.cluster
            states = {
                vbid: state_at(cluster.vbucket(vbid), cluster.vbucket(vbid).high_seqno) for vbid in range(VBUCKETS)
            }
            return {vbid: {key: item.seqno for key, item in state.items()} for vbid, state in states.items()}

        return self.source.call(found)


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Chain]:
    cluster = SandboxCluster(nodes=2, vbuckets=VBUCKETS, seed=SEED)
    with SandboxThread(cluster) as source, ExitStack() as stack:
        load = source.call(Load, cluster, SEED, rate=0, keys=KEYS)
        source.call(load.write, 2000)
        urls, links = [source.connection_string], []
        for name in LINKS:
            flags = ["--workers", "1"]
            url = urls[-1]
            if name != LINKS[-1]:
                port = free_port()
                flags += ["--dcp", str(port)]
                urls.append(f"couchbase://demo@127.0.0.1:{port}/{cluster.bucket.name}")
            links.append(stack.enter_context(Service(url, tmp_path / name, *flags, log=tmp_path / f"{name}.log")))
            links[-1].start()
        yield Chain(source, load, links, urls, Random(SEED))


@pytest.mark.ci
@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(1, marks=pytest.mark.timeout(900)),  # each process of each link once
        pytest.param(10, marks=[pytest.mark.long, pytest.mark.timeout(5400)]),
    ],
)
def test_a_chain_of_three_agrees_with_its_source_whichever_is_killed(
    chain: Chain, rounds: int, record_property: Any
) -> None:
    first_ends = chain.wait_level()
    chain.source.call(chain.load.write, 1000)  # no failover reaches back to the first snapshots
    writing = chain.source.call(lambda: asyncio.get_running_loop().create_task(chain.load.run()))
    chain.move_the_wanderer()
    for _ in range(rounds):
        for number, (link, what) in enumerate(chain.rng.sample(KILLS, len(KILLS))):
            chain.kill(link, what)
            chain.fail_over(chain.rng.sample(range(VBUCKETS), 3))
            chain.wait_news()
            time.sleep(chain.rng.random() / 2)
            if number % 4 == 3:
                chain.move_the_wanderer()
    chain.wait_level()
    chain.fail_over(list(range(VBUCKETS)))
    expected = chain.wait_level()
    assert not writing.done(), writing
    chain.source.call(writing.cancel)
    rollbacks = all_agree(chain, expected, first_ends)
    kills = ", ".join(f"{count} of {name}" for name, count in sorted(chain.kills.items()))
    record_property(
        "kills",
        f"{chain.kills.total()} kills ({kills}), {chain.failovers} failovers of a vbucket with loss, {rollbacks} "
        f"rollbacks in the three links, none to before their first snapshots; {sum(expected.values())} changes",
    )


def all_agree(chain: Chain, expected: dict[int, int], first_ends: dict[int, int]) -> int:
    """Source and links have the same; none went back further than to its first snapshot. Returns the rollbacks."""
    result = call("verify", "--data", chain.links[-1].data, "--source", chain.urls[-1])
    assert result.code == 0, result.err
    source_seqnos = chain.source_seqnos()
    rollbacks = 0
    with ExitStack() as stack:
        views = [stack.enter_context(open_view(str(link.data), partial=True)) for link in chain.links]
        for vbid in range(VBUCKETS):
            held = [documents(view, vbid) for view in views]
            assert held[0] == held[1] == held[2], f"vb {vbid}"
            assert {key: found[0] for key, found in held[0].items()} == source_seqnos[vbid], f"vb {vbid}"
            logs = {view.state(vbid).failover_log for view in views}
            assert len(logs) == 1, f"vb {vbid}"
            for view, name in zip(views, LINKS, strict=True):
                assert view.history(vbid).resync_count == 0, f"vb {vbid} of the {name} was read from 0 again"
                back = view.rollbacks(vbid)
                assert back, f"vb {vbid} of the {name} lost something"
                assert all(each.to_seqno >= first_ends[vbid] for each in back), f"vb {vbid} of the {name}"
                rollbacks += len(back)
    for link in reversed(chain.links):
        assert link.terminate() == 0
        assert not link.tracebacks()
        assert check(str(link.data)).problems == []
    return rollbacks
