"""What a read of several transactions is promised, and the checks that hold it.

A reader of documents sees one boundary. A reader of changes who applies each of them ends with the documents of the
boundary that it reads up to. Rollbacks, resyncs, merges and the purger can make either impossible between two
transactions; the reader is told so by ViewInvalidated. Every transaction of a read begins with `check`, that of a read
of changes then calls `check_tombstones`. Knows chains, boundaries, the floor and how far tombstones of a vbucket were
purged; never what is read. Invariants:
- rows that are read in the transaction of a check that did not raise are those that the first one would have seen;
- a reader of changes has no version of a key whose tombstone the purger took before the reader got it.
"""

from __future__ import annotations

from storage.env.transaction import Transaction
from storage.errors import CorruptedError, ViewInvalidated
from storage.format import keys
from storage.format.tokens import Pin, Token
from storage.history import branches, chain
from storage.model import SEQNO_MAX
from storage.read.vbucket_reader import Served, VbucketReader

_AGAIN = "start the read again"
_FROM_BEGINNING = "read it from the beginning; where the purger overtakes that, hold a lease"


def served_at(reader: VbucketReader, txn: Transaction, at: Pin | Token, *, survives_rollback: bool = True) -> Served:
    """What is seen at a position, for as long as all of it is kept; without `survives_rollback`, and served.

    Raises ViewInvalidated.
    """
    links = reader.chain_of_position(txn, at.branch, at.seqno, at.history_id)
    manifest_key = branches.manifest_key_on(txn, at.vbid, links)
    pinned = Served(at.branch, at.seqno, 0, manifest_key, False, links, survives_rollback=survives_rollback)
    check(reader, txn, pinned)
    return pinned


def check(reader: VbucketReader, txn: Transaction, pinned: Served) -> None:
    """Raise ViewInvalidated unless everything that `pinned` sees is still on the served chain and kept."""
    pub = txn.pub(reader.vbid)
    check_unmoved(reader, txn, pinned.links)
    if pinned.survives_rollback:
        return _check_kept(reader, txn, pinned, pub.branch, pub.seqno, pub.floor_seqno)
    tip = pinned.links[0]
    if pub.branch != tip.branch or pub.seqno < pinned.seqno:
        links = reader.chain_at(txn, pub.branch, pub.seqno)
        if not chain.sees(links, tip.branch, pinned.seqno):
            raise ViewInvalidated(f"a rollback or resync passed seqno {pinned.seqno}", vbid=reader.vbid, hint=_AGAIN)
    if pub.floor_seqno > pinned.seqno:
        raise ViewInvalidated(f"history before seqno {pub.floor_seqno} is gone", vbid=reader.vbid, hint=_AGAIN)
    return None


def check_tombstones(
    reader: VbucketReader, txn: Transaction, pinned: Served, after_seqno: int, purged_before: int
) -> None:
    """Raise ViewInvalidated if the purger took a tombstone above `after_seqno`, but for those that were gone before the
    reader had anything (`purged_before`, what `purged_seqno` was then).
    """
    purged = purged_seqno(reader, txn, pinned, after_seqno)
    if after_seqno < purged != purged_before:
        raise ViewInvalidated(
            f"tombstones above seqno {after_seqno} are gone from history", vbid=reader.vbid, hint=_FROM_BEGINNING
        )


def purged_seqno(reader: VbucketReader, txn: Transaction, pinned: Served, after_seqno: int) -> int:
    """No tombstone above this was purged.

    Of a copy that a resync has replaced it is not stored any more. But there the purger takes nothing more, and it had
    taken each boundary below a tombstone before, or together with, that tombstone.
    """
    if pinned.survives_rollback:
        pub = txn.pub(reader.vbid)
        if chain.common_seqno(reader.chain_at(txn, pub.branch, pub.seqno), pinned.links) is None:
            kept = chain.newest_boundary(txn, reader.vbid, pinned.links, after_seqno)
            return SEQNO_MAX if kept is None else int(kept.seqno)
    return branches.purge_row(txn, reader.vbid).local_purge_seqno


def check_unmoved(reader: VbucketReader, txn: Transaction, links: chain.Chain) -> None:
    """Raise ViewInvalidated where branches of a chain were merged or removed since it was read."""
    try:
        whole = reader.whole_chain(txn, links[0].branch)
    except CorruptedError:
        whole = ()
    if not chain.same(links, chain.recut(whole, links[0].cut)):
        raise ViewInvalidated(
            "the branches that it reads were merged or removed meanwhile", vbid=reader.vbid, hint=_AGAIN
        )


def _check_kept(
    reader: VbucketReader, txn: Transaction, pinned: Served, branch: int, seqno: int, floor_seqno: int
) -> None:
    """Raise ViewInvalidated unless everything that `pinned` sees is there, on whatever chain."""
    served = reader.chain_at(txn, branch, seqno)
    common = chain.common_seqno(served, pinned.links)
    if common is not None and floor_seqno > common:
        raise ViewInvalidated(f"history before seqno {floor_seqno} is gone", vbid=reader.vbid, hint=_AGAIN)
    if common is None:
        _check_replaced_copy(txn, reader.vbid, pinned)
    for link in pinned.links:
        if link.cut <= link.base_seqno:
            continue  # nothing of it is seen, and it may be forgotten
        kept_seqno = branches.get_branch(txn, reader.vbid, link.branch).kept_seqno
        if kept_seqno < link.cut and (common is None or common < link.cut):
            raise ViewInvalidated("what was rolled back is gone from history", vbid=reader.vbid, hint=_AGAIN)


def _check_replaced_copy(txn: Transaction, vbid: int, pinned: Served) -> None:
    """Raise ViewInvalidated if the purger had removed what `pinned` sees before a resync replaced its chain.

    The floor of that time is not stored any more. But the purger removes a boundary before, or together with, the first
    version that is not seen above it. So this looks for the boundary up to which the last chain before the resync had
    this history.
    """
    seqno = pinned.seqno
    below = [link.branch for link in pinned.links if link.base_seqno < seqno]
    shared = {pinned.branch, *below[:1]}  # a branch that nothing was published on is the parent of none
    for branch, row in branches.all_branches(txn, vbid).items():
        if branch > pinned.branch and row.parent in shared:
            shared.add(branch)
            seqno = min(seqno, row.base_seqno)
    if not seqno:
        return
    owner = next(link.branch for link in pinned.links if link.base_seqno < seqno)
    key = keys.ROW.pack(owner, seqno) + keys.BOUNDARY_SUFFIX
    if txn.get(keys.rows_db(vbid), key) is None:
        raise ViewInvalidated(f"history at seqno {seqno} is gone", vbid=vbid, hint=_AGAIN)
