"""Stored rows of a vbucket in seqno order, for followers (DCP clients of this mirror): one version of each key up to a
boundary.

Up to a boundary, a follower gets every system event and each key's newest version that is visible at the boundary. If a
row would contradict the rows sent before, ViewInvalidated is raised instead. Tombstones at or below
`ServedState.purge_seqno` may be missing (docs/protocol.md 4.6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from storage.env.transaction import Transaction
from storage.errors import CorruptedError
from storage.format import keys, seal
from storage.format.records import BRANCH, ROW_KEY, SEQNO, SNAPPY_RATIO_MAX, SYSTEM_EVENT
from storage.history import branches, chain
from storage.model import (
    SEQNO_MAX,
    Boundary,
    FailoverLog,
    Manifest,
    Rollback,
    Seqno,
    purge_seqno_of,
)
from storage.read import changes, states, validity
from storage.read.vbucket_reader import Served, VbucketReader

PIECE_ROWS = 2_000
"""Maximum number of rows that one transaction looks at."""
SETTLED_SHARE = 0.5
"""A boundary is settled if it is at least this share of the kept history older than the newest boundary. The first
snapshot of a follower from below the floor ends at a settled boundary, and a failover that loses settled boundaries
lets such a follower begin again, because it may hold half of a snapshot. By age in seconds instead, a vbucket with one
change in ten seconds lost settled boundaries in each failover, and all its followers began again. With a larger share
the purger could reach the end of a large snapshot while it is sent.
"""


@dataclass(frozen=True, kw_only=True)
class ServedState(Served):
    failover_log: FailoverLog
    purge_seqno: int
    """Seqno up to which tombstones may be gone. A follower below this seqno may hold deleted documents."""
    manifest: Manifest
    stream_filter: str | None
    """See `VbucketState.stream_filter`."""
    whole: bool
    """False during the first fill, a resync or a deferred rollback."""

    def has(self, branch: int, seqno: int) -> bool:
        return chain.sees(self.links, branch, seqno)


def served_state(reader: VbucketReader) -> ServedState:
    with reader.environment.read() as txn:
        return _served_state(reader, txn)


def _served_state(reader: VbucketReader, txn: Transaction) -> ServedState:
    served, state = reader.served(txn), txn.state_row(reader.vbid)
    local_purge_seqno = reader.purge_row(txn).local_purge_seqno
    log, is_empty = state.failover_log, not state.staged_seqno and state.open_snapshot is None
    return ServedState(
        **vars(served),
        failover_log=log,
        purge_seqno=purge_seqno_of(local_purge_seqno, state.missing_seqno, served.pub.floor_seqno),
        manifest=reader.manifest(txn, served.pub.manifest_key),
        stream_filter=state.stream_filter,
        whole=state.staging_branch == served.pub.branch and bool(log) and (served.pub.seqno > 0 or is_empty),
    )


def next_ends(
    reader: VbucketReader, after_seqno: int, least_seqno: int, ends_max: int
) -> tuple[ServedState, list[ServedState]]:
    """Return the state served now, and the states at the ends of a follower's next snapshots: the next kept boundaries
    above `after_seqno`. The list is empty for an up-to-date follower.

    No end is below `least_seqno`, the end of a snapshot that the follower holds in part, unless the served state is. A
    follower below the floor gets one snapshot up to the newest settled boundary, because the boundary at the floor may
    be purged while a large snapshot is sent. `rows` checks that an end is still kept.
    """
    with reader.environment.read() as txn:
        now = _served_state(reader, txn)
        if now.pub.seqno <= after_seqno:
            return now, []
        floor = now.pub.floor_seqno
        seqnos: list[int] = []
        for each in chain.boundaries_after(txn, reader.vbid, now.links, max(after_seqno, least_seqno - 1, floor - 1)):
            seqnos.append(int(each.seqno))
            if len(seqnos) == ends_max or each.seqno - after_seqno >= PIECE_ROWS:
                break
        if after_seqno < floor:
            seqnos = [max(seqnos[0] if seqnos else now.pub.seqno, _settled_seqno(reader, txn, now.links, floor))]
        return now, [_as_of(reader, txn, now, seqno) for seqno in seqnos or [now.pub.seqno]]


def _as_of(reader: VbucketReader, txn: Transaction, now: ServedState, seqno: int) -> ServedState:
    if seqno == now.pub.seqno:
        return now
    then = reader.cut_at(txn, now, Seqno(seqno))
    return replace(now, **vars(then), manifest=reader.manifest(txn, then.pub.manifest_key))


def _settled_seqno(reader: VbucketReader, txn: Transaction, links: chain.Chain, floor_seqno: int) -> int:
    """Return the seqno of the newest settled boundary above the floor, or the floor."""
    low, high = floor_seqno, links[0].cut
    floor, newest = (chain.newest_boundary(txn, reader.vbid, links, seqno) for seqno in (low, high))
    while low < high and floor is not None and newest is not None:  # their times rise with their seqnos
        middle = (low + high + 1) // 2
        boundary = chain.newest_boundary(txn, reader.vbid, links, middle)
        if boundary is None or _is_settled(boundary, floor, newest):
            low = middle
        else:
            high = int(boundary.seqno) - 1
    found = chain.newest_boundary(txn, reader.vbid, links, low)
    return floor_seqno if found is None else max(floor_seqno, int(found.seqno))


def _is_settled(boundary: Boundary, floor: Boundary, newest: Boundary) -> bool:
    kept_ms = max(1, newest.history_ms - floor.history_ms)
    return newest.history_ms - boundary.history_ms >= SETTLED_SHARE * kept_ms


def shared_seqno(reader: VbucketReader, pinned: ServedState, vbuuid: int, seqno: int) -> int:
    """Return the seqno of the boundary to which a follower must go back, or 0 (to the beginning). The follower holds
    rows of the history `vbuuid` above `seqno`, the last seqno that the served history shares with `vbuuid`.

    If this mirror rolled back from `seqno` or above, return the lowest boundary to which it rolled back. Otherwise this
    mirror never sent the lost rows: return the newest kept boundary up to `seqno`. Return 0 if this boundary is below
    the floor, or if the follower may hold a snapshot that began below it and ended above it. Such a snapshot comes from
    a branch without that boundary, from a copy that a resync replaced, or from a time when the follower was below the
    floor (`next_ends`).
    """
    rollbacks = changes.rollbacks(reader)
    with reader.environment.read() as txn:
        passed = [int(each.to_seqno) for each in rollbacks if each.to_seqno <= seqno <= each.from_seqno]
        base_seqno = min(passed) if passed else _newest_of(reader, txn, pinned, vbuuid, seqno)
        floor = chain.newest_boundary(txn, reader.vbid, pinned.links, pinned.pub.floor_seqno)
        crossed = any(
            each.to_seqno < base_seqno or _lost_settled(txn, each, base_seqno, floor)
            for each in rollbacks
            if each.from_seqno > base_seqno
        )
        resynced = branches.resyncs(txn, reader.vbid)[1]
    return 0 if crossed or resynced or base_seqno < pinned.pub.floor_seqno else base_seqno


def _newest_of(reader: VbucketReader, txn: Transaction, pinned: ServedState, vbuuid: int, seqno: int) -> int:
    """Return the seqno of the newest boundary up to `seqno`, or 0. A boundary at `seqno` must be of `vbuuid`."""
    found = chain.boundaries(txn, reader.vbid, chain.recut(pinned.links, seqno))
    return next((int(each.seqno) for each in found if each.seqno < seqno or each.vbuuid == vbuuid), 0)


def _lost_settled(txn: Transaction, lost: Rollback, after_seqno: int, floor: Boundary | None) -> bool:
    """Return True if a boundary above `after_seqno` may have been settled before the rollback `lost`, or if rows that
    it took back have been purged. `floor`: the present one. The floor only rises, so fewer boundaries were settled.
    """
    try:
        links = chain.load(txn, lost.vbid, lost.from_branch, lost.from_seqno)
        first = next(chain.boundaries_after(txn, lost.vbid, links, after_seqno), None)
        newest = chain.newest_boundary(txn, lost.vbid, links, lost.from_seqno)
    except CorruptedError:  # the branch is gone
        return True
    if first is None or newest is None or floor is None or chain.has_gap(txn, lost.vbid, links, after_seqno):
        return True
    return _is_settled(first, floor, newest)


class Commits:
    """Detects that vbuckets of a group were published. Reads nothing without a commit since the last call of `news`."""

    def __init__(self) -> None:
        self._number = -1
        self._seen: dict[int, bytes] = {}

    def news(self, reader: VbucketReader) -> list[int]:
        """Return the vbuckets whose served state changed since the last call; at first, all. `reader` may be of any
        vbucket of the group. Raises StorageError.
        """
        found: list[int] = []
        if self._number == reader.environment.newest_commit():
            return found
        with reader.environment.read() as txn:
            self._number = txn.raw.id()  # `newest_commit` may name a commit that is not readable yet
            for key, data in txn.raw.cursor(reader.pub).iternext():
                vbid = int.from_bytes(key, "big")
                if self._seen.get(vbid) != data:
                    self._seen[vbid] = data
                    found.append(vbid)
        return found


def rows(
    reader: VbucketReader,
    pinned: ServedState,
    after_seqno: int,
    *,
    bytes_max: int,
    rows_max: int = PIECE_ROWS,
    large_bytes: int = SEQNO_MAX,
    begins: Mapping[int, int] | None = None,
    tombstones_from: int | None = None,
) -> tuple[list[chain.Row], int, int]:
    """Return the next rows above `after_seqno`, and the seqno up to which rows were read. If the next row and its
    decompressed value have more than `large_bytes`, return no rows and, third, these bytes (else 0).

    Looks at one `chain.piece`. `begins` maps each selected collection to the seqno above which its rows are selected;
    None: select the boundary's collections. Raises ViewInvalidated, also if a tombstone above `tombstones_from` is
    missing: the follower holds documents up to that seqno.
    """

    def checked(txn: Transaction, piece: chain.Piece) -> tuple[list[chain.Row], int, int]:
        validity.check(reader, txn, pinned)
        if tombstones_from is not None:
            validity.check_tombstones(reader, txn, pinned, tombstones_from)
        for row in piece.rows:  # verify all rows, also those that are left out below
            reader.verify(*row)
        found = [(key, stored[seal.FRAME]) for key, stored in piece.rows]
        selected = begins
        if selected is None and pinned.manifest.uid:
            selected = {number: int(entry.begin_seqno) for number, entry in pinned.manifest.collections.items()}
        if selected is not None:
            found = [row for row in found if states.is_selected(row, selected)]
        found = _newest(reader, txn, pinned.links, found, all_there=piece.to_seqno == pinned.pub.seqno)
        return found, piece.to_seqno, piece.large_bytes

    with reader.environment.read() as txn:
        stat = txn.raw.stat(reader.rows)
        if stat["overflow_pages"] * stat["psize"] <= large_bytes // SNAPPY_RATIO_MAX:
            return checked(txn, chain.piece(txn, reader.vbid, pinned.links, after_seqno, rows_max, bytes_max))
    with reader.environment.read(buffers=True) as views:  # `checked` raises if these rows were purged
        piece = chain.piece(views, reader.vbid, pinned.links, after_seqno, rows_max, bytes_max, large_bytes)
    with reader.environment.read() as txn:
        return checked(txn, piece)


def last_document_seqno(reader: VbucketReader, pinned: ServedState, after_seqno: int, begins: Mapping[int, int]) -> int:
    """Return the seqno of the last document row above `after_seqno` in the collections of `begins`, or `after_seqno`.

    Walks backwards, `PIECE_ROWS` rows in each transaction. Raises ViewInvalidated.
    """
    seqno, below = 0, int(pinned.pub.seqno)
    while below:
        with reader.views(lambda txn: validity.check(reader, txn, pinned)) as (views, _):
            rows = chain.rows_before(views, reader.vbid, pinned.links, after_seqno, below)
            seqno, below = states.newest_selected(rows, begins, PIECE_ROWS)
    return seqno or after_seqno


def _newest(
    reader: VbucketReader, txn: Transaction, links: chain.Chain, found: list[chain.Row], *, all_there: bool
) -> list[chain.Row]:
    """Return the rows of `found` that no later row of the chain replaces. `all_there`: no later rows exist."""
    cursor = txn.raw.cursor(reader.keys)
    seek = cursor.set_range_dup
    cuts = {keys.PREFIX.pack(link.branch): link.cut.to_bytes(8) for link in links}
    seen: set[bytes] = set()
    kept: list[chain.Row] = []
    for row in reversed(found):
        key, frame = row
        if frame[1] != SYSTEM_EVENT:
            start = 24 + frame[4]
            wire_key = frame[start : start + (frame[2] << 8 | frame[3])]
            if wire_key in seen:
                continue
            seen.add(wire_key)
            if not all_there and seek(wire_key, key + b"\xff"):  # a later version exists: is it visible?
                later = cursor.value()
                if later[BRANCH] == key[BRANCH] and later[SEQNO] <= cuts[key[BRANCH]]:
                    continue
                newest = chain.newest_version(cursor, wire_key, links)
                if newest is None or newest[ROW_KEY] != key:
                    continue
        kept.append(row)
    kept.reverse()
    return kept
