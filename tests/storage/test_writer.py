"""The store against a model: random staging, publishing, rollbacks, refills and crashes; every view at every step."""

from __future__ import annotations

import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lmdb
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import storage.index
import storage.purge
import storage.scan
import storage.writer
from storage import bulk, directory, records
from storage.branches import all_branches, purge_row
from storage.check import check
from storage.environment import SHARED, Environment
from storage.errors import Locked, NoSuchBoundary, SeqnoOrder, StorageError, ViewInvalidated
from storage.model import SEQNO_MAX, Branch, FailoverEntry, Manifest, ManifestUid, Seqno, Vbid, Vbuuid
from storage.purge import Window
from storage.records import decode_row
from storage.view import Token, View, open_view
from storage.writer import GroupWriter
from tests.storage.model import IDENTITY, ModelVbucket, keys_of, log, row, span


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits so small that a dozen rows reach the paths that millions take in service."""
    monkeypatch.setattr(storage.writer, "INLINE_INDEX_ROWS", 3)
    monkeypatch.setattr(storage.index, "SLICE_ROWS", 2)
    monkeypatch.setattr(storage.index, "RUN_ROWS", 5)
    monkeypatch.setattr(storage.index, "_CHUNK_ROWS", 2)
    monkeypatch.setattr(storage.scan, "CHUNK_ROWS", 3)
    monkeypatch.setattr(storage.purge, "STEP_ROWS", 2)
    monkeypatch.setattr(storage.purge, "LOOK_VBUCKETS", 10)


class Clock:
    """Milliseconds that rise by one at every look."""

    now = 1_000_000

    def __call__(self) -> int:
        self.now += 1
        return self.now


def open_writer(
    path: str, group: int = 0, clock: Clock | None = None, map_size: int = 1 << 30, **options: Any
) -> GroupWriter:
    return GroupWriter.open(
        directory.group_path(path, group),
        group=group,
        vbids=directory.group_vbids(IDENTITY, group),
        identity=IDENTITY,
        clock_ms=clock or Clock(),
        map_size=map_size,
        **options,
    )


def crash(writer: GroupWriter) -> None:
    """What SIGKILL leaves: the environment as of the last commit, the lock given up."""
    for vbucket in writer._jobs:
        assert vbucket.job is not None
        vbucket.job.close()
    SHARED.release(writer.environment)
    writer._lock.release()
    writer._closed = True


VBIDS = [0, 2]
KEYS = {vbid: keys_of(vbid, 6) for vbid in VBIDS}


def in_bulk(view: View, vbid: int, as_of: int | None = None) -> list[dict[bytes, tuple[int, bytes]]]:
    """Its documents as `bulk` reads them: by rows, by keys, and by rows at first and by keys then."""
    found = []
    limits: list[dict[str, Any]] = [{}, {"ROWS_PER_DOCUMENT": 0}, {"REMEMBERED_MAX": 1}]
    for ways in limits:
        with patch.multiple(bulk, GET_ROWS=2, **ways):
            chunks = bulk.documents(view, view.pin(vbid, as_of), rows_max=3)
            rows = [decode_row(Vbid(vbid), Branch(0), frame) for chunk in chunks for frame in chunk.frames]
        found.append({row.key: (int(row.seqno), row.value) for row in rows})
        assert len(found[-1]) == len(rows)
    return found


class Store(RuleBasedStateMachine):
    """Group 0 of a mirror and its model. A snapshot is staged in pieces; its events publish together or never."""

    def __init__(self) -> None:
        super().__init__()
        self.path = tempfile.mkdtemp() + "/mirror"
        self.clock = Clock()

    @initialize()
    def create(self) -> None:
        directory.create(self.path, IDENTITY)
        self.writer = open_writer(self.path, clock=self.clock)
        self.model = {vbid: ModelVbucket(Vbid(vbid)) for vbid in VBIDS}
        self.reset_pending()
        self.tokens: list[tuple[Token, dict[bytes, bytes]]] = []
        self.held: dict[Token, int] = {}
        """Tokens that a lease keeps, and until when."""
        self.view = open_view(self.path)

    def reset_pending(self) -> None:
        self.open: dict[int, list[tuple[int, bytes, bytes | None]]] = {vbid: [] for vbid in VBIDS}
        """Events of the open snapshot."""
        self.complete: dict[int, list[tuple[int, list[tuple[int, bytes, bytes | None]]]]] = {v: [] for v in VBIDS}
        """Complete snapshots that no commit has published yet."""
        self.refill = {vbid: self.writer.state(vbid).staging_branch != self.writer.state(vbid).branch for vbid in VBIDS}

    def teardown(self) -> None:
        if hasattr(self, "view"):
            self.view.close()
            if not self.writer._closed:
                crash(self.writer)
        shutil.rmtree(Path(self.path).parent)

    @rule(
        vbid=st.sampled_from(VBIDS), data=st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=8)
    )
    def stage(self, vbid: int, data: list[tuple[int, bool]]) -> None:
        at = self.writer.state(vbid).staged_seqno
        events = []
        for number, (key, deleted) in enumerate(data, start=1):
            seqno = at + number
            value = None if deleted else b"%d" % seqno
            events.append((seqno, KEYS[vbid][key], value))
        prefix = self.writer.row_prefix(vbid)
        rows = [row(prefix, key, value, seqno) for seqno, key, value in events]
        self.writer.stage(vbid, rows, sum(len(r[1]) for r in rows), span(at + 1, events[-1][0] + 3))
        self.open[vbid] += events

    @rule(vbid=st.sampled_from(VBIDS), skipped=st.sampled_from([0, 0, 0, 2]))
    def complete_snapshot(self, vbid: int, skipped: int) -> None:
        end = self.writer.state(vbid).staged_seqno + skipped
        if end == 0 or (not self.open[vbid] and not skipped):
            return
        self.writer.publish(vbid, end, 0)
        self.complete[vbid].append((end, self.open[vbid]))
        self.open[vbid] = []

    @rule(flush=st.booleans())
    def commit(self, flush: bool) -> None:
        self.settle(self.writer.commit(flush_open=flush).published)

    def settle(self, published: Sequence[tuple[Vbid, int]]) -> None:
        """Take over into the model what a commit said it published."""
        for vbid, seqno in published:
            ready = self.complete[vbid]
            assert ready
            assert ready[-1][0] == seqno, (ready, seqno)
            if self.refill[vbid]:
                self.model[vbid] = ModelVbucket(vbid)
                self.tokens = [entry for entry in self.tokens if entry[0].vbid != vbid]
                self.refill[vbid] = False
            self.model[vbid].publish(seqno, [event for _, events in ready for event in events])
            self.complete[vbid] = []

    @rule()
    def step(self) -> None:
        self.writer.step()

    @rule()
    def finish(self) -> None:
        """All that is complete must become visible after finitely many steps."""
        for _ in range(200):
            self.settle(self.writer.commit().published)
            if not self.writer.step() and not any(self.writer.publishing(vbid) for vbid in VBIDS):
                break
        assert not any(self.complete.values())

    @rule(vbid=st.sampled_from(VBIDS), share=st.floats(0, 1.2))
    def roll_back(self, vbid: int, share: float) -> None:
        self.settle_first()
        to = int(self.model[vbid].published * share)
        before = self.writer.state(vbid)
        result = self.writer.rollback(vbid, to)
        expected = self.model[vbid].roll_back(to)
        assert result.boundary_seqno == expected
        state = self.writer.state(vbid)
        if expected:
            self.open[vbid], self.complete[vbid], self.refill[vbid] = [], [], False
            assert (state.published_seqno, state.staged_seqno) == (expected, expected)
            assert state.branch > before.branch
            assert state.rollback_count == before.rollback_count + 1
            assert all(entry.seqno <= expected for entry in state.failover_log)
        else:
            assert state == before

    def settle_first(self) -> None:
        """Branch operations commit first; let the model see what that publishes."""
        self.settle(self.writer.commit().published)

    @rule(vbid=st.sampled_from(VBIDS))
    def abandon(self, vbid: int) -> None:
        self.settle_first()
        done = self.writer.abandon(vbid)
        state = self.writer.state(vbid)
        self.open[vbid] = [event for event in self.open[vbid] if event[0] <= state.staged_seqno]
        end = self.complete[vbid][-1][0] if self.complete[vbid] else state.staging_published_seqno
        if done:
            assert state.staged_seqno == end
            assert state.open_snapshot is None
            self.open[vbid] = []
        else:
            assert self.complete[vbid], "only a complete snapshot that waits is waited for"
            assert state.staged_seqno > end

    @rule(vbid=st.sampled_from(VBIDS))
    def begin_refill(self, vbid: int) -> None:
        self.settle_first()
        self.writer.begin_refill(vbid)
        self.open[vbid], self.complete[vbid], self.refill[vbid] = [], [], True
        assert self.writer.state(vbid).staged_seqno == 0
        self.writer.save_failover_log(vbid, log(88))

    @rule()
    def crash_and_reopen(self) -> None:
        before = {vbid: self.writer.state(vbid) for vbid in VBIDS}
        self.view.close()
        crash(self.writer)
        self.writer = open_writer(self.path, clock=self.clock)
        self.held.clear()
        self.view = open_view(self.path)
        for vbid in VBIDS:
            after = self.writer.state(vbid)
            assert after.published_seqno == before[vbid].published_seqno
            assert after.staged_seqno <= before[vbid].staged_seqno
            kept = [event for _, events in self.complete[vbid] for event in events] + self.open[vbid]
            self.open[vbid] = [event for event in kept if event[0] <= after.staged_seqno]
            self.complete[vbid] = []
            self.refill[vbid] = after.staging_branch != after.branch
            if after.staged_seqno > after.staging_published_seqno and after.open_snapshot is None:
                # Complete on disk, without its key rows: the new writer makes them and publishes it.
                assert self.writer.publishing(vbid)
                self.complete[vbid] = [(after.staged_seqno, self.open[vbid])]
                self.open[vbid] = []

    @rule(keep=st.integers(1, 4), steps=st.sampled_from([1, 2, 200]))
    def purge(self, keep: int, steps: int) -> None:
        """Raise the floor and remove what is below, to the end or only a step or two."""
        self.settle_first()
        self.writer._purger.window = Window(boundaries=keep, time_ms=self.dead_for_ms)
        for _ in range(steps):
            now_ms = self.writer._clock.now_ms()
            vbid = self.writer._purger.plan(now_ms)
            if vbid is None:
                break
            before = self.writer.state(vbid).history_floor_seqno
            published_ms = {b.seqno: b.history_ms for b in self.view.boundaries(vbid)}
            self.writer._purge(vbid, now_ms)
            floor = self.writer.state(vbid).history_floor_seqno
            assert floor >= before
            if floor > before:
                by_count = sorted(self.model[vbid].boundaries)[-keep:][0]
                is_held = any(token.vbid == vbid for token in self.held)
                assert is_held or floor == by_count or published_ms[Seqno(floor)] <= now_ms - self.dead_for_ms
                self.model[vbid].purge_below(floor)
        else:
            assert steps < 200, "the purger finds no end"
        if steps == 200:
            for each in VBIDS:
                seen = [(d.seqno, d.key) for d in self.view.scan_seqno(each)]
                assert seen == [event[:2] for event in self.model[each].kept_events()]

    dead_for_ms = 40
    """Retracted rows are kept for so many looks at the clock."""

    @rule(vbid=st.sampled_from(VBIDS))
    def take_token(self, vbid: int) -> None:
        state = self.writer.state(vbid)
        token = self.view.token(vbid, state.branch, state.published_seqno)
        contents = {key: entry[1] for key, entry in self.model[vbid].live().items()}
        self.tokens.append((token, contents))  # type: ignore[arg-type]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), looks=st.sampled_from([5, 1000]))
    def hold(self, data: st.DataObject, looks: int) -> None:
        """Lease what a token stands on, or let go of it."""
        token, _ = data.draw(st.sampled_from(self.tokens))
        if self.held.pop(token, None):
            self.writer.leases.release(str(token))
            return
        until_ms = self.clock.now + looks
        try:
            self.writer.lease(str(token), {int(token.vbid): (int(token.branch), int(token.seqno))}, until_ms)
        except NoSuchBoundary:
            below_floor = token.seqno < self.writer.state(token.vbid).history_floor_seqno
            assert below_floor or self.purged(token.vbid) or self.was_filled_anew(token)
        else:
            self.held[token] = until_ms

    def was_filled_anew(self, token: Token) -> bool:
        try:
            list(self.view.changes(token.vbid, since=token))
        except ViewInvalidated as error:
            return "resynced" in str(error)
        return False

    @rule()
    def changes_bring_every_token_up_to_date(self) -> None:
        for token, contents in self.tokens:
            copy: dict[bytes, bytes] = dict(contents)
            try:
                changes = list(self.view.changes(token.vbid, since=token))
            except ViewInvalidated:
                # Allowed only where history was purged: never merely because of a rollback, nor while it is leased.
                assert self.purged(token.vbid)
                assert self.held.get(token, 0) <= self.clock.now or self.was_filled_anew(token)
                continue
            for change in changes:
                document = change.document
                if document is None:
                    assert change.kind == "rollback"
                elif change.kind == "retraction" or document.deleted:
                    copy.pop(document.key, None)
                else:
                    copy[document.key] = document.value
            expected = {key: entry[1] for key, entry in self.model[token.vbid].live().items()}
            assert copy == expected, token

    def purged(self, vbid: int) -> bool:
        """True when the vbucket's history does not reach back to its beginning any more."""
        with self.writer.environment.read() as txn:
            known = all_branches(txn, vbid)
            is_purged = purge_row(txn, vbid).purged_seqno > 0
            return is_purged or 1 not in known or any(row.kept_seqno < SEQNO_MAX for row in known.values())

    @invariant()
    def views_show_the_model(self) -> None:
        if not hasattr(self, "view"):
            return
        for vbid, model in self.model.items():
            live = model.live()
            scanned = {d.key: (d.seqno, d.value) for d in self.view.scan(vbid)}
            assert scanned == live
            assert list(scanned) == sorted(scanned)
            assert in_bulk(self.view, vbid) == [live] * 3
            assert self.view.count(vbid) == len(live)
            for key in KEYS[vbid]:
                document = self.view.get(key)
                assert (document and (document.seqno, document.value)) == live.get(key)
            many = self.view.get_many(KEYS[vbid])
            assert {key: (d.seqno, d.value) for key, d in many.items()} == live
            seen = {(d.seqno, d.key) for d in self.view.scan_seqno(vbid)}
            assert seen <= {e[:2] for e in model.events}
            assert seen >= {e[:2] for e in model.kept_events()}
            with_deletions = {d.key: d.seqno for d in self.view.scan(vbid, deletions=True)}
            assert with_deletions.items() <= {key: entry[0] for key, entry in model.contents.items()}.items()
            assert with_deletions.items() >= {key: entry[0] for key, entry in live.items()}.items()

    @invariant()
    def as_of_shows_every_boundary(self) -> None:
        if not hasattr(self, "view"):
            return
        for vbid, model in self.model.items():
            assert [b.seqno for b in self.view.boundaries(vbid)] == sorted(model.boundaries, reverse=True)
            for seqno, contents in model.boundaries.items():
                live = {key: entry for key, entry in contents.items() if entry[1] is not None}
                assert {d.key: (d.seqno, d.value) for d in self.view.scan(vbid, as_of=seqno)} == live
                assert in_bulk(self.view, vbid, seqno) == [live] * 3
                for key in KEYS[vbid][:2]:
                    document = self.view.get(key, as_of=seqno)
                    assert (document and (document.seqno, document.value)) == live.get(key)
            first = min(model.boundaries, default=1)
            with pytest.raises(NoSuchBoundary):
                list(self.view.scan(vbid, as_of=first - 1))

    @precondition(lambda self: hasattr(self, "view"))
    @rule()
    def check_is_clean(self) -> None:
        assert check(self.path).problems == []


LIMITS = settings(
    max_examples=settings().max_examples * 2 // 5,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("links_max", [0, 16], ids=["merged", "few"])
def test_every_view_equals_the_model_after_every_step(links_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.merge.LINKS_MAX", links_max)
    run_state_machine_as_test(Store, settings=LIMITS)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("links_max", [0, 16], ids=["merged", "few"])
def test_every_view_equals_the_model_after_every_step_of_many(links_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.merge.LINKS_MAX", links_max)
    run_state_machine_as_test(Store, settings=settings(LIMITS, max_examples=4000, stateful_step_count=60))


@pytest.fixture
def writer(path: str) -> Iterator[GroupWriter]:
    opened = open_writer(path)
    yield opened
    opened.close()


def publish(
    writer: GroupWriter, vbid: int, items: list[tuple[bytes, bytes | None, int]], end: int | None = None
) -> None:
    prefix = writer.row_prefix(vbid)
    rows = [row(prefix, *item) for item in items]
    writer.stage(vbid, rows, 0, span(items[0][2], items[-1][2]))
    writer.publish(vbid, end or items[-1][2], items[0][2])
    writer.commit()


def test_a_second_writer_of_the_same_group_is_refused(path: str, writer: GroupWriter) -> None:
    with pytest.raises(Locked, match="another process"):
        directory.GroupLock(writer.path)


def test_a_writer_that_was_overtaken_cannot_write(path: str) -> None:
    old = open_writer(path)
    crash(old)  # its lock is gone, but the object lives on as a stopped process would
    new = open_writer(path)
    new.close()
    revived = open_writer(path)
    revived._fence -= 1
    revived.save_failover_log(0, log())
    with pytest.raises(Locked, match="took this group over"):
        revived.commit()
    revived.close()


@pytest.mark.parametrize("seqnos", [[3, 2], [2, 2], [1, 5, 4, 6], [0]])
def test_rows_that_do_not_rise_are_refused_and_harm_nobody(path: str, writer: GroupWriter, seqnos: list[int]) -> None:
    key = keys_of(0, 1)[0]
    prefix = writer.row_prefix(0)
    rows = [row(prefix, key, b"x", seqno) for seqno in seqnos]
    with pytest.raises(SeqnoOrder):
        writer.stage(0, rows, 0, span(0, 9))
    other = keys_of(2, 1)[0]
    publish(writer, 2, [(other, b"y", 1)])
    with open_view(path) as view:
        assert view.get(other) is not None
        assert view.get(key) is None


def test_an_oso_snapshot_appears_whole_and_a_broken_one_never(path: str, writer: GroupWriter) -> None:
    a, b, c = keys_of(0, 3)
    for round_number, finish in enumerate([False, True]):
        writer.begin_oso(0)
        prefix = writer.row_prefix(0)
        rows = [row(prefix, b, b"b", 7), row(prefix, a, b"a", 3)]
        writer.stage(0, rows, 10, span(0, 2**64 - 1), unordered=True)
        writer.commit(flush_open=True)
        writer.stage(0, [row(prefix, c, b"c", 5)], 10, span(0, 2**64 - 1), unordered=True)
        assert writer.state(0).staged_seqno == 7
        with open_view(path) as view:
            assert list(view.scan(0)) == []
        if finish:
            writer.publish(0, 7, 0)
            while not writer.commit().published:
                writer.step()
        elif round_number == 0:
            crash(writer)
            writer = open_writer(path)  # writes nothing: what is left of the snapshot is the vbucket's to give up
            assert writer.state(0).staged_seqno == 7
            assert writer.state(0).open_snapshot is not None
            writer.abandon(0)
            assert writer.state(0).staged_seqno == 0
    with open_view(path) as view:
        assert {d.key: d.seqno for d in view.scan(0)} == {a: 3, b: 7, c: 5}
    publish(writer, 0, [(a, None, 8)])
    with open_view(path) as view:
        assert {d.key: d.seqno for d in view.scan(0)} == {b: 7, c: 5}
    assert check(path).problems == []
    writer.close()


def test_a_complete_snapshot_without_its_key_rows_is_published_by_the_next_writer(path: str) -> None:
    writer = open_writer(path)
    events = [(seqno, b"k%d" % seqno, b"v") for seqno in range(1, 10)]
    rows = [row(writer.row_prefix(0), key, value, seqno) for seqno, key, value in events]
    writer.stage(0, rows[:5], 5, span(0, 9))
    writer.commit(flush_open=True)
    writer.stage(0, rows[5:], 5, span(0, 9))
    writer.publish(0, 9, 0)
    assert writer.commit().published == []
    crash(writer)
    again = open_writer(path)
    assert (again.state(0).staged_seqno, again.state(0).published_seqno) == (9, 0)
    assert again.publishing(0)
    published: list[object] = []
    for _ in range(100):
        again.step()
        published += again.commit().published
    assert published == [(0, 9)]
    again.close()
    assert check(path).clean
    with open_view(path) as view:
        assert [int(boundary.seqno) for boundary in view.boundaries(0)] == [9]
        assert len(list(view.scan(0))) == 9


def test_the_map_grows_and_the_batch_is_replayed(path: str) -> None:
    writer = open_writer(path, map_size=1 << 20)
    key = keys_of(0, 1)[0]
    for round_number in range(8):
        first = round_number * 200 + 1
        publish(writer, 0, [(key, b"x" * 1000, first + n) for n in range(200)])
    assert writer.figures()["map_bytes"] > 1 << 20
    with open_view(path) as view:
        assert len(list(view.scan_seqno(0))) == 1600
    writer.close()
    assert check(path).problems == []


def test_the_map_grows_while_key_rows_are_made_and_none_is_left_out(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.writer, "INLINE_INDEX_ROWS", 0)
    monkeypatch.setattr(storage.index, "SLICE_ROWS", 100)
    writer = open_writer(path, map_size=1 << 20)
    count = 2_500
    rows = [row(writer.row_prefix(0), b"%0240d" % number, b"v", number + 1) for number in range(count)]
    writer.stage(0, rows, 0, span(1, count))
    writer.commit(flush_open=True)
    writer.publish(0, count, 1)
    writer.commit()
    before = writer.figures()["map_bytes"]
    while writer.publishing(0):
        writer.step()
        writer.commit()
    assert writer.figures()["map_bytes"] > before, "it became full while key rows were written"
    writer.close()
    assert check(path).problems == []
    with open_view(path) as view:
        assert len(list(view.scan(0))) == count


def test_a_scan_is_told_when_a_rollback_passes_it(path: str, writer: GroupWriter) -> None:
    names = keys_of(0, 10)
    publish(writer, 0, [(key, b"1", n + 1) for n, key in enumerate(names)])
    publish(writer, 0, [(key, b"2", n + 11) for n, key in enumerate(names)])
    with open_view(path) as view:
        scan = view.scan(0)
        assert next(scan).value == b"2"
        publish(writer, 0, [(names[-1], b"3", 21)])
        assert [d.value for d in scan] == [b"2"] * 9  # what came later stays out of sight
        scan = view.scan(0)
        next(scan)
        writer.rollback(0, 10)
        with pytest.raises(ViewInvalidated):
            list(scan)
        assert {d.value for d in view.scan(0)} == {b"1"}


def test_a_token_of_a_refilled_vbucket_is_refused(path: str, writer: GroupWriter) -> None:
    key = keys_of(0, 1)[0]
    publish(writer, 0, [(key, b"1", 5)])
    with open_view(path) as view:
        token = view.token(0)
        writer.begin_refill(0)
        assert view.stale(0)
        assert list(view.changes(0, since=token)) == []
        publish(writer, 0, [(key, b"2", 3)])
        assert not view.stale(0)
        with pytest.raises(ViewInvalidated, match="resynced"):
            list(view.changes(0, since=token))


def test_a_rollback_prunes_the_failover_log_and_keeps_the_vbuuid_of_the_boundary(
    path: str, writer: GroupWriter
) -> None:
    key = keys_of(0, 1)[0]
    writer.save_failover_log(0, log(5))
    publish(writer, 0, [(key, b"1", 10)])
    writer.save_failover_log(0, [FailoverEntry(Vbuuid(6), Seqno(12))])
    publish(writer, 0, [(key, b"2", 20)])
    assert writer.rollback(0, 15).boundary_seqno == 10
    assert writer.state(0).failover_log == (FailoverEntry(Vbuuid(5), Seqno(10)),)


def test_a_refill_from_an_empty_source_is_published_at_zero(path: str, writer: GroupWriter) -> None:
    key = keys_of(0, 1)[0]
    publish(writer, 0, [(key, b"gone", 5)])
    writer.begin_refill(0)
    writer.save_failover_log(0, log(9))
    writer.publish(0, 0, 0)
    assert writer.commit().published == [(0, 0)]
    state = writer.state(0)
    assert (state.branch, state.published_seqno, state.staged_seqno) == (state.staging_branch, 0, 0)
    with open_view(path) as view:
        assert list(view.scan(0)) == []
        assert not view.stale(0)
    publish(writer, 0, [(key, b"new", 1)])
    assert check(path).problems == []


# --- found by the simulation (tests/sim)


def staged(writer: GroupWriter, vbid: int, first: int, last: int, end: int, *, unordered: bool = False) -> None:
    """Rows first..last of the snapshot that ends at `end`, a key each."""
    names = keys_of(vbid, 40)
    prefix = writer.row_prefix(vbid)
    rows = [row(prefix, names[seqno], b"%d" % seqno, seqno) for seqno in range(first, last + 1)]
    writer.stage(vbid, rows, 100, span(0, end), unordered)


def settle(writer: GroupWriter) -> None:
    """Commit, and take steps until nothing waits."""
    writer.commit()
    while writer.step() or writer.has_pending:
        writer.commit()


@pytest.mark.parametrize("dies", [False, True])
def test_rows_of_the_next_snapshot_on_disk_while_key_rows_of_the_last_are_made_get_theirs(
    path: str, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """A snapshot is complete and waits for its key rows; memory pressure writes down rows of the next one; a commit
    without anything to write counted those as not on disk. They were published without key rows: documents that no read
    could find. After a crash they lay above what the state said was staged, and could not be appended again.
    """
    monkeypatch.setattr("storage.writer.INLINE_INDEX_ROWS", 2)
    writer = open_writer(path)
    staged(writer, 0, 1, 9, 10)
    writer.commit(flush_open=True)
    staged(writer, 0, 10, 10, 10)
    writer.publish(0, 10, 0)
    staged(writer, 0, 11, 12, 18)
    writer.commit(flush_open=True)
    staged(writer, 0, 13, 14, 18)
    writer.save_failover_log(0, log())
    writer.commit()
    if dies:
        crash(writer)
        writer = open_writer(path)
        assert writer.state(0).staged_seqno == 12
        staged(writer, 0, 13, 14, 18)
    else:
        settle(writer)
        assert writer.state(0).published_seqno == 10
    staged(writer, 0, 15, 18, 18)
    writer.publish(0, 18, 10)
    settle(writer)
    with open_view(path) as view:
        assert sorted(int(each.seqno) for each in view.scan(0)) == list(range(1, 19))
    assert check(path).problems == []
    writer.close()


def test_a_write_that_fails_beside_a_broken_oso_snapshot_is_that_error_and_no_other(
    path: str, writer: GroupWriter
) -> None:
    """Opening again after a failed write gave the broken snapshot up by another write, inside of the first one's
    recovery: KeyError, and the group was lost until a restart.
    """
    writer.begin_oso(0)
    staged(writer, 0, 5, 7, 0, unordered=True)
    writer.commit(flush_open=True)

    def failing(_txn: Any) -> None:
        raise lmdb.DiskError("no space")

    with pytest.raises(StorageError):
        writer._write(failing)
    assert writer.state(0).staged_seqno == 7
    writer.abandon(0)
    publish(writer, 2, [(keys_of(2, 1)[0], b"y", 1)])
    assert check(path).problems == []


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on the disk"])
def test_abandoning_the_next_snapshot_keeps_a_complete_one_that_waits_for_its_key_rows(
    path: str, writer: GroupWriter, on_disk: bool
) -> None:
    """A first snapshot of any size was fetched again because one row of the next one was given up."""
    staged(writer, 0, 1, 9, 9)
    writer.commit(flush_open=True)
    writer.publish(0, 9, 0)
    writer.commit()
    assert writer.publishing(0)
    staged(writer, 0, 10, 12, 15)
    if on_disk:
        writer.commit(flush_open=True)
    assert writer.abandon(0) is not on_disk
    state = writer.state(0)
    assert (state.staged_seqno, state.open_snapshot is None) == ((12, False) if on_disk else (9, True))
    assert writer.pending_bytes == 0
    settle(writer)
    assert writer.state(0).published_seqno == 9
    assert writer.abandon(0)
    state = writer.state(0)
    assert (state.staged_seqno, state.open_snapshot) == (9, None)
    staged(writer, 0, 10, 11, 11)
    writer.publish(0, 11, 10)
    settle(writer)
    with open_view(path) as view:
        assert sorted(int(each.seqno) for each in view.scan(0)) == list(range(1, 12))
    assert check(path).problems == []


def test_what_is_asked_to_go_with_the_complete_one_goes(writer: GroupWriter) -> None:
    """A rollback below its end: it is no longer the source's history."""
    staged(writer, 0, 1, 9, 9)
    writer.commit(flush_open=True)
    writer.publish(0, 9, 0)
    writer.commit()
    assert writer.abandon(0, keep_complete=False)
    assert (writer.state(0).staged_seqno, writer.publishing(0)) == (0, False)


def test_system_events_inside_an_oso_snapshot_come_in_any_order(path: str, writer: GroupWriter) -> None:
    """They were refused as not rising, and the vbucket asked for the same snapshot for ever."""
    writer.begin_oso(0)
    staged(writer, 0, 9, 9, 0, unordered=True)
    manifests = [Manifest(ManifestUid(uid), {0: "_default"}, Manifest.initial().collections) for uid in (1, 2)]
    for seqno, manifest in zip((4, 2), manifests, strict=True):
        writer.system_event(0, seqno, system_event_frame(seqno), manifest, span(0, 0), unordered=True)
    writer.publish(0, 9, 0)
    settle(writer)
    with open_view(path) as view:
        assert view.manifest(0) == manifests[1], "the last that came holds, at whatever seqno"
    assert check(path).problems == []


def system_event_frame(seqno: int) -> bytes:
    extras = struct.pack(">QIB", seqno, 0, 0)
    return records.HEADER.pack(0x80, 0x5F, 0, len(extras), 0, 0, len(extras), 0, 0) + extras


def test_rows_of_an_oso_snapshot_that_came_in_several_commits_all_get_key_rows(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the last commit lie among those of earlier ones; the search for the earlier was cut short by them."""
    monkeypatch.setattr("storage.writer.INLINE_INDEX_ROWS", 2)
    writer = open_writer(path)
    writer.begin_oso(0)
    staged(writer, 0, 14, 14, 0, unordered=True)
    writer.commit(flush_open=True)
    assert check(path).problems == []
    staged(writer, 0, 5, 13, 0, unordered=True)
    writer.publish(0, 14, 0)
    settle(writer)
    with open_view(path) as view:
        assert sorted(int(each.seqno) for each in view.scan(0)) == list(range(5, 15))
    assert check(path).problems == []
    writer.close()


def test_what_a_copy_was_filtered_to_is_unknown_once_an_oso_snapshot_beside_it_broke(writer: GroupWriter) -> None:
    (key,) = keys_of(0, 1)
    writer.save_filter(0, "collections 8")
    publish(writer, 0, [(key, b"1", 1)])
    writer.begin_refill(0)
    writer.begin_oso(0)
    writer.save_failover_log(0, log())
    writer.save_filter(0, "collections 9")
    writer.stage(0, [row(writer.row_prefix(0), key, b"2", 5)], 0, span(0, 0), unordered=True)
    writer.commit(flush_open=True)
    writer.abandon(0)
    assert writer.state(0).published_seqno == 1
    assert writer.state(0).stream_filter == "", "no filter goes on from it: a refill follows"


def test_an_oso_snapshot_keeps_the_failover_log_of_its_stream(path: str, writer: GroupWriter) -> None:
    """It was emptied, so the boundary named no history and the next start fetched everything again."""
    writer.save_failover_log(0, log(77))
    writer.begin_oso(0)
    staged(writer, 0, 1, 3, 0, unordered=True)
    writer.publish(0, 3, 0)
    settle(writer)
    assert writer.state(0).failover_log == log(77)
    with open_view(path) as view:
        assert [boundary.vbuuid for boundary in view.boundaries(0)] == [77]


def test_the_filter_of_the_streams_goes_with_the_staging_branch(path: str, writer: GroupWriter) -> None:
    """A reader must know what was left out: a refill begins again, what is served next to it claims nothing."""
    assert writer.state(0).stream_filter is None
    writer.save_filter(0, "collections 8")
    publish(writer, 0, [(keys_of(0, 1)[0], b"x", 1)])
    publish(writer, 0, [(keys_of(0, 1)[0], b"y", 2)])
    assert writer.rollback(0, 1).boundary_seqno == 1
    assert writer.state(0).stream_filter == "collections 8"
    writer.begin_oso(0)
    assert writer.state(0).stream_filter == "collections 8"
    writer.begin_refill(0)
    assert writer.state(0).stream_filter is None
    writer.save_filter(0, "collections 8,9")
    writer.commit()
    crash(writer)
    writer = open_writer(path)
    assert writer.state(0).stream_filter == "collections 8,9"
    assert writer.rollback(0, 1).boundary_seqno == 1
    assert writer.state(0).stream_filter == "", "of the served copy nobody knows it any more"
    writer.close()


def test_the_copy_that_is_served_beside_a_refill_is_of_its_own_history(path: str, writer: GroupWriter) -> None:
    """A rollback on command during a refill gave the old copy the failover log of the refill's stream: the source took
    its documents for its own past, and they stayed for ever.
    """
    key = keys_of(0, 1)[0]
    writer.save_failover_log(0, log(77))
    publish(writer, 0, [(key, b"1", 5)])
    publish(writer, 0, [(key, b"2", 9)])
    writer.begin_refill(0)
    writer.save_failover_log(0, log(88))
    writer.commit()
    writer.rollback(0, 6)
    assert [entry.vbuuid for entry in writer.state(0).failover_log] == [77]
    with open_view(path) as view:
        assert [boundary.vbuuid for boundary in view.boundaries(0)] == [77]
        assert [(each.from_vbuuid, each.to_vbuuid) for each in view.rollbacks(0)] == [(77, 77)]


def test_the_boundary_of_an_empty_copy_is_none_to_go_back_to(writer: GroupWriter) -> None:
    """A refill from an empty source is published at 0; "went to 0" means that nothing was changed."""
    writer.save_failover_log(0, log(77))
    publish(writer, 0, [(keys_of(0, 1)[0], b"1", 5)])
    writer.begin_refill(0)
    writer.publish(0, 0, 0)
    settle(writer)
    branch = writer.state(0).branch
    assert writer.rollback(0, 0).boundary_seqno == 0
    assert writer.state(0).branch == branch


def test_a_file_that_has_outgrown_its_map_is_opened_and_grows_on(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB opens it with a map that just holds it; its new owner's first write found no room, and so at every start."""
    begin = Environment.begin
    full = [lmdb.MapFullError("full"), lmdb.MapFullError("full")]

    def begin_full(self: Environment, *, write: bool = False) -> Any:
        if write and full:
            raise full.pop()
        return begin(self, write=write)

    monkeypatch.setattr(Environment, "begin", begin_full)
    writer = open_writer(path, map_size=1 << 20)
    assert not full
    assert writer.figures()["map_bytes"] == 4 << 20
    publish(writer, 0, [(keys_of(0, 1)[0], b"1", 1)])
    writer.close()


def test_that_the_source_has_nothing_is_known_only_once_it_was_said(path: str) -> None:
    """A stream that was accepted may bring everything yet: its log alone must not make an absent document of it."""
    writer = open_writer(path)
    writer.save_failover_log(0, log(77))
    writer.commit()
    assert writer.state(0).failover_log == log(77)
    with open_view(path) as view:
        assert not view.state(0).is_whole
        writer.publish(0, 0, 0)
        writer.commit()
        assert view.state(0).is_whole
        assert view.boundaries(0) == []
        writer.save_failover_log(0, log(78))
        writer.commit()
        assert view.state(0).is_whole
    crash(writer)
    writer = open_writer(path)
    assert writer.state(0).is_whole
    assert writer.state(0).failover_log == log(78)
    (key,) = keys_of(0, 1)
    writer.stage(0, [row(writer.row_prefix(0), key, b"1", 3)], 0, span(3, 9))
    writer.commit(flush_open=True)
    assert not writer.state(0).is_whole
    assert writer.state(0).failover_log == log(78)
    writer.abandon(0)
    assert not writer.state(0).is_whole
    writer.close()


def test_rows_of_the_first_snapshot_bring_its_log_along(path: str) -> None:
    writer = open_writer(path)
    (key,) = keys_of(0, 1)
    writer.save_failover_log(0, log(77))
    writer.stage(0, [row(writer.row_prefix(0), key, b"1", 3)], 0, span(3, 9))
    writer.commit()
    with open_view(path) as view:
        assert view.state(0).failover_log == ()
        writer.commit(flush_open=True)
        assert view.state(0).failover_log == log(77)
        assert not view.state(0).is_whole
        writer.publish(0, 9, 3)
        writer.commit()
        assert view.state(0).is_whole
    writer.close()
