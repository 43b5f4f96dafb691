"""Validity: reads that take several transactions.

**The problem.** A scan of a million documents cannot stay in one LMDB transaction: the writer may not use an LMDB page
again that an open transaction sees, and the file would grow with each commit. So a read is a series of short
transactions, and anything may happen between two of them. A scan reads a (seqno 1) of the boundary at 3; then a
failover takes c (3) back and d gets seqno 3. The rest of the scan must be b and c, or an error, but never b and d.

    transaction 1    `pub` (1, 3)    reads a          pinned: branch 1, seqno 3, history id x
                     rollback to 2, d is published
    transaction 2    `pub` (2, 3)    check: are all rows of (1, 3) still stored?

**The rule.** Every transaction of a read begins with `check`, and reads its rows in the same transaction. What may have
happened, and the answer:

- *a publish*: passes, because new rows lie above the pinned position;
- *a rollback or resync passed the position*: a page of results is refused; a read that promised its
  position for longer (`Served.survives_rollback`: a lease, a Spark task, changes) goes on while its rows are kept;
- *the purger began with those retracted rows*: refused; it noted that in `kept_seqno` first;
- *the floor rose above the position*, or, if a rollback passed that, above the last shared seqno: refused, because the
  purger may have removed versions that the read sees;
- *a merge, or the removal of a branch*: refused; the chain id told the reader to load the chain again, and it differs;
- *a refill, a power cut, an older copy of the file*: refused by the history id (`VbucketReader.chain_of_position`).

A copy that a resync replaced has no floor any more. But the purger removes a boundary before any version visible there,
or with it, so one kept boundary proves that it took no version. A read of changes also calls `check_tombstones`: a
reader that holds a deleted document must get the tombstone, or an error. If the newest purged tombstone has seqno 4
(local_purge_seqno), a reader that has everything up to 3 may hold the document; one that has 4 got the tombstone.

**Rejected.** *One long transaction*: see above. *A lock against the
writer*: a slow client would stop the mirror. A lease holds only the purger back. *To check once, at the end*: the
documents were given out by then.

**What would break.** With the check in a transaction of its own, the purger could commit between check and rows. With a
comparison of published_seqno instead of chains, the 3 of d would pass for the 3 of c.
"""

from __future__ import annotations

from storage.env.transaction import Transaction
from storage.errors import CorruptedError, ViewInvalidated
from storage.format import keys
from storage.format.records import Pub
from storage.format.tokens import Pin, Token
from storage.history import branches, chain, manifests
from storage.model import SEQNO_MAX, Seqno
from storage.read.vbucket_reader import Served, VbucketReader

_AGAIN = "start the read again"
_FROM_BEGINNING = "read it from the beginning; if the purger overtakes that, hold a lease"


def served_at(reader: VbucketReader, txn: Transaction, at: Pin | Token, *, survives_rollback: bool = True) -> Served:
    """Return the state at a position. Raises ViewInvalidated like `check`, or if the position's history is unknown."""
    links = reader.chain_of_position(txn, at.branch, at.seqno, at.history_id)
    pub = Pub(at.branch, at.seqno, Seqno(0), manifests.key_on(txn, at.vbid, links))
    pinned = Served(pub, links, survives_rollback)
    check(reader, txn, pinned)
    return pinned


def check(reader: VbucketReader, txn: Transaction, pinned: Served) -> None:
    """Raise ViewInvalidated if a document that `pinned` sees is gone or, without `survives_rollback`, not served."""
    if not pinned.links:
        return None  # nothing was published
    pub = txn.pub(reader.vbid)
    check_unmoved(reader, txn, pinned.links)
    if pinned.survives_rollback:
        served = reader.chain_at(txn, pub.branch, pub.seqno)
        return _check_kept(reader, txn, pinned, pub.floor_seqno, chain.common_seqno(served, pinned.links))
    tip = pinned.links[0]
    if pub.branch != tip.branch or pub.seqno < pinned.pub.seqno:
        links = reader.chain_at(txn, pub.branch, pub.seqno)
        if not chain.sees(links, tip.branch, pinned.pub.seqno):
            message = f"a rollback or resync passed seqno {pinned.pub.seqno}"
            error = ViewInvalidated(message, vbid=reader.vbid, hint=_AGAIN)
            error.rolled_back = True
            raise error
    if pub.floor_seqno > pinned.pub.seqno:
        raise _gone(f"history before seqno {pub.floor_seqno}", reader)
    return None


def check_tombstones(
    reader: VbucketReader, txn: Transaction, pinned: Served, after_seqno: int, purge_seqno_before: int = 0
) -> None:
    """Raise ViewInvalidated if the purger removed a tombstone above `after_seqno`. `purge_seqno_before`, the result of
    `purge_seqno` when the read began, allows removals before the read.
    """
    now = purge_seqno(reader, txn, pinned, after_seqno)
    if after_seqno < now and now != purge_seqno_before:
        message = f"tombstones above seqno {after_seqno} are gone from history"
        raise ViewInvalidated(message, vbid=reader.vbid, hint=_FROM_BEGINNING)


def purge_seqno(reader: VbucketReader, txn: Transaction, pinned: Served, after_seqno: int) -> int:
    """Return the seqno of the newest tombstone that may be purged: a reader that has less than that may lack it.

    For a copy that a resync replaced, no such seqno is stored. But the purger removed each boundary below a tombstone
    before the tombstone or with it, and now removes no more tombstones of this copy. So no tombstone is missing above a
    kept boundary.
    """
    if pinned.survives_rollback and pinned.links:
        pub = txn.pub(reader.vbid)
        if chain.common_seqno(reader.chain_at(txn, pub.branch, pub.seqno), pinned.links) is None:
            kept = chain.newest_boundary(txn, reader.vbid, pinned.links, after_seqno)
            return SEQNO_MAX if kept is None else int(kept.seqno)
    return reader.purge_row(txn).local_purge_seqno


def check_unmoved(reader: VbucketReader, txn: Transaction, links: chain.Chain) -> None:
    """Raise ViewInvalidated if branches of a chain were merged or removed since the chain was read."""
    try:
        whole = reader.whole_chain(txn, links[0].branch)
    except CorruptedError:
        whole = ()
    if not chain.same(links, chain.recut(whole, links[0].cut)):
        message = "the branches that it reads were merged or removed meanwhile"
        raise ViewInvalidated(message, vbid=reader.vbid, hint=_AGAIN)


def _check_kept(
    reader: VbucketReader, txn: Transaction, pinned: Served, floor_seqno: int, common_seqno: int | None
) -> None:
    """Raise ViewInvalidated if a document of `pinned` is gone, even if the served chain does not see the document."""
    if common_seqno is None:
        # Did the purger remove rows of `pinned` before a resync replaced their copy? The copy's last floor is no longer
        # stored. But the purger removed each boundary before the first document visible at that boundary, or with that
        # document. So one boundary must be kept: the last of `pinned` that was on the copy's last served chain.
        vbid, seqno = reader.vbid, int(pinned.pub.seqno)
        shared = {link.branch for link in pinned.links}
        for branch, row in branches.all_branches(txn, vbid).items():
            if branch > pinned.links[0].branch and row.parent in shared:  # a later rollback left the chain at its base
                seqno = min(seqno, row.base_seqno)
        owner = next(link.branch for link in pinned.links if link.base_seqno < seqno)
        if txn.raw.get(keys.ROW.pack(owner, seqno) + keys.BOUNDARY_SUFFIX, db=reader.rows) is None:
            raise _gone(f"history at seqno {seqno}", reader)
        common_seqno = -1
    elif floor_seqno > common_seqno:
        raise _gone(f"history before seqno {floor_seqno}", reader)
    if chain.has_gap(txn, reader.vbid, pinned.links, common_seqno):
        raise _gone("the history that a rollback left", reader)


def _gone(what: str, reader: VbucketReader) -> ViewInvalidated:
    return ViewInvalidated(f"{what} is gone", vbid=reader.vbid, hint=_AGAIN)
