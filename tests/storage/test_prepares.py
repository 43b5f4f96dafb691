"""Open sync writes: which are open after every commit, rollback, abandoned snapshot and crash; and when rows go."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

import storage.history.prepares
from storage.admin.check import check
from storage.errors import CorruptedError, SeqnoOrder
from storage.format import keys, records
from storage.format.records import key_of
from storage.history import chain
from storage.history.prepares import check_frame, committed_row, old_aborts, rows
from storage.history.purge import Window
from storage.model import Collection, Kind, Manifest, Seqno, Vbid
from storage.read.view import open_view
from storage.write.writer import GroupWriter
from tests.storage.model import events, keys_of, log, row, span
from tests.storage.test_writer import KEYS, VBIDS, Store, crash, open_writer, system_event_frame

pytestmark = pytest.mark.usefixtures("small_limits")

EXTRAS = struct.Struct(">QQIIIBBB")


def prepare_frame(
    key: bytes, seqno: int, value: bytes = b"v", *, deleted: int = 0, datatype: int = 1, collection: bytes = b"\0"
) -> bytes:
    wire_key = collection + key
    extras = EXTRAS.pack(seqno, 3, 9, 4_000_000_000, 0, 5, deleted, 1)
    body = len(extras) + len(wire_key) + len(value)
    return (
        records.HEADER.pack(0x80, 0x60, len(wire_key), len(extras), datatype, 0, body, 0, 77)
        + extras
        + wire_key
        + value
    )


def abort_frame(wire_key: bytes, seqno: int, prepared_seqno: int = 1) -> bytes:
    head = records.HEADER.pack(0x80, 0x63, len(wire_key), 16, 0, 0, 16 + len(wire_key), 0, 0)
    return head + struct.pack(">QQ", prepared_seqno, seqno) + wire_key


Event = tuple[int, bytes, bool]
"""(seqno, wire key, whether it prepares); anything else of a key settles it."""


def open_after(events: list[Event], seqno: int) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for at, key, prepares in events:
        if at <= seqno:
            found.pop(key, None)
            if prepares:
                found[key] = at
    return found


class StoreWithPrepares(Store):
    """The store against its model, with sync writes among everything else that can happen to it."""

    @initialize()
    def create(self) -> None:
        super().create()
        self.values: dict[tuple[int, int], bytes | None] = {}
        """What was prepared at a seqno."""
        self.line: dict[int, list[Event]] = {vbid: [] for vbid in VBIDS}
        """What came on the staging branch's history."""
        self.served_line: dict[int, list[Event]] = {}
        """The same of what is served next to a resync."""

    def expected(self, vbid: int) -> dict[bytes, int]:
        return open_after(self.line[vbid], self.writer.state(vbid).staged_seqno)

    @rule(
        vbid=st.sampled_from(VBIDS), data=st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=8)
    )
    def stage(self, vbid: int, data: list[tuple[int, bool]]) -> None:
        before = len(self.open[vbid])
        super().stage(vbid, data)
        self.line[vbid] += [(seqno, b"\0" + key, False) for seqno, key, _ in self.open[vbid][before:]]

    @rule(vbid=st.sampled_from(VBIDS), number=st.integers(0, 5), deleted=st.booleans())
    def prepare(self, vbid: int, number: int, deleted: bool) -> None:
        seqno = self.writer.state(vbid).staged_seqno + 1
        key = KEYS[vbid][number]
        self.values[vbid, seqno] = None if deleted else b"p%d" % seqno
        self.writer.prepare(
            vbid, seqno, prepare_frame(key, seqno, b"p%d" % seqno, deleted=deleted), span(seqno, seqno + 3)
        )
        self.line[vbid].append((seqno, b"\0" + key, True))

    @rule(vbid=st.sampled_from(VBIDS), number=st.integers(0, 5), commit=st.booleans())
    def settle_prepare(self, vbid: int, number: int, commit: bool) -> None:
        seqno = self.writer.state(vbid).staged_seqno + 1
        key = b"\0" + KEYS[vbid][number]
        prepared = self.expected(vbid).get(key)
        if not commit:
            self.writer.abort_prepare(vbid, seqno, abort_frame(key, seqno), span(seqno, seqno + 3))
        elif self.writer.commit_prepare(vbid, seqno, key, span(seqno, seqno + 3)):
            assert prepared is not None
            self.open[vbid].append((seqno, key[1:], self.values[vbid, prepared]))
        else:
            assert prepared is None
            return
        self.line[vbid].append((seqno, key, False))

    def settle(self, published: Any) -> None:
        for vbid, _ in published:
            self.served_line.pop(vbid, None)
        super().settle(published)

    def cut_lines(self) -> None:
        """What is not staged any more never came."""
        for vbid in VBIDS:
            staged = self.writer.state(vbid).staged_seqno
            self.line[vbid] = [event for event in self.line[vbid] if event[0] <= staged]

    @rule(vbid=st.sampled_from(VBIDS), share=st.floats(0, 1.2))
    def roll_back(self, vbid: int, share: float) -> None:
        before = self.writer.state(vbid).rollback_count
        super().roll_back(vbid, share)
        if self.writer.state(vbid).rollback_count > before:
            self.line[vbid] = self.served_line.pop(vbid, self.line[vbid])
        self.cut_lines()

    @rule(vbid=st.sampled_from(VBIDS))
    def abandon(self, vbid: int) -> None:
        super().abandon(vbid)
        self.cut_lines()

    @rule(vbid=st.sampled_from(VBIDS))
    def begin_resync(self, vbid: int) -> None:
        super().begin_resync(vbid)
        self.served_line.setdefault(vbid, self.line[vbid])
        self.line[vbid] = []

    @rule()
    def crash_and_reopen(self) -> None:
        super().crash_and_reopen()
        self.cut_lines()

    @invariant()
    def open_prepares_are_those_of_the_model(self) -> None:
        if hasattr(self, "line"):
            for vbid in VBIDS:
                assert self.writer.open_prepares(vbid) == self.expected(vbid)


LIMITS = settings(stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("examples", [20, pytest.param(60, marks=pytest.mark.ci)])
@pytest.mark.parametrize("links_max", [0, 16], ids=["merged", "few"])
def test_open_prepares_follow_every_commit_rollback_and_crash(
    links_max: int, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.history.merge.LINKS_MAX", links_max)
    run_state_machine_as_test(StoreWithPrepares, settings=settings(LIMITS, max_examples=examples))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_open_prepares_follow_every_commit_rollback_and_crash_of_many() -> None:
    run_state_machine_as_test(StoreWithPrepares, settings=settings(LIMITS, max_examples=3000, stateful_step_count=60))


@pytest.fixture
def writer(path: str) -> Iterator[GroupWriter]:
    opened = open_writer(path)
    opened.save_failover_log(0, log())
    yield opened
    opened.close()


KEY = KEYS[0][0]
WIRE_KEY = b"\0" + KEY


def boundary(writer: GroupWriter, seqno: int) -> None:
    writer.publish(0, seqno, seqno)
    writer.commit()


def stored(writer: GroupWriter) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    with writer.environment.read() as txn:
        return [(at, settled) for at, settled, _ in rows(txn, 0)]


def test_a_prepare_is_seen_by_nobody_and_its_commit_by_all(path: str, writer: GroupWriter) -> None:
    writer.prepare(0, 1, prepare_frame(KEY, 1, b"{}"), span(1, 1))
    boundary(writer, 1)
    with open_view(path) as view:
        assert view.get(KEY) is None
        assert list(events(view)) == []
        assert writer.commit_prepare(0, 4, WIRE_KEY, span(2, 4))
        boundary(writer, 4)
        document = view.get(KEY)
    assert document is not None
    assert (document.seqno, document.value, document.rev_seqno, document.cas) == (4, b"{}", 3, 77)
    assert (document.flags, document.expiry, document.datatype) == (9, 4_000_000_000, 1)
    assert writer.open_prepares(0) == {}
    assert check(path).problems == []


def test_a_committed_deletion_is_a_tombstone(path: str, writer: GroupWriter) -> None:
    writer.prepare(0, 1, prepare_frame(KEY, 1, b"", deleted=1, datatype=0), span(1, 2))
    assert writer.commit_prepare(0, 2, WIRE_KEY, span(1, 2))
    boundary(writer, 2)
    with open_view(path) as view:
        assert view.get(KEY) is None
        (tombstone,) = events(view)
    assert (tombstone.kind, tombstone.seqno) == (Kind.DELETION, 2)


def test_a_rollback_between_the_halves_opens_the_write_again(path: str, writer: GroupWriter) -> None:
    """The source lost the commit; on its new history the same prepare is aborted, or committed later."""
    writer.prepare(0, 3, prepare_frame(KEY, 3), span(1, 3))
    boundary(writer, 3)
    assert writer.commit_prepare(0, 5, WIRE_KEY, span(4, 5))
    boundary(writer, 5)
    assert writer.open_prepares(0) == {}
    assert writer.rollback(0, 4).boundary_seqno == 3
    assert writer.open_prepares(0) == {WIRE_KEY: 3}
    crash(writer)
    writer = open_writer(path)
    assert writer.open_prepares(0) == {WIRE_KEY: 3}
    assert writer.commit_prepare(0, 9, WIRE_KEY, span(4, 9))
    boundary(writer, 9)
    with open_view(path) as view:
        document = view.get(KEY)
        assert document is not None
        assert document.seqno == 9
    assert check(path).problems == []
    writer.close()


def test_halves_between_two_boundaries_leave_no_row(writer: GroupWriter) -> None:
    """Of a durable write that takes milliseconds nothing but the committed document is written."""
    for seqno in (1, 3, 5):
        writer.prepare(0, seqno, prepare_frame(KEY, seqno), span(seqno, seqno + 1))
        writer.commit(flush_open=seqno == 3)  # also where memory was short in between
        assert writer.commit_prepare(0, seqno + 1, WIRE_KEY, span(seqno, seqno + 1))
        boundary(writer, seqno + 1)
        assert stored(writer) == []


def test_a_row_goes_when_the_floor_has_passed_what_settled_it(writer: GroupWriter) -> None:
    first, second = KEYS[0][:2]
    writer.prepare(0, 1, prepare_frame(first, 1), span(1, 1))
    boundary(writer, 1)
    writer.prepare(0, 2, prepare_frame(second, 2), span(2, 2))
    boundary(writer, 2)
    assert writer.commit_prepare(0, 3, b"\0" + first, span(3, 3))
    boundary(writer, 3)
    assert stored(writer) == [((1, 1), (1, 3)), ((1, 2), (0, 0))]
    writer._vbuckets[0].change(history_floor_seqno=3)
    writer.stage(0, [row(writer.row_prefix(0), KEYS[0][2], b"x", 4)], 1, span(4, 4))
    boundary(writer, 4)
    assert stored(writer) == [((1, 2), (0, 0))]
    assert writer.open_prepares(0) == {b"\0" + second: 2}


def test_an_abort_stays_until_it_is_purged_like_a_tombstone(path: str, writer: GroupWriter) -> None:
    """Also one whose prepare left no row, or never came: a client from elsewhere may hold it."""
    writer.prepare(0, 1, prepare_frame(KEY, 1), span(1, 3))
    writer.abort_prepare(0, 2, abort_frame(WIRE_KEY, 2), span(1, 3))
    writer.abort_prepare(0, 3, abort_frame(b"\0never", 3), span(1, 3))
    boundary(writer, 3)
    assert stored(writer) == [((1, 2), (0, 0)), ((1, 3), (0, 0))]
    assert writer.open_prepares(0) == {}
    crash(writer)
    writer = open_writer(path, window=Window(boundaries=1))
    assert writer.open_prepares(0) == {}
    assert check(path).problems == []
    for seqno in (4, 5):
        writer.stage(0, [row(writer.row_prefix(0), KEYS[0][2], b"x", seqno)], 1, span(seqno, seqno))
        boundary(writer, seqno)
    while writer.step():
        pass
    assert stored(writer) == []
    assert writer.state(0).local_purge_seqno == 3
    assert check(path).problems == []
    writer.close()


def test_aborts_are_purged_in_steps_of_bounded_size(path: str) -> None:
    """However many lie between two rows."""
    writer = open_writer(path, window=Window(boundaries=1))
    writer.save_failover_log(0, log())
    for seqno in range(1, 41):
        writer.abort_prepare(0, seqno, abort_frame(b"\0a%d" % seqno, seqno), span(1, 40))
    boundary(writer, 40)
    for seqno in (41, 42):
        writer.stage(0, [row(writer.row_prefix(0), KEYS[0][2], b"x", seqno)], 1, span(seqno, seqno))
        boundary(writer, seqno)
    with writer.environment.read() as txn:
        links = chain.load(txn, 0, 1, 42)
        assert old_aborts(txn, 0, links, 3, 41, 5) == ([(1, n) for n in range(4, 9)], 8)
        assert old_aborts(txn, 0, links, 36, 41, 5) == ([(1, n) for n in range(37, 41)], 41)
        assert old_aborts(txn, 0, links, 40, 41, 5) == ([], 41)
    while writer.step():
        pass
    assert stored(writer) == []
    assert writer.state(0).local_purge_seqno == 40
    writer.close()


def test_rows_of_histories_that_nobody_sees_any_more_go(writer: GroupWriter) -> None:
    writer.stage(0, [row(writer.row_prefix(0), KEYS[0][2], b"x", 1)], 1, span(1, 1))
    boundary(writer, 1)
    writer.prepare(0, 2, prepare_frame(KEY, 2), span(2, 2))
    boundary(writer, 2)
    assert writer.rollback(0, 1).boundary_seqno == 1
    assert writer.open_prepares(0) == {}
    writer.stage(0, [row(writer.row_prefix(0), KEYS[0][2], b"y", 2)], 1, span(2, 2))
    boundary(writer, 2)
    assert stored(writer) == []


def test_a_collection_that_ends_or_begins_again_takes_its_open_prepares_along(path: str, writer: GroupWriter) -> None:
    """Neither a commit nor an abort comes for them any more."""
    writer.prepare(0, 1, prepare_frame(KEY, 1), span(1, 1))
    writer.prepare(0, 2, prepare_frame(b"x", 2, collection=b"\x08"), span(1, 2))
    both = Manifest.initial()
    both = replace(both, collections=both.collections | {8: Collection(8, 0, "c", Seqno(0))})
    writer.system_event(0, 3, system_event_frame(3), both, span(1, 3))
    assert set(writer.open_prepares(0)) == {WIRE_KEY, b"\x08x"}
    boundary(writer, 3)
    flushed = replace(both, collections=both.collections | {0: Collection(0, 0, "_default", Seqno(4))})
    writer.system_event(0, 4, system_event_frame(4), flushed, span(4, 4))
    assert set(writer.open_prepares(0)) == {b"\x08x"}
    writer.system_event(0, 5, system_event_frame(5), Manifest.initial(), span(4, 5))
    assert writer.open_prepares(0) == {}
    boundary(writer, 5)
    crash(writer)
    writer = open_writer(path)
    assert writer.open_prepares(0) == {}
    assert writer.rollback(0, 3).boundary_seqno == 3
    assert set(writer.open_prepares(0)) == {WIRE_KEY, b"\x08x"}
    assert check(path).problems == []
    writer.close()


def test_memory_counts_prepares_until_they_are_written(writer: GroupWriter) -> None:
    frame = prepare_frame(KEY, 1, b"x" * 1000)
    writer.prepare(0, 1, frame, span(1, 9))
    assert writer.pending_bytes == len(frame)
    writer.commit(flush_open=True)
    assert writer.pending_bytes == 0
    writer.prepare(0, 2, prepare_frame(KEY, 2, b"x"), span(1, 9))
    writer.abandon(0)
    assert writer.pending_bytes == 0
    assert writer.open_prepares(0) == {}


def test_prepares_that_do_not_rise_or_are_too_many_are_refused(
    writer: GroupWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.history.prepares, "OPEN_MAX", 1)
    writer.prepare(0, 5, prepare_frame(KEY, 5), span(1, 9))
    with pytest.raises(SeqnoOrder, match="does not rise"):
        writer.prepare(0, 5, prepare_frame(KEY, 5), span(1, 9))
    with pytest.raises(SeqnoOrder, match="does not rise"):
        writer.abort_prepare(0, 5, abort_frame(WIRE_KEY, 5), span(1, 9))
    with pytest.raises(SeqnoOrder, match="open at once"):
        writer.prepare(0, 6, prepare_frame(KEYS[0][1], 6), span(1, 9))
    writer.prepare(0, 6, prepare_frame(KEY, 6), span(1, 9))
    assert writer.open_prepares(0) == {WIRE_KEY: 6}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda frame: frame[:10], "damaged"),
        (lambda frame: frame[:1] + b"\x57" + frame[2:], "cannot be read"),
        (lambda frame: frame + b"x", "cannot be read"),
        (lambda frame: frame[:24] + (9).to_bytes(8) + frame[32:], "seqno 9"),
    ],
)
def test_check_finds_what_is_damaged(path: str, writer: GroupWriter, damage: Any, said: str) -> None:
    writer.prepare(0, 1, prepare_frame(KEY, 1), span(1, 1))
    boundary(writer, 1)
    key = keys.PREPARE_KEY.pack(0, 1, 1)
    with writer.environment.begin(write=True) as txn:
        tree = writer.environment.db(keys.DB_PREPARE)
        value = txn.get(key, db=tree)
        txn.put(key, value[:12] + damage(value[12:]), db=tree)
    (problem,) = check(path).problems
    assert said in problem


def test_check_finds_two_open_prepares_of_a_key_and_impossible_settlements(path: str, writer: GroupWriter) -> None:
    writer.prepare(0, 1, prepare_frame(KEY, 1), span(1, 3))
    writer.stage(0, [row(writer.row_prefix(0), KEYS[0][1], b"x", 3)], 1, span(1, 3))
    boundary(writer, 3)
    with writer.environment.begin(write=True) as txn:
        tree = writer.environment.db(keys.DB_PREPARE)
        txn.put(keys.PREPARE_KEY.pack(0, 1, 2), keys.ROW.pack(0, 0) + prepare_frame(KEY, 2), db=tree)
        other = prepare_frame(KEYS[0][2], 3)
        txn.put(keys.PREPARE_KEY.pack(0, 1, 3), keys.ROW.pack(1, 2) + other, db=tree)
        txn.put(keys.PREPARE_KEY.pack(1, 1, 3), keys.ROW.pack(0, 0) + other, db=tree)
    stray, twice, settled = check(path).problems
    assert "vbucket 1" in stray
    assert "prepare 1:2 is not the only open one" in twice
    assert "prepare 1:3 is settled at 1:2" in settled


def test_a_missing_row_is_damage_and_not_a_missing_prepare(path: str, writer: GroupWriter) -> None:
    writer.prepare(0, 1, prepare_frame(KEY, 1), span(1, 1))
    boundary(writer, 1)
    with writer.environment.begin(write=True) as txn:
        txn.delete(keys.PREPARE_KEY.pack(0, 1, 1), db=writer.environment.db(keys.DB_PREPARE))
    with pytest.raises(CorruptedError, match="1:1 is missing"):
        writer.commit_prepare(0, 2, WIRE_KEY, span(2, 2))
    writer.abort_prepare(0, 2, abort_frame(WIRE_KEY, 2), span(2, 3))
    with pytest.raises(CorruptedError, match="1:1 is missing"):
        writer.commit(flush_open=True)


def test_a_mirror_made_before_the_tree_is_read_and_gets_it_from_its_next_writer(path: str) -> None:
    writer = open_writer(path)
    writer.stage(0, [row(writer.row_prefix(0), KEY, b"x", 1)], 1, span(1, 1))
    boundary(writer, 1)
    with writer.environment.begin(write=True) as txn:
        txn.drop(writer.environment.db(keys.DB_PREPARE))
    writer.close()
    with open_view(path) as view:
        assert view.get(KEY) is not None
    assert check(path).problems == []
    writer = open_writer(path)
    writer.prepare(0, 2, prepare_frame(KEY, 2), span(2, 2))
    boundary(writer, 2)
    writer.close()


def test_layouts() -> None:
    frame = prepare_frame(b"k", 7, b"value")
    assert key_of(frame) == b"\0k"
    check_frame(frame, 7)
    assert key_of(abort_frame(b"\0k", 8)) == b"\0k"
    check_frame(abort_frame(b"\0k", 8), 8)
    document = records.decode_row(Vbid(0), 1, committed_row(frame, 9))  # type: ignore[arg-type]
    assert (document.key, document.seqno, document.value, document.kind) == (b"k", 9, b"value", Kind.MUTATION)
    assert keys_of(0, 1) == [KEYS[0][0]]
