"""Instructions to deeds: every instruction has one, in list order, and what the store refuses ends its list."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mirror.feed import performer
from mirror.feed.performer import perform
from mirror.feed.persistence import PersistenceGate
from mirror.ingest import events as happenings
from mirror.ingest import instructions as deeds
from mirror.ingest.instructions import Instruction
from mirror.ingest.offset import StreamOffset
from mirror.wire import events as ev
from mirror.wire.codec_dcp import encode as encode_event
from storage import directory
from storage.model import FailoverEntry, Identity, Manifest, Seqno, SnapshotRange, Vbid, Vbuuid
from storage.writer import GroupWriter, RollbackResult

VBID = Vbid(0)


def every_instruction(root: type[Instruction] = Instruction) -> Iterator[type[Instruction]]:
    for child in root.__subclasses__():
        if getattr(deeds, child.__name__) is child:  # not what a slotted dataclass was made of, till it is collected
            yield child
        yield from every_instruction(child)


class Actor:
    """Writes down what it is asked, over a real writer."""

    def __init__(self, writer: GroupWriter) -> None:
        self.vbid = int(VBID)
        self.writer = writer
        self.done: list[Any] = []
        self.told: list[Any] = []
        self.noted: list[Any] = []
        self.connected = True
        self.answers: dict[type, list[Instruction]] = {}
        self.gate: PersistenceGate | None = None

    def tell(self, event: Any) -> list[Instruction]:
        self.told.append(event)
        return self.answers.get(type(event), [])

    def request_stream(self, asked: deeds.RequestStream) -> int | None:
        self.done.append(("request", asked.offset.start_seqno))
        return 42 if self.connected else None

    def close_stream(self, opaque: int | None) -> None:
        self.done.append(("close", opaque))

    def get_failover_log(self) -> bool:
        self.done.append("log")
        return self.connected

    def answer_marker(self, opaque: int) -> None:
        self.done.append(("marker", opaque))

    def holds(self, seqno: int, snap_start_seqno: int, purge_seqno: int | None) -> bool:
        if self.gate is not None:
            self.gate.hold(seqno, snap_start_seqno, purge_seqno)
        return self.gate is not None

    @property
    def defers_rollbacks(self) -> bool:
        return self.gate is not None

    def drop_held(self) -> bool:
        return self.gate is not None and self.gate.drop()

    def abandon_later(self) -> None:
        self.done.append("abandon later")

    def commit(self) -> None:
        self.done.append("commit")
        self.writer.commit()

    def reroute(self) -> None:
        self.done.append(("reroute", self.writer.row_prefix(self.vbid)))

    def note_rollback(self, result: RollbackResult) -> None:
        self.noted.append((result.from_seqno, result.boundary_seqno))

    def note_resync(self, why: str) -> None:
        self.noted.append(why)

    def refresh_map(self, config: bytes) -> None:
        self.done.append(("map", config))

    def refresh_collections(self) -> None:
        self.done.append("collections")

    def reconnect(self, cause: str) -> None:
        self.done.append(("reconnect", cause))

    def retry_after(self, reason: deeds.RetryReason, attempt: int) -> None:
        self.done.append(("retry", reason, attempt))

    def report(self, status: deeds.Status, text: str) -> None:
        self.done.append(("report", status))


@pytest.fixture
def actor(tmp_path: Path) -> Iterator[Actor]:
    identity = Identity("c", "b", "u", 1, 1)
    path = str(tmp_path / "data")
    directory.create(path, identity)
    writer = GroupWriter.open(
        directory.group_path(path, 0), group=0, vbids=[0], identity=identity, sync="unsafe", clock_ms=lambda: 1000
    )
    yield Actor(writer)
    writer.close()


def rows(writer: GroupWriter, *seqnos: int, prefix: bytes | None = None) -> list[tuple[bytes, bytes]]:
    branch = writer.row_prefix(0) if prefix is None else prefix
    return [
        (branch + seqno.to_bytes(8), encode_event(ev.Mutation(0, b"\0k%d" % seqno, seqno, 1, 1, value=b"{}")))
        for seqno in seqnos
    ]


def stage(actor: Actor, *seqnos: int, prefix: bytes | None = None) -> deeds.StageRows:
    made = rows(actor.writer, *seqnos, prefix=prefix)
    return deeds.StageRows(VBID, "t", made, 100, SnapshotRange(Seqno(0), Seqno(seqnos[-1])))


def publish(seqno: int) -> deeds.PublishSnapshot:
    return deeds.PublishSnapshot(VBID, "t", Seqno(seqno), Seqno(0))


def test_every_instruction_has_a_deed() -> None:
    assert set(every_instruction()) == set(performer._DEEDS)


def test_rows_log_and_publish_become_one_commit(actor: Actor) -> None:
    log = (FailoverEntry(Vbuuid(7), Seqno(0)),)
    perform(actor, [deeds.SaveFailoverLog(VBID, "t", log), stage(actor, 1, 2, 5), publish(5)])
    assert actor.writer.commit().published == [(0, 5)]
    state = actor.writer.state(0)
    assert (state.published_seqno, state.failover_log, state.open_snapshot) == (5, log, None)
    assert actor.told == []


def test_rows_made_for_another_branch_are_rewritten(actor: Actor) -> None:
    perform(actor, [stage(actor, 1, 2, prefix=b"\0\0\0\x63"), publish(2)])
    assert actor.writer.commit().published == [(0, 2)]


def test_refused_rows_end_their_list_and_the_machine_is_told(actor: Actor) -> None:
    perform(actor, [stage(actor, 1, 5), publish(5)])
    actor.answers[happenings.StagingRefused] = [deeds.Report(VBID, "t", deeds.Status.WAITING, "so what")]
    for bad in (
        stage(actor, 4, 6),
        deeds.Advance(VBID, "t", Seqno(3), None),
        deeds.StageSystemEvent(VBID, "t", Seqno(2), b"row", Manifest.initial(), SnapshotRange(Seqno(0), Seqno(9))),
    ):
        actor.told.clear()
        actor.done.clear()
        perform(actor, [bad, publish(9), deeds.RefreshMap(VBID, "t")])
        (refused,) = actor.told
        assert isinstance(refused, happenings.StagingRefused)
        assert refused.state.staged_seqno == 5
        assert actor.done == [("report", deeds.Status.WAITING)], "nothing after what was refused"


def test_advance_moves_the_position_and_the_open_snapshot(actor: Actor) -> None:
    snapshot = SnapshotRange(Seqno(0), Seqno(9))
    perform(actor, [deeds.Advance(VBID, "t", Seqno(7), snapshot)])
    assert (actor.writer.state(0).staged_seqno, actor.writer.state(0).open_snapshot) == (7, snapshot)


def test_rollback_is_answered_with_the_state_or_with_no_boundary(actor: Actor) -> None:
    perform(actor, [stage(actor, 1, 2), publish(2)])
    actor.writer.commit()
    perform(actor, [stage(actor, 3, 4), publish(4)])
    actor.writer.commit()
    perform(actor, [deeds.RollbackTo(VBID, "t", Seqno(3))])
    (answer,) = actor.told
    assert isinstance(answer, happenings.RolledBack)
    assert answer.state.published_seqno == 2
    assert actor.done[0] == "commit", "else the machines would miss what is published on the way"
    actor.told.clear()
    perform(actor, [deeds.RollbackTo(VBID, "t", Seqno(1))])
    assert actor.told == [happenings.NoBoundary()]


def test_what_a_gate_holds_stays_staged_and_a_rollback_of_it_alone_is_none_to_readers(actor: Actor) -> None:
    perform(actor, [stage(actor, 1, 2), publish(2)])
    actor.writer.commit()
    actor.gate = PersistenceGate()
    perform(actor, [stage(actor, 3, 4), publish(4), stage(actor, 5), publish(5)])
    actor.writer.commit()
    assert (actor.writer.state(0).published_seqno, actor.writer.state(0).staged_seqno) == (2, 5)
    perform(actor, [deeds.RollbackTo(VBID, "t", Seqno(3))])
    (answer,) = actor.told
    assert isinstance(answer, happenings.RolledBack)
    assert (answer.state.published_seqno, answer.state.staged_seqno, answer.state.rollback_count) == (2, 2, 0)
    assert actor.gate.waiting == 0
    perform(actor, [stage(actor, 3), publish(3), deeds.RollbackTo(VBID, "t", Seqno(1))])
    assert actor.told[-1] == happenings.NoBoundary()  # what readers have seen was lost, and nothing older is kept


def test_a_refill_that_is_complete_but_not_yet_seen_has_no_boundary_to_go_back_to(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the simulation: while its key rows were made, the source rolled back; the copy that was still served, of
    another history, went back to a boundary of its own, and its documents were taken for those of the source.
    """
    monkeypatch.setattr("storage.writer.INLINE_INDEX_ROWS", 0)
    perform(actor, [stage(actor, 1, 2), publish(2)])
    actor.writer.commit()
    actor.writer.begin_refill(0)
    perform(actor, [stage(actor, 5, 6)])
    actor.writer.commit(flush_open=True)
    perform(actor, [publish(6)])
    actor.writer.commit()
    assert actor.writer.publishing(0)
    perform(actor, [deeds.RollbackTo(VBID, "t", Seqno(4))])
    assert actor.told == [happenings.NoBoundary()]
    assert actor.writer.state(0).rollback_count == 0


def test_answer_of_an_instruction_is_performed_before_the_next_of_the_list(actor: Actor) -> None:
    actor.answers[happenings.Abandoned] = [deeds.Report(VBID, "t", deeds.Status.WAITING, "abandoned")]
    perform(actor, [deeds.AbandonStaged(VBID, "t"), deeds.RefreshMap(VBID, "t", b"config")])
    prefix = actor.writer.row_prefix(0)
    assert actor.done == ["commit", ("reroute", prefix), ("report", deeds.Status.WAITING), ("map", b"config")]


def test_rows_that_follow_the_begin_of_an_unordered_snapshot_go_to_its_branch(actor: Actor) -> None:
    """They were scanned for the old one. Whatever comes in any order is taken in any order, system events too."""
    within = SnapshotRange(Seqno(0), Seqno(0))
    made = rows(actor.writer, 7, 3)
    event = encode_event(ev.SystemEvent(0, 5, 0, 0, b"c", bytes(16)))
    perform(
        actor,
        [
            deeds.BeginOso(VBID, "t"),
            deeds.StageRows(VBID, "t", made, 9, within, unordered=True),
            deeds.StageSystemEvent(VBID, "t", Seqno(5), event, Manifest.initial(), within, unordered=True),
            publish(7),
        ],
    )
    actor.writer.commit()
    assert actor.told == []
    assert actor.writer.state(0).published_seqno == 7
    assert actor.writer.row_prefix(0) != b"\0\0\0\1"


def test_a_sync_write_is_staged_half_by_half(actor: Actor) -> None:
    within = SnapshotRange(Seqno(1), Seqno(9))
    frame = encode_event(ev.Prepare(0, b"\0k", 1, 1, 1, value=b"{}"))
    perform(actor, [deeds.StagePrepare(VBID, "t", Seqno(1), frame, within)])
    assert actor.writer.open_prepares(0) == {b"\0k": 1}
    perform(actor, [deeds.CommitPrepare(VBID, "t", Seqno(2), b"\0k", within)])
    assert actor.writer.open_prepares(0) == {}
    perform(actor, [deeds.AbortPrepare(VBID, "t", Seqno(3), b"\0k", within)])
    assert actor.writer.state(0).staged_seqno == 3
    assert actor.told == []


def test_a_commit_without_its_prepare_ends_its_list_and_the_machine_learns_of_it(actor: Actor) -> None:
    within = SnapshotRange(Seqno(1), Seqno(9))
    perform(actor, [deeds.CommitPrepare(VBID, "t", Seqno(2), b"\0k", within), publish(9)])
    assert actor.told == [happenings.PrepareMissing(actor.writer.state(0), 2)]
    assert not actor.writer.publishing(0)


@pytest.mark.parametrize("kind", [deeds.StagePrepare, deeds.CommitPrepare, deeds.AbortPrepare])
def test_a_half_that_does_not_rise_ends_its_list(actor: Actor, kind: Any) -> None:
    within = SnapshotRange(Seqno(1), Seqno(9))
    frame = encode_event(ev.Prepare(0, b"\0k", 5, 1, 1, value=b"{}"))
    perform(actor, [deeds.StagePrepare(VBID, "t", Seqno(5), frame, within)])
    what = frame if kind is deeds.StagePrepare else b"\0k"
    perform(actor, [kind(VBID, "t", Seqno(5), what, within), publish(9)])
    (told,) = actor.told
    assert isinstance(told, happenings.StagingRefused)
    assert not actor.writer.publishing(0)


def test_what_streams_are_filtered_to_is_kept(actor: Actor) -> None:
    perform(actor, [deeds.SaveFilter(VBID, "t", "collections 8")])
    actor.writer.commit()
    assert actor.writer.state(0).stream_filter == "collections 8"


def test_staged_rows_are_abandoned_and_the_published_stay(actor: Actor) -> None:
    perform(actor, [stage(actor, 1, 2), publish(2), stage(actor, 3, 4), deeds.AbandonStaged(VBID, "t")])
    (answer,) = actor.told
    assert isinstance(answer, happenings.Abandoned)
    assert (answer.state.published_seqno, answer.state.staged_seqno) == (2, 2)


def test_abandoning_waits_for_a_complete_snapshot_where_the_next_one_is_on_the_disk(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.writer.INLINE_INDEX_ROWS", 0)
    perform(actor, [stage(actor, 1, 4)])
    actor.writer.commit(flush_open=True)
    perform(actor, [publish(4)])
    actor.writer.commit()
    perform(actor, [stage(actor, 5, 6), deeds.AbandonStaged(VBID, "t")])
    (answer,) = actor.told
    assert isinstance(answer, happenings.Abandoned)
    assert answer.state.staged_seqno == 4
    actor.told.clear()
    perform(actor, [stage(actor, 5, 6)])
    actor.writer.commit(flush_open=True)
    perform(actor, [deeds.AbandonStaged(VBID, "t")])
    assert actor.told == []
    assert actor.done[-1] == "abandon later"
    while actor.writer.publishing(0):
        actor.writer.step()
        actor.writer.commit()
    perform(actor, [deeds.AbandonStaged(VBID, "t")])
    (answer,) = actor.told
    assert (answer.state.published_seqno, answer.state.staged_seqno) == (4, 4)


@pytest.mark.parametrize("asked", [deeds.BeginRefill, deeds.AbandonStaged])
def test_ends_that_were_held_are_forgotten_with_what_was_staged(actor: Actor, asked: Any) -> None:
    """A refill or an abandoned snapshot: an end of what is gone would be published on the branch that follows."""
    perform(actor, [stage(actor, 1, 2), publish(2)])
    actor.writer.commit()
    actor.gate = PersistenceGate()
    perform(actor, [stage(actor, 3, 4), publish(4), asked(VBID, "t")])
    assert actor.gate.waiting == 0
    assert actor.gate.release(9) is None


def test_refill_needs_room_beside_the_old_copy(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    perform(actor, [stage(actor, 1, 2), publish(2)])
    actor.writer.commit()
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=1024))
    perform(actor, [deeds.BeginRefill(VBID, "t")])
    assert isinstance(actor.told[-1], happenings.RefillRefused)
    assert actor.writer.state(0).staging_branch == actor.writer.state(0).branch
    monkeypatch.setattr(shutil, "disk_usage", usage)
    perform(actor, [deeds.BeginRefill(VBID, "t")])
    assert isinstance(actor.told[-1], happenings.RefillBegun)
    assert actor.writer.state(0).published_seqno == 2, "the old copy is served on"


def test_requests_go_out_or_the_machine_learns_that_there_is_no_connection(actor: Actor) -> None:
    asked = deeds.RequestStream(VBID, "t", StreamOffset.fresh(), 2**64 - 1, 0)
    perform(actor, [asked, deeds.GetFailoverLog(VBID, "t")])
    assert actor.told == [happenings.StreamRequested(42)]
    actor.connected = False
    actor.told.clear()
    perform(actor, [asked, deeds.GetFailoverLog(VBID, "t")])
    assert [type(event) for event in actor.told] == [happenings.ConnectionLost, happenings.ConnectionLost]


def test_the_rest_is_handed_on(actor: Actor) -> None:
    perform(
        actor,
        [
            deeds.CloseStream(VBID, "t", 5),
            deeds.AnswerMarker(VBID, "t", 6),
            deeds.RefreshCollections(VBID, "unknown"),
            deeds.Reconnect(VBID, "stale"),
            deeds.RetryAfter(VBID, "t", deeds.RetryReason.SOURCE_BUSY, 3),
        ],
    )
    assert actor.done == [
        ("close", 5),
        ("marker", 6),
        "collections",
        ("reconnect", "stale"),
        ("retry", "source-busy", 3),
    ]
