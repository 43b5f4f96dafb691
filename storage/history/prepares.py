"""Open sync writes: prepared, and neither committed nor aborted yet. No reader sees them; DCP clients may.

Knows the tree `prepare` and the layout of PREPARE and ABORT messages; never what makes a write durable. A prepare is a
row of its own, (branch, seqno) like any other, that names what settled it. Whether it is open follows from the chain:
its row is visible and what settled it is not. So a rollback or an abandoned snapshot opens it again without a write.
Whatever comes of its key settles it: the commit or the abort, a later prepare, or a plain row (in a disk snapshot the
source sends a commit as a mutation); and so does what ends or empties its collection. An abort is a row, too: nothing
else informs a client that holds the prepare. Invariants: at most one prepare of a key is open; nothing above the seqno
that `state` says is staged is written; a settled prepare stays for as long as a kept boundary may lie between it and
what settled it, and an abort until the purger has passed it; memory holds keys and positions of the open ones, and the
messages that no commit has written yet.
Source: docs/protocol.md 2.6 and 2.11; kv_engine docs/dcp/documentation/commands/{prepare,commit,abort}.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from itertools import islice

from storage.env.environment import Environment
from storage.env.transaction import Transaction
from storage.errors import CorruptedError, SeqnoOrder
from storage.format import keys, records
from storage.history import chain
from storage.model import SEQNO_MAX, Manifest, VbucketState

PREPARE, ABORT = 0x60, 0x63
"""Opcodes: what a row is."""

OPEN_MAX = 65_536
"""Open prepares of one vbucket. Writers wait for each durable write: so many mean aborts that never came."""
FORGET_LOOKS = 200
"""Rows looked at in one commit for those that nothing can need any more."""

Position = tuple[int, int]
"""Branch and seqno."""

Row = tuple[Position, Position, bytes]
"""Where it is, where it was settled, and the message."""

_SETTLED = keys.ROW
_EXTRAS = struct.Struct(">QQIIIBBB")
"""seqno, rev_seqno, flags, expiry, lock time, nru, deleted, durability level."""
_MUTATION_EXTRAS = struct.Struct(">QQIIIHB")
_DELETION_EXTRAS = struct.Struct(">QQIB")
_ABORT_EXTRAS = struct.Struct(">QQ")
"""prepared seqno, own seqno."""
_FRAME_MIN = records.HEADER.size + _EXTRAS.size
_EXTRAS_SIZES = {PREPARE: _EXTRAS.size, ABORT: _ABORT_EXTRAS.size}
_ROW_MIN = records.HEADER.size + _ABORT_EXTRAS.size
_NOT_SETTLED: Position = (0, 0)


def committed_row(frame: bytes, seqno: int) -> bytes:
    """What the committed write would have been without sync writes: a mutation or a deletion, in stored form."""
    _, _, key_length, _, datatype, vbid, body_length, opaque, cas = records.HEADER.unpack_from(frame)
    _, rev_seqno, flags, expiry, lock_time, nru, deleted, _ = _EXTRAS.unpack_from(frame, records.HEADER.size)
    if deleted:
        opcode, extras = records.DELETION, _DELETION_EXTRAS.pack(seqno, rev_seqno, 0, 0)
    else:
        opcode, extras = records.MUTATION, _MUTATION_EXTRAS.pack(seqno, rev_seqno, flags, expiry, lock_time, 0, nru)
    body_length += len(extras) - _EXTRAS.size
    head = records.HEADER.pack(records.MAGIC, opcode, key_length, len(extras), datatype, vbid, body_length, opaque, cas)
    return head + extras + frame[_FRAME_MIN:]


def check_frame(frame: bytes, seqno: int) -> None:
    """Raise CorruptedError unless `frame` is a whole PREPARE or ABORT message of that seqno."""
    if (
        len(frame) < _ROW_MIN
        or frame[0] != records.MAGIC
        or frame[4] != _EXTRAS_SIZES.get(frame[1])
        or len(frame) != 24 + int.from_bytes(frame[8:12])
        or not 0 < (frame[2] << 8 | frame[3]) <= len(frame) - 24 - frame[4]
    ):
        raise CorruptedError("a prepare cannot be read")
    at = 24 if frame[1] == PREPARE else 32
    if int.from_bytes(frame[at : at + 8]) != seqno:
        raise CorruptedError(f"it holds the prepare of seqno {int.from_bytes(frame[at : at + 8])}")


def in_range(txn: Transaction, vbid: int, links: chain.Chain, after_seqno: int, last_seqno: int) -> Iterator[Row]:
    """Generate the rows of a chain in (after_seqno, last_seqno], rising."""
    cursor = txn.cursor(keys.DB_PREPARE)
    for link in reversed(links):
        low, high = max(after_seqno, link.base_seqno), min(last_seqno, link.cut)
        if low >= high or not cursor.set_range(keys.PREPARE_KEY.pack(vbid, link.branch, low + 1)):
            continue
        end = keys.PREPARE_KEY.pack(vbid, link.branch, high)
        for key, value in cursor.iternext():
            if key > end:
                break
            yield _row(txn, key, value)


def rows(txn: Transaction, vbid: int) -> Iterator[Row]:
    """Generate the rows of a vbucket, rising: where it was prepared, where it was settled ((0, 0): nowhere), frame.
    An abort is settled nowhere.
    """
    cursor = txn.cursor(keys.DB_PREPARE)
    if cursor.set_range(keys.VBID_KEY.pack(vbid)):
        for key, value in cursor.iternext():
            if key[:2] != keys.VBID_KEY.pack(vbid):
                break
            yield _row(txn, key, value)


def _row(txn: Transaction, key: bytes, value: bytes) -> Row:
    if len(key) != keys.PREPARE_KEY.size or len(value) < _SETTLED.size + _ROW_MIN:
        raise CorruptedError("a row of the prepares is damaged", path=txn.path, vbid=int.from_bytes(key[:2]))
    _, branch, seqno = keys.PREPARE_KEY.unpack(key)
    return (branch, seqno), _SETTLED.unpack_from(value), value[_SETTLED.size :]


def is_open(at: Position, settled: Position, frame: bytes, cuts: Mapping[int, int]) -> bool:
    """Whether a row is a prepare that is open where `cuts` (branch -> cut) ends."""
    return frame[1] == PREPARE and at[1] <= cuts.get(at[0], -1) and not 0 < settled[1] <= cuts.get(settled[0], -1)


def open_at(txn: Transaction, vbid: int, links: chain.Chain) -> dict[bytes, Position]:
    """The prepares that are open at the tip of a chain: prefixed key -> where it was prepared."""
    cuts = {link.branch: link.cut for link in links}
    found: dict[bytes, Position] = {}
    for at, settled, frame in rows(txn, vbid):
        if is_open(at, settled, frame, cuts):
            found[records.key_of(frame)] = at
    return found


def old_aborts(
    txn: Transaction, vbid: int, links: chain.Chain, after_seqno: int, last_seqno: int, looks: int
) -> tuple[list[Position], int]:
    """The aborts of a chain in (after_seqno, last_seqno] among `looks` rows, and the seqno up to which that is all."""
    found: list[Position] = []
    for at, _, frame in islice(in_range(txn, vbid, links, after_seqno, last_seqno), looks):
        if frame[1] == ABORT:
            found.append(at)
        after_seqno, looks = at[1], looks - 1
    return found, last_seqno if looks else after_seqno


class Prepares:
    """The writer's memory of one vbucket's open prepares, and what of it no commit has written yet."""

    __slots__ = ("_any_stored", "_new", "_settled", "open", "pending_bytes")

    def __init__(self) -> None:
        """Without any."""
        self.open: dict[bytes, Position] = {}
        self.pending_bytes = 0
        self._any_stored = False
        self._new: dict[Position, bytes] = {}
        self._settled: dict[Position, Position] = {}

    @staticmethod
    def load(txn: Transaction, state: VbucketState) -> Prepares:
        """As they stand at what is staged."""
        loaded = Prepares()
        cursor = txn.cursor(keys.DB_PREPARE)
        prefix = keys.VBID_KEY.pack(state.vbid)
        if cursor.set_range(prefix) and cursor.key()[:2] == prefix:
            loaded._any_stored = True
            links = chain.load(txn, state.vbid, state.staging_branch, state.staged_seqno)
            loaded.open = open_at(txn, state.vbid, links)
        return loaded

    # -- accepting ------------------------------------------------------------------------------------------------

    def prepared(self, at: Position, frame: bytes) -> int:
        """Take a prepare in; one of its key that is still open is settled by it. Returns the bytes that it costs."""
        key = records.key_of(frame)
        self.settled(key, at)
        if len(self.open) >= OPEN_MAX:
            raise SeqnoOrder(f"more than {OPEN_MAX} durable writes are open at once")
        self.open[key] = at
        self._new[at] = frame
        self.pending_bytes += len(frame)
        return len(frame)

    def aborted(self, at: Position, frame: bytes) -> int:
        """Take an abort in; it settles the prepare of its key, if one is open. Returns the bytes that it costs."""
        self.settled(records.key_of(frame), at)
        self._new[at] = frame
        self.pending_bytes += len(frame)
        return len(frame)

    def settled(self, key: bytes, by: Position) -> None:
        """Something came of a key: its prepare, if one is open, is not any more."""
        at = self.open.pop(key, None)
        if at is not None:
            self._settled[at] = by

    def settled_by_rows(self, rows: list[tuple[bytes, bytes]]) -> None:
        """The same for rows. Costs nothing while no prepare is open."""
        if self.open:
            for row_key, frame in rows:
                if not records.is_system_event(frame):
                    self.settled(records.key_of(frame), keys.ROW.unpack(row_key))

    def settled_by_manifest(self, manifest: Manifest, by: Position) -> None:
        """A collection that ends or begins takes the open prepares in it along."""
        for key, at in list(self.open.items()):
            collection = manifest.collections.get(keys.split_key(key)[0])
            if collection is None or at[1] <= collection.begin_seqno:
                self.settled(key, by)

    def frame(self, environment: Environment, vbid: int, key: bytes) -> bytes | None:
        """The message of the open prepare of a key; None when none is open."""
        at = self.open.get(key)
        if at is None:
            return None
        if at in self._new:
            return self._new[at]
        with environment.read() as txn:
            value = txn.get(keys.DB_PREPARE, keys.PREPARE_KEY.pack(vbid, *at))
        if value is None:
            raise CorruptedError(f"the prepare {at[0]}:{at[1]} is missing", path=environment.path, vbid=vbid)
        return bytes(value[_SETTLED.size :])

    def moved(self, branch: int, parent: int, to_seqno: int) -> None:
        """Those of a branch up to a seqno are its parent's now (`move`)."""
        there = [(key, at) for key, at in self.open.items() if at[0] == branch and at[1] <= to_seqno]
        self.open |= {key: (parent, at[1]) for key, at in there}
        for at in [at for at in self._settled if at[0] == branch and at[1] <= to_seqno]:
            self._settled[parent, at[1]] = self._settled.pop(at)

    # -- committing -----------------------------------------------------------------------------------------------

    def put(self, txn: Transaction, state: VbucketState, staged_seqno: int, publish_seqno: int | None) -> None:
        """Write what belongs to the commit that says `staged_seqno`. Changes nothing in memory.

        With `publish_seqno` the commit publishes: whatever was prepared and settled since the boundary before it can
        never be open again.
        """
        if not (self._any_stored or self._new):
            return
        vbid = state.vbid
        for at, frame in self._new.items():
            by = self._settled.get(at, _NOT_SETTLED)
            if at[1] > staged_seqno or self._is_over(at, by, state, publish_seqno):
                continue
            if by[1] > staged_seqno:
                by = _NOT_SETTLED
            txn.put(keys.DB_PREPARE, keys.PREPARE_KEY.pack(vbid, *at), _SETTLED.pack(*by) + frame)
        for at, by in self._settled.items():
            if by[1] > staged_seqno or at in self._new:
                continue
            row_key = keys.PREPARE_KEY.pack(vbid, *at)
            if self._is_over(at, by, state, publish_seqno):
                txn.delete(keys.DB_PREPARE, row_key)
                continue
            value = txn.get(keys.DB_PREPARE, row_key)
            if value is None:
                raise CorruptedError(f"the prepare {at[0]}:{at[1]} is missing", path=txn.path, vbid=vbid)
            txn.put(keys.DB_PREPARE, row_key, _SETTLED.pack(*by) + value[_SETTLED.size :])
        if publish_seqno is not None and self._any_stored:
            _forget(txn, state, publish_seqno)

    @staticmethod
    def _is_over(at: Position, by: Position, state: VbucketState, publish_seqno: int | None) -> bool:
        return (
            publish_seqno is not None
            and at[0] == state.staging_branch
            and at[1] > state.staging_published_seqno
            and by != _NOT_SETTLED
            and by[1] <= publish_seqno
        )

    def written(self, staged_seqno: int) -> int:
        """The commit succeeded: forget what it wrote. Returns the bytes that it freed."""
        if not (self._new or self._settled):
            return 0
        done = [at for at in self._new if at[1] <= staged_seqno]
        freed = sum(len(self._new.pop(at)) for at in done)
        self._any_stored = self._any_stored or bool(done)
        self._settled = {at: by for at, by in self._settled.items() if by[1] > staged_seqno}
        self.pending_bytes -= freed
        return freed


def forget_branches(txn: Transaction, vbid: int, numbers: frozenset[int]) -> None:
    """Remove the rows of branches that no chain has; what was settled there is open, since nobody sees that it was."""
    cursor = txn.cursor(keys.DB_PREPARE)
    there = cursor.set_range(keys.VBID_KEY.pack(vbid))
    while there and cursor.key()[:2] == keys.VBID_KEY.pack(vbid):
        value = cursor.value()
        if keys.PREPARE_KEY.unpack(cursor.key())[1] in numbers:
            there = cursor.delete()
            continue
        if _SETTLED.unpack_from(value)[0] in numbers:
            cursor.put(cursor.key(), _SETTLED.pack(*_NOT_SETTLED) + value[_SETTLED.size :])
        there = cursor.next()


def move(
    txn: Transaction,
    vbid: int,
    branch: int,
    parent: int,
    base_seqno: int,
    to_seqno: int,
    *,
    done: bool,
) -> None:
    """Let the prepares of a branch up to `to_seqno` be its parent's (`merge`). All of it is below the floor: what was
    settled there is settled for good, and what lies above the base on the parent was lost. `done`: so was the rest.
    """
    cursor = txn.cursor(keys.DB_PREPARE)
    moved: list[tuple[bytes, bytes]] = []
    there = cursor.set_range(keys.VBID_KEY.pack(vbid))
    while there and cursor.key()[:2] == keys.VBID_KEY.pack(vbid):
        _, at_branch, seqno = keys.PREPARE_KEY.unpack(cursor.key())
        if at_branch > branch:
            break
        value = cursor.value()
        by_branch, by_seqno = _SETTLED.unpack_from(value)
        is_lost = (at_branch == parent and seqno > base_seqno) or (at_branch == branch and seqno > to_seqno and done)
        if is_lost or (by_branch == branch and by_seqno <= to_seqno):
            there = cursor.delete()
            continue
        if (by_branch == branch and done) or (by_branch == parent and by_seqno > base_seqno):
            value = _SETTLED.pack(*_NOT_SETTLED) + value[_SETTLED.size :]
            cursor.put(cursor.key(), value)
        if at_branch == branch and seqno <= to_seqno:
            moved.append((keys.PREPARE_KEY.pack(vbid, parent, seqno), value))
            there = cursor.delete()
            continue
        there = cursor.next()
    for key, value in moved:
        txn.put(keys.DB_PREPARE, key, value)


def _forget(txn: Transaction, state: VbucketState, publish_seqno: int) -> None:
    """Remove a few rows that can never be open again: dead ones, and those settled at or below the floor."""
    floor = state.history_floor_seqno if state.staging_published_seqno else publish_seqno
    cuts = {link.branch: link.cut for link in chain.load(txn, state.vbid, state.staging_branch, SEQNO_MAX)}
    cursor = txn.cursor(keys.DB_PREPARE)
    there = cursor.set_range(keys.VBID_KEY.pack(state.vbid))
    for _ in range(FORGET_LOOKS):
        if not there or cursor.key()[:2] != keys.VBID_KEY.pack(state.vbid):
            return
        _, branch, seqno = keys.PREPARE_KEY.unpack(cursor.key())
        by_branch, by_seqno = _SETTLED.unpack_from(cursor.value())
        if seqno > cuts.get(branch, -1) or (by_branch in cuts and 0 < by_seqno <= min(floor, cuts[by_branch])):
            there = cursor.delete()
        elif seqno > floor:  # the rest of this branch is younger
            there = cursor.set_range(keys.PREPARE_KEY.pack(state.vbid, branch + 1, 0))
        else:
            there = cursor.next()
