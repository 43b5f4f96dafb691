"""Dialogues with a machine over a toy store: event in, instructions out; each test is a sentence of the protocol.

The rig performs what the store is requested and answers at once, validates the machine after every event, and checks
that requests say what the store holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror.ingest import events as ev
from mirror.ingest import instructions as ins
from mirror.ingest.handshake import ROLLBACK_ROUNDS_MAX
from mirror.ingest.instructions import RetryReason
from mirror.ingest.machine import TRANSITIONS, VbucketMachine
from mirror.ingest.selection import StreamFilter
from mirror.ingest.state import STORE_PHASES, Phase
from mirror.server.rollback import StreamHistory, judge
from mirror.wire.constants import MarkerVersion, SnapshotFlag, Status, StreamEndReason
from mirror.wire.events import (
    Abort,
    CollectionCreated,
    CollectionDropped,
    Commit,
    OsoSnapshot,
    Prepare,
    SeqnoAdvanced,
    SnapshotMarker,
    StreamEnd,
    StreamEvent,
    StreamRequest,
    SystemEventContent,
)
from mirror.wire.system_events import encode_system_event
from storage.model import SEQNO_MAX, FailoverLog
from tests.ingest.toy_store import Rig, ToyStore, row, validate

ACK = int(SnapshotFlag.ACK)
DISK = int(SnapshotFlag.DISK)


def log(*entries: tuple[int, int]) -> FailoverLog:
    return FailoverLog.of(entries)


LOG = log((0xA, 0))


def rig_at(*boundaries: int, failover_log: FailoverLog = LOG, **more: Any) -> Rig:
    """Return a rig that holds these boundaries and has requested its stream."""
    store = ToyStore()
    for boundary in boundaries[:-1]:
        store.holding(boundary)
    store.holding(boundaries[-1] if boundaries else 0, failover_log, **more)
    rig = Rig(store)
    rig.feed(ev.Start())
    return rig


def streaming_at(*boundaries: int, **more: Any) -> Rig:
    """Return the same rig with its stream accepted."""
    rig = rig_at(*boundaries, **more)
    rig.feed(ev.StreamAccepted(rig.opaque_counter, rig.machine.stored.failover_log or LOG))
    return rig


def resyncing_at_100() -> Rig:
    """Return a rig whose source has no common history with it; the stream of the new one is accepted."""
    rig = rig_at(100)
    rollback(rig, 0)
    rig.feed(ev.FailoverLogReceived(log()))
    rig.feed(ev.StreamAccepted(rig.opaque_counter, log((0xC, 0))))
    return rig


def marker(rig: Rig, start: int, end: int, flags: int = 1, purge_seqno: int | None = None) -> list[ins.Instruction]:
    """Feed a V1 marker or, with `purge_seqno`, a V2.2 one."""
    version = MarkerVersion.V1 if purge_seqno is None else MarkerVersion.V2_2
    event = SnapshotMarker(0, start, end, flags, opaque=rig.opaque_counter, version=int(version))
    return rig.feed(replace(event, purge_seqno=purge_seqno or 0))


def rows(rig: Rig, *seqnos: int) -> list[ins.Instruction]:
    return rig.feed_rows(rig.opaque_counter, [row(seqno, b"k%d" % seqno, b"v") for seqno in seqnos])


def rollback(rig: Rig, seqno: int) -> list[ins.Instruction]:
    return rig.feed(ev.StreamRollback(rig.opaque_counter, seqno))


def refused(rig: Rig, status: int, context: bytes = b"") -> list[ins.Instruction]:
    return rig.feed(ev.StreamRefused(rig.opaque_counter, status, context))


def ended(rig: Rig, reason: int) -> list[ins.Instruction]:
    return rig.feed(StreamEnd(0, reason, opaque=rig.opaque_counter))


def advanced(rig: Rig, seqno: int) -> list[ins.Instruction]:
    return rig.feed(SeqnoAdvanced(0, seqno, opaque=rig.opaque_counter))


def kinds(done: list[ins.Instruction]) -> list[type]:
    """Return the kinds of instructions, without reports."""
    return [type(instruction) for instruction in done if not isinstance(instruction, ins.ReportStatus)]


def status_of(rig: Rig) -> ins.VbucketStatus:
    return rig.machine.shown.status


def requested(rig: Rig) -> tuple[int, int, int, int]:
    """Return start, snapshot start, snapshot end and vbuuid of the newest stream request."""
    offset = rig.last(ins.RequestStream).offset
    return offset.start_seqno, offset.snap_start_seqno, offset.snap_end_seqno, offset.vbuuid


def wire_request(rig: Rig) -> StreamRequest:
    """Return the newest stream request as the source gets it."""
    instruction = rig.last(ins.RequestStream)
    start, snap_start, snap_end, vbuuid = requested(rig)
    return StreamRequest(0, 0, start, instruction.end_seqno, vbuuid, snap_start, snap_end)


# --- asking ---


def test_a_fresh_vbucket_requests_from_zero_without_a_vbuuid() -> None:
    rig = rig_at(failover_log=log())
    assert requested(rig) == (0, 0, 0, 0)
    request = rig.last(ins.RequestStream)
    assert request.end_seqno == 2**64 - 1
    assert request.purge_seqno is None


@pytest.mark.parametrize("how", ["break", "restart", "end"])
def test_a_request_after_a_break_continues_the_open_snapshot(how: str) -> None:
    rig = streaming_at(100)
    marker(rig, 101, 120)
    rows(rig, 105)
    if how == "end":
        ended(rig, StreamEndReason.SLOW)
        rig.feed(ev.RetryDue())
    else:
        rig.feed(ev.ConnectionLost()) if how == "break" else rig.restart()
        rig.feed(ev.Start())
    assert requested(rig) == (105, 100, 120, 0xA)


@pytest.mark.parametrize("marker_start", [0, 100, 101, 105])
def test_a_history_that_forked_inside_the_open_snapshot_brings_the_version_that_the_snapshot_left_out(
    marker_start: int,
) -> None:
    """`doc` has versions at 103 and 110. The snapshot to 120 left out 103; the failover at 108 loses 110."""
    rig = streaming_at(100)
    marker(rig, marker_start, 120)
    rig.feed_rows(rig.opaque_counter, [row(105, b"other", b"v")])
    rig.feed(ev.ConnectionLost())
    rig.feed(ev.Start())
    source = StreamHistory(log((0xB, 108), (0xA, 0)), high_seqno=130, purge_seqno=0)
    while (rollback_seqno := judge(wire_request(rig), source)) is not None:
        rollback(rig, rollback_seqno)
    rig.feed(ev.StreamAccepted(rig.opaque_counter, source.failover_log))
    marker(rig, 0, 130)
    versions = [row(103, b"doc", b"old"), row(105, b"other", b"v"), row(130, b"last", b"v")]
    start_seqno = requested(rig)[0]
    rig.feed_rows(rig.opaque_counter, [each for each in versions if int.from_bytes(each[0][4:12]) > start_seqno])
    assert rig.store.served.seqno == 130
    assert {key[1:] for key in rig.store.served.documents} == {b"doc", b"other", b"last"}


def test_a_break_after_a_marker_without_rows_resumes_at_the_boundary() -> None:
    rig = streaming_at(100)
    marker(rig, 101, 120)
    rig.feed(ev.ConnectionLost())
    rig.feed(ev.Start())
    assert requested(rig) == (100, 100, 100, 0xA)


def test_staged_rows_that_cannot_be_continued_are_dropped_before_the_request() -> None:
    rig = Rig(ToyStore().holding(0, LOG, 9, (0, 0)))
    assert kinds(rig.feed(ev.Start())) == [ins.AbandonStaged, ins.RequestStream]
    assert requested(rig) == (0, 0, 0, 0)


def test_the_purge_seqno_is_sent_only_with_a_request_inside_a_snapshot() -> None:
    rig = Rig(ToyStore().holding(0, LOG))
    rig.feed(ev.Start(sends_purge_seqno=True))
    rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG))
    marker(rig, 0, 120, DISK, purge_seqno=40)
    rows(rig, 30)
    assert rig.store.purge_seqno == 40
    for sends_purge_seqno, expected in ((False, None), (True, 40)):
        rig.restart()
        rig.feed(ev.Start(sends_purge_seqno=sends_purge_seqno))
        assert rig.last(ins.RequestStream).purge_seqno == expected
    rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG))
    marker(rig, 0, 120, DISK, purge_seqno=40)
    rows(rig, 120)
    rig.restart()
    rig.feed(ev.Start(sends_purge_seqno=True))
    assert rig.last(ins.RequestStream).purge_seqno is None


@pytest.mark.parametrize(
    ("marked", "take", "missing_seqno"),
    [
        (True, lambda rig: rows(rig, 30), 40),
        (True, lambda rig: created(rig, 30, 8), 40),
        (True, lambda rig: advanced(rig, 30), 40),
        (True, lambda rig: ended(rig, StreamEndReason.OK), 40),
        (False, lambda rig: advanced(rig, 30), SEQNO_MAX),
    ],
    ids=["a row", "a system event", "an advance", "the regular end", "an advance without a marker"],
)
def test_the_missing_tombstones_are_known_before_anything_of_the_first_snapshot_is_held(
    marked: bool, take: Callable[[Rig], object], missing_seqno: int
) -> None:
    rig = Rig(ToyStore().holding(0, LOG))
    rig.feed(ev.Start(sends_purge_seqno=True, collections=False, end_seqno=120))
    rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG))
    if marked:
        marker(rig, 0, 120, DISK, purge_seqno=40)
    take(rig)
    assert rig.store.staging.position
    assert rig.store.missing_seqno == missing_seqno


def test_the_tombstones_missing_from_the_first_snapshot_stay_missing() -> None:
    rig = Rig(ToyStore().holding(0, LOG))
    for purge_seqno, seqno in ((80, 30), (20, 120), (10, 121), (90, 122)):  # one node after the other
        rig.feed(ev.Start(sends_purge_seqno=True))
        rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG))
        marker(rig, 0, max(120, seqno), DISK, purge_seqno=purge_seqno)
        rows(rig, seqno)
        assert (rig.store.missing_seqno, rig.store.purge_seqno) == (80, purge_seqno)
        rig.restart()


def test_a_source_without_purge_seqnos_may_lack_any_tombstone_of_the_first_snapshot() -> None:
    """The marker decides: a node of 8.0 accepts V2.2 markers, and sends V1 if a setting says so."""
    rig = Rig(ToyStore().holding(0, LOG))
    for purge_seqno, expected in ((0, 0), (None, SEQNO_MAX), (7, SEQNO_MAX)):
        rig.feed(ev.Start(sends_purge_seqno=True))
        rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG))
        marker(rig, 0, 120, DISK, purge_seqno)
        rows(rig, rig.machine.assembler.position_seqno + 1)
        assert rig.store.missing_seqno == expected
        rig.restart()
    rig = rig_at(100)
    rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG))
    marker(rig, 101, 120)
    rows(rig, 110)
    assert rig.store.missing_seqno == 0, "the first snapshot is complete"


@pytest.mark.parametrize("reason", [StreamEndReason.STATE_CHANGED, StreamEndReason.ROLLBACK])
def test_a_position_inside_a_snapshot_is_given_up_if_its_streams_stay_empty(reason: int) -> None:
    """An ephemeral bucket of 8.0 did so for ever, because its backfill does not look at the request's purge seqno."""
    rig = Rig(ToyStore().holding(0, LOG))
    rig.feed(ev.Start(sends_purge_seqno=True))
    rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG))
    marker(rig, 0, 120, DISK, purge_seqno=90)
    rows(rig, 30)
    rig.feed(ev.ConnectionLost())
    rig.feed(ev.Start(sends_purge_seqno=True))
    for _ in range(3):
        assert requested(rig) == (30, 0, 120, 0xA)
        rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG))
        ended(rig, reason)
        rig.feed(ev.RetryDue())
    assert requested(rig) == (0, 0, 0, 0)
    assert any("accepted the position 30 inside a snapshot 3 times" in report.text for report in rig.reports)
    assert rig.store.served.documents == {}


def test_a_position_inside_a_snapshot_is_kept_while_streams_bring_rows() -> None:
    rig = Rig(ToyStore().holding(0, LOG))
    rig.feed(ev.Start())
    rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG))
    for seqno in range(10, 20):
        marker(rig, 0, 120, DISK)
        rows(rig, seqno)
        for reason in (StreamEndReason.STATE_CHANGED,) * 3 + (StreamEndReason.BACKFILL_FAIL, StreamEndReason.SLOW):
            ended(rig, reason)
            rig.feed(ev.RetryDue())
            assert requested(rig) == (seqno, 0, 120, 0xA)
            rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG))


def test_a_machine_waits_for_a_source_mirror_that_is_behind() -> None:
    held = log((0xB, 90), (0xA, 0))
    rig = rig_at(100, failover_log=held)
    rig.feed(ev.Start(by_mirror=True))
    rig.feed(ev.StreamRefused(rig.opaque_counter, Status.NOT_MY_VBUCKET, b""))
    assert "has not published 100 yet" in rig.machine.shown.text
    for _ in range(3):
        rig.feed(ev.RetryDue())
        rig.feed(ev.StreamRollback(rig.opaque_counter, 0))
        rig.feed(ev.FailoverLogReceived(log((0xA, 0))))
        assert (rig.machine.phase, rig.store.served.seqno) == (Phase.WAITING, 100)
    rig.feed(ev.RetryDue())
    rig.feed(ev.StreamRollback(rig.opaque_counter, 0))
    rig.feed(ev.FailoverLogReceived(log((0xC, 95), (0xA, 0))))
    assert requested(rig)[0] < 100, "it has heard of a failover that is not known here"


def test_a_stream_with_an_end_finishes_at_the_end_of_its_snapshot() -> None:
    rig = Rig(ToyStore())
    rig.feed(ev.Start(end_seqno=5))
    assert rig.last(ins.RequestStream).end_seqno == 5
    rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG))
    marker(rig, 0, 8)
    rows(rig, 8)
    ended(rig, 0)
    assert rig.machine.phase is Phase.FINISHED
    assert kinds(rig.feed(ev.Start(end_seqno=5))) == []
    assert kinds(rig.feed(ev.Start())) == [ins.RequestStream]


def test_a_request_inside_a_snapshot_reaches_to_the_end_of_the_snapshot() -> None:
    rig = Rig(ToyStore().holding(0, LOG, 7, (0, 9)))
    rig.feed(ev.Start(end_seqno=5))
    assert rig.last(ins.RequestStream).end_seqno == 9


@pytest.mark.parametrize(("purge_seqno", "passes"), [(0, True), (100, True), (101, False), (None, True)])
def test_a_vbucket_resumed_below_the_purge_seqno_is_fetched_again(purge_seqno: int | None, passes: bool) -> None:
    """A filtered mirror may lack deletions then (MB-71917)."""
    rig = streaming_at(100)
    done = marker(rig, 101, 150, DISK, purge_seqno)
    if passes:
        assert kinds(done) == []
        assert ins.RetryAfter not in kinds(rows(rig, 150))
        return
    assert kinds(done) == [ins.CloseStream, ins.BeginResync, ins.RequestStream]
    assert requested(rig) == (0, 0, 0, 0)
    assert "purged deletions up to 101 and let 100 pass" in rig.reports[-2].text


def test_a_purge_seqno_above_a_position_inside_a_snapshot_causes_no_resync() -> None:
    rig = rig_at(100, staged=110, open_snapshot=(101, 120))
    rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG))
    assert kinds(marker(rig, 101, 120, DISK, 115)) == []


# --- accepted ---


def test_the_failover_log_of_an_accepted_stream_replaces_ours_before_any_row() -> None:
    rig = rig_at(100)
    done = rig.feed(ev.StreamAccepted(rig.opaque_counter, log((0xB, 100), (0xA, 0))))
    assert kinds(done) == [ins.SaveFacts]
    assert rig.store.failover_log == tuple(log((0xB, 100), (0xA, 0)))


def test_a_failover_log_that_did_not_change_is_not_saved_again() -> None:
    rig = rig_at(100)
    assert kinds(rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG))) == []


def streaming_from_zero() -> VbucketMachine:
    """Return a machine whose stream has opaque 7 and whose publishes wait for the test."""
    machine = VbucketMachine(0, ToyStore().state())
    for event in (ev.Start(), ev.StreamRequested(7), ev.StreamAccepted(7, LOG)):
        machine.handle(event)
    return machine


def test_a_marker_with_ack_is_answered_once_its_snapshot_is_durable() -> None:
    machine = streaming_from_zero()
    machine.handle(SnapshotMarker(0, 0, 5, ACK | DISK, opaque=7))
    published = machine.handle_run(7, [row(5, b"k", b"v")], 50)
    assert ins.PublishSnapshot in kinds(published)
    assert ins.AnswerMarker not in kinds(published)
    assert machine.handle(ev.Published(4)) == []
    assert machine.handle(ev.Published(5)) == [ins.AnswerMarker(7)]
    assert machine.handle(ev.Published(5)) == []


def test_a_marker_with_ack_waits_for_a_snapshot_on_its_way_to_disk() -> None:
    machine = streaming_from_zero()
    machine.handle(SnapshotMarker(0, 0, 5, DISK, opaque=7))
    machine.handle_run(7, [row(5, b"k", b"v")], 50)
    assert kinds(machine.handle(SnapshotMarker(0, 0, 5, ACK, opaque=7))) == []
    assert kinds(machine.handle(ev.Published(5))) == [ins.AnswerMarker]


def test_a_marker_with_ack_of_a_durable_snapshot_is_answered_at_once() -> None:
    rig = streaming_at(100)
    assert kinds(marker(rig, 0, 100, ACK)) == [ins.AnswerMarker]


def test_a_marker_is_not_answered_when_its_stream_is_gone() -> None:
    rig = streaming_at(100)
    marker(rig, 101, 102, ACK)
    rig.feed(ev.ConnectionLost())
    assert rig.feed(ev.Published(100)) == []


def test_messages_of_another_stream_are_ignored() -> None:
    rig = streaming_at(100)
    stale = rig.opaque_counter - 1
    assert rig.feed(SnapshotMarker(0, 0, 7, 1, opaque=stale)) == []
    assert rig.feed_rows(stale, [row(101, b"k", b"v")]) == []
    assert rig.feed(StreamEnd(0, 2, opaque=stale)) == []
    assert rig.machine.phase is Phase.STREAMING


def test_a_backfill_and_a_live_stream_have_different_states() -> None:
    rig = streaming_at(100)
    marker(rig, 0, 120, DISK)
    assert status_of(rig) is ins.VbucketStatus.BACKFILLING
    rows(rig, 120)
    assert status_of(rig) is ins.VbucketStatus.STREAMING


@pytest.mark.parametrize(
    ("flags", "collections", "waits"),
    [(1, True, True), (DISK, True, False), (1, False, False)],
    ids=["from memory", "from disk: it may take long", "without collections nothing may carry the end"],
)
def test_a_machine_waits_for_the_end_of_a_memory_snapshot(flags: int, collections: bool, waits: bool) -> None:
    rig = rig_at(100)
    rig.feed(ev.Start(collections=collections))
    rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG))
    assert not rig.machine.waits_for_end
    marker(rig, 101, 104, flags)
    rows(rig, 101, 102)
    assert rig.machine.waits_for_end is waits
    rows(rig, 103, 104)
    assert not rig.machine.waits_for_end


def test_a_vbucket_is_caught_up_when_the_high_seqno_is_durable() -> None:
    rig = streaming_at(100)
    assert not rig.machine.caught_up
    rig.feed(ev.HighSeqno(102))
    assert not rig.machine.caught_up
    marker(rig, 101, 102)
    rows(rig, 102)
    assert rig.machine.caught_up


def test_prepares_and_aborts_are_not_stored_as_documents() -> None:
    rig = streaming_at(100)
    marker(rig, 101, 106)
    rig.feed(Prepare(0, b"\0k", 101, 1, 5, value=b"kept", opaque=rig.opaque_counter))
    rig.feed(Prepare(0, b"\0l", 102, 1, 5, value=b"lost", opaque=rig.opaque_counter))
    rows(rig, 104)
    rig.feed(Abort(0, b"\0l", 102, 106, opaque=rig.opaque_counter))
    assert rig.store.served.seqno == 106
    assert [document.seqno for document in rig.store.served.documents.values()] == [104]


# --- what is mirrored of the bucket ---

AIRLINE = StreamFilter(collection_ids=(8,))
BOTH = StreamFilter(collection_ids=(8, 9))


def filtered(rig: Rig, stream_filter: StreamFilter) -> list[type]:
    return kinds(rig.feed(ev.Start(filter=stream_filter)))


def take_content(rig: Rig, seqno: int, content: SystemEventContent) -> None:
    rig.feed(replace(encode_system_event(content, vbid=0, seqno=seqno), opaque=rig.opaque_counter))


def created(rig: Rig, seqno: int, collection_id: int) -> None:
    take_content(rig, seqno, CollectionCreated(1, 0, collection_id, f"c{collection_id}"))


def dropped(rig: Rig, seqno: int, collection_id: int) -> None:
    take_content(rig, seqno, CollectionDropped(2, 0, collection_id))


def filtered_at(stream_filter: StreamFilter, *boundaries: int) -> Rig:
    """A rig that holds boundaries of a stream so filtered, with the collections it names."""
    store = ToyStore()
    rig = Rig(store)
    filtered(rig, stream_filter)
    rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG))
    for boundary in boundaries:
        marker(rig, boundary, boundary)
        created(rig, boundary, stream_filter.collection_ids[boundaries.index(boundary)])
    return rig


def test_the_filter_of_a_stream_is_saved_before_its_rows() -> None:
    rig = Rig(ToyStore())
    assert filtered(rig, AIRLINE) == [ins.RequestStream]
    done = kinds(rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG)))
    assert done == [ins.SaveFacts]
    assert rig.store.failover_log == LOG
    assert rig.store.stream_filter == AIRLINE.text


def test_a_stream_with_the_same_filter_resumes_at_its_position() -> None:
    rig = filtered_at(BOTH, 50, 100)
    assert filtered(rig, BOTH) == [ins.CloseStream, ins.RequestStream]
    assert requested(rig) == (100, 100, 100, 0xA)


def test_a_collection_that_was_left_out_before_is_fetched_from_the_start() -> None:
    """Its documents between its creation and our position would never come."""
    rig = filtered_at(AIRLINE, 100)
    assert filtered(rig, BOTH) == [ins.CloseStream, ins.BeginResync, ins.RequestStream]
    assert requested(rig) == (0, 0, 0, 0)
    assert rig.store.served.seqno == 100
    assert kinds(rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG)))[-1] is ins.SaveFacts
    assert rig.store.stream_filter == BOTH.text
    marker(rig, 1, 120)
    rows(rig, 110)
    rig.feed(ev.ConnectionLost())
    assert filtered(rig, BOTH) == [ins.RequestStream]
    assert requested(rig)[0] == 110, "the resync is of the new filter"


def test_a_collection_whose_end_was_seen_may_be_left_out() -> None:
    rig = filtered_at(BOTH, 50, 100)
    marker(rig, 101, 110)
    dropped(rig, 110, 9)
    assert filtered(rig, AIRLINE) == [ins.CloseStream, ins.RequestStream]
    assert requested(rig)[0] == 110


def test_a_collection_whose_end_was_not_seen_is_not_kept() -> None:
    """The source dropped it while no stream was open, and a stream without it never reports the drop."""
    rig = filtered_at(BOTH, 50, 100)
    assert filtered(rig, AIRLINE) == [ins.CloseStream, ins.BeginResync, ins.RequestStream]


@pytest.mark.parametrize("stored", [None, "", "scope 8", "of a later version"])
def test_an_unknown_stored_filter_counts_as_leaving_out_the_collection(stored: str | None) -> None:
    store = ToyStore().holding(100, LOG)
    store.stream_filter = stored
    rig = Rig(store)
    assert filtered(rig, AIRLINE) == [ins.BeginResync, ins.RequestStream]


def test_part_of_a_snapshot_of_another_filter_is_dropped() -> None:
    rig = filtered_at(AIRLINE)
    marker(rig, 1, 120)
    rows(rig, 110)
    assert filtered(rig, BOTH) == [ins.CloseStream, ins.AbandonStaged, ins.RequestStream]
    assert requested(rig) == (0, 0, 0, 0)


def test_part_of_a_snapshot_is_not_continued_with_less_than_it_may_hold() -> None:
    """Rows of a collection can come before the event that begins it: the manifest does not say that they are held."""
    rig = filtered_at(BOTH)
    marker(rig, 1, 120)
    created(rig, 50, 8)
    rows(rig, 110)
    assert filtered(rig, AIRLINE) == [ins.CloseStream, ins.AbandonStaged, ins.RequestStream]
    assert requested(rig) == (0, 0, 0, 0)


def test_a_machine_waits_for_a_new_collection_after_the_last_was_dropped() -> None:
    rig = filtered_at(AIRLINE, 100)
    marker(rig, 101, 110)
    dropped(rig, 110, 8)
    assert kinds(ended(rig, StreamEndReason.FILTER_EMPTY)) == [ins.RefreshCollections]
    assert rig.machine.phase is Phase.REFUSED
    assert filtered(rig, StreamFilter(collection_ids=(10,))) == [ins.BeginResync, ins.RequestStream]


# --- rollback ---


def test_a_rollback_goes_back_to_the_newest_kept_boundary_and_asks_there() -> None:
    rig = rig_at(50, 80, 100, failover_log=log((0xB, 90), (0xA, 0)))
    done = rollback(rig, 85)
    assert kinds(done) == [ins.RollbackTo, ins.RequestStream]
    assert requested(rig) == (80, 80, 80, 0xA)
    assert rig.store.failover_log == tuple(LOG)


@pytest.mark.parametrize("answer", [85, 100, 2**64 - 1])
def test_a_rollback_that_is_not_lower_than_the_last_requests_the_failover_log(answer: int) -> None:
    rig = rig_at(50, 80, 100)
    if answer == 85:
        rollback(rig, 85)
    assert kinds(rollback(rig, answer)) == [ins.GetFailoverLog]


def test_a_rollback_to_zero_looks_for_common_history_first() -> None:
    rig = rig_at(50, 80, 100, failover_log=log((0xB, 70), (0xA, 0)))
    assert kinds(rollback(rig, 0)) == [ins.GetFailoverLog]
    done = rig.feed(ev.FailoverLogReceived(log((0xC, 60), (0xA, 0))))
    # Not the log first: a crash in between would leave 80 as if it were of 0xA. Found by the simulation.
    assert kinds(done) == [ins.RollbackTo, ins.RequestStream]
    assert requested(rig) == (50, 50, 50, 0xA)
    assert rig.store.rollbacks == [(100, 50)]


def test_common_history_that_reaches_our_position_needs_no_rollback() -> None:
    """The newest entry began at our very position, and the source has never heard of it: nothing is fetched again."""
    rig = rig_at(80, 100, failover_log=log((0xB, 100), (0xA, 0)))
    assert requested(rig) == (100, 100, 100, 0xB)
    rollback(rig, 0)
    done = rig.feed(ev.FailoverLogReceived(log((0xC, 100), (0xA, 0))))
    assert kinds(done) == [ins.SaveFacts, ins.RequestStream]
    assert requested(rig) == (100, 100, 100, 0xA)
    assert rig.store.rollbacks == []


def test_entries_that_share_a_seqno_are_tried_newest_first() -> None:
    rig = rig_at(100, failover_log=log((0xC, 100), (0xB, 100), (0xA, 0)))
    rollback(rig, 0)
    rig.feed(ev.FailoverLogReceived(log((0xD, 100), (0xB, 100), (0xA, 0))))
    assert requested(rig) == (100, 100, 100, 0xB)


def test_a_request_below_the_newest_entry_sends_the_common_vbuuid() -> None:
    """The source forgot the older entry, and knows the newer one: it is a descendant of what we hold."""
    rig = rig_at(50, failover_log=log((0xB, 70), (0xA, 0)))
    assert requested(rig) == (50, 50, 50, 0xA)
    rollback(rig, 0)
    rig.feed(ev.FailoverLogReceived(log((0xC, 90), (0xB, 70))))
    assert requested(rig) == (50, 50, 50, 0xB)


def test_rollbacks_after_the_retry_at_common_history_continue_downwards() -> None:
    rig = rig_at(20, 50, 80, 100, failover_log=log((0xB, 70), (0xA, 0)))
    rollback(rig, 0)
    rig.feed(ev.FailoverLogReceived(log((0xC, 90), (0xA, 0))))
    assert requested(rig) == (50, 50, 50, 0xA)
    assert kinds(rollback(rig, 30)) == [ins.RollbackTo, ins.RequestStream]
    assert requested(rig) == (20, 20, 20, 0xA)
    assert kinds(rollback(rig, 30)) == [ins.BeginResync, ins.RequestStream]


def test_a_resync_begins_after_common_history_was_tried_in_vain() -> None:
    rig = rig_at(80, 100)
    rollback(rig, 0)
    rig.feed(ev.FailoverLogReceived(LOG))
    assert requested(rig) == (100, 100, 100, 0xA)
    done = rollback(rig, 0)
    assert kinds(done) == [ins.BeginResync, ins.RequestStream]
    assert requested(rig) == (0, 0, 0, 0)
    assert rig.store.served.seqno == 100
    assert rig.machine.resyncing
    assert not rig.machine.caught_up


def test_a_resync_is_swapped_in_by_its_publish() -> None:
    rig = resyncing_at_100()
    assert status_of(rig) is ins.VbucketStatus.RESYNCING
    marker(rig, 0, 30, DISK)
    rows(rig, 10)
    assert rig.store.served.seqno == 100
    rows(rig, 30)
    assert rig.store.served.seqno == 30
    assert not rig.machine.resyncing
    assert status_of(rig) is ins.VbucketStatus.STREAMING


def test_a_broken_resync_continues_after_a_restart() -> None:
    rig = resyncing_at_100()
    marker(rig, 0, 30, DISK)
    rows(rig, 10)
    rig.restart()
    rig.feed(ev.Start())
    assert requested(rig) == (10, 0, 30, 0xC)
    assert rig.machine.resyncing
    assert kinds(rollback(rig, 0)) == [ins.AbandonStaged, ins.RequestStream]
    assert requested(rig) == (0, 0, 0, 0)
    assert rig.store.served.seqno == 100


@pytest.mark.parametrize("how", ["poll", "marker"])
def test_a_resync_from_an_empty_source_is_complete_at_zero(how: str) -> None:
    """No snapshot will ever say so, and the old copy would be shown for ever."""
    rig = resyncing_at_100()
    done = rig.feed(ev.HighSeqno(0)) if how == "poll" else marker(rig, 0, 0)
    assert kinds(done) == [ins.PublishSnapshot]
    assert rig.store.served.seqno == 0
    assert not rig.machine.resyncing
    assert kinds(rig.feed(ev.HighSeqno(0))) == []


def test_an_empty_vbucket_of_the_source_is_published_once() -> None:
    """Else a reader could not distinguish what is absent from what has yet to come."""
    rig = streaming_at(failover_log=log())
    assert kinds(rig.feed(ev.HighSeqno(0))) == [ins.PublishSnapshot]
    assert kinds(rig.feed(ev.HighSeqno(0))) == []
    assert rig.store.served.seqno == 0


def test_a_high_seqno_of_zero_does_not_publish_a_vbucket_with_data() -> None:
    rig = streaming_at(100)
    assert kinds(rig.feed(ev.HighSeqno(0))) == []


def test_a_rollback_below_every_boundary_ends_in_a_resync() -> None:
    rig = rig_at(80, 100)
    assert kinds(rollback(rig, 30)) == [ins.RollbackTo, ins.GetFailoverLog]
    assert rig.store.served.seqno == 100
    assert kinds(rig.feed(ev.FailoverLogReceived(log((0xC, 30), (0xA, 0))))) == [
        ins.RollbackTo,
        ins.BeginResync,
        ins.RequestStream,
    ]


def test_a_rollback_inside_a_snapshot_to_our_boundary_or_above_drops_the_open_snapshot() -> None:
    rig = rig_at(100, staged=105, open_snapshot=(101, 120))
    done = rollback(rig, 102)
    assert kinds(done) == [ins.AbandonStaged, ins.RequestStream]
    assert requested(rig) == (100, 100, 100, 0xA)


def test_a_rollback_inside_a_snapshot_to_below_our_boundary_is_a_rollback() -> None:
    rig = rig_at(80, 100, staged=105, open_snapshot=(101, 120))
    assert kinds(rollback(rig, 90)) == [ins.RollbackTo, ins.RequestStream]
    assert requested(rig) == (80, 80, 80, 0xA)


def test_a_rollback_to_zero_inside_the_first_backfill_begins_it_again() -> None:
    """The usual end of a broken backfill of a bucket with deletes: its position is below the purge seqno."""
    rig = rig_at(staged=50, open_snapshot=(0, 120))
    assert requested(rig) == (50, 0, 120, 0xA)
    assert kinds(rollback(rig, 0)) == [ins.AbandonStaged, ins.RequestStream]
    assert requested(rig) == (0, 0, 0, 0)


def test_common_history_found_inside_a_snapshot_drops_the_open_snapshot_first() -> None:
    rig = rig_at(80, 100, staged=105, open_snapshot=(101, 120))
    assert kinds(rollback(rig, 0)) == [ins.GetFailoverLog]
    assert kinds(rig.feed(ev.FailoverLogReceived(LOG))) == [ins.AbandonStaged, ins.RequestStream]
    assert requested(rig) == (100, 100, 100, 0xA)


def test_a_request_from_zero_that_is_rolled_back_is_repeated_later() -> None:
    rig = rig_at(failover_log=log())
    assert kinds(rollback(rig, 0)) == [ins.RetryAfter]
    assert "this mirror holds no data" in rig.machine.shown.text


def test_a_source_that_rolls_back_without_end_is_bounded() -> None:
    boundaries = range(1, 3 * ROLLBACK_ROUNDS_MAX)
    rig = rig_at(*boundaries)
    for rounds in range(ROLLBACK_ROUNDS_MAX):
        assert ins.RollbackTo in kinds(rollback(rig, boundaries[-1] - rounds - 1))
    assert kinds(rollback(rig, boundaries[-1] - ROLLBACK_ROUNDS_MAX - 1)) == [ins.GetFailoverLog]


def test_the_rounds_are_counted_again_after_an_accepted_stream() -> None:
    rig = rig_at(20, 50, 80, 100)
    rollback(rig, 85)
    rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG))
    ended(rig, 2)
    rig.feed(ev.RetryDue())
    assert kinds(rollback(rig, 79)) == [ins.RollbackTo, ins.RequestStream]


def test_a_rollback_below_every_entry_sends_the_common_vbuuid() -> None:
    """The newest kept boundary is older than every entry, and says of no history what it is."""
    rig = rig_at(80, 100, failover_log=log((0xB, 90)))
    rollback(rig, 0)
    done = rig.feed(ev.FailoverLogReceived(log((0xC, 95), (0xB, 70))))
    assert [each for each in done if isinstance(each, ins.SaveFacts)] == [
        ins.SaveFacts({"failover_log": log((0xB, 80))})
    ]
    assert requested(rig) == (80, 80, 80, 0xB)


def test_a_resync_that_finds_no_space_keeps_the_old_copy_and_tries_again_later() -> None:
    rig = rig_at(100)
    machine = rig.machine
    rollback(rig, 0)
    done = machine.handle(ev.FailoverLogReceived(log()))
    assert kinds(done) == [ins.BeginResync]
    done = machine.handle(ev.ResyncRefused("5 GiB are needed, 1 GiB is free"))
    assert kinds(done) == [ins.RetryAfter]
    assert (machine.shown.status, machine.shown.text) == (ins.VbucketStatus.REFUSED, "5 GiB are needed, 1 GiB is free")
    assert kinds(machine.handle(ev.RetryDue())) == [ins.RequestStream]


def test_a_refused_failover_log_is_followed_by_a_full_request_later() -> None:
    rig = rig_at(100)
    rollback(rig, 0)
    assert kinds(rig.feed(ev.FailoverLogRefused(Status.ETMPFAIL))) == [ins.RetryAfter]
    assert kinds(rig.feed(ev.RetryDue())) == [ins.RequestStream]
    assert kinds(rollback(rig, 0)) == [ins.GetFailoverLog]
    assert kinds(rig.feed(ev.FailoverLogRefused(Status.NOT_MY_VBUCKET))) == [ins.RefreshMap, ins.RetryAfter]
    rig.feed(ev.RetryDue())
    rollback(rig, 0)
    assert kinds(rig.feed(ev.FailoverLogRefused(Status.ERANGE))) == [ins.RetryAfter]


# --- ends and refusals ---


@pytest.mark.parametrize("reason", [*range(7), 9, 1000])
def test_any_other_end_of_a_stream_is_followed_by_a_full_request(reason: int) -> None:
    """Any of them may hide a rollback: the source rewrites that code before sending it."""
    rig = streaming_at(80, 100)
    done = ended(rig, reason)
    assert kinds(done)[-1] is ins.RetryAfter
    assert (ins.RefreshMap in kinds(done)) == (reason == StreamEndReason.STATE_CHANGED)
    rig.feed(ev.RetryDue())
    assert requested(rig) == (100, 100, 100, 0xA)
    assert kinds(rollback(rig, 90)) == [ins.RollbackTo, ins.RequestStream]


def test_a_lost_privilege_is_shown_as_a_refusal_and_the_stream_is_requested_again() -> None:
    """It may be granted again at any time, without a message."""
    rig = streaming_at(100)
    assert kinds(ended(rig, StreamEndReason.LOST_PRIVILEGES)) == [ins.RetryAfter]
    assert (rig.reports[-1].status, "privilege" in rig.reports[-1].text) == (ins.VbucketStatus.REFUSED, True)
    assert kinds(rig.feed(ev.RetryDue())) == [ins.RequestStream]


def test_a_stream_end_for_an_empty_filter_stops_the_vbucket_with_a_reason() -> None:
    rig = streaming_at(100)
    assert kinds(ended(rig, StreamEndReason.FILTER_EMPTY)) == [ins.RefreshCollections]
    assert rig.machine.phase is Phase.REFUSED
    assert "dropped" in rig.reports[-1].text
    assert kinds(rig.feed(ev.RetryDue())) == []
    assert kinds(rig.feed(ev.Start())) == [ins.RequestStream]


def test_the_regular_end_closes_the_open_snapshot_without_collections() -> None:
    rig = Rig(ToyStore().holding(100, LOG))
    rig.feed(ev.Start(collections=False, end_seqno=120))
    rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG))
    marker(rig, 101, 120)
    rows(rig, 105)
    assert kinds(ended(rig, 0)) == [ins.Advance, ins.PublishSnapshot]
    assert rig.store.served.seqno == 120
    assert rig.machine.phase is Phase.FINISHED


@pytest.mark.parametrize(
    ("reason", "start"),
    [
        (StreamEndReason.OK, ev.Start(collections=False)),
        (StreamEndReason.SLOW, ev.Start(collections=False, end_seqno=120)),
        (StreamEndReason.OK, ev.Start(end_seqno=120)),
    ],
    ids=["a stream without an end", "an end of another kind", "a stream that says where each snapshot ends"],
)
def test_a_premature_stream_end_does_not_publish_half_a_snapshot(reason: int, start: ev.Start) -> None:
    """Found by the simulation: END_STREAM with code OK in the middle of a snapshot published the half of it."""
    rig = Rig(ToyStore().holding(100, LOG))
    rig.feed(start)
    rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG))
    marker(rig, 101, 120)
    rows(rig, 105)
    assert kinds(ended(rig, reason)) == [ins.RetryAfter]
    assert rig.store.served.seqno == 100


def test_a_resync_is_over_if_it_is_published_just_before_a_violation() -> None:
    """Found by the simulation: the run ended the snapshot and went on beyond it; the machine still said "resyncing"."""
    rig = resyncing_at_100()
    assert rig.machine.resyncing
    marker(rig, 0, 3)
    rows(rig, 1, 3, 4)
    assert rig.violation_count == 1
    assert not rig.machine.resyncing
    validate(rig.machine)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (Status.KEY_EEXISTS, [ins.CloseStream, ins.RetryAfter]),
        (Status.EINVAL, []),
        (Status.NOT_MY_VBUCKET, [ins.RefreshMap, ins.RetryAfter]),
        (Status.EACCESS, [ins.RetryAfter]),
        (Status.ENOMEM, [ins.RetryAfter]),
        (Status.ETMPFAIL, [ins.RetryAfter]),
        (Status.EBUSY, [ins.RetryAfter]),
        (Status.NOT_INITIALIZED, [ins.RetryAfter]),
        (Status.BUCKET_PAUSED, [ins.RetryAfter]),
        (Status.NOT_SUPPORTED, []),
        (Status.UNKNOWN_COLLECTION, [ins.RetryAfter]),
        (Status.UNKNOWN_SCOPE, [ins.RefreshCollections, ins.RetryAfter]),
        (Status.DCP_STREAM_ID_INVALID, []),
        (Status.AUTH_STALE, [ins.Reconnect, ins.RetryAfter]),
        (Status.NO_BUCKET, [ins.Reconnect, ins.RetryAfter]),
        (0x7777, [ins.RetryAfter]),
        (Status.ERANGE, [ins.GetFailoverLog]),
        (Status.ROLLBACK, [ins.GetFailoverLog]),
    ],
)
def test_each_refusal_has_a_reaction_and_a_text(status: int, expected: list[type]) -> None:
    rig = rig_at(100)
    assert kinds(refused(rig, status)) == expected
    assert len(rig.machine.shown.text.split()) >= 6
    assert (rig.machine.phase is Phase.REFUSED) == (expected == [])


def test_the_map_in_a_refusal_is_passed_on() -> None:
    rig = rig_at(100)
    done = refused(rig, Status.NOT_MY_VBUCKET, b'{"rev": 8}')
    assert [instruction.config for instruction in done if isinstance(instruction, ins.RefreshMap)] == [b'{"rev": 8}']


def test_a_range_error_inside_a_snapshot_drops_the_open_snapshot_first() -> None:
    rig = rig_at(staged=50, open_snapshot=(0, 120))
    assert kinds(refused(rig, Status.ERANGE)) == [ins.AbandonStaged, ins.RequestStream]


def test_tries_wait_longer_and_longer_until_something_is_published() -> None:
    rig = rig_at(100)
    for _ in range(3):
        refused(rig, Status.ETMPFAIL)
        rig.feed(ev.RetryDue())
    waits = [(wait.reason, wait.attempt) for wait in rig.outbox if isinstance(wait, ins.RetryAfter)]
    assert waits == [(RetryReason.SOURCE_BUSY, attempt) for attempt in range(3)]
    rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG))
    marker(rig, 101, 102)
    rows(rig, 102)
    ended(rig, 2)
    rig.feed(ev.RetryDue())
    refused(rig, Status.ETMPFAIL)
    assert rig.last(ins.RetryAfter) == ins.RetryAfter(RetryReason.SOURCE_BUSY, 0)


def test_an_idle_stream_that_is_caught_up_counts_as_progress_too() -> None:
    rig = rig_at(100)
    refused(rig, Status.ETMPFAIL)
    rig.feed(ev.RetryDue())
    rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG))
    rig.feed(ev.HighSeqno(100))
    assert rig.machine.attempts == {}


def test_tries_after_another_refusal_count_from_zero() -> None:
    """A node that had warmed up for a minute, before its users came, was asked again after another minute."""
    rig = rig_at(100)
    for _ in range(8):
        refused(rig, Status.ETMPFAIL)
        rig.feed(ev.RetryDue())
    refused(rig, Status.EACCESS)
    assert rig.last(ins.RetryAfter) == ins.RetryAfter(RetryReason.REFUSED_FOR_NOW, 0)
    rig.feed(ev.RetryDue())
    refused(rig, Status.ETMPFAIL)  # a source that alternates is asked less and less often, too
    assert rig.last(ins.RetryAfter) == ins.RetryAfter(RetryReason.SOURCE_BUSY, 8)


# --- violations ---


def test_a_violation_drops_the_open_snapshot_and_the_stream_is_requested_again() -> None:
    rig = streaming_at(100)
    marker(rig, 101, 120)
    rows(rig, 105)
    done = rows(rig, 104)
    assert kinds(done) == [ins.CloseStream, ins.AbandonStaged, ins.RetryAfter]
    assert rig.last(ins.RetryAfter).reason is RetryReason.VIOLATION
    assert "104" in rig.machine.shown.text
    assert rig.store.served.documents == {}
    rig.feed(ev.RetryDue())
    assert requested(rig) == (100, 100, 100, 0xA)


def test_rows_out_of_order_inside_a_run_are_refused_by_the_store_and_end_the_stream() -> None:
    rig = streaming_at(100)
    marker(rig, 101, 120)
    rows(rig, 102)
    done = rows(rig, 103, 110, 105, 120)
    assert kinds(done) == [ins.StageRows, ins.CloseStream, ins.AbandonStaged, ins.RetryAfter]
    assert rig.store.served.seqno == 100
    assert rig.machine.assembler.boundary_seqno == 100


def test_violations_in_a_row_wait_longer_and_longer() -> None:
    rig = streaming_at(100)
    for attempt in range(3):
        advanced(rig, 5)
        assert rig.last(ins.RetryAfter).attempt == attempt
        rig.feed(ev.RetryDue())
        rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG))
    assert rig.violation_count == 3


def test_markers_that_ask_for_an_answer_are_bounded() -> None:
    rig = streaming_at(100)
    while rig.machine.phase is Phase.STREAMING:
        marker(rig, 101, 120, ACK)
    assert "ask for an answer" in rig.machine.shown.text
    assert kinds(rig.feed(ev.Published(100))) == []


# --- connections ---


def test_a_stop_closes_the_stream_and_requests_nothing() -> None:
    rig = streaming_at(100)
    opaque = rig.machine.opaque
    done = rig.feed(ev.Stop("moved to another node"))
    assert [instruction for instruction in done if isinstance(instruction, ins.CloseStream)] == [
        ins.CloseStream(opaque)
    ]
    assert (rig.machine.phase, rig.machine.shown.text) == (Phase.IDLE, "moved to another node")


def test_an_answer_to_a_request_of_a_lost_connection_is_ignored() -> None:
    rig = rig_at(100)
    stale = rig.opaque_counter
    rig.feed(ev.ConnectionLost())
    rig.feed(ev.Start())
    assert rig.feed(ev.StreamAccepted(stale, LOG)) == []
    assert rig.feed(ev.StreamRollback(stale, 0)) == []
    assert rig.feed(ev.StreamRefused(stale, Status.EACCESS)) == []
    assert rig.machine.phase is Phase.REQUESTING


def test_a_vbucket_without_an_active_node_waits_for_the_next_map() -> None:
    rig = streaming_at(100)
    rig.feed(ev.NoActiveNode())
    assert status_of(rig) is ins.VbucketStatus.NO_ACTIVE_NODE
    assert kinds(rig.feed(ev.Start())) == [ins.RequestStream]
    assert status_of(rig) is ins.VbucketStatus.REQUESTING


def test_a_refusal_outlives_the_connection() -> None:
    rig = rig_at(100)
    refused(rig, Status.EINVAL)
    rig.feed(ev.ConnectionLost())
    assert status_of(rig) is ins.VbucketStatus.REFUSED


@pytest.mark.parametrize(
    "answer", ["rolled back", "abandoned", "abandoned by a violation", "resync opened", "resync refused", "no boundary"]
)
def test_a_connection_lost_while_the_store_is_at_work_waits_for_both(answer: str) -> None:
    part: dict[str, Any] = {"staged": 105, "open_snapshot": (101, 120)} if answer.startswith("abandoned") else {}
    rig = rig_at(80, 100, **part)
    machine, store = rig.machine, rig.store
    if answer == "abandoned by a violation":
        rig.feed(ev.StreamAccepted(rig.opaque_counter, LOG))
        done = machine.handle(SeqnoAdvanced(0, 5, opaque=rig.opaque_counter))
    elif answer in ("rolled back", "no boundary", "abandoned"):
        done = machine.handle(
            ev.StreamRollback(rig.opaque_counter, {"rolled back": 90, "no boundary": 30}.get(answer, 101))
        )
    else:
        rollback(rig, 0)
        done = machine.handle(ev.FailoverLogReceived(log()))
    assert machine.phase in STORE_PHASES
    assert machine.handle(ev.ConnectionLost("the cable")) == []
    assert machine.phase in STORE_PHASES
    instruction = next(each for each in done if isinstance(each, (ins.RollbackTo, ins.AbandonStaged, ins.BeginResync)))
    done = machine.handle(ev.ResyncRefused("full") if answer == "resync refused" else store.perform(instruction))
    assert ins.RequestStream not in kinds(done)
    assert machine.phase is Phase.IDLE
    assert machine.shown.text == "the cable"
    validate(machine)
    assert kinds(machine.handle(ev.Start())) == [ins.RequestStream]


def test_a_connection_that_returns_during_store_work_is_used_afterwards() -> None:
    rig = rig_at(80, 100)
    machine, store = rig.machine, rig.store
    done = machine.handle(ev.StreamRollback(rig.opaque_counter, 90))
    machine.handle(ev.ConnectionLost())
    assert kinds(machine.handle(ev.Start())) == []
    instruction = next(instruction for instruction in done if isinstance(instruction, ins.RollbackTo))
    assert kinds(machine.handle(store.perform(instruction))) == [ins.RequestStream]


def test_a_publish_that_was_rolled_back_meanwhile_is_ignored() -> None:
    rig = rig_at(80, 100)
    rollback(rig, 90)
    rig.feed(ev.Published(100))
    assert rig.machine.durable_seqno == 80


# --- legality ---


@pytest.mark.parametrize(
    ("phase", "answers"),
    [
        (Phase.ROLLING_BACK, {ev.RolledBack, ev.NoBoundary}),
        (Phase.ABANDONING, {ev.Abandoned}),
        (Phase.OPENING_RESYNC, {ev.ResyncOpened, ev.ResyncRefused}),
    ],
)
def test_a_phase_of_the_store_ends_only_with_the_answer_of_the_store(phase: Phase, answers: set[type]) -> None:
    assert {kind for kind, move in TRANSITIONS[phase].items() if move.to != (phase,)} == answers


SEQNOS = st.sampled_from([0, 1, 99, 100, 101, 105, 120, 2**64 - 1])
OPAQUES = st.sampled_from([0x1000, 0x1001, 0x1002, 0x1003])
ANY_EVENT: st.SearchStrategy[ev.LocalEvent | StreamEvent | int] = st.one_of(
    st.builds(ev.Start, st.booleans(), st.booleans()),
    st.just(ev.Stop()),
    st.just(ev.ConnectionLost()),
    st.just(ev.NoActiveNode()),
    st.just(ev.RetryDue()),
    st.builds(ev.HighSeqno, SEQNOS),
    st.builds(ev.StreamAccepted, OPAQUES, st.just(LOG)),
    st.builds(ev.StreamRollback, OPAQUES, SEQNOS),
    st.builds(ev.StreamRefused, OPAQUES, st.sampled_from([*Status, 0x7777])),
    st.builds(ev.FailoverLogReceived, st.sampled_from([[], LOG, log((0xB, 99), (0xA, 0))])),
    st.builds(ev.FailoverLogRefused, st.sampled_from(Status)),
    SEQNOS,  # a row of the newest stream
    st.builds(
        lambda start, end, flags, opaque: SnapshotMarker(0, start, end, flags, opaque=opaque),
        SEQNOS,
        SEQNOS,
        st.integers(0, 63),
        OPAQUES,
    ),
    st.builds(lambda seqno, opaque: SeqnoAdvanced(0, seqno, opaque=opaque), SEQNOS, OPAQUES),
    st.builds(lambda flags, opaque: OsoSnapshot(0, flags, opaque=opaque), st.integers(0, 4), OPAQUES),
    st.builds(lambda reason, opaque: StreamEnd(0, reason, opaque=opaque), st.integers(0, 10), OPAQUES),
    st.builds(lambda seqno, opaque: Prepare(0, b"\0k", seqno, 1, 5, opaque=opaque), SEQNOS, OPAQUES),
    st.builds(lambda seqno, opaque: Commit(0, b"\0k", 0, seqno, opaque=opaque), SEQNOS, OPAQUES),
    st.builds(lambda seqno, opaque: Abort(0, b"\0k", 0, seqno, opaque=opaque), SEQNOS, OPAQUES),
    st.builds(
        lambda stream_filter: ev.Start(filter=stream_filter), st.sampled_from([None, AIRLINE, BOTH, StreamFilter(8)])
    ),
)


@settings(max_examples=3 * settings().max_examples, deadline=None)
@given(
    st.sampled_from([(), (100,), (50, 100)]),
    st.sampled_from([None, (101, 120), (0, 0)]),
    st.lists(ANY_EVENT, max_size=30),
)
def test_any_sequence_of_events_leaves_a_valid_machine(
    boundaries: tuple[int, ...], open_snapshot: tuple[int, int] | None, events: list[ev.LocalEvent | StreamEvent | int]
) -> None:
    staged = 105 if open_snapshot else 0
    rig = rig_at(*boundaries, staged=staged, open_snapshot=open_snapshot)
    for event in events:
        if isinstance(event, int):
            rows(rig, event)
        else:
            rig.feed(event)
    assert rig.store.served.seqno in {0, *boundaries, *rig.store.published}
