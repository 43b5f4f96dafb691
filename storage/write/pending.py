"""What a writer has accepted and not yet committed: the memory of each vbucket of a group.

Knows rows, seqnos and manifests as they are staged; of LMDB it reads alone, and it never commits. `commit`
writes what is here and then calls back what was written. Invariants: `state` is the last commit and the operations
accepted since; rows rise in seqno above what is staged; an operation that raises SeqnoOrder
has changed nothing; `PendingBytes.count` is the sum over the group of rows and manifests in memory.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import islice
from operator import itemgetter, lt
from typing import Any

from storage.env.transaction import Transaction
from storage.errors import SeqnoOrder
from storage.format import keys, records, seal
from storage.history import branches, index
from storage.model import FailoverLog, Manifest, ManifestChange, Seqno, SnapshotRange, Vbid, VbucketState

_unpack_row_key = keys.ROW.unpack

MANIFEST_DEPTH_MIN = 16
"""A manifest is never written whole before it is made of more rows than this, and than twice its collections."""


class PendingBytes:
    """How many bytes of a group wait in memory."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        """None yet."""
        self.count = 0


class PendingVbucket:
    """One vbucket: its state, and what is pending above the last commit.

    What changes with every snapshot (staged seqno, open snapshot) is kept outside of `base` and joined to it by
    `state`: live snapshots hold two or three mutations, and a new VbucketState for each would cost more than writing
    them.
    """

    __slots__ = (
        "_bytes",
        "_path",
        "base",
        "complete_count",
        "complete_seqno",
        "complete_start",
        "counters",
        "dirty",
        "flushed_seqno",
        "indexed_bytes",
        "indexed_seqno",
        "job",
        "known_empty",
        "manifest_changes",
        "manifest_depth",
        "manifest_key",
        "manifest_keys",
        "open_snapshot",
        "pending_bytes",
        "prefix",
        "rows",
        "staged_seqno",
        "unindexed_count",
    )

    def __init__(self, loaded: branches.LoadedVbucket, byte_count: PendingBytes, path: str) -> None:
        """Nothing is pending yet. `byte_count` is the group's."""
        state = loaded.state
        self._bytes = byte_count
        self._path = path
        self.base = state
        self.staged_seqno: int = state.staged_seqno
        self.open_snapshot = state.open_snapshot
        self.prefix = keys.PREFIX.pack(state.staging_branch)
        self.rows: list[tuple[bytes, bytes]] = []
        self.pending_bytes = 0
        self.complete_count = 0  # how many of `rows` belong to complete snapshots
        self.complete_seqno: int | None = None  # newest complete end that is not published yet
        self.complete_start = 0
        self.flushed_seqno: int = state.staged_seqno
        self.indexed_seqno = loaded.indexed_seqno
        self.indexed_bytes = 0  # of rows above what is published that an IndexJob has read
        self.counters = loaded.counters  # of the newest published boundary
        self.unindexed_count: int | None = 0 if self.indexed_seqno >= self.flushed_seqno else None  # None: not counted
        self.manifest_key = loaded.manifest_key  # of the newest manifest row at or below what is published
        self.manifest_keys = loaded.manifest_keys  # of those above it that are on the disk, rising
        self.manifest_changes: list[tuple[int, ManifestChange]] = []  # (seqno, change), rising, that are not yet
        self.manifest_depth = loaded.manifest_depth
        self.job: index.IndexJob | None = None
        self.dirty = False
        self.known_empty = bool(state.failover_log)  # matters only while nothing is stored: it was published at 0

    @staticmethod
    def load(txn: Transaction, vbid: Vbid, byte_count: PendingBytes) -> PendingVbucket:
        """A vbucket as the last commit left it."""
        return PendingVbucket(branches.load(txn, vbid), byte_count, txn.path)

    @property
    def state(self) -> VbucketState:
        """Everything accepted so far; published_seqno counts commits only."""
        return self.base._replace(staged_seqno=Seqno(self.staged_seqno), open_snapshot=self.open_snapshot)

    def change(self, **fields: Any) -> None:
        """Replace fields of the state that change rarely."""
        self.base = self.base._replace(**fields)

    @property
    def commit_worthy(self) -> bool:
        """False while all that is pending are rows of an open snapshot: they wait in memory for its end."""
        return self.complete_seqno is not None or not self.rows

    # -- accepting ------------------------------------------------------------------------------------------------

    def stage(self, rows: list[tuple[bytes, bytes]], byte_count: int, open_snapshot: SnapshotRange) -> None:
        """Accept rows of the open snapshot above what is staged. Raises SeqnoOrder (see `GroupWriter.stage`)."""
        row_keys = [row[0] for row in rows]
        first_branch, first = _unpack_row_key(row_keys[0])
        last_branch, last = _unpack_row_key(row_keys[-1])
        if not first_branch == last_branch == self.base.staging_branch:
            raise SeqnoOrder("rows were made for another branch", path=self._path, vbid=self.base.vbid)
        if first <= self.staged_seqno or not all(map(lt, row_keys, islice(row_keys, 1, None))):
            raise SeqnoOrder(
                f"{len(rows)} rows from {first} to {last} do not rise above staged seqno {self.staged_seqno}",
                path=self._path,
                vbid=self.base.vbid,
            )
        self.rows += seal.sealed_rows(row_keys, rows)
        self.pending_bytes += byte_count
        self._bytes.count += byte_count
        self.staged_seqno = last
        self.open_snapshot = open_snapshot
        self.dirty = True

    def advance(self, seqno: int) -> None:
        """Move the position without a row. Raises SeqnoOrder when it would fall."""
        if seqno < self.staged_seqno:
            raise SeqnoOrder(f"advance to {seqno} below {self.staged_seqno}", path=self._path, vbid=self.base.vbid)
        self.staged_seqno = seqno
        self.dirty = True

    def set_open_snapshot(self, open_snapshot: SnapshotRange | None) -> None:
        """Record the range of the open snapshot."""
        self.open_snapshot = open_snapshot
        self.dirty = True

    def system_event(
        self,
        seqno: int,
        row_value: bytes,
        manifest: Manifest,
        open_snapshot: SnapshotRange,
        change: ManifestChange | None,
    ) -> None:
        """Accept a system event: its row, and the manifest that holds from its seqno on."""
        branch = self.base.staging_branch
        self.stage([(keys.ROW.pack(branch, seqno), row_value)], len(row_value), open_snapshot)
        if change is None:
            change = ManifestChange.between(self.base.manifest, manifest)
        self._bytes.count += self._change_manifest(seqno, manifest, change)

    def _change_manifest(self, seqno: int, manifest: Manifest, change: ManifestChange) -> int:
        """Accept a manifest that holds from `seqno` on; returns the bytes that it costs until it is written.

        A row holds what has changed, and now and then all: so that reading a manifest takes no more rows than it has
        collections, times a constant.
        """
        if self.manifest_depth > MANIFEST_DEPTH_MIN + 2 * len(manifest.collections):
            change = change.as_whole(manifest)
        self.manifest_changes.append((seqno, change))
        self.manifest_depth = 1 if change.whole else self.manifest_depth + 1
        self.change(manifest=manifest)
        return change.byte_count

    def publish(self, boundary_seqno: int, snap_start_seqno: int, source_purge_seqno: int | None) -> None:
        """The snapshot that ends at `boundary_seqno` is complete (see `GroupWriter.publish`)."""
        assert boundary_seqno >= self.base.staging_published_seqno, (self.base.vbid, boundary_seqno)
        self.complete_seqno = boundary_seqno
        self.complete_start = snap_start_seqno
        if boundary_seqno >= self.staged_seqno:
            self.complete_count = len(self.rows)
            self.staged_seqno = boundary_seqno
            self.open_snapshot = None
        else:
            above = records.row_key(self.prefix, boundary_seqno + 1)
            self.complete_count = bisect_left(self.rows, above, key=itemgetter(0))
        if source_purge_seqno is not None:
            self.change(source_purge_seqno=Seqno(source_purge_seqno))
        self.dirty = True

    def save_failover_log(self, log: FailoverLog, source_purge_seqno: int | None, missing_seqno: int | None) -> None:
        """Replace the failover log (see `GroupWriter.save_failover_log`)."""
        self.change(failover_log=log)
        if source_purge_seqno is not None:
            self.change(source_purge_seqno=Seqno(source_purge_seqno))
        if missing_seqno is not None:
            self.change(missing_seqno=missing_seqno)
        self.dirty = True

    # -- what a commit wrote --------------------------------------------------------------------------------------

    def manifest_key_at(self, seqno: int) -> branches.ManifestKey:
        """The newest manifest row at or below a seqno, of those on the disk and those that are pending."""
        if not self.manifest_keys and not self.manifest_changes:
            return self.manifest_key
        branch = self.base.staging_branch
        staged = [at for _, at in self.manifest_keys] + [at for at, _ in self.manifest_changes]
        below = [at for at in staged if at <= seqno]
        return (branch, below[-1]) if below else self.manifest_key

    def manifests_written(self, count: int) -> None:
        """The first `count` manifest changes are on the disk."""
        branch, written = self.base.staging_branch, self.manifest_changes[:count]
        del self.manifest_changes[:count]
        self._bytes.count -= sum(change.byte_count for _, change in written)
        self.manifest_keys += [
            (branch, seqno) for seqno, _ in written if (branch, seqno) not in self.manifest_keys[-1:]
        ]

    def rows_written(self, count: int) -> None:
        """The first `count` rows are on the disk."""
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
        self._bytes.count -= dropped
        self.flushed_seqno = flushed

    # -- giving up ------------------------------------------------------------------------------------------------

    def drop_rows(self) -> None:
        """Forget the rows in memory."""
        self._bytes.count -= self.pending_bytes
        self.rows = []
        self.pending_bytes = 0
        self.complete_count = 0

    def drop_complete(self) -> None:
        """Forget that a snapshot was complete; what of it is on the disk stays hidden."""
        self.drop_rows()
        self.complete_seqno = None

    def drop_above(self, txn: Transaction, seqno: int) -> None:
        """Continue from `seqno`, after `drop_rows`: forget the position and manifests above it."""
        self.staged_seqno = seqno
        self._drop_manifests(txn, seqno)
        self.dirty = True

    def _drop_manifests(self, txn: Transaction, above_seqno: int) -> None:
        kept = [(seqno, change) for seqno, change in self.manifest_changes if seqno <= above_seqno]
        if len(kept) == len(self.manifest_changes) and all(at <= above_seqno for _, at in self.manifest_keys):
            return
        self._bytes.count -= sum(change.byte_count for _, change in self.manifest_changes[len(kept) :])
        self.manifest_changes = kept
        self.manifest_keys = [key for key in self.manifest_keys if key[1] <= above_seqno]
        newest = self.manifest_keys[-1] if self.manifest_keys else self.manifest_key
        manifest, depth = branches.read_manifest(txn, self.base.vbid, newest)
        self.manifest_depth = depth + len(kept)
        self.change(manifest=manifest.changed(*(change for _, change in kept)))

    def drop_manifests(self) -> None:
        """Forget the bytes of all manifests that are pending: this object is replaced."""
        self._bytes.count -= sum(change.byte_count for _, change in self.manifest_changes)
