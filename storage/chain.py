"""Branches: which rows of a vbucket a view sees, and where its kept boundaries are.

Knows the `branch` tree and boundary rows; writes nothing. A chain is the served branch and its parents, newest first,
each with its cut: rows of that branch with seqno <= cut are visible. Invariants: a parent's number is smaller than its
child's; a parent's cut is the smallest base_seqno below it on the chain, so cuts never rise towards the root; the rows
of a branch lie above its base_seqno. So the rows of a chain, walked from root to tip, strictly rise in seqno.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from storage import keys, records
from storage.environment import Environment
from storage.errors import CorruptedError
from storage.model import SEQNO_MAX, Boundary, Branch, Seqno, Vbid, Vbuuid


@dataclass(frozen=True, slots=True)
class Link:
    """One branch of a chain: rows with base_seqno < seqno <= cut are visible."""

    branch: int
    base_seqno: int
    cut: int
    kept_seqno: int = SEQNO_MAX
    """Rows of the branch above it may be gone already (they are on no served chain)."""


Chain = tuple[Link, ...]


def load(environment: Environment, txn: Any, vbid: int, branch: int, cut: int) -> Chain:
    """The chain of `branch` cut at `cut`, newest first."""
    links = []
    db = environment.db(keys.DB_BRANCH)
    current: int | None = branch
    while current is not None:
        try:
            row = records.decode_branch(txn.get(keys.BRANCH_KEY.pack(vbid, current), db=db))
        except CorruptedError as error:
            raise CorruptedError(f"branch {current}: {error.message}", path=environment.path, vbid=vbid) from error
        if row.parent is not None and row.parent >= current:
            raise CorruptedError(f"branch {current} has parent {row.parent}", path=environment.path, vbid=vbid)
        links.append(Link(current, row.base_seqno, cut, row.kept_seqno))
        cut = min(cut, row.base_seqno)
        current = row.parent
    return tuple(links)


def recut(chain: Chain, cut: int) -> Chain:
    """The same chain seen as of seqno `cut`."""
    return tuple(Link(link.branch, link.base_seqno, min(link.cut, cut), link.kept_seqno) for link in chain)


def newest_version(cursor: Any, wire_key: bytes, chain: Chain) -> bytes | None:
    """The newest visible dup of `wire_key` on `chain` (13 bytes), or None. `cursor` is on the key tree.

    Cost: one seek for each branch of the chain at most, whatever the number of versions.
    """
    if not cursor.set_key(wire_key) or not cursor.last_dup():
        return None
    dup: bytes = cursor.value()
    for link in chain:
        if dup[:12] > (limit := keys.ROW.pack(link.branch, link.cut) + b"\xff")[:12]:
            if cursor.set_range_dup(wire_key, limit):
                if not cursor.prev_dup():
                    return None
            else:
                cursor.set_key(wire_key)
                cursor.last_dup()
            dup = cursor.value()
        if dup[:4] == limit[:4]:
            return dup
    return None


def boundary_of(key: bytes, value: bytes, vbid: int) -> Boundary:
    """A boundary row as a Boundary."""
    branch, seqno = keys.ROW.unpack_from(key)
    if len(value) != keys.BOUNDARY.size:
        raise CorruptedError(f"boundary row {branch}:{seqno} has {len(value)} bytes", vbid=vbid)
    start, vbuuid, time_ms = keys.BOUNDARY.unpack(value)
    return Boundary(Branch(branch), Seqno(seqno), Seqno(start), Vbuuid(vbuuid), time_ms)


def newest_boundary(environment: Environment, txn: Any, vbid: Vbid, chain: Chain, to_seqno: int) -> Boundary | None:
    """The newest kept boundary of the chain with seqno <= `to_seqno`; None when there is none above 0.

    Walks rows backwards from `to_seqno`, so it costs at most the rows of one snapshot.
    """
    for boundary in boundaries(environment, txn, vbid, recut(chain, to_seqno)):
        return boundary
    return None


def boundaries(environment: Environment, txn: Any, vbid: Vbid, chain: Chain) -> Iterator[Boundary]:
    """Generate the kept boundaries of a chain, newest first. Each once, though a rollback's branch repeats its base."""
    cursor = txn.cursor(environment.db(keys.rows_db(vbid)))
    last = None
    for link in chain:
        tip = keys.ROW.pack(link.branch, link.cut) + b"\x02"
        if not (cursor.prev() if cursor.set_range(tip) else cursor.last()):
            return  # nothing lies below the tip, so nothing below the tips of its parents either
        for key, value in cursor.iterprev():
            if key[:4] != tip[:4]:
                break
            if len(key) == keys.BOUNDARY_KEY_SIZE:
                boundary = boundary_of(key, value, vbid)
                if boundary.seqno != last:
                    last = boundary.seqno
                    yield boundary
