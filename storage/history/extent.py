"""What a vbucket's history takes: how far back it reaches, and how much space it needs, without walking it.

Knows counters that LMDB keeps anyway and one boundary row; walks nothing, so a status of a thousand vbuckets costs a
few milliseconds. Invariant: what would need a walk to know is not guessed: `boundaries` is None while staged rows wait
for their key rows.
"""

from __future__ import annotations

from typing import NamedTuple

from storage.env.transaction import Transaction
from storage.format import keys
from storage.history import branches, chain
from storage.model import Seqno, Vbid


class History(NamedTuple):
    """The past of one vbucket, and the size of its trees."""

    floor_seqno: Seqno
    floor_ms: int | None
    """When the floor's boundary was published; None: nothing was."""
    boundaries: int | None
    """Kept boundaries, those of branches that a rollback left included; and each drop or creation of a collection."""
    versions: int
    """Versions of documents that are stored, tombstones included: less the live documents, it is what history takes."""
    row_bytes: int
    """Pages of the row tree."""
    key_bytes: int
    """Pages of the key tree."""
    purged_seqno: Seqno
    """Up to here the purger has looked."""
    local_purge_seqno: Seqno
    """The newest tombstone that it took."""
    resync_count: int
    """How often a copy that was read again from 0 has replaced an older one."""
    last_resync_ms: int | None
    """When readers first saw the last such copy that history still knows of."""


def of(txn: Transaction, vbid: int) -> History:
    """The history of a vbucket as of the transaction."""
    branch, published, floor, *_ = txn.pub(vbid)
    links = chain.load(txn, vbid, branch, published)
    boundary = chain.newest_boundary(txn, Vbid(vbid), links, floor) if floor else None
    loaded = branches.load(txn, Vbid(vbid))
    rows, references = (txn.stat(tree(vbid)) for tree in (keys.rows_db, keys.keys_db))
    all_indexed = loaded.indexed_seqno == loaded.state.staged_seqno
    purged_seqno, local_purge_seqno, *_ = branches.purge_row(txn, vbid)
    resyncs_ms, resync_count = branches.resyncs(txn, vbid)
    return History(
        floor_seqno=Seqno(floor),
        floor_ms=boundary.time_ms if boundary is not None else None,
        boundaries=max(0, rows["entries"] - references["entries"]) if all_indexed else None,
        versions=references["entries"],
        row_bytes=_bytes_of(rows),
        key_bytes=_bytes_of(references),
        purged_seqno=Seqno(purged_seqno),
        local_purge_seqno=Seqno(local_purge_seqno),
        resync_count=resync_count,
        last_resync_ms=max(resyncs_ms, default=None),
    )


def _bytes_of(stat: dict[str, int]) -> int:
    return stat["psize"] * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"])
