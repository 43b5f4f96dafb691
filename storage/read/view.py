"""The reader's API: `open_view`, `View`, and the types of its answers. Any process may use it at any time.

Knows the format and nothing of the service. Invariants: one answer is read in one LMDB transaction (served branch,
published_seqno and rows together); a scan keeps the boundary it began with and renews its transaction between chunks,
so it neither blocks the purger nor makes the file grow, and raises ViewInvalidated when a rollback or the purger has
passed it. A View may be used by many threads; a generator it returned by one at a time. After fork open a new one.

The work is done by `point_reads` (documents by key), `scan` (documents in order), `changes` and `retractions` (events
in order), `states` (positions and history), each through a `VbucketReader` that `groups` opens.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Iterator

import lmdb

from storage.env.environment import MAP_SIZE
from storage.format.collection_names import CollectionName
from storage.format.keys import PUB_STALE, vbid_of
from storage.format.tokens import TOKEN_LENGTH_MAX, AsOf, Pin, Time, Token
from storage.history import extent
from storage.history.extent import History
from storage.model import SEQNO_MAX, Boundary, Document, Identity, Manifest, Seqno, Vbid, VbucketState
from storage.read import changes as events
from storage.read import retractions, states, validity, wait
from storage.read import scan as scans
from storage.read.changes import Change, Pieces, Rollback
from storage.read.groups import Groups
from storage.read.large import LargeDocument
from storage.read.point_reads import Found, PointReads
from storage.read.states import Past, ServedPosition

__all__ = [
    "TOKEN_LENGTH_MAX",
    "AsOf",
    "Change",
    "CollectionName",
    "Found",
    "Past",
    "Pieces",
    "Pin",
    "Rollback",
    "ServedPosition",
    "Time",
    "Token",
    "View",
    "open_view",
]


def open_view(
    path: str | os.PathLike[str], *, map_size: int = MAP_SIZE, stale_reads: bool = False, verify_reads: bool = True
) -> View:
    """Open the mirror in the data directory `path` for reading, whether its service runs or not.

    `map_size` is how much address space each group gets at first, in bytes; it grows by itself. With `stale_reads` a
    vbucket that is resynced is read from its old copy, also where the setting `resync_reads` withholds that.

    `verify_reads`: compare the checksum of each row that is read, and raise CorruptedError where it does not match.

    Raises NotAMirror, ReadOnly (no write access to a lock file), CorruptedError, FormatTooNew, WrongBucket.
    """
    return View(os.fspath(path), map_size=map_size, stale_reads=stale_reads, verify_reads=verify_reads)


_views: weakref.WeakSet[View] = weakref.WeakSet()


def _after_fork() -> None:
    for view in list(_views):
        view.groups.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


class View(PointReads):
    """A reader of one mirror, made by `open_view`. Use it as a context manager, or call `close`.

    Each answer is read in one transaction: documents and the position that they belong to are of one moment. A scan
    keeps the boundary that it began with. Many threads may use one view; a generator that it returned is for one thread
    at a time. After fork, open another view in the child.

    Documents: `get`, `get_many`, `exists`, `scan`. Changes: `changes`, `changes_between`, `token`. One's own writes:
    `wait_for`. Positions and history: `state`, `states`, `boundaries`, `rollbacks`, `history`. Collections: `manifest`.
    """

    def __init__(
        self, path: str, *, map_size: int = MAP_SIZE, stale_reads: bool = False, verify_reads: bool = True
    ) -> None:
        """Call `open_view` instead."""
        super().__init__(Groups(path, map_size=map_size, stale_reads=stale_reads, verify_reads=verify_reads))
        self.path = path
        self.identity: Identity = self.groups.identity
        self.vbids = self.identity.vbids
        """The vbuckets that this mirror holds: all of the bucket's, unless several mirrors share them."""
        self._known_positions: states.KnownPositions = {}
        self._known_uids: states.KnownUids = {}
        _views.add(self)

    def __enter__(self) -> View:
        """Return the view itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Release the environments. Later calls, and generators of this view that go on, raise Closed."""
        self.groups.close()

    def vbid_of(self, key: bytes) -> Vbid:
        """The vbucket of a document key."""
        return Vbid(vbid_of(key, self.identity.vbucket_count))

    # -- collections ----------------------------------------------------------------------------------------------

    def manifest(self, vbid: int | None = None) -> Manifest:
        """Scopes and collections as one vbucket knows them now: the first of `vbids`, unless `vbid` is given."""
        reader = self.reader(self.vbids[0] if vbid is None else vbid)
        with reader.environment.read() as txn:
            return reader.manifest(txn, reader.served(txn).manifest_key)

    def manifest_uids(self) -> dict[int, int]:
        """Return the uid of the manifest of each vbucket. Next to nothing is read where none changed since the last
        call.
        """
        return states.manifest_uids(self.groups, self._known_uids)

    def manifest_of(self, pin: Pin) -> Manifest:
        """Scopes and collections as they were at the boundary of a pin. Raises ViewInvalidated."""
        reader = self.reader(pin.vbid)
        with reader.environment.read() as txn:
            return reader.manifest(txn, validity.served_at(reader, txn, pin, survives_rollback=False).manifest_key)

    # -- documents in order (by key: `PointReads`) ----------------------------------------------------------------

    def scan(
        self,
        vbid: int | None = None,
        *,
        prefix: bytes | str = b"",
        start: bytes | str = b"",
        end: bytes | str | None = None,
        collection: CollectionName | None = None,
        limit: int | None = None,
        as_of: AsOf = None,
        now: float | None = None,
        deletions: bool = False,
        raw: bool = False,
    ) -> Iterator[Document]:
        """Return an iterator over documents: vbucket by vbucket, within each collection in the order of their keys.

        Without `vbid` it covers all vbuckets, without `collection` all collections; `start` <= key < `end`. Each
        vbucket is seen at one boundary. `deletions` adds tombstones and expired documents. The other arguments and
        errors are those of `get`; a value that cannot be decompressed is as in `get_many`. Raises ViewInvalidated on
        the way when a rollback or the purger has passed the boundary: scan again.
        """
        prefix, start = (text.encode() if isinstance(text, str) else text for text in (prefix, start))
        stop = end.encode() if isinstance(end, str) else end
        selection = scans.KeySelection(prefix, start, stop, deletions, raw)
        left = limit if limit is not None else -1
        for each in self.vbids if vbid is None else (vbid,):
            if left == 0:
                return
            for document in scans.documents(self.reader(each), selection, collection, as_of, now, self.path):
                yield document
                left -= 1
                if left == 0:
                    return

    def pin(self, vbid: int, as_of: AsOf = None, *, now: float | None = None) -> Pin:
        """Name what a vbucket serves (now, or as of a boundary), for `scan_page`. Raises NoSuchBoundary."""
        return scans.pin(self.reader(vbid), as_of, now)

    def scan_page(
        self,
        pin: Pin,
        collection: CollectionName | None = None,
        *,
        start: bytes = b"",
        prefix: bytes = b"",
        end: bytes | None = None,
        limit: int = scans.CHUNK_ROWS,
        bytes_max: int | None = None,
        deletions: bool = False,
        raw: bool = False,
    ) -> tuple[list[Document], bytes]:
        """At most `limit` documents from `start` on as `pin` sees them, and the next page's start (empty: the end).

        One transaction and bounded work, so a page may hold fewer documents than `limit`, even none, before the end;
        their values are no more than `bytes_max`, but for a first one that is larger by itself.
        Raises ViewInvalidated when a rollback, a resync or the purger passed the pin.
        """
        selection = scans.KeySelection(prefix, start, end, deletions, raw)
        return scans.page(self.groups, pin, collection, selection, limit, bytes_max)

    def scan_page_or_large(
        self,
        pin: Pin,
        collection_id: int,
        *,
        start: bytes,
        end: bytes | None,
        limit: int,
        bytes_max: int | None,
        large_bytes: int,
    ) -> tuple[list[Document], LargeDocument | None, bytes]:
        """As `scan_page` with `raw`. A value of more than `large_bytes`, stored or decompressed, is a page by itself,
        and is not read.
        """
        selection = scans.KeySelection(b"", start, end, raw=True)
        return scans.page_or_large(self.groups, pin, collection_id, selection, limit, bytes_max, large_bytes)

    def count_keys(self, pin: Pin, collection_id: int, *, start: bytes, keys_max: int) -> tuple[int, bytes]:
        """Return how many of the next `keys_max` keys have a document as `pin` sees them, expired ones included, and
        the key to go on from (empty: the end). No document is read. Raises ViewInvalidated.
        """
        return scans.count_keys(self.groups, pin, collection_id, start, keys_max)

    def scan_seqno(
        self, vbid: int, after_seqno: int = 0, to_seqno: int = SEQNO_MAX, *, raw: bool = False
    ) -> Iterator[Document]:
        """Every kept event of a vbucket (all versions, tombstones, system events), rising in seqno, up to what is
        published now. Raises ViewInvalidated when a rollback or the purger passes it.
        """
        reader = self.reader(vbid)
        way = events.resolve_range(reader, None, None)._replace(after_seqno=Seqno(after_seqno))
        yield from events.rows(reader, way, raw, to_seqno=to_seqno)

    def count(self, vbid: int, *, now: float | None = None) -> int:
        """Live documents of a vbucket, counted by walking its keys (expiry is not looked at)."""
        return scans.count(self.reader(vbid))

    # -- positions and history ------------------------------------------------------------------------------------

    def state(self, vbid: int) -> VbucketState:
        """The stored state of one vbucket."""
        return states.state(self.reader(vbid))

    def states(self) -> list[VbucketState]:
        """The stored states of all vbuckets, in rising vbid."""
        return [self.state(vbid) for vbid in self.vbids]

    def published(self) -> list[ServedPosition]:
        """Return what every vbucket of `vbids` serves now, in that order: the cheapest way to see that one moved."""
        return states.published(self.groups, self._known_positions)

    def token(self, vbid: int, branch: int | None = None, seqno: int | None = None) -> Token:
        """The position (branch, seqno) of a vbucket as a token; without them, what is published now."""
        return states.token(self.reader(vbid), branch, seqno)

    def history_ids(self, vbid: int, branch: int) -> tuple[int, ...]:
        """The histories that positions on a branch are of, oldest first: more than one where a power cut may have
        undone some that were given out. Empty for a branch that this mirror does not have.
        """
        return states.history_ids(self.reader(vbid), branch)

    def newest_of(
        self, pin: Pin, collection_id: int, *, below: int | None = None, rows_max: int = scans.CHUNK_ROWS
    ) -> tuple[Seqno, int]:
        """Seqno of the newest event of a collection as `pin` sees it (its creation or flush, where there is none after
        it), and where to go on with looking: `below` of another call; 0: that was all. Raises ViewInvalidated,
        UnknownCollection.
        """
        return states.newest_of(self.reader(pin.vbid), pin, collection_id, below, rows_max)

    def past(self, vbid: int) -> Past:
        """How far back a vbucket can be read, and when it was resynced."""
        return states.past(self.reader(vbid))

    def history(self, vbid: int) -> History:
        """How far back a vbucket's history reaches and what it takes."""
        with self.groups.environment(vbid).read() as txn:
            return extent.of(txn, vbid)

    def stale(self, vbid: int) -> bool:
        """True while a resync is under way next to what is served."""
        reader = self.reader(vbid)
        txn = reader.begin_read()
        try:
            return bool(reader.served_in(txn)[5] & PUB_STALE)
        except (struct.error, lmdb.Error) as error:
            raise reader.damaged(error) from error
        finally:
            reader.environment.end(txn)

    def boundaries(self, vbid: int) -> list[Boundary]:
        """The kept boundaries of the served history, newest first."""
        return states.boundaries(self.reader(vbid))

    def rollbacks(self, vbid: int) -> list[Rollback]:
        """Rollbacks of a vbucket, oldest first."""
        return events.rollbacks(self.reader(vbid))

    def wait_for(self, token: wait.MutationToken, timeout_s: float) -> None:
        """Return once the write that `token` names can be read here.

        Raises WriteLost as soon as it is known that a failover of the source has undone it, and NotPublished after
        `timeout_s` seconds. It holds no transaction, and other threads may use the view meanwhile.
        """
        wait.wait_for(self, token, timeout_s)

    # -- changes --------------------------------------------------------------------------------------------------

    def changes(
        self,
        vbid: int | None = None,
        *,
        since: Token | None = None,
        raw: bool = False,
        pieces: Pieces | None = None,
    ) -> Iterator[Change]:
        """Return an iterator over published events in order, up to now; with `since` those after a token.

        A token below the history floor resumes too, as long as no tombstone above it was purged: older versions of
        what it has yet to see are left out, as the source's own dedup does. When the token's history was rolled back,
        the rollback comes first, with what it retracted and restored; the last of these carries the first token of the
        new history. Who applies each change has the documents of the boundary that was published at the beginning.

        Raises ViewInvalidated when the history the token stood on was replaced whole (a resync) or is no longer kept,
        and when a rollback happens, or the purger overtakes the reader, while the generator runs. A lease on the oldest
        boundary keeps the purger back.

        With `pieces` the generator holds no more than one piece, and none of the documents that it returned.
        """
        for each in self.vbids if vbid is None else (vbid,):
            token = since if since is not None and since.vbid == each else None
            yield from events.between(self.reader(each), token, None, raw, pieces)

    def check_since(self, token: Token) -> None:
        """Raise ViewInvalidated where `changes` since this token would at its beginning. Reads no document."""
        events.resolve_range(self.reader(token.vbid), token, None)

    def changes_between(self, start: Token | None, end: Token, *, raw: bool = False) -> Iterator[Change]:
        """What leads from one published position (None: the beginning) to a later one: the same at every call.

        `end` need not be on the history that is served now: rows and branches never change, so the two positions alone
        decide what is between them, as long as all of it is kept. Raises ViewInvalidated when it is not, or when a
        resync lies between.
        """
        return events.between(self.reader(end.vbid), start, end, raw)

    def check_way(self, start: Token | None, end: Token) -> int:
        """The seqno up to which both positions have one history. Raises ViewInvalidated where `changes_between` would
        at its beginning.
        """
        return events.resolve_range(self.reader(end.vbid), start, end).after_seqno

    def retracted_by(
        self, vbid: int, to_seqno: int, *, raw: bool = False
    ) -> tuple[Boundary, Iterator[tuple[str, Document]]]:
        """What a rollback to `to_seqno` would do now: its boundary, then its retractions and restorations.

        Raises NoSuchBoundary below the history floor.
        """
        return retractions.retracted_by(self.reader(vbid), to_seqno, raw)
