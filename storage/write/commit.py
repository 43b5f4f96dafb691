"""Writes the part of a commit that belongs to one vbucket.

Knows `PendingVbucket` and the trees (LMDB's named databases); `owner` handles failed commits. Invariants:
- a vbucket's rows, key rows, boundary, manifests and entries in `state` (the writer's) and `pub` (the readers') are put
  into one transaction;
- after a transaction that publishes a vbucket, every row of a document up to published_seqno has its key row;
- `put` changes nothing in memory, so `owner` can repeat the transaction.
"""

from __future__ import annotations

from storage.env.transaction import Transaction
from storage.errors import SeqnoOrder
from storage.format import keys, records
from storage.history import branches, index
from storage.model import FailoverLog, Seqno, SnapshotRange
from storage.write.pending import PendingVbucket, Plan

Rows = list[tuple[bytes, bytes]]


def put(txn: Transaction, vbucket: PendingVbucket, moment: branches.Moment, *, flush_open: bool) -> Plan:
    """Write all complete snapshots, and with `flush_open` also the rows of the open snapshot. Raises SeqnoOrder."""
    state, seqno = vbucket.base, Seqno(vbucket.complete_seqno or 0)
    count = len(vbucket.rows) if flush_open else vbucket.complete_count
    rows = vbucket.rows if count == len(vbucket.rows) else vbucket.rows[:count]
    if rows:
        consumed, added = txn.cursor(keys.rows_db(state.vbid)).putmulti(rows, append=True)
        if consumed != added or consumed != len(rows):
            raise SeqnoOrder(f"of {len(rows)} rows {added} rise in seqno", path=txn.path, vbid=state.vbid)
    manifest_count = 0
    for at, change in vbucket.manifest_changes:
        if flush_open or at <= seqno:
            manifest_count += 1
            key = keys.MANIFEST_KEY.pack(state.vbid, state.staging_branch, at)
            txn.put(keys.DB_MANIFEST, key, records.encode_manifest(change))
    staged_seqno, open_snapshot = _staged_on_disk(vbucket, len(rows))
    if not vbucket.can_publish:
        known = staged_seqno or state.staging_published_seqno or vbucket.known_empty
        # A stored log without rows means an empty vbucket. So write the log only if there are rows, or if the vbucket
        # is known to be empty.
        log = state.failover_log if known else FailoverLog()
        stored = state._replace(staged_seqno=staged_seqno, open_snapshot=open_snapshot, failover_log=log)
        txn.put_state_row(state.vbid, records.StateRow.of(stored))
        return Plan(len(rows), None, vbucket.counters, manifest_count)
    first = not state.staging_published_seqno
    published = state._replace(
        branch=state.staging_branch,
        published_seqno=seqno,
        history_floor_seqno=seqno if first else state.history_floor_seqno,
        staged_seqno=staged_seqno,
        staging_published_seqno=seqno,
        open_snapshot=open_snapshot,
        missing_seqno=min(state.missing_seqno, seqno) if first else state.missing_seqno,
    )
    if state.rollback_deferred:
        published = published._replace(rollback_count=state.rollback_count + 1, last_rollback_ms=moment.wall_ms)
    row_bytes = vbucket.counters.row_bytes + _put_key_rows(txn, vbucket, rows)
    counters = branches.put_published(
        txn,
        state,
        published,
        vbucket.complete_start,
        vbucket.manifest_key_at(seqno),
        moment,
        branches.BoundaryCounters(vbucket.counters.ordinal, row_bytes),
    )
    txn.put_state_row(state.vbid, records.StateRow.of(published))
    return Plan(len(rows), published, counters, manifest_count, has_rows_above=vbucket.flushed_seqno > seqno)


def _put_key_rows(txn: Transaction, vbucket: PendingVbucket, rows: Rows) -> int:
    """Write the missing key rows of the complete snapshot. Return the bytes of rows since the last boundary."""
    vbid, until = vbucket.vbid, vbucket.indexed_until
    complete = rows if vbucket.complete_count == len(rows) else rows[: vbucket.complete_count]
    key_rows = records.key_rows(complete)
    row_bytes = vbucket.indexed_bytes + sum([len(frame) for _, frame in complete])
    if vbucket.unindexed_count and vbucket.indexed_seqno < until:
        earlier, _, _, earlier_bytes = index.key_rows_of(txn, vbid, vbucket.unindexed(until), vbucket.unindexed_count)
        key_rows = earlier + key_rows
        row_bytes += earlier_bytes
    key_rows.sort(key=index.BY_KEY)
    index.put_key_rows(txn, vbid, key_rows)
    return row_bytes


def _staged_on_disk(vbucket: PendingVbucket, row_count: int) -> tuple[Seqno, SnapshotRange | None]:
    """Return the staged seqno and the open snapshot as they are on disk after this commit."""
    if row_count == len(vbucket.rows):
        return Seqno(vbucket.staged_seqno), vbucket.open_snapshot
    if vbucket.complete_seqno is not None and vbucket.complete_seqno >= vbucket.flushed_seqno:
        return Seqno(vbucket.complete_seqno), None
    # Earlier commits may have written rows of the open snapshot; an earlier, complete snapshot may lack key rows.
    is_published = vbucket.flushed_seqno == vbucket.base.staging_published_seqno
    return Seqno(vbucket.flushed_seqno), None if is_published else vbucket.open_snapshot
