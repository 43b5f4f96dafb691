"""The writes of a commit to one vbucket.

Knows the trees and `PendingVbucket`; never fences, full maps or failed commits (`owner`). Invariants: rows, key rows,
`state`, `pub`, boundary and manifests of a vbucket are written in one transaction; a vbucket becomes visible at a new
published_seqno only in a transaction after which every row up to it has its key row; `put` changes nothing in memory,
so that it can run again when the map was full.
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
    """Write everything that is complete, and with `flush_open` also the rows of the open snapshot."""
    state = vbucket.base
    count = len(vbucket.rows) if flush_open else vbucket.complete_count
    rows = vbucket.rows if count == len(vbucket.rows) else vbucket.rows[:count]
    if rows:
        consumed, added = txn.cursor(keys.rows_db(state.vbid)).putmulti(rows, append=True)
        if consumed != added or consumed != len(rows):
            raise SeqnoOrder(f"of {len(rows)} rows {added} rise in seqno", path=txn.path, vbid=state.vbid)
    counters = vbucket.counters
    publish = vbucket.can_publish
    if publish:
        row_bytes = _put_key_rows(txn, vbucket, rows)
        counters = branches.BoundaryCounters(counters.ordinal, counters.row_bytes + row_bytes)
    manifest_count = 0
    for seqno, change in vbucket.manifest_changes:
        if flush_open or seqno <= (vbucket.complete_seqno or 0):
            manifest_count += 1
            key = keys.MANIFEST_KEY.pack(state.vbid, state.staging_branch, seqno)
            txn.put(keys.DB_MANIFEST, key, records.encode_manifest(change))
    complete_seqno = vbucket.complete_seqno if publish else None
    if complete_seqno is not None:
        counters = branches.put_published(
            txn,
            state,
            state.staging_branch,
            complete_seqno,
            vbucket.complete_start,
            vbucket.manifest_key_at(complete_seqno),
            moment,
            counters,
        )
    missing_seqno = _missing_seqno(vbucket) if publish else state.missing_seqno
    _put_state(txn, vbucket, len(rows), publish, moment.wall_ms, missing_seqno)
    has_rows_above = publish and vbucket.flushed_seqno > (vbucket.complete_seqno or 0)
    return Plan(len(rows), publish, moment.wall_ms, counters, manifest_count, missing_seqno, has_rows_above)


def _put_key_rows(txn: Transaction, vbucket: PendingVbucket, rows: Rows) -> int:
    """Write the key rows that are missing up to the complete end; returns the bytes of the rows since the last one."""
    vbid, until = vbucket.vbid, vbucket.indexed_until
    complete = rows if vbucket.complete_count == len(rows) else rows[: vbucket.complete_count]
    key_rows = records.key_rows(complete)
    row_bytes = vbucket.indexed_bytes + sum([len(frame) for _, frame in complete])
    if vbucket.unindexed_count and vbucket.indexed_seqno < until:
        earlier, _, _, earlier_bytes = index.key_rows_between(
            txn, vbid, vbucket.prefix, vbucket.indexed_seqno, until, vbucket.unindexed_count
        )
        key_rows = earlier + key_rows
        row_bytes += earlier_bytes
    key_rows.sort(key=index.BY_KEY)
    index.put_key_rows(txn, vbid, key_rows)
    return row_bytes


def _staged_on_disk(vbucket: PendingVbucket, row_count: int) -> tuple[int, SnapshotRange | None]:
    """Return the staged seqno and the open snapshot after this commit; rows left in memory do not count."""
    if row_count == len(vbucket.rows):
        return vbucket.staged_seqno, vbucket.open_snapshot
    if vbucket.complete_seqno is not None and vbucket.complete_seqno >= vbucket.flushed_seqno:
        return vbucket.complete_seqno, None
    # Rows of the open snapshot are on disk, perhaps while a complete one before it waits for its key rows.
    is_published = vbucket.flushed_seqno == vbucket.base.staging_published_seqno
    return vbucket.flushed_seqno, None if is_published else vbucket.open_snapshot


def _put_state(
    txn: Transaction, vbucket: PendingVbucket, row_count: int, publish: bool, now_ms: int, missing_seqno: int
) -> None:
    state = vbucket.base
    staged, open_snapshot = _staged_on_disk(vbucket, row_count)
    published = indexed = state.staging_published_seqno  # a crash repeats the key rows of a job
    if publish and vbucket.complete_seqno is not None:
        published = indexed = Seqno(vbucket.complete_seqno)
    rolled_back = publish and state.rollback_deferred
    # A log on disk without anything of its history says that the source has nothing: not before that is known.
    log = state.failover_log if staged or published or publish or vbucket.known_empty else FailoverLog()
    row = records.StateRow(  # without names: they would nearly double its cost, once for each vbucket of a commit
        state.staging_branch,
        staged,
        published,
        indexed,
        open_snapshot,
        log,
        state.source_purge_seqno,
        state.rollback_count + rolled_back,
        now_ms if rolled_back else state.last_rollback_ms,
        state.stream_filter,
        missing_seqno,
    )
    txn.put_state_row(state.vbid, row)


def _missing_seqno(vbucket: PendingVbucket) -> int:
    """Return the missing_seqno after a publish: the first snapshot bounds what the source left out."""
    state = vbucket.base
    if state.staging_published_seqno or vbucket.complete_seqno is None:
        return state.missing_seqno
    return min(state.missing_seqno, vbucket.complete_seqno)
