"""The rows of each vbucket that the writer has accepted but not yet committed.

Knows staged rows, seqnos and manifests. Only reads LMDB: `commit` writes the rows, and `PendingVbucket.settle` then
notes what was written. Invariants:
- `state` is the last commit's state, changed by the operations accepted since that commit;
- rows rise in seqno above the staged seqno;
- an operation that raises SeqnoOrder has changed nothing;
- `GroupPending.byte_count` counts the bytes of all pending rows and manifests of the group.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import islice
from operator import itemgetter, lt
from typing import Any, NamedTuple, Unpack

from storage.env.transaction import Transaction
from storage.errors import SeqnoOrder
from storage.format import keys, records, seal
from storage.history import branches, chain, index, manifests
from storage.model import Manifest, ManifestChange, Seqno, SnapshotRange, SourceFacts, VbucketState
from storage.write.owner import GroupOwner, contained

_unpack_row_key = keys.ROW.unpack

MANIFEST_DEPTH_MIN = 16
"""A manifest is stored whole, not as a change, once it consists of more rows than this plus two per collection."""

INLINE_INDEX_ROWS = 20_000
"""A commit writes up to this many missing key rows of a vbucket; if more are missing, an IndexJob runs first."""


class Plan(NamedTuple):
    row_count: int
    published: VbucketState | None
    """The state that the commit published; None: readers see nothing new."""
    counters: branches.BoundaryCounters
    manifest_count: int
    has_rows_above: bool = False
    """True if earlier commits wrote rows above the published end."""


class GroupPending:
    def __init__(self) -> None:
        self.byte_count = 0
        self.jobs: list[PendingVbucket] = []
        """Vbuckets with an IndexJob. Only the first vbucket's job runs."""


class PendingVbucket:
    """The state of one vbucket, and its pending rows and manifests.

    The staged seqno and the open snapshot change with every snapshot. So they are attributes outside of `base`: a new
    `base` would cost more than the two or three mutations of a live snapshot. `state` joins them.
    """

    def __init__(self, txn: Transaction, vbid: int, owner: GroupOwner, group: GroupPending) -> None:
        self.vbid = vbid
        self.owner = owner
        self._group = group
        self.load(txn)

    def load(self, txn: Transaction) -> None:
        """Load the last commit's state, without pending rows. The caller must first subtract the bytes of old pending
        rows and manifests from `GroupPending.byte_count`.
        """
        state, manifest_rows = branches.load(txn, self.vbid)
        self.base = state
        self.staged_seqno: int = state.staged_seqno
        self.open_snapshot = state.open_snapshot
        self.prefix = keys.PREFIX.pack(state.staging_branch)
        """The number of the staging branch, the first 4 bytes of a new row's key."""
        self.rows: list[tuple[bytes, bytes]] = []
        self.pending_bytes = 0
        self.complete_count = 0  # the number of `rows` in complete snapshots
        self.complete_seqno: int | None = None  # end of the complete snapshot to publish
        self.complete_start = 0
        self.flushed_seqno: int = state.staged_seqno
        self.indexed_seqno = txn.state_row(self.vbid).indexed_seqno
        self.indexed_bytes = 0  # bytes of rows above the published end that an IndexJob has read
        self.counters = branches.counters_at_end(txn, state)
        self.unindexed_count: int | None = 0 if self.indexed_seqno >= self.flushed_seqno else None  # None: not counted
        self.manifest_key, self.manifest_keys, self.manifest_depth = manifest_rows
        self.manifest_changes: list[tuple[int, ManifestChange]] = []  # (seqno, change), rising, not yet on the disk
        self.job: index.IndexJob | None = None
        self.dirty = False
        self.known_empty = bool(state.failover_log)  # without stored rows, a log means an empty vbucket

    @property
    def state(self) -> VbucketState:
        """The state with everything accepted so far; published_seqno is the last commit's."""
        return self.base._replace(staged_seqno=Seqno(self.staged_seqno), open_snapshot=self.open_snapshot)

    def change(self, **fields: Any) -> None:
        self.base = self.base._replace(**fields)

    @property
    def commit_worthy(self) -> bool:
        """False if all pending rows belong to the open snapshot: they wait in memory for the snapshot's end."""
        return self.complete_seqno is not None or not self.rows

    @property
    def publishable(self) -> bool:
        """True if a complete snapshot waits for its publish, and the vbucket has no IndexJob."""
        return self.complete_seqno is not None and self.job is None

    @property
    def indexed_until(self) -> int:
        """Rows on disk up to this seqno must have key rows before the complete snapshot is published."""
        assert self.complete_seqno is not None
        return min(self.complete_seqno, self.flushed_seqno)

    @property
    def can_publish(self) -> bool:
        """True if a complete snapshot waits for its publish, and the next commit can write all missing key rows."""
        if self.complete_seqno is None or self.job is not None:
            return False
        few = self.unindexed_count is not None and self.unindexed_count <= INLINE_INDEX_ROWS
        return few or self.indexed_seqno >= self.indexed_until

    # -- accepting ------------------------------------------------------------------------------------------------

    @contained
    def stage(self, rows: list[tuple[bytes, bytes]], byte_count: int, open_snapshot: SnapshotRange) -> None:
        """Accept rows of the open snapshot on the staging branch, as pairs of row key and DCP message. `byte_count` is
        the size of the messages.

        Raises SeqnoOrder, and accepts no row, if the rows are of another branch or do not strictly rise above the
        staged seqno.
        """
        if not rows:
            return
        row_keys = [row[0] for row in rows]
        first_branch, first = _unpack_row_key(row_keys[0])
        last_branch, last = _unpack_row_key(row_keys[-1])
        if not first_branch == last_branch == self.base.staging_branch:
            raise SeqnoOrder("rows were made for another branch", path=self.owner.path, vbid=self.vbid)
        if first <= self.staged_seqno or not all(map(lt, row_keys, islice(row_keys, 1, None))):
            raise SeqnoOrder(
                f"{len(rows)} rows from {first} to {last} do not rise above staged seqno {self.staged_seqno}",
                path=self.owner.path,
                vbid=self.vbid,
            )
        self.rows += seal.sealed_rows(row_keys, rows)
        self.pending_bytes += byte_count
        self._group.byte_count += byte_count
        self.staged_seqno = last
        self.open_snapshot = open_snapshot
        self.dirty = True

    def advance(self, seqno: int, open_snapshot: SnapshotRange | None) -> None:
        """Move the staged seqno without a row. Raises SeqnoOrder if it would fall."""
        if seqno < self.staged_seqno:
            raise SeqnoOrder(f"advance to {seqno} below {self.staged_seqno}", path=self.owner.path, vbid=self.vbid)
        self.staged_seqno = seqno
        self.open_snapshot = open_snapshot
        self.dirty = True

    @contained
    def system_event(
        self,
        seqno: int,
        row_value: bytes,
        manifest: Manifest,
        open_snapshot: SnapshotRange,
        change: ManifestChange | None = None,
    ) -> None:
        """Accept a system event: its row, and `manifest`, which is valid from `seqno` on.

        `change` is the difference from the previous manifest; None: compute it.
        """
        self.stage([(keys.ROW.pack(self.base.staging_branch, seqno), row_value)], len(row_value), open_snapshot)
        if change is None:
            change = ManifestChange.between(self.base.manifest, manifest)
        if self.manifest_depth > MANIFEST_DEPTH_MIN + 2 * len(manifest.collections):
            change = change.as_whole(manifest)
        self.manifest_changes.append((seqno, change))
        self.manifest_depth = 1 if change.whole else self.manifest_depth + 1
        self.change(manifest=manifest)
        self._group.byte_count += change.byte_count

    @contained
    def publish(self, boundary_seqno: int, snap_start_seqno: int) -> None:
        """Mark the snapshot that ends at `boundary_seqno` as complete; a later commit makes it visible.

        `boundary_seqno` is above the staged seqno if the source sent no row for the snapshot's end. It is below the
        staged seqno if `publish = persisted` delayed the publish; rows above `boundary_seqno` then stay staged.
        """
        assert boundary_seqno >= self.base.staging_published_seqno, (self.vbid, boundary_seqno)
        self.complete_seqno = boundary_seqno
        self.complete_start = snap_start_seqno
        if boundary_seqno >= self.staged_seqno:
            self.complete_count = len(self.rows)
            self.staged_seqno = boundary_seqno
            self.open_snapshot = None
        else:
            above = records.row_key(self.prefix, boundary_seqno + 1)
            self.complete_count = bisect_left(self.rows, above, key=itemgetter(0))
        self.dirty = True

    def save(self, **facts: Unpack[SourceFacts]) -> None:
        """Store facts of a stream with the vbucket's next commit.

        The vbucket's first failover log is stored only with its first rows, or after `publish` at 0 (an empty vbucket).
        """
        self.change(**facts)
        self.dirty = True

    # -- key rows of a large snapshot -----------------------------------------------------------------------------

    def complete_on_disk(self) -> bool:
        """Return True if the disk has a complete snapshot that lacks key rows, and mark this snapshot as complete.

        The start seqno of its snapshot marker was not stored, so the boundary gets the last published end instead.
        """
        state = self.base
        if state.open_snapshot is not None or state.staged_seqno <= state.staging_published_seqno:
            return False
        self.complete_seqno = state.staged_seqno
        self.complete_start = state.staging_published_seqno
        return True

    def begin_job(self) -> None:
        assert self.complete_seqno is not None
        self.job = index.IndexJob(self.owner.environment, self.vbid, self.unindexed(self.complete_seqno))
        self._group.jobs.append(self)

    def end_job(self) -> None:
        """Note that the job has written its key rows. Rows committed during the job get key rows from a commit or
        another job.
        """
        assert self.job is not None
        self.indexed_seqno = self.job.to_seqno
        self.indexed_bytes += self.job.row_bytes
        self.cancel_job()
        self.count_unindexed()
        self.dirty = True

    def cancel_job(self) -> None:
        """Remove the job. Its key rows stay on disk; readers see them only once their rows are published."""
        if self.job is not None:
            self.job.close()
            self.job = None
            self._group.jobs.remove(self)

    def count_unindexed(self) -> None:
        """Set `unindexed_count`, the number of rows on disk without key rows; None: too many for one commit."""
        with self.owner.environment.read() as txn:
            stored = chain.rows_after(txn, self.vbid, (self.unindexed(self.flushed_seqno),))
            count = sum(1 for _ in islice(stored, INLINE_INDEX_ROWS + 1))
        self.unindexed_count = count if count <= INLINE_INDEX_ROWS else None

    def unindexed(self, to_seqno: int) -> chain.ChainLink:
        """Return the link of the rows up to `to_seqno` that have no key rows."""
        return chain.ChainLink(self.base.staging_branch, self.indexed_seqno, to_seqno)

    # -- what a commit wrote --------------------------------------------------------------------------------------

    def manifest_key_at(self, seqno: int) -> manifests.Key:
        """Return the key of the newest manifest row at or below a seqno, stored or pending."""
        if not self.manifest_keys and not self.manifest_changes:
            return self.manifest_key
        branch = self.base.staging_branch
        staged = [at for _, at in self.manifest_keys] + [at for at, _ in self.manifest_changes]
        below = [at for at in staged if at <= seqno]
        return (branch, below[-1]) if below else self.manifest_key

    def purged(self, floor_seqno: int, local_purge_seqno: int, moved: tuple[int, int, int] | None) -> None:
        """Take over the purger's changes. `moved` (branch, parent, seqno): rows of `branch` up to `seqno` were moved to
        `parent`.
        """
        self.change(history_floor_seqno=Seqno(floor_seqno), local_purge_seqno=Seqno(local_purge_seqno))
        if moved is not None and self.manifest_key[0] == moved[0] and self.manifest_key[1] <= moved[2]:
            self.manifest_key = (moved[1], self.manifest_key[1])

    def settle(self, plan: Plan) -> None:
        self.counters = plan.counters
        if plan.manifest_count:
            self._settle_manifests(plan.manifest_count)
        self._settle_rows(plan.row_count)
        indexed_rows = 0
        if plan.published is not None:
            indexed_rows = self.complete_count
            self._settle_published(plan.published)
        if self.unindexed_count is not None:
            self.unindexed_count += plan.row_count - indexed_rows
        self.complete_count = 0
        self.dirty = bool(self.rows)

    def _settle_manifests(self, count: int) -> None:
        branch, written = self.base.staging_branch, self.manifest_changes[:count]
        del self.manifest_changes[:count]
        self._group.byte_count -= sum(change.byte_count for _, change in written)
        self.manifest_keys += [
            (branch, seqno) for seqno, _ in written if (branch, seqno) not in self.manifest_keys[-1:]
        ]

    def _settle_rows(self, count: int) -> None:
        if count == len(self.rows):
            flushed = self.staged_seqno
            dropped = self.pending_bytes
            self.rows = []
        else:
            flushed = max(self.flushed_seqno, self.complete_seqno or 0)
            stored = sum(len(value) for _, value in self.rows[:count])
            dropped = min(stored - count * seal.SIZE, self.pending_bytes)
            self.rows = self.rows[count:]
        self.pending_bytes -= dropped
        self._group.byte_count -= dropped
        self.flushed_seqno = flushed

    def _settle_published(self, published: VbucketState) -> None:
        seqno = published.published_seqno
        self.manifest_key = self.manifest_key_at(seqno)
        self.manifest_keys = [key for key in self.manifest_keys if key[1] > seqno]
        self.base = published
        self.known_empty = True
        self.indexed_seqno = seqno
        self.indexed_bytes = 0
        self.unindexed_count = 0
        self.complete_seqno = None

    # -- giving up ------------------------------------------------------------------------------------------------

    def _drop_rows(self) -> None:
        self._group.byte_count -= self.pending_bytes
        self.rows = []
        self.pending_bytes = 0
        self.complete_count = 0

    def _drop_above(self, seqno: int) -> None:
        """Lower the staged seqno to `seqno` and forget manifests above it. Call `_drop_rows` first."""
        self.staged_seqno = seqno
        self.dirty = True
        kept = [(at, change) for at, change in self.manifest_changes if at <= seqno]
        if len(kept) == len(self.manifest_changes) and all(at <= seqno for _, at in self.manifest_keys):
            return
        self._group.byte_count -= sum(change.byte_count for _, change in self.manifest_changes[len(kept) :])
        self.manifest_changes = kept
        self.manifest_keys = [key for key in self.manifest_keys if key[1] <= seqno]
        newest = self.manifest_keys[-1] if self.manifest_keys else self.manifest_key
        with self.owner.environment.read() as txn:
            manifest, depth = manifests.read(txn, self.vbid, newest)
        self.manifest_depth = depth + len(kept)
        self.change(manifest=manifest.changed(*(change for _, change in kept)))

    def _reread(self) -> None:
        """Load the last commit again. Call `_drop_rows` first."""
        self._group.byte_count -= sum(change.byte_count for _, change in self.manifest_changes)
        with self.owner.environment.read() as txn:
            self.load(txn)
