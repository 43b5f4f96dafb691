"""Purge: how old history goes, in small steps, without any reader noticing.

**The problem.** a is written (seqno 1), b (2), a again (3), and b is deleted (4); snapshots end at 2 and 4. Readers may
go back an hour (`Window`). After that hour no read needs a@1 or b@2. The tombstone b@4 shows no
document, but a follower that holds b needs it. To look at every document for this would cost as much as the bucket is
large, every hour.

    rows         a@1  b@2  |2   a@3  b@4 deleted  |4                    |2: the boundary at 2
    floor at 2   nothing is removed: reads as of 2 see a@1 and b@2
    floor at 4   a@1 and b@2 go, with the boundary at 2; b@4 goes; local_purge_seqno = 4
                 a follower below 4 may hold b: it must begin again

**The rule.** The group's writer calls the purger when it is idle. Each step is one transaction of bounded size, and the
purger may stop after any.

1. The floor rises to a kept boundary first, in a commit of its own. Readers as of a boundary below are refused from
   then on. It rises as far as window, leases and a deferred rollback allow, and falls only with a resync.
2. The purger then visits the rows in (purged, floor] once, in seqno order. Each row lets the older versions of its key
   go: so the work grows with the changes, not with the bucket. A tombstone goes with them if it is the newest version
   of its key at the floor. A drop or flush lets the collection's rows go.
3. In the same transaction local_purge_seqno becomes the seqno of the newest tombstone that went, or of the oldest kept
   manifest if older ones went. A follower that has everything up to there lacks nothing; one with less may.
4. Retracted rows are on no chain. They go when their rollback is older than the window, or when the floor has passed
   the boundary that it went to; the transaction of the first removal lowers `kept_seqno` of their branch. Rows that
   were never published go at once. What a lease holds stays (`leases`).
5. A key row goes before its row, so no key row names a missing row (`removal`).
6. A branch record goes when no needed branch stands on it. If many links lie below the floor, they are joined
   (`merge`).

Ages are measured by `HistoryClock`, which setting the wall clock does not move.

**Rejected.** *To remove the older version when the newer one is written*: no reads in the past, and readers that are in
the middle of a scan would miss documents. *A walk over all keys*: hours of reading to find the few that
changed. *Tombstones kept for ever*: the file of a queue would grow for ever.

**What would break.** If rows went before the floor was committed, a reader as of 2 would miss a without an error. If
local_purge_seqno rose later, a follower could resume between the two commits and keep b for ever. If the tombstone went
while an older version was kept, b would be back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from storage.env.environment import Environment
from storage.env.transaction import Transaction
from storage.format import keys, records, seal
from storage.history import branches, chain, manifests, merge
from storage.history.leases import Leases
from storage.history.removal import Dead, Removal
from storage.model import SEQNO_MAX, BranchReason, Seqno

LOOK_VBUCKETS = 8
"""Vbuckets that `Purger.plan` checks in one call."""
STEP_ROWS = 4_000
"""Rows of a full-size step. A step that only removes neighbouring rows takes four times as many."""
STEP_MS_MAX = 20
"""Target for the longest step, milliseconds. After a step of more than 60 % of this, the next step is half as large."""
NOT_SEEN_AT_FIRST = (BranchReason.RESYNC, BranchReason.DEFERRED_ROLLBACK)
"""Branches opened for these reasons are hidden from readers until their first publish. Until then `time_ms` is 0."""
SHARE_MIN = 0.05
"""Smallest step, as a share of `STEP_ROWS`. Smaller steps are no faster, because of the disk's sync."""


@dataclass(frozen=True, slots=True)
class Window:
    """Limits of the kept history (None: no limit). The tightest limit decides."""

    time_ms: int | None = None
    """Readers can go back this many milliseconds, if the mirror is old enough and no other limit is reached."""
    boundaries: int | None = None
    size_bytes: int | None = None
    """Bytes of rows of a vbucket above its floor."""


class AdaptiveStepSize:
    """The number of rows in a step, adapted to the duration of earlier steps."""

    def __init__(self) -> None:
        self._share = 0.25

    @property
    def rows(self) -> int:
        return max(2, int(STEP_ROWS * self._share))

    def took(self, elapsed_ms: int) -> None:
        if elapsed_ms > STEP_MS_MAX * 0.6:
            self._share = max(SHARE_MIN, self._share / 2)
        elif elapsed_ms < STEP_MS_MAX * 0.4:
            self._share = min(1.0, self._share * 1.1)


Work = Callable[[Transaction], int | None]
"""Does one step in a write transaction, and returns the number of removed rows. Called again if LMDB's map was full."""


class Step(NamedTuple):
    vbid: int
    work: Work


class Purger:
    """Purges the vbuckets of one group in turn: the writer passes the result of `plan` to `step`."""

    def __init__(
        self, environment: Environment, vbids: Sequence[int], window: Window, leases: Leases | None = None
    ) -> None:
        self.environment = environment
        self.window = window
        self.leases = Leases() if leases is None else leases
        self._vbids = vbids
        self._turn = 0
        self._idle_looks = 0
        self._removal: Removal | None = None
        self._walk: tuple[int, bytes, bytes] | None = None  # of `_of_dropped_collections`: vbid, event, next key
        self._next_walk: tuple[int, bytes, bytes] | None = None  # `_walk` after the step's commit
        self._ranges: dict[int, tuple[tuple[int, int], list[Dead]]] = {}
        self._forgotten: dict[int, tuple[tuple[object, ...], list[int]]] = {}
        self._short: dict[int, int] = {}  # by vbid: the served branch, if its chain is short (and stays so)
        self.moved: merge.Moved | None = None
        """Rows that the last step moved between branches."""
        self.step_size = AdaptiveStepSize()
        self.removed_rows = 0

    def plan(self, now_ms: int) -> Step | None:
        """Look for work in a few vbuckets, without writing. Return the next step, or None."""
        if self._removal is not None:
            return Step(self._removal.vbid, self._remove)
        with self.environment.read() as txn:
            for _ in range(min(LOOK_VBUCKETS, len(self._vbids))):
                vbid = self._vbids[self._turn]
                if (work := self.next_work(txn, vbid, now_ms)) is not None:
                    self._idle_looks = 0
                    return Step(vbid, work)
                self._idle_looks += 1
                self._turn = (self._turn + 1) % len(self._vbids)
        return None

    @property
    def round_is_over(self) -> bool:
        return self._idle_looks >= len(self._vbids)

    def next_work(self, txn: Transaction, vbid: int, now_ms: int) -> Work | None:
        """Return the next step in a vbucket, or None. The step must run before any other commit."""
        rows = self.step_size.rows
        if (dead := next(self._removable(txn, vbid, now_ms), None)) is not None:
            self._removal = Removal(vbid, dead)
            return self._remove
        if numbers := self._forgettable(txn, vbid, now_ms):
            return lambda txn: self._forget(txn, vbid, numbers[:rows])
        pub = txn.pub(vbid)
        floor = pub.floor_seqno
        if old := merge.old_rollbacks(txn, vbid, pub, rows):
            return lambda txn: merge.forget_rollbacks(txn, old)
        purged = branches.purge_row(txn, vbid).purged_seqno
        if pub.seqno == floor == purged and self._short.get(vbid) == pub.branch:
            return None
        links = chain.load(txn, vbid, pub.branch, pub.seqno)
        if purged < floor and self._is_history(txn, vbid, links, floor, now_ms):
            return lambda txn: self._purge_versions(txn, vbid, links, purged, floor)
        if purged == floor and (pair := self._next_pair(txn, vbid, links, floor)) is not None:
            return lambda txn: self._merge(txn, vbid, pair)
        if (target := self._target_floor(txn, vbid, pub, links, now_ms, rows)) > floor:
            return lambda txn: txn.put_pub(vbid, pub._replace(floor_seqno=Seqno(target)))
        return None

    def step(self, txn: Transaction, planned: Step) -> int:
        """Run a planned step and return the number of removed rows. Call `settle` after the commit."""
        self.moved = None
        self._next_walk = self._walk
        return planned.work(txn) or 0

    def settle(self, removed_rows: int, elapsed_ms: int) -> None:
        self.removed_rows += removed_rows
        self._walk = self._next_walk
        self.step_size.took(elapsed_ms)
        if self._removal is not None and not self._removal.settle():
            self._removal = None

    def _remove(self, txn: Transaction) -> int:
        assert self._removal is not None
        self._announce_gap(txn, self._removal.vbid, self._removal.dead)
        return self._removal.step(txn, self.step_size.rows)

    def _forget(self, txn: Transaction, vbid: int, numbers: list[int]) -> None:
        branches.forget(txn, vbid, numbers)
        # `_forgettable` caches by the number of branches in the group, which the next new branch may restore.
        self._forgotten.pop(vbid, None)

    def _merge(self, txn: Transaction, vbid: int, pair: merge.Pair) -> None:
        self.moved = merge.step(txn, vbid, pair, self.step_size.rows)
        self._ranges.pop(vbid, None)  # the merge may have put rows into an empty dead range
        self._forgotten.pop(vbid, None)

    def _next_pair(self, txn: Transaction, vbid: int, links: chain.Chain, floor: int) -> merge.Pair | None:
        if len(links) <= merge.LINKS_MAX + 1:
            self._short[vbid] = txn.pub(vbid).branch
            return None
        known = branches.all_branches(txn, vbid)
        return merge.next_pair(txn, vbid, links, floor, known)

    # -- the floor ------------------------------------------------------------------------------------------------

    def _is_history(self, txn: Transaction, vbid: int, links: chain.Chain, floor: int, now_ms: int) -> bool:
        """Return True if rows below the floor may be removed. If only `Window.time_ms` is set, the floor's boundary
        must be as old: in a new mirror this keeps the tombstones below the first boundary.
        """
        window = self.window
        if window.time_ms is None or window.boundaries is not None or window.size_bytes is not None:
            return True
        boundary = chain.newest_boundary(txn, vbid, links, floor)
        return boundary is None or boundary.history_ms <= now_ms - window.time_ms

    def _target_floor(
        self, txn: Transaction, vbid: int, pub: records.Pub, links: chain.Chain, now_ms: int, looks: int
    ) -> int:
        """Return the floor that the window requires, at most `looks` boundaries above the present floor."""
        window, floor = self.window, pub.floor_seqno
        tip = chain.newest_boundary(txn, vbid, links, pub.seqno)
        at = chain.newest_boundary(txn, vbid, links, floor)
        if tip is None or at is None:
            return floor
        for boundary in islice(chain.boundaries_after(txn, vbid, links, floor), looks):
            if not (
                (window.time_ms is not None and boundary.history_ms <= now_ms - window.time_ms)
                or (window.boundaries is not None and tip.ordinal - at.ordinal >= window.boundaries)
                or (window.size_bytes is not None and tip.row_bytes - at.row_bytes > window.size_bytes)
            ):
                break
            at = boundary
        target = int(at.seqno)
        if target > floor and (held := self.leases.floor_max(txn, vbid, links, now_ms)) is not None:
            target = max(floor, min(target, held))
        if target > floor and (base := self._deferred_base(txn, vbid, pub.branch)) is not None:
            target = max(floor, min(target, base))
        return max(floor, target)

    def _deferred_base(self, txn: Transaction, vbid: int, served: int) -> int | None:
        """Return the base of a deferred rollback's branch, or None. Readers will need the history from the base on."""
        state = txn.state_row(vbid)
        return state.staging_published_seqno or None if state.staging_branch != served else None

    # -- versions below the floor ---------------------------------------------------------------------------------

    def _purge_versions(self, txn: Transaction, vbid: int, links: chain.Chain, purged: int, floor: int) -> int:
        """For the rows of one step, remove older versions and tombstones. Return the number of removed rows."""
        limit = self.step_size.rows
        victims = _Victims(txn, vbid, links, floor)
        boundaries: list[bytes] = []
        position = floor
        visited = 0
        for key, frame in chain.rows_after(txn, vbid, links, purged, boundaries=True):
            seqno = records.seqno_of(key)
            if seqno > floor:
                break
            if len(key) == keys.BOUNDARY_KEY_SIZE:
                if seqno < floor:
                    boundaries.append(key)
                continue
            if visited >= 2 * limit or len(victims.found) >= limit:
                position = seqno - 1
                break
            visited += 1
            seal.frame_of(frame, key, vbid, txn.path)  # only a sound row may replace older ones
            chain.check_place(txn, vbid, key, frame)
            if not records.is_system_event(frame):
                victims.add_replaced_by(key, frame)
                continue
            found, following = self._of_dropped_collections(txn, vbid, links, seqno, 2 * limit - visited)
            victims.found += found
            self._next_walk = None
            if following:  # continue at this event and key in the next step
                self._next_walk = (vbid, key[records.ROW_KEY], following)
                position = seqno - 1
                break
            if manifests.forget_before(txn, vbid, links, keys.ROW.unpack(key)):
                victims.local_purge_seqno = seqno
        removed = victims.delete()
        _forget_boundaries(txn, vbid, links, boundaries, purged, floor, position)
        local_purge_seqno = max(victims.local_purge_seqno, branches.purge_row(txn, vbid).local_purge_seqno)
        branches.change_purge_row(txn, vbid, purged_seqno=position, local_purge_seqno=local_purge_seqno)
        return removed

    def _of_dropped_collections(
        self, txn: Transaction, vbid: int, links: chain.Chain, seqno: int, looks: int
    ) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Walk over about `looks` key rows of the collections that the system event at `seqno` dropped or flushed.
        Return the key rows to remove, and the key to continue from (empty: the end).

        The position of the walk is only in memory, so a new process begins the walk again.
        """
        event = keys.ROW.pack(next(link.branch for link in links if link.base_seqno < seqno), seqno)
        start = self._walk[2] if self._walk is not None and self._walk[:2] == (vbid, event) else b""
        data = txn.get(keys.DB_MANIFEST, keys.VBID_KEY.pack(vbid) + event)
        change = records.decode_manifest(data)
        found: list[tuple[bytes, bytes]] = []
        cuts = {link.branch: min(link.cut, seqno) for link in links}
        ended = change.emptied
        cursor = txn.cursor(keys.keys_db(vbid))
        looked = 0
        current = b""
        for prefix in sorted(map(keys.encode_collection_id, ended)):
            if start > prefix and not start.startswith(prefix):
                continue
            if not cursor.set_range(max(prefix, start)):
                continue
            for wire_key, dup in cursor.iternext():
                if not wire_key.startswith(prefix):
                    break
                if wire_key != current and looked >= looks:
                    return found, wire_key
                current = wire_key
                looked += 1
                branch, at, _ = keys.DUP.unpack(dup)
                if at <= cuts.get(branch, -1):
                    found.append((wire_key, dup))
        return found, b""

    # -- branches that no view sees any more ----------------------------------------------------------------------

    def _removable(self, txn: Transaction, vbid: int, now_ms: int) -> Iterator[Dead]:
        window_ms = self.window.time_ms
        served, _, floor, *_ = txn.pub(vbid)
        ranges = self._dead_ranges(txn, vbid, served)
        for dead in list(ranges):
            in_window = window_ms is None or (dead.since_ms or 0) > now_ms - window_ms
            if dead.since_ms is not None and (
                (in_window and dead.after_seqno >= floor) or self._is_held(txn, vbid, dead, now_ms)
            ):
                continue
            if chain.has_rows(txn, vbid, dead.branch, dead.after_seqno, dead.to_seqno):
                yield dead
            else:
                ranges.remove(dead)  # only a merge adds rows to it again (`_merge`)

    def _forgettable(self, txn: Transaction, vbid: int, now_ms: int) -> list[int]:
        """Return the result of `forgettable` without the branches that a lease needs. The result is cached until
        branches or dead ranges change.
        """
        served = txn.pub(vbid).branch
        ranges = self._dead_ranges(txn, vbid, served)
        seen = (self._ranges[vbid][0], len(ranges), txn.stat(keys.DB_BRANCH)["entries"])
        known = self._forgotten.get(vbid)
        if known is None or known[0] != seen:
            staging = txn.state_row(vbid).staging_branch
            with_rows = {branch for dead in ranges for branch in (dead.branch, dead.left_by)}
            found = forgettable(branches.all_branches(txn, vbid), served, staging, with_rows)
            known = self._forgotten[vbid] = (seen, found)
        held = {link.branch for link in self.leases.held_rows(txn, vbid, now_ms)} if known[1] else set()
        return [branch for branch in known[1] if branch not in held]

    def _is_held(self, txn: Transaction, vbid: int, dead: Dead, now_ms: int) -> bool:
        held = self.leases.held_rows(txn, vbid, now_ms)
        return any(link.branch == dead.branch and link.cut > dead.after_seqno for link in held)

    def _dead_ranges(self, txn: Transaction, vbid: int, served: int) -> list[Dead]:
        """Return the result of `dead_ranges`, cached until a branch is opened, published or merged."""
        newest = txn.newest_branch(vbid)
        known = self._ranges.get(vbid)
        if known is None or known[0] != (served, newest):
            known = self._ranges[vbid] = ((served, newest), dead_ranges(txn, vbid))
        return known[1]

    def _announce_gap(self, txn: Transaction, vbid: int, dead: Dead) -> None:
        """Before rows of a dead range are removed, lower the branch's `kept_seqno`, so that readers refuse the range.
        Remove the range's rows in `span` and `manifest`.
        """
        row = branches.get_branch(txn, vbid, dead.branch)
        if row.kept_seqno > dead.after_seqno:
            branches.put_branch(txn, vbid, dead.branch, row._replace(kept_seqno=dead.after_seqno))
        if dead.after_seqno == SEQNO_MAX:
            return
        last = keys.SPAN_KEY.pack(vbid, dead.branch, dead.to_seqno)
        for tree in (keys.DB_SPAN, keys.DB_MANIFEST):  # both have keys of this form
            cursor = txn.cursor(tree)
            there = cursor.set_range(keys.SPAN_KEY.pack(vbid, dead.branch, dead.after_seqno + 1))
            for _ in range(self.step_size.rows):
                if not there or not cursor.key() or cursor.key() > last:
                    break
                there = cursor.delete()


class _Victims:
    def __init__(self, txn: Transaction, vbid: int, links: chain.Chain, floor: int) -> None:
        self.found: list[tuple[bytes, bytes]] = []
        """Wire key and reference of each version; duplicates occur."""
        self.local_purge_seqno = 0
        """Seqno of the newest removed tombstone, or of the oldest kept manifest if older ones were removed; 0: neither.
        """
        self._txn = txn
        self._links = links
        self._at_floor = chain.recut(links, floor)
        self._seen: set[tuple[bytes, bytes]] = set()
        self._keys, self._rows = keys.keys_db(vbid), keys.rows_db(vbid)
        self._cursor = txn.cursor(self._keys)

    def add_replaced_by(self, row_key: bytes, frame: bytes) -> None:
        """Add the older versions of a row's key, and the row if it is a tombstone and the newest at the floor."""
        ((wire_key, dup),) = records.key_rows([(row_key, frame)])
        seqno = records.seqno_of(row_key)
        older = chain.recut(self._links, seqno - 1)
        while (before := chain.newest_version(self._cursor, wire_key, older)) is not None:
            if (wire_key, before) in self._seen:
                break  # its older versions were added, too
            self._seen.add((wire_key, before))
            self.found.append((wire_key, before))
            older = chain.recut(older, records.seqno_of(before) - 1)
        is_tombstone = records.kind_of(dup) != records.MUTATION
        if is_tombstone and chain.newest_version(self._cursor, wire_key, self._at_floor) == dup:
            self.found.append((wire_key, dup))
            self.local_purge_seqno = seqno

    def delete(self) -> int:
        """Delete the versions from both trees, in each tree's order. Return the number of versions."""
        unique = sorted(set(self.found))
        for wire_key, dup in unique:
            removed = self._txn.delete(self._keys, wire_key, dup)
            assert removed, (wire_key, dup)
        for row_key in sorted(dup[records.ROW_KEY] for _, dup in unique):
            self._txn.delete(self._rows, row_key)
        return len(unique)


def _forget_boundaries(
    txn: Transaction, vbid: int, links: chain.Chain, boundaries: list[bytes], purged: int, floor: int, position: int
) -> None:
    """Up to `position`, remove the given boundaries, and the one at `purged`, the floor of an earlier purge."""
    last = [keys.ROW.pack(link.branch, purged) + keys.BOUNDARY_SUFFIX for link in links if link.base_seqno < purged]
    for key in [*last[:1], *boundaries]:
        if records.seqno_of(key) <= min(position, floor - 1):
            txn.delete(keys.rows_db(vbid), key)
            txn.delete(keys.DB_SPAN, keys.VBID_KEY.pack(vbid) + key[records.ROW_KEY])


def dead_ranges(txn: Transaction, vbid: int) -> list[Dead]:
    """Return every range of rows that no view of the served branch or the staging branch will ever see.

    Repeats the history: each branch was opened at a boundary of the chain that was served then.
    """
    known = branches.all_branches(txn, vbid)
    if len(known) == 1:
        return []
    served = txn.pub(vbid).branch
    staging = txn.state_row(vbid).staging_branch
    found = []
    links: list[chain.ChainLink] = []  # the chain served so far, root to tip
    for branch, row in known.items():
        if is_unseen(row):
            if branch != staging:  # else it is an unfinished resync or deferred rollback
                found.append(Dead(branch, 0, SEQNO_MAX, None, branch))
            continue
        if branch > served:
            continue
        since_ms = None if row.reason == BranchReason.ABANDONED else row.history_ms
        while links and links[-1].branch != row.parent:
            left = links.pop()
            found.append(Dead(left.branch, left.base_seqno, left.cut, since_ms, branch))
        if links and row.base_seqno < links[-1].cut:
            left = links.pop()
            found.append(Dead(left.branch, row.base_seqno, left.cut, since_ms, branch))
            links.append(left._replace(cut=row.base_seqno))
        links.append(chain.ChainLink(branch, row.base_seqno, SEQNO_MAX))
    return found


def is_unseen(row: records.BranchRow) -> bool:
    return not row.time_ms and row.reason in NOT_SEEN_AT_FIRST


def forgettable(known: branches.Known, served: int, staging: int, with_rows: set[int]) -> list[int]:
    """Return the branches whose records are not needed, newest first. Needed are the chains of the served branch, of
    the staging branch and of each branch in `with_rows`: that has rows, or has left some. If a copy that a resync
    replaced has rows, the chain that it served last is needed, too, to check which rows are kept
    (`storage.read.validity`).
    """
    copy_of: dict[int, int] = {}
    newest_of: dict[int, int] = {}
    for branch, row in known.items():
        copy_of[branch] = branch if row.parent is None else copy_of[row.parent]
        if not is_unseen(row):
            newest_of[copy_of[branch]] = branch
    needed = {served, staging, *with_rows, *(newest_of.get(copy_of[branch], 0) for branch in with_rows)}
    found = []
    for branch in sorted(known, reverse=True):  # a parent's number is smaller
        if branch in needed:
            needed.add(known[branch].parent or 0)
        else:
            found.append(branch)
    return found
