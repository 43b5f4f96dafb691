"""SIGKILL under load, again and again on one data directory: whatever dies, and whenever, nothing published is harmed.

After each kill, and again after each restart: the integrity walk finds nothing, every published state is the source's
at the end of a snapshot that it announced, and every stream is requested from what was published on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mirror.sandbox import SandboxCluster, SandboxThread
from storage.read.view import open_view
from tests.crash.judge import high_seqnos, is_level, judge, published_seqnos
from tests.crash.load import Load
from tests.crash.service import Service, until
from tests.processes import caught_up

NODES, VBUCKETS, GROUPS, WORKERS = 3, 24, 4, 2
RATE, KEYS = 300, 3000
HISTORY_S = 60
"""Of the mirror: long for a reader of a past state, short enough that history is purged among the kills."""


def source_figures(cluster: SandboxCluster) -> dict[int, tuple[int, int]]:
    """Worker slot -> (open streams, bytes sent so far), of the connections that are open now."""
    figures: dict[int, tuple[int, int]] = {}
    for node in cluster.nodes:
        for connection in node.connections:
            producer = connection.producer
            if producer is not None:
                slot = int(producer.name.rpartition(":")[2])
                streams, sent = figures.get(slot, (0, 0))
                figures[slot] = (streams + len(producer.streams), sent + connection.link.bytes_sent)
    return figures


@dataclass
class Campaign:
    """A mirror, its source, a load, and the kills so far."""

    source: SandboxThread
    service: Service
    load: Load
    rng: Random
    tally: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("worker", "supervisor", "both"), 0))
    staged_hits: int = 0
    """Kills after which some vbucket had rows of an unfinished snapshot on disk."""

    @property
    def cluster(self) -> SandboxCluster:
        return self.source.cluster

    def figures(self) -> dict[int, tuple[int, int]]:
        return self.source.call(source_figures, self.cluster)

    def requests(self) -> dict[int, int]:
        return self.source.call(
            lambda: {vbid: len(self.cluster.sent(vbid).stream_requests) for vbid in range(VBUCKETS)}
        )

    def vbids_of(self, slot: int) -> list[int]:
        return [vbid for vbid in range(VBUCKETS) if vbid % GROUPS % WORKERS == slot]

    def wait_streaming(self, slots: list[int]) -> None:
        """Return at a moment at which each of these workers has just been sent bytes."""
        before = self.figures()

        def all_sent_to() -> bool:
            now = self.figures()
            return all(slot in now and now[slot][0] and now[slot][1] > before.get(slot, (0, 0))[1] for slot in slots)

        until(f"bytes to be sent to workers {slots}", all_sent_to, poll_s=0.002)

    def kill_once(self, kind: str) -> None:
        """Kill at a random moment, restart, and check everything."""
        victims = [self.rng.randrange(WORKERS)] if kind == "worker" else list(range(WORKERS))
        until(f"workers {victims} to have streams", lambda: self.figures().keys() >= set(victims))
        time.sleep(self.rng.random() * self.rng.choice((0.05, 0.3, 0.9)))
        workers = self.service.wait_workers(WORKERS)
        pids = {slot: row["pid"] for slot, row in workers.items()}
        again = {slot: row["counters"].get("requested_again_bytes", 0) for slot, row in workers.items()}
        assert not any(again.values()), f"workers were sent published bytes again: {again}"
        self.wait_streaming(victims)
        if kind == "worker":
            published, requested = self._kill_worker(pids[victims[0]])
        else:
            more = [pids[slot] for slot in victims] if kind == "both" else []
            self.service.kill_supervisor(*more)
            published, requested = judge(self.cluster, self.service.data, live=False), self.requests()
        self.tally[kind] += 1
        self.staged_hits += bool(self._vbuckets_with_staged_rows())
        self._prepare_backlog()
        if kind != "worker":
            self.service.start()
        self.wait_requested_again([vbid for slot in victims for vbid in self.vbids_of(slot)], requested, published)
        after = judge(self.cluster, self.service.data, live=True)
        assert all(after[vbid] >= published[vbid] for vbid in after), (published, after)

    def _kill_worker(self, pid: int) -> tuple[dict[int, int], dict[int, int]]:
        """Kill one worker; what it had published, and the stream requests it had made.

        Half of the time its supervisor is held still for a moment, so that what is left can be looked at in peace.
        """
        if self.rng.random() < 0.5:
            published = published_seqnos(self.service.data)
            requested = self.requests()
            self.service.kill(pid)
            judge(self.cluster, self.service.data, live=True)
            return published, requested
        os.kill(self.service.pid, signal.SIGSTOP)
        try:
            self.service.kill(pid)
            return judge(self.cluster, self.service.data, live=True), self.requests()
        finally:
            os.kill(self.service.pid, signal.SIGCONT)

    def _prepare_backlog(self) -> None:
        """Have missed changes come from disk, now and then so slowly that the next kill falls into their snapshot."""

        def prepare(writes: int, bytes_per_second: int) -> None:
            faults = self.cluster.faults
            faults.clear()
            faults.slow(bytes_per_second, future=True)
            self.load.write(writes)
            if writes:
                self.cluster.bucket.to_disk()

        self.source.call(prepare, *self.rng.choice(((0, 0), (20, 0), (300, 0), (6000, 60_000))))

    def _vbuckets_with_staged_rows(self) -> int:
        with open_view(str(self.service.data), partial=True) as view:
            return sum(state.staged_seqno > state.published_seqno for state in view.states())

    def wait_requested_again(self, vbids: list[int], requested: dict[int, int], published: dict[int, int]) -> None:
        until(
            f"new streams of vbuckets {vbids}",
            lambda: all(now > requested[vbid] for vbid, now in self.requests().items() if vbid in vbids),
        )
        for vbid in vbids:
            for request in self.cluster.sent(vbid).stream_requests[requested[vbid] :]:
                assert request.start_seqno >= published[vbid], (
                    f"vb {vbid} had published {published[vbid]} and requested again from {request.start_seqno}"
                )


@pytest.fixture
def campaign(tmp_path: Path, seed: int) -> Iterator[Campaign]:
    cluster = SandboxCluster(nodes=NODES, vbuckets=VBUCKETS, seed=seed, checkpoint_items_max=200, checkpoints_kept=3)
    load = Load(cluster, seed, rate=RATE, keys=KEYS)
    with SandboxThread(cluster) as source:
        source.call(load.write, 3000)
        source.call(cluster.bucket.to_disk)
        flags = ["--groups", str(GROUPS), "--workers", str(WORKERS), "--set", "batch_bytes_max=65536"]
        flags += ["--set", f"history_s={HISTORY_S}"]
        with Service(source.connection_string, tmp_path / "data", *flags) as service:
            writing = source.call(lambda: asyncio.get_running_loop().create_task(load.run()))
            service.start()
            yield Campaign(source, service, load, Random(seed))
            assert not writing.done(), writing
            source.call(writing.cancel)


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(1, marks=pytest.mark.small),
        pytest.param(6, marks=[pytest.mark.ci, pytest.mark.timeout(900)]),
        pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(5400)]),
    ],
)
def test_kills_at_random_moments_harm_nothing(campaign: Campaign, count: int, record_property: Any) -> None:
    deck: list[str] = []
    for _ in range(count):
        if not deck:
            deck = ["worker", "supervisor", "both"]
            campaign.rng.shuffle(deck)
        campaign.kill_once(deck.pop())
    campaign.load.rate = 0
    campaign.source.call(campaign.cluster.faults.clear)
    campaign.source.call(campaign.cluster.faults.slow, 0)
    campaign.service.wait_workers(WORKERS)
    until("all of the source", lambda: is_level(campaign.cluster, campaign.service.data), poll_s=0.1)
    the_idle_cost_nothing(campaign)
    assert campaign.service.terminate() == 0
    assert judge(campaign.cluster, campaign.service.data, live=False) == high_seqnos(campaign.cluster)
    assert not campaign.service.tracebacks()
    kinds = ", ".join(f"{number} of {kind}" for kind, number in campaign.tally.items())
    record_property(
        "kills",
        f"{count} kills ({kinds}), each of processes that were being sent bytes, {campaign.staged_hits} with an "
        f"unfinished snapshot on disk; {sum(high_seqnos(campaign.cluster).values())} changes mirrored",
    )


def the_idle_cost_nothing(campaign: Campaign) -> None:
    """When all is published, a kill of everything makes the source send not one byte of data again."""

    def bytes_sent() -> int:
        return sum(campaign.cluster.sent(vbid).bytes for vbid in range(VBUCKETS))

    service = campaign.service
    requested, before = campaign.requests(), campaign.source.call(bytes_sent)
    service.kill_supervisor()
    service.start()
    campaign.wait_requested_again(list(range(VBUCKETS)), requested, high_seqnos(campaign.cluster))
    until("the status to say that everything is published", lambda: caught_up(service.status()))
    assert campaign.source.call(bytes_sent) == before
