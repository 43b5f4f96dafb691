"""Streams: whatever a client holds, and whatever happens to the mirror, at a snapshot's end they agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from mirror.serve.dcp.dcp_stream import DcpStream
from mirror.serve.dcp.filter import ServedFilter
from mirror.wire import codec_dcp
from mirror.wire.constants import StreamEndReason
from mirror.wire.events import StreamEnd, StreamRequest
from storage.model import SEQNO_MAX
from storage.read import stream_reads
from tests.serve.dcp_model import Change, World, client_of

EVENTFUL = {"accepted", "middle", "rolled back", "begins again", "waits", "complete", "STATE_CHANGED", "not whole"}


def run(path: Path, seed: int, steps: int) -> Counter[str]:
    rng = Random(seed)
    world = World(path, rng)
    clients = [client_of(world, rng) for _ in range(4)]
    try:
        for _ in range(steps):
            step(world, rng)
            for client in clients:
                if client.stream is None:
                    client.connect()
                if rng.random() < 0.7:
                    client.read(rng.choice([1, 60, 300, 1000]))
                if rng.random() < 0.05:
                    client.hang_up()
        if (opened := world.writer.vbuckets[0].state.open_snapshot) is not None:
            world.publish(opened.end_seqno)
        world.write(1)
        world.receive(world.high_seqno)
        for client in clients:
            for _ in range(10_000):
                if client.stream is None:
                    client.connect()
                if not client.read(1000) and client.stream is not None:
                    break
            assert client.boundary.seqno == world.high_seqno, client.seen
    finally:
        world.close()
    seen: Counter[str] = Counter()
    for client in clients:
        seen.update(client.seen)
    return seen


def step(world: World, rng: Random) -> None:
    world.write(rng.randrange(6))
    roll = rng.random()
    opened = world.writer.vbuckets[0].state.open_snapshot
    if opened is not None:
        if rng.random() < 0.5:
            world.publish(opened.end_seqno)
    elif roll < 0.75:
        held = world.held_seqno
        if held < world.high_seqno:
            world.receive(rng.randint(held + 1, world.high_seqno), publish=rng.random() < 0.8)
    roll = rng.random()
    if roll < 0.04:
        world.fail_over(keep_seqno=max(0, world.high_seqno - rng.choice([0, 3, 15, 60])))
        world.follow_failover()
    elif roll < 0.05:
        world.purge_source()
        if world.writer.vbuckets[0].state.open_snapshot is None:
            world.resync()
    elif roll < 0.08:
        if world.writer.vbuckets[0].state.open_snapshot is None and not world.resyncing:
            world.go_back()
    elif roll < 0.18:
        world.purge()


SEEDS = [*range(6), 1169]
"""1169: a client of a history that the mirror never had must go back to where the mirror rolled back."""


@pytest.mark.parametrize("seed", [*SEEDS, *(pytest.param(each, marks=pytest.mark.long) for each in range(6, 40))])
def test_a_client_equals_the_mirror_at_the_end_of_each_snapshot(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.read.stream_reads.SETTLED_SHARE", (0.3, 0.5, 2)[seed % 3])
    run(tmp_path, seed, 150)


@pytest.mark.ci
def test_the_random_histories_contain_every_kind_of_event(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    for seed in range(100, 108):
        (tmp_path / str(seed)).mkdir()
        seen += run(tmp_path / str(seed), seed, 150)
    assert seen.keys() >= EVENTFUL, seen
    assert seen["complete"] > 500


def went_back(world: World) -> None:
    """The row at 98 replaced one at 92. A client that holds a part of that snapshot would lack it at 96."""
    assert world.writer.vbuckets[0].rollback(90).boundary_seqno == 90
    world.writer.vbuckets[0].save(failover_log=world.log)
    world.receive(96)


def began_again(world: World) -> None:
    world.resync()
    world.receive(98, publish=False)
    assert world.writer.vbuckets[0].base.failover_log == world.log


@pytest.mark.parametrize("happen", [went_back, began_again])
def test_a_stream_ends_if_the_mirror_leaves_its_branch_under_the_same_failover_log(
    tmp_path: Path, happen: Callable[[World], None]
) -> None:
    world = World(tmp_path, Random(1))
    world.changes = [
        Change(seqno, key, True) for seqno, key in ((90, b"\0a"), (92, b"\0b"), (95, b"\0c"), (98, b"\0b"))
    ]
    world.high_seqno = 98
    world.receive(90)
    world.receive(98)
    served = stream_reads.served_state(world.view.reader(0))
    request = StreamRequest(0, 0, 95, SEQNO_MAX, world.log.vbuuid_at(95), 90, 98, opaque=7)
    stream = DcpStream(request, served, ServedFilter(), client_of(world, world.rng).controls, lambda: world.view)
    happen(world)
    assert stream.take(1000) == codec_dcp.encode(StreamEnd(0, int(StreamEndReason.STATE_CHANGED), opaque=7))
    world.close()
