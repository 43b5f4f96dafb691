"""The value types of the store: identifiers, documents, boundaries and the state of a vbucket.

All types but `SourceFacts` are immutable. `mirror.ingest` imports no other module of `storage`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple, NewType, TypedDict

Seqno = NewType("Seqno", int)
Vbuuid = NewType("Vbuuid", int)
ManifestUid = NewType("ManifestUid", int)
Branch = NewType("Branch", int)

NO_VBUUID = Vbuuid(0)
"""The vbuuid of a stream request from seqno 0, and of seqnos below the oldest entry of a failover log."""

SEQNO_MAX = 2**64 - 1
DEFAULT_COLLECTION = 0
"""Collection id of `_default._default`."""


class Kind(IntEnum):
    """Kind of a stored row. The values are the DCP opcodes of the messages."""

    MUTATION = 0x57
    DELETION = 0x58
    EXPIRATION = 0x59
    SYSTEM_EVENT = 0x5F


class BranchReason(IntEnum):
    FIRST = 1
    ROLLBACK = 2
    RESYNC = 3
    ABANDONED = 4
    DEFERRED_ROLLBACK = 6
    MERGING = 7
    """The branch lies below the floor, and the purger is moving its rows to the parent."""


class FailoverEntry(NamedTuple):
    """One history of the source: `vbuuid` began after `seqno`."""

    vbuuid: Vbuuid
    seqno: Seqno


class FailoverLog(tuple[FailoverEntry, ...]):
    """Histories of a vbucket, newest first; seqnos never rise from one entry to the next (docs/protocol.md 2.5)."""

    __slots__ = ()

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> FailoverLog:
        return cls([FailoverEntry(Vbuuid(vbuuid), Seqno(seqno)) for vbuuid, seqno in pairs])

    @property
    def newest_vbuuid(self) -> Vbuuid:
        """NO_VBUUID if the log is empty."""
        return self[0].vbuuid if self else NO_VBUUID

    def vbuuid_at(self, seqno: int) -> Vbuuid:
        """Return the vbuuid of the newest entry that began at or below `seqno`. Return NO_VBUUID if no entry did, and
        for seqno 0, which belongs to every history.
        """
        if seqno:
            for entry in self:
                if entry.seqno <= seqno:
                    return entry.vbuuid
        return NO_VBUUID

    def end_of(self, vbuuid: int, high_seqno: int) -> int | None:
        """Return the last seqno of the history `vbuuid`: the seqno of the next newer entry, or `high_seqno` for the
        newest. None: no entry has this vbuuid.
        """
        end_seqno = high_seqno
        for entry in self:
            if entry.vbuuid == vbuuid:
                return end_seqno
            end_seqno = entry.seqno
        return None

    def pruned(self, seqno: int, vbuuid: int | None = None) -> FailoverLog:
        """Return the log after a rollback to a boundary at `seqno`.

        If no entry is left, add an entry with the boundary's `vbuuid`. This entry begins at `seqno`, because rows
        below may belong to an older history.
        """
        kept = [entry for entry in self if entry.seqno <= seqno]
        if not kept and seqno and vbuuid:
            kept = [FailoverEntry(Vbuuid(vbuuid), Seqno(seqno))]
        return FailoverLog(kept)


@dataclass(frozen=True, slots=True)
class SnapshotRange:
    """An incomplete snapshot, as the source's markers described it. The start is not reliable (docs/protocol.md 2.6.4):
    for a request, the snapshot begins at our own boundary.
    """

    start_seqno: Seqno
    end_seqno: Seqno
    flags: int = 0


@dataclass(frozen=True, slots=True)
class Collection:
    """A collection as of some seqno of a vbucket. Only documents above `begin_seqno` belong to the collection."""

    collection_id: int
    scope_id: int
    name: str
    begin_seqno: Seqno
    max_ttl: int | None = None


ID_DIGITS = len(str(2**32 - 1))


def collection_named(text: str) -> str | int:
    """Return the collection that a text names: digits alone are an id, and the scope of a bare name is `_default`."""
    if text.isascii() and text.isdigit() and len(text) <= ID_DIGITS:  # int() refuses thousands of digits
        return int(text)
    return text if "." in text else f"_default.{text}"


@dataclass(frozen=True)
class Manifest:
    uid: ManifestUid
    scopes: dict[int, str] = field(default_factory=dict)
    collections: dict[int, Collection] = field(default_factory=dict)

    @staticmethod
    def initial() -> Manifest:
        """Return the manifest of a new bucket: `_default._default` alone, from seqno 0."""
        default = Collection(DEFAULT_COLLECTION, 0, "_default", Seqno(0))
        return Manifest(ManifestUid(0), {0: "_default"}, {DEFAULT_COLLECTION: default})

    def name_of(self, collection_id: int) -> str | None:
        """Return `scope.collection`, or None for an unknown id."""
        entry = self.collections.get(collection_id)
        return None if entry is None else self._name(entry)

    def names(self) -> dict[int, str]:
        return {each.collection_id: self._name(each) for each in self.collections.values()}

    def _name(self, entry: Collection) -> str:
        return f"{self.scopes.get(entry.scope_id, '?')}.{entry.name}"

    @cached_property
    def ids(self) -> dict[str, int]:
        return {name: collection_id for collection_id, name in self.names().items()}

    def collection(self, name: str | int) -> Collection | None:
        found = collection_named(name) if isinstance(name, str) else name
        return self.collections.get(self.ids.get(found, -1) if isinstance(found, str) else found)

    def has(self, collection_id: int, seqno: int) -> bool:
        """Return True if the collection exists and was not flushed after a row at `seqno`."""
        collection = self.collections.get(collection_id)
        return collection is not None and seqno > collection.begin_seqno

    def changed(self, *changes: ManifestChange) -> Manifest:
        """Return the manifest after `changes`, given oldest first."""
        uid, scopes, collections = self.uid, dict(self.scopes), dict(self.collections)
        for change in changes:
            if change.whole:
                scopes, collections = {}, {}
            uid = change.uid
            for scope_id, name in change.scopes.items():
                if name is None:
                    scopes.pop(scope_id, None)
                else:
                    scopes[scope_id] = name
            for collection_id, collection in change.collections.items():
                if collection is None:
                    collections.pop(collection_id, None)
                else:
                    collections[collection_id] = collection
        return Manifest(uid, scopes, collections)


@dataclass(frozen=True, slots=True)
class ManifestChange:
    """The difference between two manifests. The value None marks a dropped scope or collection."""

    uid: ManifestUid
    scopes: dict[int, str | None]
    collections: dict[int, Collection | None]
    emptied: tuple[int, ...] = ()
    """Ids of the collections that were dropped or flushed."""
    whole: bool = False
    """True if `scopes` and `collections` are the complete second manifest."""

    @staticmethod
    def between(
        before: Manifest,
        after: Manifest,
        scope_ids: Iterable[int] | None = None,
        collection_ids: Iterable[int] | None = None,
    ) -> ManifestChange:
        """Compare two manifests. `scope_ids` and `collection_ids` limit the comparison (None: compare all)."""
        old, new = before.collections, after.collections
        scope_ids = [*before.scopes, *after.scopes] if scope_ids is None else scope_ids
        collection_ids = [*old, *new] if collection_ids is None else collection_ids
        scopes = {sid: after.scopes.get(sid) for sid in scope_ids if before.scopes.get(sid) != after.scopes.get(sid)}
        collections = {cid: new.get(cid) for cid in collection_ids if old.get(cid) != new.get(cid)}
        emptied = tuple(
            cid for cid, entry in collections.items() if cid in old and _begin(entry) > old[cid].begin_seqno
        )
        return ManifestChange(after.uid, scopes, collections, emptied)

    def as_whole(self, after: Manifest) -> ManifestChange:
        return replace(self, scopes=dict(after.scopes), collections=dict(after.collections), whole=True)

    @property
    def byte_count(self) -> int:
        return 256 * (1 + len(self.scopes) + len(self.collections))


def _begin(collection: Collection | None) -> int:
    return SEQNO_MAX if collection is None else collection.begin_seqno


@dataclass(frozen=True, slots=True)
class Boundary:
    """The kept end of a published snapshot. A vbucket can be read as of a boundary and rolled back to it."""

    branch: Branch
    seqno: Seqno
    snap_start_seqno: Seqno
    vbuuid: Vbuuid
    time_ms: int
    """Wall clock when published, milliseconds since 1970."""
    history_ms: int = 0
    """Time by `HistoryClock` (storage/write/owner.py) when published. The purger computes the boundary's age by it."""
    ordinal: int = 0
    """Number of boundaries on the chain up to this boundary, with purged boundaries."""
    row_bytes: int = 0
    """Bytes of the rows on the chain up to this boundary, with purged rows."""
    history_id: int = field(default=0, compare=False)
    """See `Token.history_id`."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """A rollback that readers saw: from (`from_branch`, `from_seqno`) to a new branch that begins at `to_seqno`."""

    vbid: int
    from_branch: Branch
    from_seqno: Seqno
    to_branch: Branch
    to_seqno: Seqno
    from_vbuuid: Vbuuid
    to_vbuuid: Vbuuid
    time_ms: int


def purge_seqno_of(local_purge_seqno: int, missing_seqno: int, floor_seqno: int) -> int:
    """Return the purge seqno of a served copy (docs/protocol.md 4.6).

    `missing_seqno` may be SEQNO_MAX (unknown, see `VbucketState`). Then the floor bounds the result.
    """
    return max(local_purge_seqno, min(missing_seqno, floor_seqno))


class SourceFacts(TypedDict, total=False):
    """Facts about a vbucket that a source reports besides rows. `VbucketState` explains them."""

    failover_log: FailoverLog
    source_purge_seqno: Seqno
    missing_seqno: int
    stream_filter: str | None


class VbucketState(NamedTuple):
    """The state from which a vbucket continues after a restart. A commit writes the state together with the rows."""

    # A tuple for speed: each commit calls `_replace`, which takes an eighth of the time of `dataclasses.replace`.

    vbid: int
    branch: Branch
    """The served branch."""
    published_seqno: Seqno
    history_floor_seqno: Seqno
    staging_branch: Branch
    """The branch that rows are written to. It differs from `branch` during a resync or a deferred rollback."""
    staged_seqno: Seqno
    """The last seqno received on the staging branch, with a row or with a message that only advances the seqno."""
    staging_published_seqno: Seqno
    """The published seqno of the staging branch: `published_seqno` if readers see this branch, 0 during a resync, the
    seqno of the rollback's boundary during a deferred rollback.
    """
    open_snapshot: SnapshotRange | None
    """The incomplete snapshot that the last staged rows belong to; None between snapshots."""
    failover_log: FailoverLog
    """The source's log of the staging branch, without the entries that rollbacks removed. Readers may see another
    history (`states.vbuuid_at`).
    """
    source_purge_seqno: Seqno
    local_purge_seqno: Seqno
    manifest: Manifest
    """The manifest as of `staged_seqno`."""
    rollback_count: int = 0
    last_rollback_ms: int | None = None
    stream_filter: str | None = None
    """The filter in the stream requests of the staging branch; None: no filter; empty: unknown."""
    missing_seqno: int = 0
    """Tombstones up to here may be missing on the staging branch: the source purged them before the first snapshot. If
    the source does not report its purge seqno, the value is SEQNO_MAX until the first snapshot is published.
    """

    @property
    def purge_seqno(self) -> int:
        return purge_seqno_of(self.local_purge_seqno, self.missing_seqno, self.history_floor_seqno)

    @property
    def has_served_log(self) -> bool:
        """False during a resync or a deferred rollback: readers see a history that `failover_log` may not have."""
        return self.staging_branch == self.branch

    @property
    def rollback_deferred(self) -> bool:
        """True during a deferred rollback: rows go to a new branch, and readers see the old one."""
        return not self.has_served_log and self.staging_published_seqno > 0

    @property
    def is_whole(self) -> bool:
        """True once a complete snapshot is served. The snapshot of an empty vbucket ends at seqno 0. Once this
        snapshot is published, there is a failover log, and nothing is staged.
        """
        if self.published_seqno:
            return True
        nothing_staged = self.staged_seqno == 0 and self.open_snapshot is None
        return bool(self.failover_log) and nothing_staged and self.has_served_log


class Document(NamedTuple):
    """A document as readers get it. `value`: the decompressed body without xattrs, or the stored value (`raw`)."""

    # A tuple for speed: a frozen dataclass of these fields takes three times as long to build.

    vbid: int
    collection_id: int
    key: bytes
    """The key without its collection id prefix."""
    seqno: Seqno
    rev_seqno: int
    cas: int
    flags: int
    expiry: int
    """Seconds since 1970; 0: never. For tombstones: the delete time, if the source gave one."""
    datatype: int
    """Datatype of `value`. Bits as on the wire: 1 JSON, 2 Snappy, 4 XATTR."""
    value: bytes
    kind: Kind = Kind.MUTATION
    branch: Branch = Branch(0)

    @property
    def deleted(self) -> bool:
        return self.kind is not Kind.MUTATION


class DocumentField(NamedTuple):
    """A numeric field of a document, for HTTP headers, JSON, and columns of SQL, Arrow and Spark."""

    name: str
    """The field's name in `Document`."""
    byte_count: int
    """Size as an unsigned integer."""
    meaning: str
    in_json: bool = True
    is_column: bool = True


DOCUMENT_FIELDS = (
    DocumentField("vbid", 2, "the vbucket"),
    DocumentField("collection_id", 4, "the collection", is_column=False),  # columns hold the name instead
    DocumentField("seqno", 8, "number of the version in its vbucket"),
    DocumentField("rev_seqno", 8, "number of the version among those of its key"),
    DocumentField("cas", 8, "CAS of the version"),
    DocumentField("flags", 4, "the application's flags"),
    DocumentField("expiry", 4, "seconds since 1970; 0: never; of a tombstone the delete time, if the source gave one"),
    DocumentField("datatype", 1, "bits of the value as it is here: 1 JSON, 2 Snappy, 4 xattrs"),
    DocumentField("branch", 4, "the line of local history that the version is on", in_json=False, is_column=False),
)
"""The fields in display order."""
JSON_FIELDS = tuple(each.name for each in DOCUMENT_FIELDS if each.in_json)


@dataclass(frozen=True, slots=True)
class Identity:
    """The bucket that a data directory mirrors, and the directory's layout. Each LMDB environment has a copy."""

    cluster_uuid: str
    bucket_name: str
    bucket_uuid: str
    vbucket_count: int
    group_count: int
    held: tuple[int, int] | None = None
    """First and last vbucket of this mirror, if other mirrors hold the rest; None: this mirror holds all."""
    selection: str = ""
    """The mirrored part of the bucket (text of a `Selection`); empty: the whole bucket."""

    @property
    def vbids(self) -> range:
        if self.held is None:
            return range(self.vbucket_count)
        return range(self.held[0], self.held[1] + 1)

    def group_vbids(self, group: int) -> range:
        """Return the vbuckets of a group that this mirror holds, in rising order."""
        first = self.vbids.start
        first += (group - first) % self.group_count
        return range(first, self.vbids.stop, self.group_count)
