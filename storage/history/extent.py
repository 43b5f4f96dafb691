"""The extent of a vbucket's history: how far back it reaches, and the space it takes.

Reads LMDB's counters, small records and one boundary row, but no documents, so the status of 1,000 vbuckets takes a few
milliseconds.
"""

from __future__ import annotations

from typing import NamedTuple

from storage.env.transaction import Transaction
from storage.format import keys
from storage.history import branches, chain
from storage.model import Seqno


class History(NamedTuple):
    floor_seqno: Seqno
    floor_ms: int | None
    """Time of the floor's boundary, milliseconds since 1970; None: nothing was published."""
    boundaries: int | None
    """Number of entries of the row tree without a key row: boundaries of all branches, system events, abandoned rows.
    None while staged rows have no key rows yet.
    """
    versions: int
    """Number of stored versions of documents, with tombstones and history."""
    row_bytes: int
    """Bytes of the row tree's LMDB pages."""
    key_bytes: int
    """Bytes of the key tree's LMDB pages."""
    purged_seqno: Seqno
    """As in `branches.PurgeRow`."""
    local_purge_seqno: Seqno
    """As in `branches.PurgeRow`."""
    resync_count: int
    """Number of resyncs whose copy replaced the old one."""
    resyncs_ms: tuple[int, ...]
    """For each resynced copy that is still stored: time of the first publish, milliseconds since 1970, oldest first.
    """

    @property
    def last_resync_ms(self) -> int | None:
        return max(self.resyncs_ms, default=None)


def of(txn: Transaction, vbid: int) -> History:
    pub, state = txn.pub(vbid), txn.state_row(vbid)
    boundary = chain.boundary_at(txn, vbid, pub.branch, pub.floor_seqno) if pub.floor_seqno else None
    rows, references = (txn.stat(tree(vbid)) for tree in (keys.rows_db, keys.keys_db))
    purge = branches.purge_row(txn, vbid)
    resyncs_ms, resync_count = branches.resyncs(txn, vbid)
    return History(
        floor_seqno=Seqno(pub.floor_seqno),
        floor_ms=boundary.time_ms if boundary is not None else None,
        boundaries=(
            max(0, rows["entries"] - references["entries"]) if state.indexed_seqno == state.staged_seqno else None
        ),
        versions=references["entries"],
        row_bytes=_bytes_of(rows),
        key_bytes=_bytes_of(references),
        purged_seqno=Seqno(purge.purged_seqno),
        local_purge_seqno=Seqno(purge.local_purge_seqno),
        resync_count=resync_count,
        resyncs_ms=resyncs_ms,
    )


def _bytes_of(stat: dict[str, int]) -> int:
    return stat["psize"] * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"])
