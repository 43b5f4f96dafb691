"""The spool behind a vbucket of a read: whole snapshots are handed out, and nothing is left out of one."""

from __future__ import annotations

import asyncio

import pytest

from mirror.feed.read.reader import SourceReader
from mirror.feed.read.snapshot import Position, Snapshot, SpoolSink
from mirror.feed.read.spool import OpenSpools, SpoolFile
from mirror.ingest import events
from mirror.ingest import instructions as ins
from mirror.wire import events as ev
from storage.format.records import encode_mutation
from storage.model import FailoverLog, Manifest, ManifestUid, Seqno, SnapshotRange
from tests.feed.recorded_source import PASSWORD, RecordedSource, Script, fresh_exchange

VBID = 3
WITHIN = SnapshotRange(Seqno(0), Seqno(9))


class Owner:
    """A read that keeps what it is handed."""

    def __init__(self) -> None:
        self.spools = OpenSpools(SpoolFile(), 10_000)
        self.snapshots: list[Snapshot] = []
        self.lost: list[int] = []


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def sink(owner: Owner) -> SpoolSink:
    return SpoolSink(int(VBID), Position(), owner.spools, owner.snapshots.append, owner.lost.append)


def stage(*seqnos: int) -> ins.StageRows:
    rows = [(bytes(4) + seqno.to_bytes(8), encode_mutation(b"k%d" % seqno, b"{}", seqno)) for seqno in seqnos]
    return ins.StageRows(rows, 100, WITHIN)


def publish(seqno: int, purge_seqno: int | None = None) -> ins.PublishSnapshot:
    return ins.PublishSnapshot(Seqno(seqno), Seqno(0), purge_seqno)


def test_a_complete_snapshot_is_delivered_with_its_history(owner: Owner, sink: SpoolSink) -> None:
    sink.save({"failover_log": FailoverLog.of([(7, 0)])})
    assert sink.stage(stage(1, 4)) is None
    assert sink.publish(publish(5, 2)) == events.Published(5)
    assert sink.stage(stage(8)) is None
    assert sink.publish(publish(9)) == events.Published(9)
    first, second = owner.snapshots
    assert [(each.start_seqno, each.end_seqno, each.row_count, each.vbuuid) for each in owner.snapshots] == [
        (0, 5, 2, 7),
        (5, 9, 1, 7),
    ]
    assert (first.purge_seqno, second.purge_seqno, owner.spools.memory_bytes) == (2, None, 0)
    assert sink.position == Position(7, 9)
    assert (sink.state().published_seqno, sink.state().source_purge_seqno) == (9, 2)


def test_abandoned_and_refused_rows_are_in_no_snapshot(owner: Owner, sink: SpoolSink) -> None:
    sink.stage(stage(1))
    sink.stage(ins.StageSystemEvent(Seqno(2), b"event", Manifest(ManifestUid(7)), WITHIN))
    assert sink.abandon(ins.AbandonStaged()) == events.Abandoned(sink.state())
    sink.stage(stage(1))
    assert isinstance(sink.stage(stage(4, 3)), events.StagingRefused)
    assert owner.spools.memory_bytes == 0
    sink.publish(publish(9))
    (snapshot,) = owner.snapshots
    assert (snapshot.row_count, snapshot.manifest) == (0, Manifest.initial())


def test_a_rollback_or_a_resync_ends_the_read(owner: Owner, sink: SpoolSink) -> None:
    sink.roll_back(ins.RollbackTo(Seqno(4)))
    sink.begin_resync("the history is unknown")
    assert owner.lost == [4, 0]


@pytest.mark.usefixtures("short_pauses")
async def test_a_half_of_a_durable_write_is_never_left_out_of_a_snapshot() -> None:
    """The reader once ignored such messages, and returned the snapshot as whole."""
    marker = ev.SnapshotMarker(VBID, 1, 3, 1)
    plain = ev.Mutation(VBID, b"\0plain", 1, 1, 1, value=b"{}")
    halves = [ev.Prepare(VBID, b"\0durable", 2, 1, 2, value=b"{}"), ev.Commit(VBID, b"\0durable", 2, 3)]
    whole = ev.Mutation(VBID, b"\0durable", 3, 1, 3, value=b"{}")
    streams = [fresh_exchange(VBID, [(99, 0)], [marker, plain, *rest]) for rest in (halves, [whole])]
    async with RecordedSource(Script(frozenset((6, 7, 8, 10, 11, 18)), {int(VBID): streams})) as source:

        def read() -> list[bytes]:
            with SourceReader(source.connection_string, password=PASSWORD) as reader:
                items = reader.read({int(VBID): Position()}, {int(VBID): 3})
                return [each.key for item in items if isinstance(item, Snapshot) for each in item.documents()]

        assert await asyncio.to_thread(read) == [b"plain", b"durable"]
