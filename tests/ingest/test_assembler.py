"""Snapshots from messages, rule by rule of docs/protocol.md 2.6 and 2.7: which messages stage, which publish, which are
violations. A dialogue is a list of messages; what it says is what came out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mirror.ingest.assembler import Assembler, Violation
from mirror.ingest.collections import NAMES_MAX
from mirror.ingest.instructions import Advance, Instruction, PublishSnapshot, StageRows, StageSystemEvent
from mirror.ingest.selection import StreamFilter
from mirror.wire.constants import MarkerVersion
from mirror.wire.events import (
    Abort,
    CollectionCreated,
    Commit,
    OsoSnapshot,
    Prepare,
    ScopeCreated,
    SeqnoAdvanced,
    SnapshotMarker,
    SystemEvent,
)
from mirror.wire.frame import decode as decode_frame
from mirror.wire.system_events import encode_system_event
from storage.model import FailoverLog, Manifest, ManifestUid, Seqno, SnapshotRange
from tests.ingest.toy_store import ToyStore, row, validate_assembler

Message = Callable[[Assembler, list[Instruction]], None]


def marker(start: int, end: int, purge_seqno: int = 0) -> Message:
    return lambda assembler, out: assembler.marker(
        SnapshotMarker(0, start, end, 1, purge_seqno=purge_seqno, version=int(MarkerVersion.V2_2)), out
    )


def rows(*seqnos: int) -> Message:
    made = [row(seqno, b"k%d" % seqno, b"v") for seqno in seqnos]
    return lambda assembler, out: assembler.rows(made, sum(len(value) for _, value in made), out)


def advanced(seqno: int) -> Message:
    return lambda assembler, out: assembler.seqno_advanced(SeqnoAdvanced(0, seqno), out)


def scope(seqno: int) -> Message:
    event = encode_system_event(ScopeCreated(7, 8, "inventory"), vbid=0, seqno=seqno)
    return lambda assembler, out: assembler.system_event(event, out)


def prepared(seqno: int, key: bytes = b"\0k") -> Message:
    return lambda assembler, out: assembler.sync_write(Prepare(0, key, seqno, 1, 5, value=b"v"), out)


def committed(seqno: int, key: bytes = b"\0k") -> Message:
    return lambda assembler, out: assembler.sync_write(Commit(0, key, 0, seqno), out)


def aborted(seqno: int, key: bytes = b"\0k") -> Message:
    return lambda assembler, out: assembler.sync_write(Abort(0, key, 0, seqno), out)


def oso(flag: int) -> Message:
    return lambda assembler, out: assembler.oso_snapshot(OsoSnapshot(0, flag), out)


def ended() -> Message:
    return lambda assembler, out: assembler.stream_ended_regularly(out)


def assembler_at(
    boundary: int = 0, staged: int = 0, open_snapshot: tuple[int, int] | None = None, *, collections: bool = True
) -> Assembler:
    assembler = Assembler(lambda _out: None)
    assembler.load(ToyStore().holding(boundary, FailoverLog(), staged, open_snapshot).state())
    assembler.begin_stream(inside_snapshot=assembler.resumable, collections_granted=collections)
    return assembler


def said(assembler: Assembler, *messages: Message) -> list[Any]:
    """Summarise a dialogue: ("rows", seqnos) | ("advance", seqno) | ("publish", seqno) | ..."""
    out: list[Instruction] = []
    for message in messages:
        message(assembler, out)
        validate_assembler(assembler)
    return [_short(instruction) for instruction in out]


def _short(instruction: Instruction) -> Any:
    if isinstance(instruction, StageRows):
        return ("rows", *(int.from_bytes(key[4:]) for key, _ in instruction.rows))
    if isinstance(instruction, Advance):
        return ("advance", instruction.seqno)
    if isinstance(instruction, PublishSnapshot):
        return ("publish", instruction.seqno)
    if isinstance(instruction, StageSystemEvent):
        return ("system event", instruction.seqno)
    return type(instruction)


# --- the end of a snapshot ---


@pytest.mark.parametrize(
    ("last", "staged"),
    [
        (rows(5), ("rows", 5)),
        (advanced(5), ("advance", 5)),
        (scope(5), ("system event", 5)),
        (prepared(5), ("advance", 5)),
        (aborted(5), ("advance", 5)),
    ],
)
def test_any_message_with_the_end_seqno_completes_the_snapshot(last: Message, staged: Any) -> None:
    assembler = assembler_at()
    assert said(assembler, marker(0, 5), rows(1, 4), last) == [("rows", 1, 4), staged, ("publish", 5)]
    assert assembler.boundary_seqno == assembler.position_seqno == 5


def test_a_snapshot_is_not_published_before_its_end() -> None:
    assembler = assembler_at()
    assert said(assembler, marker(0, 5), rows(1), rows(3, 4)) == [("rows", 1), ("rows", 3, 4)]
    assert (assembler.boundary_seqno, assembler.position_seqno) == (0, 4)


def test_an_advance_below_the_end_moves_the_position_and_closes_nothing() -> None:
    assembler = assembler_at()
    assert said(assembler, marker(0, 9), advanced(5), rows(6), advanced(7), rows(9)) == [
        ("advance", 5),
        ("rows", 6),
        ("advance", 7),
        ("rows", 9),
        ("publish", 9),
    ]


def test_an_advance_to_the_current_position_is_ignored() -> None:
    assert said(assembler_at(), marker(0, 9), rows(5), advanced(5)) == [("rows", 5)]


@pytest.mark.parametrize("start", [0, 7, 8, 9, 10, 99])
def test_the_start_of_a_marker_is_not_trusted(start: int) -> None:
    assembler = assembler_at(7)
    assert said(assembler, marker(start, 10), rows(8, 10)) == [("rows", 8, 10), ("publish", 10)]


@pytest.mark.parametrize("continued", [[], [rows(9), marker(9, 10, purge_seqno=6)]])
def test_a_publish_names_the_start_of_its_snapshot_and_the_purge_seqno(continued: list[Message]) -> None:
    out: list[Instruction] = []
    assembler = assembler_at(7)
    for message in (marker(8, 10, purge_seqno=6), *continued, rows(10)):
        message(assembler, out)
    assert out[-1] == PublishSnapshot(Seqno(10), Seqno(8), 6)


def test_staged_rows_carry_their_size_and_snapshot_range() -> None:
    out: list[Instruction] = []
    assembler = assembler_at(7)
    marker(8, 10)(assembler, out)
    rows(8, 9)(assembler, out)
    [staged] = out
    assert isinstance(staged, StageRows)
    assert staged.open_snapshot == SnapshotRange(Seqno(8), Seqno(10), 1)
    assert staged.byte_count == sum(len(value) for _, value in staged.rows)


# --- markers that follow markers ---


def test_a_second_marker_with_the_same_end_continues_the_snapshot() -> None:
    assembler = assembler_at()
    assert said(assembler, marker(0, 9), rows(3), marker(0, 9), rows(5), rows(9)) == [
        ("rows", 3),
        ("rows", 5),
        ("rows", 9),
        ("publish", 9),
    ]


@pytest.mark.parametrize("collections", [True, False])
def test_a_second_marker_that_overlaps_with_a_later_end_prolongs_the_snapshot(collections: bool) -> None:
    """The cursor was dropped: what is left of the open snapshot comes from disk, within the new one."""
    assembler = assembler_at(collections=collections)
    assert said(assembler, marker(0, 9), rows(3), marker(4, 12), rows(9), rows(12)) == [
        ("rows", 3),
        ("rows", 9),
        ("rows", 12),
        ("publish", 12),
    ]


def test_a_following_marker_does_not_close_a_snapshot_with_collections() -> None:
    assembler = assembler_at()
    assert said(assembler, marker(0, 9), rows(3), marker(10, 12), rows(12)) == [
        ("rows", 3),
        ("rows", 12),
        ("publish", 12),
    ]


def test_a_following_marker_closes_an_unfinished_snapshot_without_collections() -> None:
    assembler = assembler_at(collections=False)
    assert said(assembler, marker(0, 9), rows(3), marker(10, 12), rows(12)) == [
        ("rows", 3),
        ("advance", 9),
        ("publish", 9),
        ("rows", 12),
        ("publish", 12),
    ]


def test_the_regular_end_of_a_stream_does_not_close_a_snapshot_with_collections() -> None:
    assert said(assembler_at(), marker(0, 9), rows(3), ended()) == [("rows", 3)]


def test_a_marker_that_ends_inside_the_open_snapshot_contradicts_it() -> None:
    with pytest.raises(Violation, match="inside the open one"):
        said(assembler_at(), marker(0, 9), rows(3), marker(4, 8))


def test_a_marker_that_ends_below_the_held_rows_contradicts_them() -> None:
    with pytest.raises(Violation, match="below 7"):
        said(assembler_at(7), marker(0, 6))


def test_a_marker_of_a_snapshot_held_already_opens_nothing() -> None:
    assembler = assembler_at(7)
    assert said(assembler, marker(0, 7)) == []
    assert assembler.open_snapshot is None


# --- after a mid-snapshot request ---


@pytest.mark.parametrize("collections", [True, False])
@pytest.mark.parametrize("start", [0, 4, 6, 10])
@pytest.mark.parametrize("end", [9, 20])
def test_the_first_marker_after_a_request_inside_a_snapshot_replaces_its_end(
    collections: bool, start: int, end: int
) -> None:
    assembler = assembler_at(4, 6, (4, 9), collections=collections)
    assert said(assembler, marker(start, end), rows(7), rows(end)) == [("rows", 7), ("rows", end), ("publish", end)]


@pytest.mark.parametrize("end", [6, 7, 8])
def test_a_resumed_snapshot_is_not_complete_before_the_end_that_it_had(end: int) -> None:
    """Found by the simulation: a source that goes on from memory sends a checkpoint at a time. The first part of the
    snapshot left out what was superseded up to 9, so at 8 documents were missing and older versions shown.
    """
    assembler = assembler_at(4, 6, (4, 9))
    assert said(assembler, marker(4, end)) == []
    for seqno in range(7, end + 1):
        assert said(assembler, rows(seqno)) == [("rows", seqno)]
    assert said(assembler, marker(end + 1, 9), rows(9)) == [("rows", 9), ("publish", 9)]


@pytest.mark.parametrize("early", [rows(7), advanced(7), scope(7), prepared(7)])
def test_rows_before_the_first_marker_of_a_resumed_snapshot_are_refused(early: Message) -> None:
    with pytest.raises(Violation, match=r"outside any snapshot|before the first marker"):
        said(assembler_at(4, 6, (4, 9)), early)


def test_the_regular_end_of_the_stream_closes_no_snapshot_that_was_not_yet_resumed() -> None:
    assert said(assembler_at(4, 6, (4, 9), collections=False), ended()) == []


def test_a_marker_without_its_first_item_leaves_no_trace() -> None:
    """Another client sent the pending marker's range, and could not resume (JDCP-241)."""
    assembler = assembler_at(4)
    said(assembler, marker(5, 9))
    assembler.end_stream()
    assert assembler.open_snapshot is None
    assert not assembler.holds_part

    assembler = assembler_at(4, 6, (4, 9))
    said(assembler, marker(4, 20))
    assembler.end_stream()
    assert assembler.open_snapshot == SnapshotRange(Seqno(4), Seqno(9))
    assert assembler.resumable


# --- runs ---


def test_a_run_is_passed_on_unchanged() -> None:
    """Constant work per run, whatever its length."""
    made = [row(seqno, b"k", b"v") for seqno in range(1, 1001)]
    out: list[Instruction] = []
    assembler = assembler_at()
    marker(0, 2000)(assembler, out)
    assembler.rows(made, 5, out)
    [staged] = out
    assert isinstance(staged, StageRows)
    assert staged.rows is made


def test_a_run_with_the_end_inside_is_split_there_and_the_rest_is_a_violation() -> None:
    assembler = assembler_at()
    out: list[Instruction] = []
    marker(0, 5)(assembler, out)
    with pytest.raises(Violation, match="beyond the end"):
        rows(3, 5, 6, 7)(assembler, out)
    assert [_short(instruction) for instruction in out] == [("rows", 3, 5), ("publish", 5)]
    staged = out[0]
    assert isinstance(staged, StageRows)
    assert staged.byte_count == sum(len(value) for _, value in staged.rows)


def test_a_run_that_jumps_over_the_end_publishes_nothing() -> None:
    assembler = assembler_at()
    out: list[Instruction] = []
    marker(0, 5)(assembler, out)
    with pytest.raises(Violation, match="beyond the end"):
        rows(3, 6)(assembler, out)
    assert out == []


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([rows(8)], "outside any snapshot"),
        ([marker(0, 20), rows(7)], "must rise"),
        ([marker(0, 20), rows(3)], "must rise"),
        ([marker(0, 20), rows(9), rows(9)], "must rise"),
        ([marker(0, 20), rows(9, 9)], "must rise"),
        ([marker(0, 20), rows(12, 9)], "must rise"),
        ([marker(0, 20), rows(21)], "beyond the end"),
        ([marker(0, 20), advanced(21)], "beyond the end"),
        ([marker(0, 20), advanced(6)], "already held"),
        ([advanced(2**64 - 1)], str(2**64 - 1)),
        ([marker(8, 2**64 - 1)], "no seqno"),
        ([scope(8)], "outside any snapshot"),
        ([marker(0, 20), scope(7)], "must rise"),
        ([marker(0, 20), scope(21)], "beyond the end"),
        ([prepared(8)], "outside any snapshot"),
        ([marker(0, 20), prepared(7)], "must rise"),
        ([marker(0, 20), aborted(7)], "must rise"),
        ([marker(0, 20), committed(8)], "a commit at 8 without its value"),
        ([oso(1)], "not requested"),
        ([marker(0, 20), oso(2)], "not requested"),
    ],
)
def test_a_message_that_cannot_be_part_of_the_stream_is_a_violation(messages: list[Message], text: str) -> None:
    with pytest.raises(Violation, match=text):
        said(assembler_at(7), *messages)


def test_a_system_event_that_cannot_be_read_is_a_violation() -> None:
    assembler = assembler_at(7)
    said(assembler, marker(0, 20))
    with pytest.raises(Violation, match="cannot be read"):
        assembler.system_event(SystemEvent(0, 8, 99, 0), [])


# --- system events ---


def test_a_system_event_is_staged_in_stored_form_with_the_manifest_from_there_on() -> None:
    assembler = assembler_at()
    out: list[Instruction] = []
    marker(0, 9)(assembler, out)
    event = replace(encode_system_event(ScopeCreated(7, 8, "inventory"), vbid=0, seqno=3), opaque=77, stream_id=5)
    assembler.system_event(event, out)
    [staged] = out
    assert isinstance(staged, StageSystemEvent)
    assert (staged.manifest.uid, staged.manifest.scopes[8]) == (7, "inventory")
    frame, _ = decode_frame(staged.row_value)
    assert (frame.opaque, frame.framing) == (0, b"")
    assert assembler.manifest == staged.manifest


def test_more_scopes_and_collections_than_a_bucket_can_have_are_a_violation() -> None:
    """Each event costs a copy of the names: a source with a million of them would keep the worker for hours."""
    names = {number: f"s{number}" for number in range(NAMES_MAX - 1)}
    assembler = assembler_at(7)
    assembler.manifest = Manifest(ManifestUid(1), names, {})
    said(assembler, marker(0, 20))
    last = encode_system_event(ScopeCreated(2, NAMES_MAX, "last"), vbid=0, seqno=8)
    assembler.system_event(last, [])
    beyond = encode_system_event(ScopeCreated(3, NAMES_MAX + 1, "beyond"), vbid=0, seqno=9)
    with pytest.raises(Violation, match=f"{NAMES_MAX + 1} scopes and collections at 9; {NAMES_MAX} at most"):
        assembler.system_event(beyond, [])
    assert len(assembler.manifest.scopes) == NAMES_MAX


# --- what is left out ---


def created(seqno: int, collection_id: int, scope_id: int = 8) -> Message:
    content = CollectionCreated(3, scope_id, collection_id, "airline")
    event = encode_system_event(content, vbid=0, seqno=seqno)
    return lambda assembler, out: assembler.system_event(event, out)


def test_a_stream_of_one_collection_is_given_the_name_of_its_scope() -> None:
    assembler = assembler_at()
    only = StreamFilter(collection_ids=(9,))
    names = {8: "inventory", 0: "_default"}
    assembler.begin_stream(inside_snapshot=False, collections_granted=True, stream_filter=only, scope_names=names)
    said(assembler, marker(0, 9), created(4, 9))
    assert assembler.manifest.scopes == {8: "inventory"}
    assert [entry.name for entry in assembler.manifest.collections.values()] == ["airline"], "no word of the default"


@pytest.mark.parametrize("shown", [None, StreamFilter(collection_ids=(0, 9)), StreamFilter(scope_id=0)])
def test_the_manifest_has_the_default_collection_if_it_is_mirrored(shown: StreamFilter | None) -> None:
    assembler = assembler_at()
    assembler.begin_stream(inside_snapshot=False, collections_granted=True, stream_filter=shown)
    said(assembler, marker(0, 9), created(4, 9, scope_id=0))
    assert set(assembler.manifest.collections) == {0, 9}


# --- states ---


@pytest.mark.parametrize(
    ("boundary", "staged", "open_snapshot", "holds_part", "resumable"),
    [
        (7, 7, None, False, False),
        (7, 9, (8, 12), True, True),
        (7, 9, None, False, False),  # complete, and to be published by the store
        (7, 9, (8, 9), True, False),
        (7, 7, (8, 12), False, False),
        (0, 9, (0, 12), True, True),
    ],
)
def test_a_stored_state_is_resumable_if_it_holds_part_of_a_snapshot(
    boundary: int, staged: int, open_snapshot: tuple[int, int] | None, holds_part: bool, resumable: bool
) -> None:
    assembler = Assembler(lambda _out: None)
    assembler.load(ToyStore().holding(boundary, FailoverLog(), staged, open_snapshot).state())
    assert (assembler.holds_part, assembler.resumable) == (holds_part, resumable)
