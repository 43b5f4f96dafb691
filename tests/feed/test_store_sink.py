"""The store behind a vbucket: what each instruction does to it, what it refuses, and what it answers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mirror.feed.follow.store_sink import PersistenceGate, StoreSink
from mirror.ingest import events
from mirror.ingest import instructions as ins
from storage.env import directory
from storage.model import Identity, Manifest, Seqno, SnapshotRange
from storage.write.writer import GroupWriter, WriterOptions
from tests.storage.model import row

VBID = 0


class Store(StoreSink):
    """The sink of a real writer with one vbucket."""

    def __init__(self, path: Path) -> None:
        identity = Identity("c", "b", "u", 1, 1)
        directory.create(str(path), identity)
        options = WriterOptions(group=0, identity=identity, sync="unsafe", clock_ms=lambda: 1000)
        self.group = GroupWriter(directory.group_path(str(path), 0), options)
        self.commits = 0
        super().__init__(self.group.vbuckets[VBID], self)

    def commit(self, *, flush_open: bool = False) -> None:
        self.commits += 1
        self.group.commit(flush_open=flush_open)

    def schedule(self) -> None: ...

    def rows(self, *seqnos: int, prefix: bytes | None = None) -> events.StagingRefused | None:
        made = [row(prefix or self.row_prefix(), b"k%d" % seqno, b"{}", seqno) for seqno in seqnos]
        return self.stage(ins.StageRows(made, 100, SnapshotRange(Seqno(0), Seqno(seqnos[-1]))))

    def complete(self, seqno: int) -> None:
        self.publish(ins.PublishSnapshot(Seqno(seqno), Seqno(0)))

    def snapshot(self, *seqnos: int) -> None:
        assert self.rows(*seqnos) is None
        self.complete(seqnos[-1])
        self.group.commit()

    def back(self, seqno: int) -> events.RolledBack | events.NoBoundary:
        return self.roll_back(ins.RollbackTo(Seqno(seqno)))


ABANDON = ins.AbandonStaged()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "data")
    yield made
    made.group.close()


def test_rows_out_of_order_or_of_another_branch_are_refused(store: Store) -> None:
    store.snapshot(1, 5)
    system_event = ins.StageSystemEvent(Seqno(2), b"row", Manifest.initial(), SnapshotRange(Seqno(0), Seqno(9)))
    for refused in (
        store.rows(4, 6),
        store.rows(6, 7, prefix=b"\0\0\0\x63"),
        store.stage(ins.Advance(Seqno(3), None)),
        store.stage(system_event),
    ):
        assert isinstance(refused, events.StagingRefused)
        assert (refused.state.staged_seqno, store.group.pending_bytes) == (5, 0)


def test_an_advance_moves_the_position_and_the_open_snapshot(store: Store) -> None:
    snapshot = SnapshotRange(Seqno(0), Seqno(9))
    store.stage(ins.Advance(Seqno(7), snapshot))
    assert (store.state().staged_seqno, store.state().open_snapshot) == (7, snapshot)


def test_a_rollback_is_answered_with_the_state_or_with_no_boundary(store: Store) -> None:
    store.snapshot(1, 2)
    store.snapshot(3, 4)
    answer = store.back(3)
    assert isinstance(answer, events.RolledBack)
    assert answer.state.published_seqno == 2
    assert store.commits == 1, "else the machines would miss what is published on the way"
    assert store.back(1) == events.NoBoundary()


def test_a_held_snapshot_stays_staged_and_its_rollback_is_invisible_to_readers(store: Store) -> None:
    store.snapshot(1, 2)
    gate = store.gate = PersistenceGate()
    store.snapshot(3, 4)
    store.snapshot(5)
    assert (store.state().published_seqno, store.state().staged_seqno) == (2, 5)
    answer = store.back(3)
    assert isinstance(answer, events.RolledBack)
    assert (answer.state.published_seqno, answer.state.staged_seqno, answer.state.rollback_count) == (2, 2, 0)
    assert gate.waiting == 0
    store.rows(3)
    store.complete(3)
    assert store.back(1) == events.NoBoundary(), "what readers have seen was lost, and nothing older is kept"


def test_a_complete_resync_that_is_not_visible_yet_has_no_boundary(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the simulation: while its key rows were made, the source rolled back; the copy that was still served, of
    another history, went back to a boundary of its own, and its documents were taken for those of the source.
    """
    monkeypatch.setattr("storage.write.pending.INLINE_INDEX_ROWS", 0)
    store.snapshot(1, 2)
    store.writer.begin_resync()
    store.rows(5, 6)
    store.commit(flush_open=True)
    store.complete(6)
    store.commit()
    assert store.writer.complete_seqno is not None
    assert store.back(4) == events.NoBoundary()
    assert store.state().rollback_count == 0


def test_an_abandon_waits_for_a_complete_snapshot_below_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.write.pending.INLINE_INDEX_ROWS", 0)
    store.rows(1, 4)
    store.commit(flush_open=True)
    store.complete(4)
    store.commit()
    store.rows(5, 6)
    answer = store.abandon(ABANDON)
    assert answer is not None
    assert answer.state.staged_seqno == 4
    store.rows(5, 6)
    store.commit(flush_open=True)
    assert store.abandon(ABANDON) is None
    while store.writer.complete_seqno is not None:
        store.group.step()
        store.commit()
    answer = store.abandon(ABANDON)
    assert answer is not None
    assert (answer.state.published_seqno, answer.state.staged_seqno) == (4, 4)


@pytest.mark.parametrize("resync", [True, False])
def test_held_ends_are_dropped_with_the_staged_rows(store: Store, resync: bool) -> None:
    """A resync or an abandoned snapshot: an end of what is gone would be published on the branch that follows."""
    store.snapshot(1, 2)
    gate = store.gate = PersistenceGate()
    store.snapshot(3, 4)
    assert gate.waiting == 1
    if resync:
        store.begin_resync("why")
    else:
        store.abandon(ABANDON)
    plain: Any = SimpleNamespace(rollback_deferred=False)
    assert (gate.waiting, gate.release(9, plain)) == (0, None)


def test_a_resync_needs_space_next_to_the_old_copy(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.snapshot(1, 2)
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=1024))
    assert isinstance(store.begin_resync("why"), events.ResyncRefused)
    assert store.state().staging_branch == store.state().branch
    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert isinstance(store.begin_resync("why"), events.ResyncOpened)
    assert store.state().published_seqno == 2, "the old copy is served on"
