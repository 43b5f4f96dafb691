"""Reads the branch records of a vbucket, publishes, and opens branches for rollbacks, abandoned rows and resyncs.

Functions that write use the writer's transaction, so the trees (LMDB databases) `branch`, `pub`, `state` and `rollback`
and the boundary row change together. After a rollback, the new branch's chain does not see the retracted rows; the
purger removes them later. Branch numbers rise and are never reused.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from storage.env.transaction import Transaction
from storage.errors import CorruptedError, NoSuchBoundary, StorageError
from storage.format import keys, records
from storage.history import chain, manifests
from storage.model import (
    SEQNO_MAX,
    Boundary,
    Branch,
    BranchReason,
    FailoverLog,
    Manifest,
    Rollback,
    Seqno,
    VbucketState,
    Vbuuid,
)

HISTORY_IDS_MAX = 512
"""Maximum number of history ids of a branch. Each writer that publishes on the branch adds an id, and so does a merge.
The oldest ids are dropped, and tokens with these ids are refused.
"""


class Moment(NamedTuple):
    wall_ms: int
    """Milliseconds since 1970, for people and for reads as of a time."""
    history_ms: int
    """Milliseconds of the `HistoryClock`, by which the purger computes ages."""


NEVER = Moment(0, 0)


class BoundaryCounters(NamedTuple):
    """Totals of a chain up to a boundary, stored in the boundary's row."""

    ordinal: int = 0
    """Number of boundaries of the chain so far."""
    row_bytes: int = 0
    """Bytes of all rows of the chain so far."""


class PurgeRow(NamedTuple):
    """The purger's position in a vbucket. Before the first purge, all fields but `chain_id` are 0."""

    purged_seqno: int = 0
    """Seqno up to which the purger has visited the rows."""
    local_purge_seqno: int = 0
    """Seqno up to which the purger may have removed tombstones and manifests."""
    chain_id: int = 0
    """A random number. When it changes, readers load their remembered chains again."""
    resyncs_gone: int = 0
    """Number of published resyncs whose branch records were removed."""


Known = dict[int, records.BranchRow]
"""The record of every branch of a vbucket, by branch number, rising."""


def purge_row(txn: Transaction, vbid: int) -> PurgeRow:
    data = txn.get(keys.DB_PURGE, keys.VBID_KEY.pack(vbid))
    if data is None:
        return PurgeRow()
    if len(data) != keys.PURGE.size:
        raise CorruptedError("the purge record is damaged", path=txn.path, vbid=vbid)
    return PurgeRow(*keys.PURGE.unpack(data))


def change_purge_row(txn: Transaction, vbid: int, **fields: int) -> None:
    row = purge_row(txn, vbid)._replace(**fields)
    txn.put(keys.DB_PURGE, keys.VBID_KEY.pack(vbid), keys.PURGE.pack(*row))


def draw_chain_id(txn: Transaction, vbid: int, **fields: int) -> None:
    """Make readers load the vbucket's chains again."""
    change_purge_row(txn, vbid, chain_id=secrets.randbits(64) or 1, **fields)


def load(
    txn: Transaction, vbid: int, known: Mapping[manifests.Key, Manifest] | None = None
) -> tuple[VbucketState, manifests.StagingRows]:
    """Return a vbucket's state, and the `manifest` rows of its staging branch. `known`: manifests read before."""
    pub, row = txn.pub(vbid), txn.state_row(vbid)
    staging, staged, published = row.staging_branch, row.staged_seqno, row.staging_published_seqno
    serves_staging = staging == pub.branch
    if staged < published or (serves_staging and published != pub.seqno):
        raise CorruptedError(
            f"positions contradict each other (published {pub.seqno}, staged {staged})", path=txn.path, vbid=vbid
        )
    key = pub.manifest_key
    if not serves_staging:  # `published` is the boundary of a deferred rollback, or 0 during a resync
        key = manifests.key_on(txn, vbid, chain.load(txn, vbid, staging, published) if published else ())
    manifest, depth = manifests.read(txn, vbid, key, known)
    above = list(manifests.between(txn, vbid, staging, published, staged))
    for _, change in above:
        depth = 1 if change.whole else depth + 1
    if above:
        manifest = manifest.changed(*(change for _, change in above))
    stored = row._asdict()
    del stored["indexed_seqno"]
    state = VbucketState(
        vbid=vbid,
        branch=pub.branch,
        published_seqno=pub.seqno,
        history_floor_seqno=pub.floor_seqno,
        local_purge_seqno=Seqno(purge_row(txn, vbid).local_purge_seqno),
        manifest=manifest,
        **stored,
    )
    return state, manifests.StagingRows(key, [at for at, _ in above], depth)


def counters_at_end(txn: Transaction, state: VbucketState) -> BoundaryCounters:
    boundary = chain.boundary_at(txn, state.vbid, state.staging_branch, state.staging_published_seqno)
    return BoundaryCounters() if boundary is None else BoundaryCounters(boundary.ordinal, boundary.row_bytes)


def newest_moment(txn: Transaction, vbid: int) -> Moment:
    """Return when the newest boundary was published or readers first saw the served branch, whichever is later."""
    pub = txn.pub(vbid)
    served = get_branch(txn, vbid, pub.branch)
    opened = Moment(served.time_ms, served.history_ms)
    boundary = chain.boundary_at(txn, vbid, pub.branch, pub.seqno)
    if boundary is None:
        return opened
    return max(opened, Moment(boundary.time_ms, boundary.history_ms), key=attrgetter("history_ms"))


def all_branches(txn: Transaction, vbid: int) -> Known:
    stored = txn.of_vbucket(keys.DB_BRANCH, vbid)
    return {keys.BRANCH_KEY.unpack(key)[1]: records.decode_branch(value) for key, value in stored}


def get_branch(txn: Transaction, vbid: int, branch: int) -> records.BranchRow:
    return records.decode_branch(txn.get(keys.DB_BRANCH, keys.BRANCH_KEY.pack(vbid, branch)))


def put_branch(txn: Transaction, vbid: int, branch: int, row: records.BranchRow) -> None:
    txn.put(keys.DB_BRANCH, keys.BRANCH_KEY.pack(vbid, branch), records.encode_branch(row))


def change_branch(txn: Transaction, vbid: int, branch: int, **fields: Any) -> None:
    put_branch(txn, vbid, branch, get_branch(txn, vbid, branch)._replace(**fields))


def resyncs(txn: Transaction, vbid: int) -> tuple[tuple[int, ...], int]:
    """Return the times of published resyncs whose copies are still stored (ms since 1970), and the number of all
    published resyncs.
    """
    rows = all_branches(txn, vbid).values()
    moments = tuple(row.time_ms for row in rows if row.reason == BranchReason.RESYNC and row.time_ms)
    return moments, purge_row(txn, vbid).resyncs_gone + len(moments)


def forget(txn: Transaction, vbid: int, numbers: list[int]) -> None:
    """Remove the records of branches without rows: their entries in `branch`, `span` and `manifest`.

    `numbers` never contains the newest branch, so no branch number is used again.
    """
    resyncs_gone = purge_row(txn, vbid).resyncs_gone
    for number in numbers:
        row, prefix = get_branch(txn, vbid, number), keys.BRANCH_KEY.pack(vbid, number)
        resyncs_gone += row.reason == BranchReason.RESYNC and row.time_ms > 0
        txn.delete(keys.DB_BRANCH, prefix)
        for tree in (keys.DB_MANIFEST, keys.DB_SPAN):
            cursor = txn.cursor(tree)
            there = cursor.set_range(prefix)
            while there and cursor.key()[: len(prefix)] == prefix:
                there = cursor.delete()
    draw_chain_id(txn, vbid, resyncs_gone=resyncs_gone)


def with_history(history_ids: records.HistoryIds, history_id: int, above_seqno: int) -> records.HistoryIds:
    """Return the history ids of a branch with a new id for positions above `above_seqno`."""
    kept = [*history_ids[:1], *(each for each in history_ids[1:] if each[1] < above_seqno)]
    return (*kept, (history_id, above_seqno))[-HISTORY_IDS_MAX:]


def begin_history(txn: Transaction, vbid: int) -> None:
    """Begin a new history id for positions above the published seqno. Each new owner calls this.

    A power cut, an older copy of the file or a restored volume may have undone commits that readers saw. With the new
    id, a token of an undone commit differs from the token of a later commit at the same seqno. A new chain id makes
    open readers load their chains again.
    """
    history_id = txn.environment.history_id
    pub = txn.pub(vbid)
    staging = txn.state_row(vbid).staging_branch
    history_ids = get_branch(txn, vbid, pub.branch).history_ids
    change_branch(txn, vbid, pub.branch, history_ids=with_history(history_ids, history_id, pub.seqno))
    if staging != pub.branch:  # no older id of an unpublished branch is valid
        change_branch(txn, vbid, staging, history_ids=((history_id, 0),))
    draw_chain_id(txn, vbid)


# -- publishing and new branches --------------------------------------------------------------------------------------


def put_published(
    txn: Transaction,
    before: VbucketState,
    after: VbucketState,
    snap_start_seqno: int,
    manifest_key: manifests.Key,
    now: Moment,
    counters: BoundaryCounters,
) -> BoundaryCounters:
    """Publish the staging branch up to `after.published_seqno`, and write the boundary there. Return the boundary's
    counters.

    The first publish of a resync or deferred rollback also sets the branch's time: the moment from which readers see
    the branch. After a resync the purger starts again from seqno 0.
    """
    vbid, branch, seqno = after.vbid, after.branch, after.published_seqno
    if branch != before.branch:
        row = get_branch(txn, vbid, branch)
        put_branch(txn, vbid, branch, row._replace(time_ms=now.wall_ms, history_ms=now.history_ms))
        if before.rollback_deferred:
            _put_rollback(txn, before, branch, row.base_seqno, row.vbuuid, now.wall_ms)
        else:
            change_purge_row(txn, vbid, purged_seqno=0, local_purge_seqno=0)
    txn.put_pub(vbid, records.Pub(branch, seqno, after.history_floor_seqno, manifest_key))
    previous = before.staging_published_seqno
    if seqno == previous:  # that boundary is stored, perhaps on the parent; seqno 0 needs none
        return counters
    counters = BoundaryCounters(counters.ordinal + 1, counters.row_bytes)
    start, vbuuid = min(snap_start_seqno, seqno), before.failover_log.vbuuid_at(seqno)
    _put_boundary(txn, vbid, branch, seqno, start, vbuuid, *now, *counters)
    chain.put_span(txn, vbid, branch, seqno, previous)
    return counters


def _put_boundary(txn: Transaction, vbid: int, branch: int, seqno: int, *fields: int) -> None:
    key = keys.ROW.pack(branch, seqno) + keys.BOUNDARY_SUFFIX
    txn.put(keys.rows_db(vbid), key, keys.BOUNDARY.pack(*fields))


def _open_branch(
    txn: Transaction, vbid: int, at: Boundary | None, vbuuid: int, reason: int, now: Moment = NEVER
) -> Branch:
    """Open a branch that begins at a boundary (None: at seqno 0). Its parent is the branch with that boundary, so a
    branch on which nothing was published is never a parent.
    """
    newest = txn.newest_branch(vbid)
    if not newest:
        raise CorruptedError("the vbucket has no branch", path=txn.path, vbid=vbid)
    parent, base_seqno = (None, 0) if at is None else (at.branch, at.seqno)
    history_ids = ((txn.environment.history_id, base_seqno),)
    row = records.BranchRow(parent, base_seqno, vbuuid, reason, now.wall_ms, SEQNO_MAX, now.history_ms, history_ids)
    put_branch(txn, vbid, newest + 1, row)
    return Branch(newest + 1)


def _put_state(txn: Transaction, state: VbucketState, branch: Branch, seqno: Seqno, **changes: Any) -> None:
    """Write `state` with `branch` as the staging branch, published up to `seqno`, without staged rows above it."""
    at = state._replace(
        staging_branch=branch,
        staged_seqno=seqno,
        staging_published_seqno=seqno,
        open_snapshot=None,
        **changes,
    )
    txn.put_state_row(state.vbid, records.StateRow.of(at))


def check_settled(state: VbucketState, path: str) -> None:
    """Raise StorageError during a resync or a deferred rollback: readers see another branch than the writer writes."""
    if state.has_served_log:
        return
    if state.rollback_deferred:
        what = "readers still see the history before a failover, until all copies have persisted the new one"
        hint = "wait until they have, then try again"
    else:
        what, hint = "it is being resynced", "wait until the new copy is published, then try again"
    raise StorageError(what, path=path, vbid=state.vbid, hint=hint)


def rollback_boundary(txn: Transaction, state: VbucketState, to_seqno: int) -> Boundary:
    """Return the boundary that an operator's rollback would go to.

    Raises NoSuchBoundary if `to_seqno` is below the floor, StorageError during a resync or deferred rollback.
    """
    check_settled(state, txn.path)
    boundary = chain.boundary_at(txn, state.vbid, state.branch, min(to_seqno, state.published_seqno))
    if boundary is None or boundary.seqno < state.history_floor_seqno:
        raise NoSuchBoundary(
            f"nothing is kept at or below seqno {to_seqno}; history begins at seqno {state.history_floor_seqno}",
            path=txn.path,
            vbid=state.vbid,
            hint="give a later seqno; `dcp-mirror state` shows the kept boundaries",
        )
    return boundary


def roll_back(txn: Transaction, state: VbucketState, boundary: Boundary, now: Moment) -> None:
    """Open a branch at a kept boundary of the served chain, and serve this branch.

    During a resync `state.failover_log` is the log of the new copy, which may share no history with the served copy.
    Then the branch gets a log with the boundary's vbuuid alone.
    """
    vbid, at, floor_seqno = state.vbid, boundary.seqno, state.history_floor_seqno
    other_copy = not state.has_served_log and not state.rollback_deferred
    own_log = FailoverLog() if other_copy else state.failover_log
    log = own_log.pruned(at, boundary.vbuuid)
    vbuuid = log.vbuuid_at(at)
    manifest_key = manifests.key_on(txn, vbid, chain.load(txn, vbid, state.branch, at))
    branch = _open_branch(txn, vbid, boundary, vbuuid, BranchReason.ROLLBACK, now)
    txn.put_pub(vbid, records.Pub(branch, at, min(floor_seqno, at), manifest_key))
    _put_rollback(txn, state, branch, at, vbuuid, now.wall_ms)
    # A resync overwrites the served copy's `stream_filter` and `missing_seqno`. The lost `missing_seqno` was at most
    # the floor.
    _put_state(
        txn,
        state,
        branch,
        at,
        failover_log=log,
        rollback_count=state.rollback_count + 1,
        last_rollback_ms=now.wall_ms,
        stream_filter="" if other_copy and state.stream_filter is not None else state.stream_filter,
        missing_seqno=floor_seqno if other_copy else state.missing_seqno,
    )


def _put_rollback(
    txn: Transaction,
    state: VbucketState,
    branch: Branch,
    to_seqno: int,
    to_vbuuid: int,
    now_ms: int,
) -> None:
    left = _published_boundary(txn, state, state.published_seqno)
    vbuuids = left.vbuuid, Vbuuid(to_vbuuid)
    rollback = Rollback(state.vbid, left.branch, left.seqno, branch, Seqno(to_seqno), *vbuuids, now_ms)
    key = keys.ROLLBACK_KEY.pack(state.vbid, state.rollback_count + 1)
    txn.put(keys.DB_ROLLBACK, key, records.encode_rollback(rollback))


def defer_rollback(txn: Transaction, state: VbucketState, boundary: Boundary) -> None:
    """Open a branch at a kept boundary of the served chain, and make it the staging branch.

    Readers stay on the served branch until the first publish of the new branch (`put_published`).
    """
    log = state.failover_log.pruned(boundary.seqno, boundary.vbuuid)
    vbuuid = log.vbuuid_at(boundary.seqno)
    branch = _open_branch(txn, state.vbid, boundary, vbuuid, BranchReason.DEFERRED_ROLLBACK)
    _put_state(txn, state, branch, boundary.seqno, failover_log=log)


def abandon(txn: Transaction, state: VbucketState, now: Moment) -> None:
    """Abandon the staged rows: open a branch at the published seqno, so that no chain sees these rows. During a
    resync or deferred rollback, begin the resync or rollback again instead.
    """
    vbid, base = state.vbid, state.published_seqno
    if state.rollback_deferred:
        defer_rollback(txn, state, _published_boundary(txn, state, state.staging_published_seqno))
        return
    if not state.has_served_log:
        begin_resync(txn, state)
        return
    boundary = _published_boundary(txn, state, base) if base else None
    log = state.failover_log if base else FailoverLog()  # at seqno 0 a log means that the source's vbucket is empty
    branch = _open_branch(txn, vbid, boundary, log.vbuuid_at(base), BranchReason.ABANDONED, now)
    txn.put_pub(vbid, txn.pub(vbid)._replace(branch=branch))
    _put_state(txn, state, branch, base, failover_log=log, missing_seqno=state.missing_seqno if base else 0)


def _published_boundary(txn: Transaction, state: VbucketState, seqno: int) -> Boundary:
    boundary = chain.boundary_at(txn, state.vbid, state.branch, seqno)
    if boundary is None or boundary.seqno != seqno:
        raise CorruptedError(f"published seqno {seqno} has no boundary", path=txn.path, vbid=state.vbid)
    return boundary


def set_unavailable(txn: Transaction, vbid: int, unavailable: bool) -> None:
    pub = txn.pub(vbid)
    if pub.is_stale and pub.is_unavailable != unavailable:
        txn.put_pub(vbid, pub._replace(flags=pub.flags ^ keys.PUB_UNAVAILABLE))


def begin_resync(txn: Transaction, state: VbucketState, *, unavailable: bool = False) -> None:
    """Open a staging branch without a parent, next to the served copy. The branch has time 0 until published."""
    branch = _open_branch(txn, state.vbid, None, 0, BranchReason.RESYNC)
    pub = txn.pub(state.vbid)
    flags = keys.PUB_STALE | (keys.PUB_UNAVAILABLE if unavailable else 0)
    txn.put_pub(state.vbid, pub._replace(flags=pub.flags | flags))
    fresh = {"source_purge_seqno": Seqno(0), "stream_filter": None, "missing_seqno": 0}
    _put_state(txn, state, branch, Seqno(0), failover_log=FailoverLog(), **fresh)
