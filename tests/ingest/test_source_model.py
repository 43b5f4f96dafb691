"""Machines against a model of the source, over a toy store: whatever happens in whatever order,

- what is published is exactly what the source held at the end of a complete snapshot, on the history of its stream;
- when a stream is accepted, what is published is part of the source's present history: nothing lost is still held;
- an offset always satisfies its invariant and says what the store holds (checked by the rig);
- the source may break the protocol at any message: nothing becomes visible by it, and nothing stops;
- when everything has calmed down, the mirror catches up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mirror.ingest import events as ev
from mirror.ingest import instructions as ins
from mirror.ingest.events import Row
from mirror.ingest.offset import StreamOffset
from mirror.ingest.rollback import Accept, OutOfRange
from mirror.ingest.state import Phase
from mirror.wire.constants import SnapshotFlag, Status, StreamEndReason
from mirror.wire.events import (
    Abort,
    Commit,
    Mutation,
    OsoSnapshot,
    SeqnoAdvanced,
    SnapshotMarker,
    StreamEnd,
    StreamEvent,
    SystemEvent,
)
from storage.model import FailoverLog
from tests.ingest.source_model import Source, row
from tests.ingest.toy_store import Rig, ToyStore

KEYS = [b"a", b"b", b"c", b"d", b"e"]
SEQNOS = st.integers(0, 60) | st.just(2**64 - 1)
TEMPORARY = [Status.ETMPFAIL, Status.ENOMEM, Status.NOT_MY_VBUCKET, Status.KEY_EEXISTS, Status.AUTH_STALE, 0x7777]
REOPENING_ENDS = [reason for reason in StreamEndReason if reason not in (7, 8)] + [77]


class Mirrored(RuleBasedStateMachine):
    """A source, a machine and a store; each rule is one thing that can happen."""

    @initialize(seed=st.integers(0, 2**32), collections=st.booleans(), sends_purge_seqno=st.booleans())
    def begin(self, seed: int, collections: bool, sends_purge_seqno: bool) -> None:
        self.source = Source(Random(seed), collections, sends_purge_seqno)
        self.rig = Rig(ToyStore())
        self.messages: Iterator[StreamEvent | list[Row] | None] = iter(())
        self.published_before = 0
        self.streamed = False
        self.start()

    # --- the source's life ---

    @rule(key=st.sampled_from(KEYS), deleted=st.booleans())
    def write(self, key: bytes, deleted: bool) -> None:
        self.source.write(key, deleted and key in self.source.state_at(self.source.high_seqno))

    @rule(count=st.integers(1, 12))
    def write_many(self, count: int) -> None:
        for _ in range(count):
            self.source.write(self.source.random.choice(KEYS))

    @rule()
    def write_hidden(self) -> None:
        self.source.write(None)

    @rule(often=st.integers(0, 3))
    def purge(self, often: int) -> None:
        if often == 3:
            self.source.purge()

    @rule(lost=st.integers(0, 12), entries_unknown=st.integers(0, 2), cut=st.sampled_from(REOPENING_ENDS))
    def fail_over(self, lost: int, entries_unknown: int, cut: int) -> None:
        self.end_stream(cut)
        self.source.fail_over(lost, entries_unknown)

    @rule(often=st.integers(0, 5))
    def lose_everything(self, often: int) -> None:
        if often < 5:
            return
        self.end_stream(int(StreamEndReason.STATE_CHANGED))
        self.source.forget_everything()

    # --- the conversation ---

    @rule(steps=st.integers(1, 6), count=st.integers(1, 6))
    def converse(self, steps: int, count: int) -> None:
        """What would happen next if nothing went wrong."""
        for _ in range(steps):
            self.start()
            self.retry()
            phase = self.rig.machine.phase
            if phase is Phase.REQUESTING:
                self.answer()
            elif phase is Phase.ASKING_LOG:
                self.answer_log(False)
            elif phase is Phase.STREAMING:
                self.deliver(count)

    @rule(count=st.integers(1, 12))
    def write_and_converse(self, count: int) -> None:
        self.write_many(count)
        self.converse(6, count)

    @rule(lost=st.integers(1, 5), entries_unknown=st.integers(0, 1))
    def fail_over_and_converse(self, lost: int, entries_unknown: int) -> None:
        self.write_many(6)
        self.converse(6, 6)
        self.fail_over(lost, entries_unknown, int(StreamEndReason.STATE_CHANGED))
        self.write_many(3)
        self.converse(3, 1)

    @rule(
        count=st.integers(1, 4),
        what=st.sampled_from(["lose_connection", "move_away", "restart"]),
        then=st.sampled_from(["", "", "fail_over", "purge", "break"]),
    )
    def break_off_inside_and_converse(self, count: int, what: str, then: str) -> None:
        """Part of a snapshot is held; then something happens; then all goes on."""
        self.converse(6, 100)
        for key in KEYS:
            self.source.write(key)
        self.converse(1, 1 + count)
        getattr(self, what)()
        if then == "fail_over":
            self.source.fail_over(count)
            self.write_many(3)
        elif then == "purge":
            self.source.purge()
        elif then == "break":
            self.converse(2, 2)
            self.rig.feed_rows(self.rig.opaque_counter, [row(2**63, b"a", b"never")])
        self.converse(2, 1)

    @rule()
    def start(self) -> None:
        if self.rig.machine.phase in (Phase.IDLE, Phase.REFUSED):
            self.feed(ev.Start(self.source.collections, self.source.sends_purge_seqno))

    @rule()
    def retry(self) -> None:
        self.feed(ev.RetryDue())

    @precondition(lambda self: self.rig.machine.phase is Phase.REQUESTING)
    @rule()
    def answer(self) -> None:
        request, opaque = self.rig.last(ins.RequestStream), self.rig.opaque_counter
        answer = self.source.answer(request)
        if isinstance(answer, Accept):
            self.messages = self.source.stream(request, opaque)
            self.streamed = True
            self.feed(ev.StreamAccepted(opaque, self.source.failover_log))
            self.check_history()
        elif isinstance(answer, OutOfRange):
            raise AssertionError(f"out of range: {request}")
        else:
            self.feed(ev.StreamRollback(opaque, answer.seqno))

    @precondition(lambda self: self.rig.machine.phase is Phase.REQUESTING)
    @rule(status=st.sampled_from(TEMPORARY))
    def refuse(self, status: int) -> None:
        self.feed(ev.StreamRefused(self.rig.opaque_counter, status))

    @precondition(lambda self: self.rig.machine.phase is Phase.REQUESTING)
    @rule(seqno=SEQNOS)
    def answer_with_any_rollback(self, seqno: int) -> None:
        """Whatever the source may mean by it: it costs fetching again, and never more."""
        self.feed(ev.StreamRollback(self.rig.opaque_counter, seqno))

    @precondition(lambda self: self.rig.machine.phase is Phase.ASKING_LOG)
    @rule(refused=st.sampled_from([False, False, True]))
    def answer_log(self, refused: bool) -> None:
        if refused:
            self.feed(ev.FailoverLogRefused(int(Status.ETMPFAIL)))
        else:
            self.feed(ev.FailoverLogReceived(self.source.failover_log))

    @precondition(lambda self: self.rig.machine.phase is Phase.STREAMING)
    @rule(count=st.integers(1, 8))
    def deliver(self, count: int) -> None:
        for _ in range(count):
            message = next(self.messages, None)
            if message is None:
                return
            if isinstance(message, list):
                self.check_new(self.rig.feed_rows(self.rig.opaque_counter, message))
            else:
                self.feed(message)

    @rule()
    def poll_high_seqno(self) -> None:
        self.feed(ev.HighSeqno(self.source.high_seqno))

    @rule(reason=st.sampled_from(REOPENING_ENDS))
    def end_stream(self, reason: int) -> None:
        """The stream ends before the machine can be sent anything of another history."""
        if self.rig.machine.phase is Phase.STREAMING:
            if reason == StreamEndReason.OK and next(self.messages, None) is not None:
                reason = int(StreamEndReason.DISCONNECTED)  # a source says OK only when it has sent everything
            self.feed(StreamEnd(0, reason, opaque=self.rig.opaque_counter))
        elif self.rig.machine.phase is Phase.REQUESTING:
            self.feed(ev.ConnectionLost())
        self.messages = iter(())

    @rule()
    def lose_connection(self) -> None:
        self.feed(ev.ConnectionLost())

    @rule()
    def move_away(self) -> None:
        self.feed(ev.Stop("moved"))

    @rule()
    def restart(self) -> None:
        self.rig.restart()
        self.start()

    # --- a source gone wrong ---

    @precondition(lambda self: self.rig.machine.phase is Phase.STREAMING)
    @rule(first=SEQNOS, second=SEQNOS, what=st.integers(0, 7))
    def break_the_protocol(self, first: int, second: int, what: int) -> None:
        """Something that cannot be part of the stream as it stands; what could be is left out."""
        machine, opaque = self.rig.machine, self.rig.opaque_counter
        assembler = machine.assembler
        position, open_snapshot = assembler.position_seqno, assembler.open_snapshot
        within = open_snapshot is not None and position < first <= open_snapshot.end_seqno
        violations = machine.shown.violation_count
        if what == 0 and not within:
            self.check_new(self.rig.feed_rows(opaque, [row(first, b"a", b"never")]))
        elif what == 1 and first >= second:
            self.check_new(self.rig.feed_rows(opaque, [row(first, b"a", b"never"), row(second, b"b", b"never")]))
        elif what == 2 and max(first, assembler._resumed_end) < position:
            self.feed(SnapshotMarker(0, 0, first, int(SnapshotFlag.MEMORY), opaque=opaque))
        elif what == 3 and (first < position or (open_snapshot is not None and first > open_snapshot.end_seqno)):
            self.feed(SeqnoAdvanced(0, first, opaque=opaque))
        elif what == 4:
            self.feed(OsoSnapshot(0, 1, opaque=opaque))
        elif what == 5 and not within:
            self.feed(Abort(0, b"\0a", second, first, opaque=opaque))
        elif what == 6:
            self.feed(SystemEvent(0, first, 99, 0, opaque=opaque))
        elif what == 7 and not within:
            self.feed(Commit(0, b"\0a", second, first, opaque=opaque))
        else:
            return
        assert machine.shown.violation_count == violations + 1
        assert machine.phase is not Phase.STREAMING

    @rule(first=SEQNOS, opaque=st.integers(0, 0x2000))
    def send_something_stale(self, first: int, opaque: int) -> None:
        """Messages of streams that are no more, and answers to requests that nobody waits for."""
        opaque = opaque if opaque != self.rig.machine.opaque else 0
        status = self.rig.machine.phase
        for event in (
            SnapshotMarker(0, 0, first, 1, opaque=opaque),
            SeqnoAdvanced(0, first, opaque=opaque),
            StreamEnd(0, 2, opaque=opaque),
            ev.StreamAccepted(opaque, FailoverLog()),
            ev.StreamRollback(opaque, 0),
            ev.StreamRefused(opaque, 4),
            ev.NoBoundary(),
            ev.ResyncRefused("never requested"),
        ):
            assert self.rig.feed(event) == []
        assert self.rig.feed_rows(opaque, [row(first, b"a", b"never")]) == []
        assert self.rig.machine.phase is status

    # --- what must hold ---

    def feed(self, event: ev.LocalEvent | StreamEvent) -> None:
        self.check_new(self.rig.feed(event))

    def check_new(self, done: list[ins.Instruction]) -> None:
        """Everything that was published just now is a state that the source had."""
        for instruction in done:
            if isinstance(instruction, ins.PublishSnapshot):
                held = self.rig.store.served
                assert self.streamed, "published without a stream"
                assert held.seqno <= self.source.high_seqno
                self.check_history()

    def check_history(self) -> None:
        store = self.rig.store
        if self.rig.machine.resyncing:
            return  # the old copy is shown, and said to be stale
        held = {key[1:]: event.value for key, event in store.served.documents.items() if isinstance(event, Mutation)}
        assert held == self.source.state_at(store.served.seqno), f"at {store.served.seqno}"

    @invariant()
    def the_machine_is_valid(self) -> None:
        if hasattr(self, "rig"):
            self.rig.machine.validate()

    def teardown(self) -> None:
        """Calm down: without faults everything is caught up within a bounded number of rounds."""
        if not hasattr(self, "rig"):
            return
        self.source.write(b"a")
        self.rig.feed(ev.ConnectionLost())
        for _ in range(60):
            machine = self.rig.machine
            self.feed(ev.HighSeqno(self.source.high_seqno))
            if machine.phase is Phase.STREAMING:
                self.deliver(1000)
                if not self.source.collections and not machine.caught_up:
                    self.end_stream(int(StreamEndReason.OK))  # closes a snapshot whose end is not hit
            if machine.caught_up and machine.phase is Phase.STREAMING:
                break
            self.start()
            self.retry()
            if machine.phase is Phase.REQUESTING:
                self.answer()
            if machine.phase is Phase.ASKING_LOG:
                self.answer_log(False)
        assert self.rig.store.served.seqno == self.source.high_seqno
        self.check_history()


TestMirrored = Mirrored.TestCase
TestMirrored.settings = settings(max_examples=2 * settings().max_examples, stateful_step_count=50, deadline=None)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_same_for_long() -> None:
    run_state_machine_as_test(Mirrored, settings=settings(max_examples=50_000, stateful_step_count=50, deadline=None))


def test_the_rows_of_the_model_are_rows_of_the_wire() -> None:
    source = Source(Random(1))
    source.write(b"a")
    request = ins.RequestStream(StreamOffset.fresh(), 2**64 - 1)
    marker, run, nothing = islice(source.stream(request, 5), 3)
    assert isinstance(marker, SnapshotMarker)
    assert replace(marker, flags=0) == SnapshotMarker(0, 0, 1, 0, opaque=5)
    assert run == [row(1, b"a", b"a1 at 1")]
    assert nothing is None
