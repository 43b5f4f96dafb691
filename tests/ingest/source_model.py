"""A source in a few lines: one vbucket with history, deduplication, failovers, purges and filtered seqnos.

It answers stream requests by the producer's rule and streams what kv_engine would: markers, deduplicated rows, doubled
markers with one end, advances in the middle and at the end of snapshots. What it holds at any seqno of its present
history can be queried, which is what a mirror's published state is compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from mirror.ingest.events import Row
from mirror.ingest.instructions import RequestStream
from mirror.ingest.rollback import ProducerAnswer, producer_answer
from mirror.wire.codec_dcp import encode
from mirror.wire.constants import SnapshotFlag, StreamEndReason
from mirror.wire.events import Deletion, Mutation, SeqnoAdvanced, SnapshotMarker, StreamEnd, StreamEvent
from storage.model import FailoverLog

PREFIX = b"\0\0\0\1"


@dataclass(frozen=True)
class Item:
    """One change; `key` None: of something that the stream does not show."""

    key: bytes | None
    value: bytes | None


@dataclass
class Source:
    """The active copy. `items[n]` has seqno n + 1."""

    random: Random
    collections: bool = True
    sends_purge_seqno: bool = False
    items: list[Item] = field(default_factory=list)
    failover_log: FailoverLog = field(default_factory=FailoverLog)
    purge_seqno: int = 0
    _vbuuid_counter: int = 0xA0

    def __post_init__(self) -> None:
        self._new_history(0)

    @property
    def high_seqno(self) -> int:
        return len(self.items)

    def state_at(self, seqno: int) -> dict[bytes, bytes]:
        """What is alive at a seqno of the present history."""
        state: dict[bytes, bytes] = {}
        for item in self.items[:seqno]:
            if item.key is not None:
                if item.value is None:
                    state.pop(item.key, None)
                else:
                    state[item.key] = item.value
        return state

    # --- what happens to it ---

    def write(self, key: bytes | None, deleted: bool = False) -> None:
        value = b"%x at %d" % (self.failover_log[0].vbuuid, self.high_seqno + 1)
        self.items.append(Item(key, None if deleted or key is None else value))

    def fail_over(self, lost: int, entries_unknown: int = 0) -> None:
        """Another node takes over: without the newest `lost` changes, and without ever having heard of some entries."""
        seqno = max(0, self.high_seqno - lost)
        del self.items[seqno:]
        self.purge_seqno = min(self.purge_seqno, seqno)
        self.failover_log = self.failover_log.pruned(seqno)
        for _ in range(entries_unknown):
            # It cannot have changes of a history that it never heard of.
            if len(self.failover_log) > 1 and self.failover_log[0].seqno >= seqno:
                self.failover_log = FailoverLog(self.failover_log[1:])
        self._new_history(seqno)

    def forget_everything(self) -> None:
        """The vbucket was recreated."""
        self.items.clear()
        self.failover_log = FailoverLog()
        self.purge_seqno = 0
        self._new_history(0)

    def purge(self) -> None:
        """Tombstones that stand are forgotten."""
        self.purge_seqno = max(self.purge_seqno, self.random.randint(0, self.high_seqno))

    def _new_history(self, seqno: int) -> None:
        self._vbuuid_counter += 1
        self.failover_log = FailoverLog.of([(self._vbuuid_counter, seqno), *self.failover_log])

    # --- what it answers ---

    def answer(self, request: RequestStream) -> ProducerAnswer:
        offset = request.offset
        return producer_answer(
            offset.start_seqno,
            offset.snap_start_seqno,
            offset.snap_end_seqno,
            offset.vbuuid,
            self.failover_log,
            self.high_seqno,
            self.purge_seqno,
            client_purge_seqno=request.purge_seqno,
        )

    def stream(self, request: RequestStream, opaque: int) -> Iterator[StreamEvent | list[Row] | None]:
        """The messages of an accepted stream; None while the source has no more."""
        position = int(request.offset.start_seqno)
        end_min = int(request.offset.snap_end_seqno)
        start = int(request.offset.snap_start_seqno)
        purge_seqno_known = request.purge_seqno
        while True:
            if position == self.high_seqno:
                yield None
                continue
            if 0 < position < self.purge_seqno != purge_seqno_known:
                yield StreamEnd(0, int(StreamEndReason.STATE_CHANGED), opaque=opaque)  # as engines say "rollback"
                return
            end = self.random.choice(
                (self.high_seqno, self.random.randint(max(end_min, position + 1), self.high_seqno))
            )
            yield from self._snapshot(start, position, end, opaque)
            position = end
            start = self.random.choice((end, end + 1))
            end_min, purge_seqno_known = 0, None

    def _snapshot(self, start: int, position: int, end: int, opaque: int) -> Iterator[StreamEvent | list[Row]]:
        purge_seqno = self.purge_seqno if self.sends_purge_seqno else 0
        marker = SnapshotMarker(0, start, end, int(SnapshotFlag.DISK), purge_seqno=purge_seqno, opaque=opaque)
        yield marker
        rows = self._rows(position, end)
        last = position
        while rows:
            count = self.random.choice((1, self.random.randint(1, len(rows))))
            run, rows = rows[:count], rows[count:]
            last = int.from_bytes(run[-1][0][4:])
            yield run
            if rows and self.random.random() < 0.2:
                yield marker  # the second part, with history, say: one snapshot with one end
            between = int.from_bytes(rows[0][0][4:]) - 1 if rows else end - 1
            if self.collections and between > last and self.random.random() < 0.3:
                last = between
                yield SeqnoAdvanced(0, last, opaque=opaque)
        if last < end and self.collections:
            yield SeqnoAdvanced(0, end, opaque=opaque)

    def _rows(self, position: int, end: int) -> list[Row]:
        newest: dict[bytes, int] = {}
        for seqno in range(position + 1, end + 1):
            key = self.items[seqno - 1].key
            if key is not None:
                newest[key] = seqno
        rows = []
        for key, seqno in sorted(newest.items(), key=lambda pair: pair[1]):
            value = self.items[seqno - 1].value
            if value is None and seqno < self.purge_seqno:
                continue
            rows.append(row(seqno, key, value))
        return rows


def row(seqno: int, key: bytes, value: bytes | None) -> Row:
    """A row as the scanner makes it."""
    event = (
        Deletion(0, b"\0" + key, seqno, 1, seqno)
        if value is None
        else Mutation(0, b"\0" + key, seqno, 1, seqno, value=value)
    )
    return PREFIX + seqno.to_bytes(8), encode(event)
