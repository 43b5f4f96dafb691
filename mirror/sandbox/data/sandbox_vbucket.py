"""One vbucket of the sandbox: all versions, the newest version of each key, and the failover log.

`log` has the versions of the current history in the order of seqnos, without a gap above `forgotten_seqno`. Of the
versions up to a seqno E, those with a `next_seqno` of 0 or above E are a deduplicated snapshot that ends at E
(kv_engine docs/dcp/documentation/concepts.md). Only a `bounded` vbucket forgets superseded versions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from random import Random

from mirror.sandbox.data.item import ABORT, PREPARE, SYSTEM_EVENT, Item, mutation_frame
from mirror.wire.constants import SystemEventId
from storage.model import FailoverLog, Vbuuid

CHECKPOINT_ITEMS_MAX = 10_000
"""Versions in a checkpoint (a section of the changes in memory) before the next one opens: kv_engine's default."""

CHECKPOINTS_KEPT = 4
"""Checkpoints in memory. A stream that falls behind the oldest checkpoint continues from disk."""

_SEQNO = attrgetter("seqno")

FAILOVER_LOG_MAX = 25
"""Entries of the failover log that are kept: kv_engine's default."""


class Vbucket:
    def __init__(
        self,
        vbid: int,
        rng: Random,
        *,
        checkpoint_items_max: int = CHECKPOINT_ITEMS_MAX,
        checkpoints_kept: int = CHECKPOINTS_KEPT,
        keeps_history: bool = False,
        bounded: bool = False,
    ) -> None:
        """With `keeps_history` superseded versions stay on disk. Without it, a `bounded` vbucket forgets superseded
        versions that are in no checkpoint, as kv_engine does.
        """
        self.vbid = vbid
        self.history_start_seqno = int(keeps_history)
        """Superseded versions from this seqno on stay on disk; 0: none do."""
        self.without_history: set[int] = set()
        """Ids of collections whose superseded versions do not stay on disk."""
        self.log: list[Item] = []
        self.forgotten_seqno = 0
        """A version is gone if a change up to this seqno superseded it. So no snapshot can end below this seqno, and no
        failover can go back below it.
        """
        self.newest: dict[int, dict[bytes, Item]] = {0: {}}
        """Collection id -> key -> newest version, tombstones included."""
        self.prepared: dict[bytes, Item] = {}
        self.purge_seqno = 0
        self.rev_seqno_max_deleted = 0
        self.collection_high_seqno: dict[int, int] = {}
        self.changed: set[Callable[[], None]] = set()
        self.cas_max = 0
        self._rng = rng
        self.failover_log = FailoverLog.of([(self._new_vbuuid(), 0)])
        self._checkpoint_items_max = checkpoint_items_max
        self._checkpoints_kept = checkpoints_kept
        self._checkpoints: deque[int] = deque([1])
        self._kept_items = checkpoint_items_max * checkpoints_kept
        self.bounded = bounded and not keeps_history
        self._forget_at_items = 2 * self._kept_items
        self._forgotten_purge_seqno = 0
        self._open_group: int | None = None
        self._group_first: dict[int, int] = {}
        self._group_last: dict[int, int] = {}
        self._system: dict[bytes, Item] = {}
        self._aborted: dict[bytes, Item] = {}
        """Key -> its newest abort. An abort does not supersede the document; the next prepare supersedes the abort."""

    # --- state

    @property
    def high_seqno(self) -> int:
        return self.log[-1].seqno if self.log else 0

    @property
    def vbuuid(self) -> int:
        return self.failover_log.newest_vbuuid

    @property
    def memory_floor_seqno(self) -> int:
        """Changes above this seqno are in memory; streams get earlier changes from disk."""
        return self._checkpoints[0] - 1

    @property
    def document_count(self) -> int:
        """The number of documents, including expired ones until their EXPIRATION is written."""
        return sum(not item.deleted for items in self.newest.values() for item in items.values())

    def keeps(self, item: Item) -> bool:
        if not 0 < self.history_start_seqno <= item.seqno:
            return False
        return item.kind == SYSTEM_EVENT or item.collection_id not in self.without_history

    @property
    def max_visible_seqno(self) -> int:
        """The seqno of the newest change that is no prepare or abort."""
        return next((item.seqno for item in reversed(self.log) if item.kind not in (PREPARE, ABORT)), 0)

    def next_cas(self, now_ns: int) -> int:
        """Return the CAS of a hybrid clock: the higher of the time and the last CAS plus 1."""
        self.cas_max = max(now_ns & ~0xFFFF, self.cas_max + 1)
        return self.cas_max

    # --- changes

    def append(self, item: Item) -> Item:
        """Append the next version of a document, a prepare or an abort; for system events use `append_event`."""
        assert item.seqno == self.high_seqno + 1 or item.seqno <= self.forgotten_seqno, "seqnos have no gaps"
        kind = item.kind
        collection_id = item.collection_id
        if kind == PREPARE:
            _supersede(self._aborted.pop(item.key, None), item)
            self.prepared[item.key] = item
        elif kind == ABORT:
            self._complete(item)
            self._aborted[item.key] = item
        else:
            _supersede(self.newest[collection_id].get(item.key), item)
            if item.key in self.prepared:
                self._complete(item)
            self.newest[collection_id][item.key] = item
            self.collection_high_seqno[collection_id] = item.seqno
        self._push(item)
        return item

    def append_event(self, item: Item, event: SystemEventId, id_: int, *, new_checkpoint: bool) -> None:
        """Append a system event of the scope or collection `id_`. The begin or end of a collection empties it."""
        if new_checkpoint:
            self.open_checkpoint()
        _supersede(self._system.get(item.key), item)
        self._system[item.key] = item
        if event in (SystemEventId.COLLECTION_BEGIN, SystemEventId.COLLECTION_END):
            _supersede(self._system.pop(system_key(id_=id_, modified=True), None), item)
            for gone in self.newest.pop(id_, {}).values():
                _supersede(gone, item)
            for sync_writes in (self.prepared, self._aborted):
                for gone in [old for old in sync_writes.values() if old.collection_id == id_]:
                    _supersede(sync_writes.pop(gone.key), item)
            if event == SystemEventId.COLLECTION_BEGIN:
                self.newest[id_] = {}
            self.collection_high_seqno[id_] = item.seqno
        self._push(item)

    def load(self, documents: Iterable[tuple[bytes, bytes]], *, now_ns: int, datatype: int = 1, flags: int = 0) -> int:
        """Add many documents to the default collection, as if already on disk; return their number.

        Keys are wire keys, and must be new.
        """
        log, items, vbid = self.log, self.newest[0], self.vbid
        first = seqno = self.high_seqno
        known = len(items)
        cas = self.next_cas(now_ns)
        for key, value in documents:
            seqno += 1
            cas += 1
            item = Item(seqno, key, mutation_frame(vbid, key, seqno, 1, cas, value, flags=flags, datatype=datatype))
            log.append(item)
            items[key] = item
        assert len(items) == known + seqno - first, "a key was given twice, or was here before"
        self.cas_max = cas
        self.collection_high_seqno[0] = seqno
        self.to_disk()
        self._notify()
        return seqno - first

    @contextmanager
    def group(self) -> Iterator[None]:
        first = self._open_group = self.high_seqno + 1
        yield
        self._open_group = None
        last = self.high_seqno
        for seqno in range(first, last):
            self._group_last[seqno] = last
            self._group_first[seqno] = first
        if self._checkpoints[-1] > first:  # a checkpoint was opened inside the group: move its start
            self._checkpoints[-1] = first
        self._notify()

    def lose_together(self, first: int) -> None:
        """Let a failover lose all changes since `first` or none of them. A snapshot may still end between them."""
        for seqno in range(first, self.high_seqno):
            self._group_first.setdefault(seqno, first)

    def open_checkpoint(self) -> None:
        if self._checkpoints[-1] != self.high_seqno + 1:
            self._checkpoints.append(self.high_seqno + 1)
            while len(self._checkpoints) > self._checkpoints_kept:
                self._checkpoints.popleft()

    def to_disk(self) -> None:
        """Forget the changes in memory, as a restart does: streams get them in disk snapshots."""
        self._checkpoints = deque([self.high_seqno + 1])

    def purge(self, below_seqno: int | None = None) -> int:
        """Compact: forget tombstones, aborts and the events of drops up to `below_seqno`, but never the newest change.
        Return the purge seqno.
        """
        last = self.high_seqno - 1 if below_seqno is None else min(below_seqno, self.high_seqno - 1)
        if self.history_start_seqno:
            last = min(last, self.history_start_seqno - 1)
        for item in self.log[: self._count_up_to(last)]:
            if item.next_seqno:
                continue
            ended = item.kind == SYSTEM_EVENT and item.event in (SystemEventId.COLLECTION_END, SystemEventId.SCOPE_DROP)
            if item.deleted:
                self.rev_seqno_max_deleted = max(self.rev_seqno_max_deleted, item.rev_seqno)
            if item.deleted or item.kind == ABORT or ended:
                self._bury(item)
                self.purge_seqno = item.seqno
        return self.purge_seqno

    def discard_history(self, below_seqno: int) -> None:
        if self.history_start_seqno:
            self.history_start_seqno = max(self.history_start_seqno, min(below_seqno, self.high_seqno + 1))

    def failover(self, lose: int = 0) -> int:
        """Begin a new history without the last `lose` changes (a group is lost whole); return its start seqno."""
        base = max(self.high_seqno - lose, self.forgotten_seqno)
        base = self._group_first.get(base, base + 1) - 1
        if base < self.high_seqno:
            self._cut(base)
        entries = [(self._new_vbuuid(), base), *self.failover_log.pruned(base)]
        self.failover_log = FailoverLog.of(entries[:FAILOVER_LOG_MAX])
        self.to_disk()
        self._notify()
        return base

    def _forget(self) -> None:
        """Drop the versions that were superseded before the oldest change that checkpoints can hold.

        All system events stay. At least the newest `_kept_items` tombstones and aborts stay, too. Running backfills
        still read the old `log`.
        """
        seqno = self.high_seqno - self._kept_items
        if self._open_group is not None:
            seqno = min(seqno, self._open_group - 1)
        seqno = self._group_first.get(seqno, seqno + 1) - 1
        if seqno <= self.forgotten_seqno:
            return
        buried = [item.seqno for item in self.log if not item.next_seqno and (item.deleted or item.kind == ABORT)]
        if len(buried) > self._kept_items:
            self.purge(min(buried[-self._kept_items] - 1, seqno))
        self._forgotten_purge_seqno = max(
            (item.seqno for item in self.log if item.next_seqno == item.seqno < seqno),
            default=self._forgotten_purge_seqno,
        )
        self.log = [
            item
            for item in self.log
            if item.seqno >= seqno or not 0 < item.next_seqno <= seqno or item.kind == SYSTEM_EVENT
        ]
        self.forgotten_seqno = seqno
        self._group_first = {key: first for key, first in self._group_first.items() if key > seqno}
        self._group_last = {key: last for key, last in self._group_last.items() if key > seqno}
        self._forget_at_items = len(self.log) * 3 // 2 + self._kept_items

    def _count_up_to(self, seqno: int) -> int:
        return seqno if self.forgotten_seqno == 0 else bisect_right(self.log, seqno, key=_SEQNO)

    def _complete(self, item: Item) -> None:
        prepare = self.prepared.pop(item.key, None)
        assert prepare or item.seqno <= self.forgotten_seqno, "only a prepare that was forgotten is missing"
        _supersede(prepare, item)

    def _push(self, item: Item) -> None:
        self.log.append(item)
        if self.high_seqno - self._checkpoints[-1] + 1 >= self._checkpoint_items_max:
            self.open_checkpoint()
        if self.bounded and len(self.log) >= self._forget_at_items:
            self._forget()
        self._notify()

    def _notify(self) -> None:
        for call in tuple(self.changed):
            call()

    def _new_vbuuid(self) -> Vbuuid:
        return Vbuuid(self._rng.getrandbits(48) | 1)

    def _cut(self, base: int) -> None:
        kept = self.log[: self._count_up_to(base)]
        purged = {item.seqno for item in kept if item.next_seqno == item.seqno}
        self.log, self.newest, self._system, self.prepared, self._aborted = [], {0: {}}, {}, {}, {}
        self.collection_high_seqno = {}
        self._checkpoints = deque([1])
        self._group_first = {seqno: first for seqno, first in self._group_first.items() if seqno <= base}
        self._group_last = {seqno: last for seqno, last in self._group_last.items() if seqno <= base}
        self.purge_seqno = max(purged, default=self._forgotten_purge_seqno)
        # The replay below finds the newest versions again.
        for item in kept:
            item.next_seqno = 0
        changed, self.changed = self.changed, set()
        for item in kept:
            if item.kind == SYSTEM_EVENT:
                event = SystemEventId(item.event)
                self.append_event(item, event, system_id(item), new_checkpoint=False)
            else:
                self.append(item)
        for item in kept:
            if item.seqno in purged and not item.next_seqno:
                self._bury(item)
        self.changed = changed

    def _bury(self, item: Item) -> None:
        """Purge a tombstone, an abort or a drop event: mark it as superseded by itself."""
        item.next_seqno = item.seqno
        if item.deleted:
            del self.newest[item.collection_id][item.key]
        elif item.kind == ABORT:
            del self._aborted[item.key]

    # --- reads of a stream

    def cut(self, after_seqno: int, count: int) -> tuple[int, bool]:
        """Return the last seqno of a memory snapshot of about `count` changes, and True if it opens a checkpoint.

        The snapshot ends in the checkpoint of its first change, and not inside a group.
        """
        first = after_seqno + 1
        assert self.memory_floor_seqno < first <= self.high_seqno
        last = min(after_seqno + count, self.high_seqno)
        opens = False
        for start in self._checkpoints:
            if start == first:
                opens = True
            elif start > first:
                last = min(last, start - 1)
                break
        return self._group_last.get(last, last), opens

    def changes(self, first_seqno: int, last_seqno: int) -> Sequence[Item]:
        return self.log[self._count_up_to(first_seqno - 1) : self._count_up_to(last_seqno)]


def _supersede(old: Item | None, new: Item) -> None:
    if old is not None:
        old.next_seqno = new.seqno


def system_key(*, about_scope: bool = False, id_: int, modified: bool = False) -> bytes:
    return b"\xff\xff\xff\xff\xff" + (b"s" if about_scope else b"m" if modified else b"c") + id_.to_bytes(4)


def system_id(item: Item) -> int:
    return int.from_bytes(item.key[-4:])
