"""The store against a model: random staging, publishing, rollbacks, resyncs and crashes; every view at every step."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

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

from storage.admin.check import check
from storage.env import directory
from storage.errors import Closed, NoSuchBoundary, ViewInvalidated
from storage.format.records import decode_row
from storage.history.branches import all_branches, purge_row
from storage.history.purge import Window
from storage.model import SEQNO_MAX, Branch, Seqno
from storage.read import bulk, states
from storage.read.view import Token, View, open_view
from tests.processes import in_child
from tests.storage.model import IDENTITY, ModelVbucket, events, keys_of, log, row, span
from tests.storage.open_readers import OpenReader, Position, begin
from tests.storage.rig import Clock, crash, open_writer

pytestmark = pytest.mark.usefixtures("small_limits")


VBIDS = [0, 2]
TO_THE_END = 5_000
"""Steps of background work within which it must come to its end."""
KEYS = {vbid: keys_of(vbid, 6) for vbid in VBIDS}


def in_bulk(view: View, vbid: int, as_of: int | None = None) -> list[dict[bytes, tuple[int, bytes]]]:
    """Its documents as `bulk` reads them: by rows, by keys, and by rows at first and by keys then."""
    found = []
    limits: list[dict[str, Any]] = [{}, {"ROWS_PER_DOCUMENT": 0}, {"REMEMBERED_MAX": 1}]
    for ways in limits:
        with patch.multiple(bulk, GET_ROWS=2, **ways):
            chunks = bulk.documents(view.reader(vbid), view.pin(vbid, as_of), rows_max=3)
            rows = [decode_row(vbid, Branch(0), frame) for chunk in chunks for frame in chunk.frames]
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
        self.model = {vbid: ModelVbucket(vbid) for vbid in VBIDS}
        self.reset_pending()
        self.tokens: list[tuple[Token, dict[bytes, bytes]]] = []
        self.held: dict[Token, int] = {}
        """Tokens that a lease keeps, and until when."""
        self.view = open_view(self.path, partial=True)
        self.readers: list[OpenReader] = []
        self.positions: dict[int, list[Position]] = {vbid: [] for vbid in VBIDS}
        """The served contents at the moments when readers began."""

    def reset_pending(self) -> None:
        self.open: dict[int, list[tuple[int, bytes, bytes | None]]] = {vbid: [] for vbid in VBIDS}
        """Events of the open snapshot."""
        self.complete: dict[int, list[tuple[int, list[tuple[int, bytes, bytes | None]]]]] = {v: [] for v in VBIDS}
        """Complete snapshots that no commit has published yet."""
        self.resync = {
            vbid: self.writer.vbuckets[vbid].state.staging_branch != self.writer.vbuckets[vbid].state.branch
            for vbid in VBIDS
        }

    def teardown(self) -> None:
        if hasattr(self, "view"):
            self.view.close()
            if not self.writer.owner.closed:
                crash(self.writer)
        shutil.rmtree(Path(self.path).parent)

    @rule(
        vbid=st.sampled_from(VBIDS), data=st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=8)
    )
    def stage(self, vbid: int, data: list[tuple[int, bool]]) -> None:
        at = self.writer.vbuckets[vbid].state.staged_seqno
        events = []
        for number, (key, deleted) in enumerate(data, start=1):
            seqno = at + number
            value = None if deleted else b"%d" % seqno
            events.append((seqno, KEYS[vbid][key], value))
        prefix = self.writer.vbuckets[vbid].prefix
        rows = [row(prefix, key, value, seqno) for seqno, key, value in events]
        self.writer.vbuckets[vbid].stage(rows, sum(len(r[1]) for r in rows), span(at + 1, events[-1][0] + 3))
        self.open[vbid] += events

    @rule(vbid=st.sampled_from(VBIDS), skipped=st.sampled_from([0, 0, 0, 2]))
    def complete_snapshot(self, vbid: int, skipped: int) -> None:
        end = self.writer.vbuckets[vbid].state.staged_seqno + skipped
        if end == 0 or (not self.open[vbid] and not skipped):
            return
        self.writer.vbuckets[vbid].publish(end, 0)
        self.complete[vbid].append((end, self.open[vbid]))
        self.open[vbid] = []

    @rule(flush=st.booleans())
    def commit(self, flush: bool) -> None:
        self.settle(self.writer.commit(flush_open=flush).published)

    def settle(self, published: Sequence[tuple[int, int]]) -> None:
        """Take over into the model what a commit said it published."""
        for vbid, seqno in published:
            ready = self.complete[vbid]
            assert ready
            assert ready[-1][0] == seqno, (ready, seqno)
            if self.resync[vbid]:
                self.model[vbid] = ModelVbucket(vbid)
                self.tokens = [entry for entry in self.tokens if entry[0].vbid != vbid]
                self.resync[vbid] = False
            self.model[vbid].publish(seqno, [event for _, events in ready for event in events])
            self.complete[vbid] = []

    @rule()
    def step(self) -> None:
        self.writer.step()

    @rule()
    def finish(self) -> None:
        """All that is complete must become visible after finitely many steps."""
        for _ in range(TO_THE_END):
            self.settle(self.writer.commit().published)
            if not self.writer.step() and not any(
                (self.writer.vbuckets[vbid].complete_seqno is not None) for vbid in VBIDS
            ):
                break
        assert not any(self.complete.values())

    @rule(vbid=st.sampled_from(VBIDS), share=st.floats(0, 1.2))
    def roll_back(self, vbid: int, share: float) -> None:
        self.settle_first()
        to = int(self.model[vbid].published * share)
        before = self.writer.vbuckets[vbid].state
        result = self.writer.vbuckets[vbid].rollback(to)
        expected = self.model[vbid].roll_back(to)
        assert result.boundary_seqno == expected
        state = self.writer.vbuckets[vbid].state
        if expected:
            self.open[vbid], self.complete[vbid], self.resync[vbid] = [], [], False
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
        done = self.writer.vbuckets[vbid].abandon()
        state = self.writer.vbuckets[vbid].state
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
    def begin_resync(self, vbid: int) -> None:
        self.settle_first()
        self.writer.vbuckets[vbid].begin_resync()
        self.open[vbid], self.complete[vbid], self.resync[vbid] = [], [], True
        assert self.writer.vbuckets[vbid].state.staged_seqno == 0
        self.writer.vbuckets[vbid].save(failover_log=log(88))

    @rule()
    def crash_and_reopen(self) -> None:
        before = {vbid: self.writer.vbuckets[vbid].state for vbid in VBIDS}
        self.view.close()
        crash(self.writer)
        self.writer = open_writer(self.path, clock=self.clock)
        self.held.clear()
        self.view = open_view(self.path, partial=True)
        for vbid in VBIDS:
            after = self.writer.vbuckets[vbid].state
            assert after.published_seqno == before[vbid].published_seqno
            assert after.staged_seqno <= before[vbid].staged_seqno
            kept = [event for _, events in self.complete[vbid] for event in events] + self.open[vbid]
            self.open[vbid] = [event for event in kept if event[0] <= after.staged_seqno]
            self.complete[vbid] = []
            self.resync[vbid] = after.staging_branch != after.branch
            if after.staged_seqno > after.staging_published_seqno and after.open_snapshot is None:
                # Complete on disk, without its key rows: the new writer makes them and publishes it.
                assert self.writer.vbuckets[vbid].complete_seqno is not None
                self.complete[vbid] = [(after.staged_seqno, self.open[vbid])]
                self.open[vbid] = []

    @rule(keep=st.integers(1, 4), steps=st.sampled_from([1, 2, TO_THE_END]))
    def purge(self, keep: int, steps: int) -> None:
        """Raise the floor and remove what is below, to the end or only a step or two."""
        self.settle_first()
        self.writer.background.purger.window = Window(boundaries=keep, time_ms=self.dead_for_ms)
        for _ in range(steps):
            now_ms = self.writer.owner.clock.now_ms()
            step = self.writer.background.purger.plan(now_ms)
            if step is None:
                break
            vbid = step.vbid
            before = self.writer.vbuckets[vbid].state.history_floor_seqno
            published_ms = {b.seqno: b.history_ms for b in self.view.boundaries(vbid)}
            self.writer.background.purge(step, now_ms)
            floor = self.writer.vbuckets[vbid].state.history_floor_seqno
            assert floor >= before
            if floor > before:
                by_count = sorted(self.model[vbid].boundaries)[-keep:][0]
                is_held = any(token.vbid == vbid for token in self.held)
                assert is_held or floor <= by_count or published_ms[Seqno(floor)] <= now_ms - self.dead_for_ms
                self.model[vbid].purge_below(floor)
        else:
            assert steps < TO_THE_END, "the purger finds no end"
        if steps == TO_THE_END:
            for each in VBIDS:
                is_held = any(token.vbid == each for token in self.held)
                assert is_held or len(self.model[each].boundaries) <= keep
                seen = [(d.seqno, d.key) for d in events(self.view, each)]
                assert seen == [event[:2] for event in self.model[each].kept_events()]

    dead_for_ms = 40
    """Retracted rows are kept for so many looks at the clock."""

    @rule(vbid=st.sampled_from(VBIDS))
    def take_token(self, vbid: int) -> None:
        state = self.writer.vbuckets[vbid].state
        token = self.view.token(vbid, state.branch, state.published_seqno)
        contents = {key: entry[1] for key, entry in self.model[vbid].live().items()}
        self.tokens.append((token, contents))  # type: ignore[arg-type]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), looks=st.sampled_from([5, 1000]))
    def hold(self, data: st.DataObject, looks: int) -> None:
        """Lease what a token stands on, or let go of it."""
        token, _ = data.draw(st.sampled_from(self.tokens))
        if self.held.pop(token, None):
            self.writer.background.leases.release(str(token))
            return
        until_ms = self.clock.now + looks
        try:
            self.writer.background.lease(str(token), {int(token.vbid): (int(token.branch), int(token.seqno))}, until_ms)
        except NoSuchBoundary:
            below_floor = token.seqno < self.writer.vbuckets[token.vbid].state.history_floor_seqno
            assert below_floor or self.purged(token.vbid) or self.was_resynced(token)
        else:
            self.held[token] = until_ms

    def was_resynced(self, token: Token) -> bool:
        try:
            list(self.view.changes(token.vbid, since=token))
        except ViewInvalidated as error:
            return "resynced" in str(error)
        return False

    @rule(vbid=st.sampled_from(VBIDS), seed=st.integers(0, 999))
    def begin_to_read(self, vbid: int, seed: int) -> None:
        """A reader that takes a little at each of many steps of the others."""
        live = self.model[vbid].live()
        contents = {b"\0" + key: (seqno, value) for key, (seqno, value) in live.items() if value is not None}
        now = Position(self.view.pin(vbid, now=0), contents)
        reader = begin(lambda: self.view, now, self.positions[vbid], Random(seed))
        if reader.goes_on():
            self.readers.append(reader)
        self.positions[vbid] = [*self.positions[vbid][-7:], now]

    @precondition(lambda self: self.readers)
    @rule(steps=st.sampled_from([1, 1, 2, 50]))
    def read_on(self, steps: int) -> None:
        """Each ends with what was there at the boundary that it named, or is refused."""
        self.readers = [reader for reader in self.readers if reader.goes_on(steps)]

    @rule()
    def fork(self) -> None:
        """A child reads the same in a view of its own; what it inherits is refused, or ends right."""

        def read() -> None:
            inherited, readers = self.view, self.readers
            self.view = open_view(self.path, partial=True)
            self.views_show_the_model()
            self.as_of_shows_every_boundary()
            for call in (inherited.states, lambda: inherited.get(KEYS[0][0]), inherited.published):
                with pytest.raises(Closed, match="open another view in the child"):
                    call()
            while readers:
                readers = [reader for reader in readers if reader.goes_on(50)]
            inherited.close()

        in_child(read)

    @rule()
    def changes_bring_every_token_up_to_date(self) -> None:
        for token, contents in self.tokens:
            copy: dict[bytes, bytes] = dict(contents)
            try:
                changes = list(self.view.changes(token.vbid, since=token))
            except ViewInvalidated:
                if not self.has_id(token):
                    continue
                # Allowed only where history was purged: never merely because of a rollback, nor while it is leased.
                assert self.purged(token.vbid)
                assert self.held.get(token, 0) <= self.clock.now or self.was_resynced(token)
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

    def has_id(self, token: Token) -> bool:
        """False once owners changed so often that the id of its history is not kept any more."""
        history_ids = states.history_ids(self.view.reader(token.vbid), token.branch)
        return not history_ids or token.history_id in history_ids

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
            seen = {(d.seqno, d.key) for d in events(self.view, vbid)}
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
    monkeypatch.setattr("storage.history.merge.LINKS_MAX", links_max)
    run_state_machine_as_test(Store, settings=LIMITS)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("links_max", [0, 16], ids=["merged", "few"])
def test_every_view_equals_the_model_after_every_step_of_many_runs(
    links_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.history.merge.LINKS_MAX", links_max)
    run_state_machine_as_test(Store, settings=settings(LIMITS, max_examples=4000, stateful_step_count=60))
