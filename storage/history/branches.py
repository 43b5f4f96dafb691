"""Opening branches: rollback, abandoning staged rows, resync; and reading a vbucket's state back.

Each function works inside one write transaction given by the writer and leaves the vbucket whole: `branch`, `pub`,
`state`, `rollback` and the boundary row change together or not at all. Rows of the branch that is left are not touched;
they are hidden by the cut and removed later by the purger. Branch numbers rise and are never reused.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

from storage.env.transaction import Transaction
from storage.errors import CorruptedError
from storage.format import keys, records
from storage.history import chain
from storage.model import (
    Boundary,
    Branch,
    BranchReason,
    FailoverLog,
    Manifest,
    ManifestChange,
    Seqno,
    VbucketState,
    Vbuuid,
)

HISTORY_IDS_MAX = 512
"""Histories of one branch that are kept apart: one for each owner that published on it. Positions of older ones are
refused. A service that cron starts each minute is an owner each time; a row with all of them takes 10 KiB."""


MANIFESTS_MAX = 8
_manifests: dict[int, Manifest] = {}
"""Manifests that were read lately, by uid. Vbuckets with equal collections share one: 1,000 collections in each of
1,024 vbuckets are a million objects, and looking for cycles among these takes 0.2 s."""


class Moment(NamedTuple):
    wall_ms: int
    """Milliseconds since 1970, for people and for reads as of a time."""
    history_ms: int
    """`history_clock`, for what depends on age."""


class BoundaryCounters(NamedTuple):
    """Sums over the boundaries of a chain, which spare a walk."""

    ordinal: int
    """Of the newest boundary; 0: there is none yet."""
    row_bytes: int
    """Bytes of all rows of the chain so far."""


class PurgeRow(NamedTuple):
    purged_seqno: int = 0
    """Up to here the purger has looked."""
    local_purge_seqno: int = 0
    """The newest tombstone that it took."""
    chain_id: int = 0
    """Drawn at random whenever branches were merged or forgotten: what was known of chains is void."""
    resyncs_gone: int = 0
    """Resyncs that readers saw and whose branches were forgotten."""


Known = dict[int, records.BranchRow]
"""Every branch of a vbucket by number, rising."""

ManifestKey = tuple[int, int]
"""(branch, seqno) of a manifest row; (0, 0): the initial manifest, for which there is no row."""


@dataclass(frozen=True, slots=True)
class LoadedVbucket:
    state: VbucketState
    indexed_seqno: int
    manifest_key: ManifestKey
    manifest_keys: list[ManifestKey]
    """Of the manifests of the staging branch above what is published, rising."""
    manifest_depth: int
    """The number of rows that the manifest of the state is made of."""
    counters: BoundaryCounters
    """Of the newest published boundary of the staging branch."""


def load(txn: Transaction, vbid: int, known: Mapping[ManifestKey, Manifest] | None = None) -> LoadedVbucket:
    """Read the state of a vbucket. `known`: manifests that the caller remembers."""
    pub = txn.pub(vbid)
    branch, published = pub.branch, pub.seqno
    row = txn.state_row(vbid)
    staging, staged, staging_published = row.staging_branch, row.staged_seqno, row.staging_published_seqno
    if staged < staging_published or (staging == branch and staging_published != published):
        raise CorruptedError(
            f"positions contradict each other (published {published}, staged {staged})",
            path=txn.path,
            vbid=vbid,
        )
    manifest_key = pub.manifest_key
    if staging != branch and staging_published:  # a deferred rollback: what holds where it went back to
        links = chain.load(txn, vbid, staging, staging_published)
        manifest_key = manifest_key_on(txn, vbid, links)
    fresh = staging != branch and not staging_published
    if fresh:
        manifest_key = (0, 0)
    manifest, depth = read_manifest(txn, vbid, manifest_key, known)
    above = []
    changes = []
    cursor = txn.cursor(keys.DB_MANIFEST)
    if cursor.set_range(keys.MANIFEST_KEY.pack(vbid, staging, staging_published + 1)):
        for key, value in cursor.iternext():
            row_vbid, row_branch, row_seqno = keys.MANIFEST_KEY.unpack(key)
            if (row_vbid, row_branch) != (vbid, staging) or row_seqno > staged:
                break
            change = records.decode_manifest(value)
            above.append((row_branch, row_seqno))
            changes.append(change)
            depth = 1 if change.whole else depth + 1
    if changes:
        manifest = manifest.changed(*changes)
    state = VbucketState(
        vbid=vbid,
        branch=Branch(branch),
        published_seqno=Seqno(published),
        history_floor_seqno=Seqno(pub.floor_seqno),
        staging_branch=Branch(staging),
        staged_seqno=Seqno(staged),
        staging_published_seqno=Seqno(staging_published),
        open_snapshot=row.open_snapshot,
        failover_log=row.failover_log,
        source_purge_seqno=Seqno(row.source_purge_seqno),
        local_purge_seqno=Seqno(purge_row(txn, vbid).local_purge_seqno),
        manifest=manifest,
        rollback_count=row.rollback_count,
        last_rollback_ms=row.last_rollback_ms,
        stream_filter=row.stream_filter,
        missing_seqno=row.missing_seqno,
    )
    counters = BoundaryCounters(0, 0)
    if staging_published:
        links = chain.load(txn, vbid, staging, staging_published)
        boundary = chain.newest_boundary(txn, vbid, links, staging_published)
        if boundary is not None:
            counters = BoundaryCounters(boundary.ordinal, boundary.row_bytes)
    return LoadedVbucket(
        state=state,
        indexed_seqno=row.indexed_seqno,
        manifest_key=manifest_key,
        manifest_keys=above,
        manifest_depth=depth,
        counters=counters,
    )


def purge_row(txn: Transaction, vbid: int) -> PurgeRow:
    """Return how far the purger is; zeros before the first purge."""
    data = txn.get(keys.DB_PURGE, keys.VBID_KEY.pack(vbid))
    if data is None:
        return PurgeRow()
    if len(data) != keys.PURGE.size:
        raise CorruptedError("the purge record is damaged", path=txn.path, vbid=vbid)
    return PurgeRow(*keys.PURGE.unpack(data))


def draw_chain_id(txn: Transaction, vbid: int) -> None:
    """Have readers read the vbucket's chains again."""
    row = purge_row(txn, vbid)
    put_purge_row(txn, vbid, row._replace(chain_id=secrets.randbits(64) or 1))


def purge_state(txn: Transaction, vbid: int) -> tuple[int, int]:
    return txn.pub(vbid).floor_seqno, purge_row(txn, vbid).local_purge_seqno


def put_purge_row(txn: Transaction, vbid: int, row: PurgeRow) -> None:
    txn.put(keys.DB_PURGE, keys.VBID_KEY.pack(vbid), keys.PURGE.pack(*row))


def newest_moment(txn: Transaction, vbid: int) -> Moment:
    """Return when the newest published boundary or the served branch was written; zeros if nothing was."""
    pub = txn.pub(vbid)
    served = get_branch(txn, vbid, pub.branch)
    opened = Moment(served.time_ms, served.history_ms)
    links = chain.load(txn, vbid, pub.branch, pub.seqno)
    boundary = chain.newest_boundary(txn, vbid, links, pub.seqno)
    if boundary is None:
        return opened
    return max(opened, Moment(boundary.time_ms, boundary.history_ms), key=attrgetter("history_ms"))


def all_branches(txn: Transaction, vbid: int) -> Known:
    stored = txn.of_vbucket(keys.DB_BRANCH, vbid)
    return {keys.BRANCH_KEY.unpack(key)[1]: records.decode_branch(value) for key, value in stored}


def put_branch(txn: Transaction, vbid: int, branch: int, row: records.BranchRow) -> None:
    txn.put(keys.DB_BRANCH, keys.BRANCH_KEY.pack(vbid, branch), records.encode_branch(row))


def get_branch(txn: Transaction, vbid: int, branch: int) -> records.BranchRow:
    return records.decode_branch(txn.get(keys.DB_BRANCH, keys.BRANCH_KEY.pack(vbid, branch)))


def resyncs(txn: Transaction, vbid: int) -> tuple[tuple[int, ...], int]:
    """Return when readers first saw each resynced copy whose branch is left, and how many resyncs they ever saw."""
    rows = all_branches(txn, vbid).values()
    moments = tuple(row.time_ms for row in rows if row.reason == BranchReason.RESYNC and row.time_ms)
    return moments, purge_row(txn, vbid).resyncs_gone + len(moments)


def forget(txn: Transaction, vbid: int, numbers: list[int]) -> None:
    """Remove what is left of branches without rows: their rows in `branch`, copies of boundaries, leaps, manifests.

    Their numbers are not used again: the newest branch is never one of them.
    """
    resyncs = 0
    for number in numbers:
        row = get_branch(txn, vbid, number)
        resyncs += row.reason == BranchReason.RESYNC and row.time_ms > 0
        txn.delete(keys.rows_db(vbid), keys.ROW.pack(number, row.base_seqno) + keys.BOUNDARY_SUFFIX)
        txn.delete(keys.DB_BRANCH, keys.BRANCH_KEY.pack(vbid, number))
        prefix = keys.BRANCH_KEY.pack(vbid, number)
        for tree in (keys.DB_MANIFEST, keys.DB_SPAN):
            cursor = txn.cursor(tree)
            there = cursor.set_range(prefix)
            while there and cursor.key()[: len(prefix)] == prefix:
                there = cursor.delete()
    purged = purge_row(txn, vbid)
    put_purge_row(txn, vbid, purged._replace(resyncs_gone=purged.resyncs_gone + resyncs))
    draw_chain_id(txn, vbid)


def move_manifests(txn: Transaction, vbid: int, branch: int, parent: int, base_seqno: int, to_seqno: int) -> None:
    """Make the manifests of a branch up to `to_seqno` its parent's (`merge`). Those of the parent above the base of the
    branch are of a lost history.
    """
    cursor = txn.cursor(keys.DB_MANIFEST)
    there = cursor.set_range(keys.MANIFEST_KEY.pack(vbid, parent, base_seqno + 1))
    while there and cursor.key()[:6] == keys.BRANCH_KEY.pack(vbid, parent):
        there = cursor.delete()
    moved = []
    there = cursor.set_range(keys.BRANCH_KEY.pack(vbid, branch))
    while there and keys.MANIFEST_KEY.pack(vbid, branch, 0) <= cursor.key() <= keys.MANIFEST_KEY.pack(
        vbid, branch, to_seqno
    ):
        moved.append((keys.BRANCH_KEY.pack(vbid, parent) + cursor.key()[6:], cursor.value()))
        there = cursor.delete()
    for key, value in moved:
        txn.put(keys.DB_MANIFEST, key, value)
    pub = txn.pub(vbid)
    if pub.manifest_branch == branch and pub.manifest_seqno <= to_seqno:
        txn.put_pub(vbid, pub._replace(manifest_branch=parent))


def read_manifest(
    txn: Transaction,
    vbid: int,
    key: ManifestKey,
    known: Mapping[ManifestKey, Manifest] | None = None,
) -> tuple[Manifest, int]:
    """Return the manifest as of a row, and the number of rows that it is made of: that one and those before it on its
    chain, down to a whole one or to one that the caller remembers.
    """
    if key == (0, 0):
        return Manifest.initial(), 0
    known = {} if known is None else known
    if (remembered := known.get(key)) is not None:
        return remembered, 0
    base = Manifest.initial()
    changes: list[ManifestChange] = []
    for at, value in manifest_rows(txn, vbid, chain.load(txn, vbid, *key)):
        if not changes and at != key:
            break
        if (remembered := known.get(at)) is not None:
            base = remembered
            break
        changes.append(records.decode_manifest(value))
        if changes[-1].whole:
            break
    if not changes:
        raise CorruptedError(
            f"the manifest record {key[0]}:{key[1]} is missing",
            path=txn.path,
            vbid=vbid,
            hint="run `dcp-mirror check`",
        )
    changes.reverse()
    return _shared(base.changed(*changes)), len(changes)


def _shared(manifest: Manifest) -> Manifest:
    known = _manifests.get(manifest.uid)
    if known is not None and known == manifest:
        return known
    if len(_manifests) >= MANIFESTS_MAX:
        _manifests.clear()
    _manifests[manifest.uid] = manifest
    return manifest


def manifest_rows(txn: Transaction, vbid: int, links: chain.Chain) -> Iterator[tuple[ManifestKey, bytes]]:
    """Generate the manifest rows that a chain sees, newest first."""
    cursor = txn.cursor(keys.DB_MANIFEST)
    for link in links:
        limit = keys.MANIFEST_KEY.pack(vbid, link.branch, link.cut)
        found = cursor.prev() if cursor.set_range(limit + b"\x00") else cursor.last()
        while found and cursor.key()[:6] == limit[:6]:
            _, branch, seqno = keys.MANIFEST_KEY.unpack(cursor.key())
            yield (branch, seqno), cursor.value()
            found = cursor.prev()


def forget_manifests_before(txn: Transaction, vbid: int, links: chain.Chain, key: ManifestKey) -> bool:
    """Remove the manifest rows before a row that is a whole manifest: no later read needs them. Return False if it is
    not whole.
    """
    data = txn.get(keys.DB_MANIFEST, keys.MANIFEST_KEY.pack(vbid, *key))
    if data is None or not records.decode_manifest(data).whole:
        return False
    older = [at for at, _ in manifest_rows(txn, vbid, chain.recut(links, key[1] - 1))]
    for at in older:
        txn.delete(keys.DB_MANIFEST, keys.MANIFEST_KEY.pack(vbid, *at))
    return bool(older)


def manifest_key_on(txn: Transaction, vbid: int, links: chain.Chain) -> ManifestKey:
    return next((key for key, _ in manifest_rows(txn, vbid, links)), (0, 0))


def put_published(
    txn: Transaction,
    state: VbucketState,
    branch: int,
    seqno: int,
    snap_start_seqno: int,
    manifest_key: ManifestKey,
    now: Moment,
    counters: BoundaryCounters,
) -> BoundaryCounters:
    """Make `branch` up to `seqno` what readers see, and keep that boundary.

    The branch of a resync or a deferred rollback gets its time now, by which the purger knows that
    readers have seen it, and since when; where it has no parent the purger then starts on it from its beginning.
    """
    if branch != state.branch:
        row = get_branch(txn, state.vbid, branch)
        put_branch(txn, state.vbid, branch, row._replace(time_ms=now.wall_ms, history_ms=now.history_ms))
        if state.rollback_deferred:
            _put_rollback(txn, state, branch, row.base_seqno, row.vbuuid, now.wall_ms, reached_seqno=seqno)
        else:
            purged = purge_row(txn, state.vbid)
            put_purge_row(txn, state.vbid, purged._replace(purged_seqno=0, local_purge_seqno=0))
    floor = state.history_floor_seqno if state.staging_published_seqno else seqno
    txn.put_pub(
        state.vbid,
        records.Pub(
            branch=branch,
            seqno=seqno,
            floor_seqno=floor,
            manifest_branch=manifest_key[0],
            manifest_seqno=manifest_key[1],
        ),
    )
    if state.rollback_deferred and seqno == state.staging_published_seqno:
        return counters  # its boundary is there since the branch was opened
    if not seqno and branch == state.branch:
        return counters  # the source has nothing: `state` says so, and there is nothing to go back to
    if seqno == state.staging_published_seqno:
        counters = counters._replace(ordinal=counters.ordinal - 1)  # it takes the place of the one that is there
    put_boundary(txn, state, branch, seqno, snap_start_seqno, now, counters)
    chain.put_span(txn, state.vbid, branch, seqno, state.staging_published_seqno)
    return BoundaryCounters(counters.ordinal + 1, counters.row_bytes)


def put_boundary(
    txn: Transaction,
    state: VbucketState,
    branch: int,
    seqno: int,
    start: int,
    now: Moment,
    counters: BoundaryCounters,
) -> None:
    vbuuid = state.failover_log.vbuuid_at(seqno)
    key = keys.ROW.pack(branch, seqno) + keys.BOUNDARY_SUFFIX
    value = keys.BOUNDARY.pack(
        min(start, seqno), vbuuid, now.wall_ms, now.history_ms, counters.ordinal + 1, counters.row_bytes
    )
    txn.put(keys.rows_db(state.vbid), key, value)


def _next_branch(txn: Transaction, vbid: int) -> int:
    newest = txn.newest_branch(vbid)
    if not newest:
        raise CorruptedError("the vbucket has no branch", path=txn.path, vbid=vbid)
    return newest + 1


def _open_branch(
    txn: Transaction,
    vbid: int,
    parent: int | None,
    base: int,
    vbuuid: int,
    reason: int,
    now: Moment,
    history_ids: records.HistoryIds = (),
    first_branch: int = 0,
) -> int:
    number = _next_branch(txn, vbid)
    history_ids = (*history_ids, (txn.environment.history_id, base))
    row = records.BranchRow(
        parent,
        base,
        vbuuid,
        reason,
        now.wall_ms,
        history_ms=now.history_ms,
        first_branch=first_branch,
        history_ids=history_ids,
    )
    put_branch(txn, vbid, number, row)
    return number


def with_history(history_ids: records.HistoryIds, history_id: int, above_seqno: int) -> records.HistoryIds:
    """Return the ids of a branch whose positions above a seqno belong to another history from now on."""
    kept = [*history_ids[:1], *(each for each in history_ids[1:] if each[1] < above_seqno)]
    return (*kept, (history_id, above_seqno))[-HISTORY_IDS_MAX:]


def begin_history(txn: Transaction, vbid: int) -> None:
    """Let positions above what is published be of a new history.

    Each owner begins with it. Commits that readers saw may have been undone before (a power cut, an older copy of the
    file, a volume that was set back): positions that were given out above what is published now must not be taken for
    those that the next commits make. Readers that stayed open read their chains again.
    """
    history_id = txn.environment.history_id
    pub = txn.pub(vbid)
    staging = txn.state_row(vbid).staging_branch
    row = get_branch(txn, vbid, pub.branch)
    put_branch(txn, vbid, pub.branch, row._replace(history_ids=with_history(row.history_ids, history_id, pub.seqno)))
    if staging != pub.branch:  # never published as far as this file knows
        row = get_branch(txn, vbid, staging)
        put_branch(txn, vbid, staging, row._replace(history_ids=((history_id, 0),)))
    draw_chain_id(txn, vbid)


def _put_state(txn: Transaction, state: VbucketState, branch: int, seqno: int, **changes: Any) -> None:
    """Write `state` for `branch` at the complete end `seqno`, with nothing staged above it."""
    row = records.StateRow(
        staging_branch=branch,
        staged_seqno=seqno,
        staging_published_seqno=seqno,
        indexed_seqno=seqno,
        open_snapshot=None,
        failover_log=state.failover_log,
        source_purge_seqno=state.source_purge_seqno,
        rollback_count=state.rollback_count,
        last_rollback_ms=state.last_rollback_ms,
        stream_filter=state.stream_filter,
        missing_seqno=state.missing_seqno,
    )
    txn.put_state_row(state.vbid, row._replace(**changes))


def roll_back(txn: Transaction, state: VbucketState, boundary: Boundary, now: Moment) -> None:
    """Open a branch at a kept boundary of the served chain and serve it.

    While a resync is under way the failover log is that of its stream, which the served copy may share nothing with:
    then the vbuuid kept with the boundary is all that is known of its history.
    """
    vbid, at = state.vbid, boundary.seqno
    own_log = state.failover_log if state.staging_branch == state.branch or state.rollback_deferred else FailoverLog()
    log = own_log.pruned(at, boundary.vbuuid)
    to_vbuuid = log.vbuuid_at(at)
    served = chain.load(txn, vbid, state.branch, at)
    manifest_key = manifest_key_on(txn, vbid, served)
    branch = _open_branch(txn, vbid, state.branch, at, to_vbuuid, BranchReason.ROLLBACK, now)
    txn.put_pub(
        vbid,
        records.Pub(
            branch=branch,
            seqno=at,
            floor_seqno=min(state.history_floor_seqno, at),
            manifest_branch=manifest_key[0],
            manifest_seqno=manifest_key[1],
        ),
    )
    _copy_boundary(txn, vbid, branch, boundary, to_vbuuid)
    _put_rollback(txn, state, branch, at, to_vbuuid, now.wall_ms)
    # The filter and the missing_seqno of the served copy were forgotten when the resync began. The latter lies below
    # the floor.
    other_copy = state.staging_branch != state.branch and not state.rollback_deferred
    unknown = state.stream_filter is not None and other_copy
    _put_state(
        txn,
        state,
        branch,
        at,
        failover_log=log,
        rollback_count=state.rollback_count + 1,
        last_rollback_ms=now.wall_ms,
        stream_filter="" if unknown else state.stream_filter,
        missing_seqno=state.history_floor_seqno if other_copy else state.missing_seqno,
    )


def _copy_boundary(txn: Transaction, vbid: int, branch: int, boundary: Boundary, vbuuid: int) -> None:
    key = keys.ROW.pack(branch, boundary.seqno) + keys.BOUNDARY_SUFFIX
    value = chain.boundary_value(replace(boundary, vbuuid=Vbuuid(vbuuid)))
    txn.put(keys.rows_db(vbid), key, value)


def _put_rollback(
    txn: Transaction,
    state: VbucketState,
    branch: int,
    to_seqno: int,
    to_vbuuid: int,
    now_ms: int,
    reached_seqno: int | None = None,
) -> None:
    vbid = state.vbid
    served = chain.load(txn, vbid, state.branch, state.published_seqno)
    newest = chain.newest_boundary(txn, vbid, served, state.published_seqno)
    from_vbuuid = newest.vbuuid if newest is not None else 0
    record = records.encode_rollback(
        state.branch, state.published_seqno, branch, to_seqno, from_vbuuid, to_vbuuid, now_ms, reached_seqno
    )
    key = keys.ROLLBACK_KEY.pack(vbid, state.rollback_count + 1)
    txn.put(keys.DB_ROLLBACK, key, record)


def defer_rollback(txn: Transaction, state: VbucketState, boundary: Boundary) -> None:
    """Open a branch at a kept boundary of the served chain, and stage on it; readers stay where they are.

    Its first publish is the rollback (`put_published`): then readers go from what they see to that end in one step.
    """
    log = state.failover_log.pruned(boundary.seqno, boundary.vbuuid)
    vbuuid = log.vbuuid_at(boundary.seqno)
    branch = _open_branch(
        txn, state.vbid, state.branch, boundary.seqno, vbuuid, BranchReason.DEFERRED_ROLLBACK, Moment(0, 0)
    )
    _copy_boundary(txn, state.vbid, branch, boundary, vbuuid)
    _put_state(txn, state, branch, boundary.seqno, failover_log=log)


def abandon(txn: Transaction, state: VbucketState, now: Moment) -> None:
    """Leave rows of an unfinished snapshot behind on their branch, where no chain will ever see them."""
    vbid = state.vbid
    base = state.published_seqno
    if state.rollback_deferred:
        defer_rollback(txn, state, _boundary_at(txn, state, state.staging_published_seqno))
        return
    if state.staging_branch != state.branch:
        begin_resync(txn, state)
        return
    log = state.failover_log if base else FailoverLog()  # without rows a log would say that the source has nothing
    vbuuid = log.vbuuid_at(base)
    parent: int = state.branch
    first_branch = parent + 1
    history_ids: records.HistoryIds = ()
    left = get_branch(txn, vbid, parent)
    if left.reason == BranchReason.ABANDONED and left.base_seqno == base and left.parent is not None:
        # Nothing was published on the one that is left: the new one takes its place on the chain, and its positions.
        parent, first_branch, history_ids = left.parent, left.first_branch, left.history_ids[:1]
    branch = _open_branch(txn, vbid, parent, base, vbuuid, BranchReason.ABANDONED, now, history_ids, first_branch)
    txn.put_pub(vbid, txn.pub(vbid)._replace(branch=branch))
    if base:
        boundary = _boundary_at(txn, state, base)
        _copy_boundary(txn, vbid, branch, boundary, boundary.vbuuid)
    _put_state(txn, state, branch, base, failover_log=log, missing_seqno=state.missing_seqno if base else 0)


def _boundary_at(txn: Transaction, state: VbucketState, seqno: int) -> Boundary:
    served = chain.load(txn, state.vbid, state.branch, seqno)
    boundary = chain.newest_boundary(txn, state.vbid, served, seqno)
    if boundary is None or boundary.seqno != seqno:
        raise CorruptedError(f"published seqno {seqno} has no boundary", path=txn.path, vbid=state.vbid)
    return boundary


def set_unavailable(txn: Transaction, vbid: int, unavailable: bool) -> bool:
    """Refuse readers of a vbucket that is being resynced, or let them in; return False if nothing changed."""
    pub = txn.pub(vbid)
    if not pub.is_stale or pub.is_unavailable == unavailable:
        return False
    txn.put_pub(vbid, pub._replace(flags=pub.flags ^ keys.PUB_UNAVAILABLE))
    return True


def begin_resync(txn: Transaction, state: VbucketState, *, unavailable: bool = False) -> None:
    """Open a staging branch without parent, next to what is served; its time stays 0 until readers see it."""
    branch = _open_branch(txn, state.vbid, None, 0, 0, BranchReason.RESYNC, Moment(0, 0))
    pub = txn.pub(state.vbid)
    flags = keys.PUB_STALE | (keys.PUB_UNAVAILABLE if unavailable else 0)
    txn.put_pub(state.vbid, pub._replace(flags=pub.flags | flags))
    _put_state(
        txn,
        state,
        branch,
        0,
        failover_log=FailoverLog(),
        source_purge_seqno=Seqno(0),
        stream_filter=None,
        missing_seqno=0,
    )
