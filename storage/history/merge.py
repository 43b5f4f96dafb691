"""Merges old links (branches) of a chain, so that reads do not slow down with each failover.

Knows chains and every tree whose keys or values hold branch numbers; the purger decides when to merge. After a
rollback, the old branch stays on the chain as long as one of its rows is visible. Once the branch lies below the floor,
no rollback can go back to it. Then its rows can move to its parent, oldest first. The base of the branch rises with the
moved rows, and the empty branch is removed. A half-merged branch comes first, then the branch with the fewest seqnos.
The parent of that branch mostly has at least as many. So the merged parent has mostly at least twice the seqnos of the
branch, and a row moves few times.

Invariants:
- a step is one transaction and leaves the same rows visible at the same seqnos; another process may do the next step;
- rows move only after the purger has removed the retracted rows of both branches;
- a moved row may get the position (branch and seqno) of a retracted row of the parent, so these positions get a new
  history id;
- each step draws a new chain id, so readers load their chains again.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

from storage.env.transaction import Transaction, seek_before
from storage.format import keys, records
from storage.format.records import AFTER_BRANCH
from storage.history import branches, chain, manifests
from storage.model import SEQNO_MAX, BranchReason

LINKS_MAX = 16
"""A chain with at most this many links below the floor is not merged."""
ROLLBACKS_KEPT = 16
"""Number of newest rollback records of a vbucket that are always kept, for people and for `wait`."""


class Pair(NamedTuple):
    """A branch to merge into its parent, and the branch's only child."""

    parent: int
    branch: int
    child: int
    base_seqno: int
    top_seqno: int
    """The visible rows of `branch` are (base_seqno, top_seqno]."""


class Moved(NamedTuple):
    """The rows of `branch` up to `to_seqno` are now rows of `parent`."""

    branch: int
    parent: int
    to_seqno: int


def next_pair(txn: Transaction, vbid: int, links: chain.Chain, floor_seqno: int, known: branches.Known) -> Pair | None:
    """Return the branch of the served chain to merge next, with parent and child, or None. A branch with two children
    waits: one of them will be forgotten.

    Call this only after the purger has visited all rows up to the floor, and removed the retracted rows of rollbacks to
    below the floor. `known`: every branch of the vbucket.
    """
    history = [number for number, link in enumerate(links) if number and link.cut < floor_seqno]
    if len(history) <= LINKS_MAX:
        return None

    def order(number: int) -> tuple[bool, int]:
        link = links[number]
        return known[link.branch].reason != BranchReason.MERGING, link.cut - link.base_seqno

    for number in sorted(history[:-1], key=order):
        link = links[number]
        pair = Pair(
            links[number + 1].branch,
            link.branch,
            links[number - 1].branch,
            link.base_seqno,
            link.cut,
        )
        if [branch for branch, row in known.items() if row.parent == pair.branch] != [pair.child]:
            continue
        # The purger has removed retracted rows below the floor; a row moved onto another would be lost without a sign.
        parent_has = chain.has_rows(txn, vbid, pair.parent, pair.base_seqno)
        if not parent_has and not chain.has_rows(txn, vbid, pair.branch, pair.top_seqno):
            return pair
    return None


def step(txn: Transaction, vbid: int, pair: Pair, limit: int) -> Moved:
    to_seqno = _move_rows(txn, vbid, pair, limit)
    done = to_seqno == pair.top_seqno
    manifests.move(txn, vbid, pair.branch, pair.parent, pair.base_seqno, to_seqno)
    _move_base(txn, vbid, pair, to_seqno, done)
    branches.draw_chain_id(txn, vbid)
    return Moved(pair.branch, pair.parent, to_seqno)


def _move_rows(txn: Transaction, vbid: int, pair: Pair, limit: int) -> int:
    """Move up to `limit` rows with their key rows, and remove the boundaries among them. Return the seqno reached."""
    rows_db, keys_db = keys.rows_db(vbid), keys.keys_db(vbid)
    prefix = keys.PREFIX.pack(pair.branch)
    cursor = txn.cursor(rows_db)
    there = cursor.set_range(keys.ROW.pack(pair.branch, pair.base_seqno))
    taken: list[tuple[bytes, bytes]] = []
    to_seqno = pair.top_seqno
    while there and cursor.key().startswith(prefix):
        if len(cursor.key()) == keys.ROW_KEY_SIZE:
            if len(taken) == limit:
                to_seqno = keys.ROW.unpack(taken[-1][0])[1]
                break
            taken.append((cursor.key(), cursor.value()))
        there = cursor.delete()
    parent = keys.PREFIX.pack(pair.parent)
    for row_key, stored in taken:
        txn.put(rows_db, parent + row_key[AFTER_BRANCH], stored)
    for wire_key, dup in sorted(records.key_rows(taken)):
        txn.delete(keys_db, wire_key, dup)
        txn.put(keys_db, wire_key, parent + dup[AFTER_BRANCH])
    return to_seqno


def _move_base(txn: Transaction, vbid: int, pair: Pair, to_seqno: int, done: bool) -> None:
    row = branches.get_branch(txn, vbid, pair.branch)
    parent = branches.get_branch(txn, vbid, pair.parent)
    if row.reason != BranchReason.MERGING:
        ids = branches.with_history(parent.history_ids, secrets.randbits(64) or 1, pair.base_seqno)
        parent = parent._replace(history_ids=ids, kept_seqno=SEQNO_MAX)
        branches.put_branch(txn, vbid, pair.parent, parent)
    if not done:
        branches.change_branch(txn, vbid, pair.branch, base_seqno=to_seqno, reason=BranchReason.MERGING)
        return
    branches.change_branch(txn, vbid, pair.child, parent=pair.parent)
    branches.forget(txn, vbid, [pair.branch])


def forget_rollbacks(txn: Transaction, found: list[bytes]) -> None:
    for key in found:
        txn.delete(keys.DB_ROLLBACK, key)


def old_rollbacks(txn: Transaction, vbid: int, pub: records.Pub, limit: int) -> list[bytes]:
    """Return the keys of the oldest rollback records, up to the first needed record. The newest `ROLLBACKS_KEPT` are
    needed, and those of the served copy that went to the floor or above.
    """
    cursor = txn.cursor(keys.DB_ROLLBACK)
    if not seek_before(cursor, keys.ROLLBACK_KEY.pack(vbid, 2**32 - 1)) or cursor.key()[:2] != keys.VBID_KEY.pack(vbid):
        return []
    newest = keys.ROLLBACK_KEY.unpack(cursor.key())[1]
    found: list[bytes] = []
    first_branch = None
    cursor.set_range(keys.VBID_KEY.pack(vbid))
    for key, value in cursor.iternext():
        if len(found) == limit or keys.ROLLBACK_KEY.unpack(key)[1] > newest - ROLLBACKS_KEPT:
            break
        if first_branch is None:
            first_branch = min(
                [link.branch for link in chain.load(txn, vbid, pub.branch, pub.seqno)], default=pub.branch
            )
        rollback = records.decode_rollback(vbid, value)
        if rollback.to_seqno >= pub.floor_seqno and rollback.to_branch > first_branch:
            break
        found.append(key)
    return found
