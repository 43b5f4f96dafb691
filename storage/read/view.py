"""The reader's API: `open_view` and `View`. Any process may use it at any time.

An answer about one vbucket shows one commit. `validity` states the promises to reads that take several transactions.
Functions for one component of the service, such as the DCP listener, are not methods of `View`: they take the result of
`View.reader(vbid)`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import nullcontext
from typing import Self

from storage.errors import UnknownCollection
from storage.format.keys import vbid_of
from storage.format.records import Pub
from storage.format.tokens import TOKEN_LENGTH_MAX, AsOf, CollectionName, Pin, Time, Token
from storage.history import chain, extent
from storage.history.extent import History
from storage.model import Boundary, Branch, Document, Identity, Manifest, Rollback, Seqno, VbucketState
from storage.read import changes as events
from storage.read import reading, retractions, states, wait
from storage.read import scan as scans
from storage.read.changes import Change, Pieces
from storage.read.groups import Groups
from storage.read.point_reads import PointReads
from storage.read.states import Unreadable
from storage.read.vbucket_reader import ReadOptions, Served

__all__ = [
    "TOKEN_LENGTH_MAX",
    "AsOf",
    "Change",
    "CollectionName",
    "Pieces",
    "Pin",
    "Rollback",
    "Served",
    "Time",
    "Token",
    "View",
    "open_view",
]


def open_view(
    path: str | os.PathLike[str],
    *,
    stale_reads: bool = False,
    verify_reads: bool = True,
    partial: bool = False,
) -> View:
    """Open the mirror in the data directory `path` for reading, even if its service does not run.

    With `stale_reads` a vbucket is read from its old copy during a resync, even if the setting `resync_reads` withholds
    that copy. With `verify_reads` each row's checksum is compared; a wrong checksum raises CorruptedError. With
    `partial` a vbucket that is not filled yet counts as empty; otherwise its reads raise Unavailable.

    Raises NotAMirror, ReadOnly, CorruptedError, UnknownFormat; the first read of a group also WrongBucket, and ReadOnly
    without write access to the lock file.
    """
    return View(os.fspath(path), stale_reads=stale_reads, verify_reads=verify_reads, partial=partial)


_views: weakref.WeakSet[View] = weakref.WeakSet()


def _after_fork() -> None:
    for view in list(_views):
        view.groups.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


class View(PointReads):
    """A reader of one mirror, made by `open_view`. Use it as a context manager, or call `close`.

    An answer about one vbucket shows one commit, so documents and their position belong to one moment. A scan reads
    each vbucket at one boundary. Many threads may share a view, but only one at a time may use a generator. A forked
    child opens a view of its own; inherited views raise Closed, and inherited generators at their next transaction.

    Documents: `get`, `get_many`, `exists`, `scan`. Changes: `changes`, `changes_between`, `token`. Your own writes:
    `wait_for`. Positions and history: `state`, `states`, `boundaries`, `rollbacks`, `history`. Collections: `manifest`.
    """

    def __init__(
        self,
        path: str,
        *,
        stale_reads: bool = False,
        verify_reads: bool = True,
        partial: bool = False,
    ) -> None:
        reads = ReadOptions(path, stale_reads, verify_reads, partial)
        super().__init__(Groups(path, reads))
        self.path = path
        self.identity: Identity = self.groups.identity
        self.vbids = self.identity.vbids
        """The vbuckets that this mirror holds: all of the bucket, or this mirror's share."""
        self._known_positions: states.KnownPositions = {}
        self._known_uids: states.KnownUids = {}
        _views.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the environments. Later calls and unfinished generators of this view raise Closed."""
        self.groups.close()

    def vbid_of(self, key: bytes) -> int:
        """Return the vbucket of a document key."""
        return vbid_of(key, self.identity.vbucket_count)

    # -- collections ----------------------------------------------------------------------------------------------

    def manifest(self, vbid: int | None = None) -> Manifest:
        """Return the scopes and collections of one vbucket, by default of the first of `vbids`."""
        reader = self.reader(self.vbids[0] if vbid is None else vbid)
        with reader.environment.read() as txn:
            return reader.manifest(txn, reader.served(txn).pub.manifest_key)

    def manifest_uids(self, unreadable: Unreadable | None = None) -> dict[int, int]:
        """Return the uid of each vbucket's manifest, by vbid: fast if none changed. `unreadable`: see `published`."""
        return states.manifest_uids(self.groups, self._known_uids, unreadable)

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
        """Yield documents by vbucket, then by collection, then in key order.

        Without `vbid` all vbuckets are scanned, without `collection` all collections; `start` <= key < `end`. The
        documents of a vbucket are those of one boundary. `deletions` adds tombstones and expired documents. `as_of`,
        `now`, `raw` and the errors are those of `get`; a value that cannot be decompressed is returned as by
        `get_many`. Raises ViewInvalidated once a rollback, a resync or the purger has passed the boundary: scan again.
        """
        prefix, start = (text.encode() if isinstance(text, str) else text for text in (prefix, start))
        stop = end.encode() if isinstance(end, str) else end
        selection = scans.KeySelection(prefix, start, stop, deletions, raw)
        left = limit if limit is not None else -1
        vbids = self.vbids if vbid is None else (vbid,)
        reading = self.reading(vbids, as_of=as_of)
        if collection is not None:
            reading.collection_id(collection)
        for each in vbids:
            if left == 0:
                return
            for document in scans.documents(self.reader(each), selection, collection, as_of, now):
                yield document
                left -= 1
                if left == 0:
                    return

    def reading(
        self,
        vbids: Iterable[int] | None = None,
        *,
        as_of: AsOf = None,
        now_ms: int | None = None,
        pins: Iterable[Pin] = (),
        lease: reading.Lease = lambda _: nullcontext(),
    ) -> reading.BoundaryRead:
        """Return a read of some vbuckets (None: all), each at one boundary: as of `as_of`, or at the boundary in `pins`
        that an earlier read chose. `now_ms` decides expiry, as `now` for `get`. `hold` takes the `lease`.
        """
        return reading.BoundaryRead(self.groups, self.vbids if vbids is None else vbids, as_of, now_ms, pins, lease)

    def pin(self, vbid: int, as_of: AsOf = None, *, now: float | None = None) -> Pin:
        """Return a vbucket's position, now or at a boundary. Raises NoSuchBoundary, Unavailable."""
        return reading.pin_of(self.reader(vbid), as_of, None if now is None else int(now * 1000))

    def count(self, vbid: int) -> int:
        """Count the documents of a vbucket by a walk over its keys. Raises Unavailable, and ViewInvalidated if a
        rollback, a resync or the purger passes its position.
        """
        return scans.count(self.reader(vbid))

    # -- positions and history ------------------------------------------------------------------------------------

    def state(self, vbid: int) -> VbucketState:
        """Return the stored state of a vbucket."""
        reader = self.reader(vbid)
        with reader.environment.read() as txn:
            return reader.state(txn)

    def states(self) -> list[VbucketState]:
        """Return the stored states of `vbids`, in that order."""
        return [self.state(vbid) for vbid in self.vbids]

    def unfilled(self, vbids: Iterable[int] | None = None) -> list[int]:
        """Return those of some vbuckets (None: all) that are not filled yet."""
        return [vbid for vbid in (self.vbids if vbids is None else vbids) if not self.state(vbid).is_whole]

    def check_readable(self, vbids: Collection[int] | None = None) -> None:
        """Raise Unavailable unless each of some vbuckets (None: all) can be read."""
        reading.check_readable(self.groups, self.vbids if vbids is None else vbids)

    def published(self, unreadable: Unreadable | None = None) -> dict[int, Served]:
        """Return the served state of each of `vbids`: the cheapest way to notice a publish. If a group cannot be read,
        raise the error; with `unreadable`, put the error into `unreadable` and leave out the group's vbuckets.
        """
        return states.published(self.groups, self._known_positions, unreadable)

    def token(self, vbid: int, branch: int | None = None, seqno: int | None = None) -> Token:
        """Return the token of a position of a vbucket, by default of the published position. Raises ViewInvalidated if
        the position's branch is gone.
        """
        reader = self.reader(vbid)
        with reader.environment.read() as txn:
            if branch is None or seqno is None:
                served = reader.readable(txn)
            else:
                links = reader.known_chain(txn, branch, seqno)
                served = Served(Pub(Branch(branch), Seqno(seqno), Seqno(0)), links)
        return Token(reader.vbid, *served.position)

    def history(self, vbid: int) -> History:
        """Return how far back a vbucket's history reaches, and its size."""
        with self.groups.environment(vbid).read() as txn:
            return extent.of(txn, vbid)

    def stale(self, vbid: int) -> bool:
        """Return True while a resync is under way next to the served copy."""
        with self.reader(vbid).environment.read() as txn:
            return txn.pub(vbid).is_stale

    def boundaries(self, vbid: int) -> list[Boundary]:
        """Return the kept boundaries of the served history, newest first."""
        reader = self.reader(vbid)
        with reader.environment.read() as txn:
            served = reader.served(txn)
            found = chain.boundaries(txn, reader.vbid, served.links)
            return [boundary for boundary in found if boundary.seqno >= served.pub.floor_seqno]

    def rollbacks(self, vbid: int) -> list[Rollback]:
        """Return the recorded rollbacks of a vbucket, oldest first."""
        return events.rollbacks(self.reader(vbid))

    def wait_for(self, token: wait.MutationToken, timeout_s: float) -> None:
        """Wait until the write that `token` names can be read here.

        Raises WriteLost if the mirror learns that a failover of the source has undone the write, and NotPublished after
        `timeout_s` seconds. Holds no transaction while it waits.
        """
        wait.wait_for(self.groups, token, timeout_s)

    # -- changes --------------------------------------------------------------------------------------------------

    def changes(
        self, vbid: int | None = None, *, since: Token | None = None, raw: bool = False, pieces: Pieces | None = None
    ) -> Iterator[Change]:
        """Yield published events in order, up to now; with `since`, only events after this token.

        A token below the history floor is accepted as long as no tombstone above the token was purged. Superseded
        versions may then be missing, as after the source's own deduplication. If the token's history was rolled back,
        the rollback comes first, then its retractions and restorations. All of these events but the last have `since`
        as their token, so a reader that resumes from `since` gets them again. A reader that applied every change
        of a vbucket has the documents of the boundary that was the newest when the generator reached the vbucket.

        Raises Unavailable, and ViewInvalidated if a resync replaced the token's history, or if this history is no
        longer kept. A running generator raises ViewInvalidated also after a rollback or resync, or if the purger
        overtakes the reader. A lease on the oldest boundary holds the purger back.

        `pieces` limits the bytes of rows that the generator reads at once. The generator keeps no document that it
        yielded.
        """
        for each in self.vbids if vbid is None else (vbid,):
            token = since if since is not None and since.vbid == each else None
            yield from events.since(self.reader(each), token, raw, pieces)

    def changes_between(self, start: Token | None, end: Token, *, raw: bool = False) -> Iterator[Change]:
        """Yield the changes from one published position (None: the beginning) to a later one. Every call yields the
        same changes, except for superseded versions that the purger has removed.

        `end` may be on a history that is no longer served. Raises ViewInvalidated if the changes are no longer kept, or
        a resync lies between the positions.
        """
        reader = self.reader(end.vbid)
        yield from events.between(reader, start, events.resolve_range(reader, start, end), raw)

    def check_way(self, start: Token | None, end: Token) -> int:
        """Return the last seqno of the history that both positions share. Raises what `changes_between` raises."""
        return events.resolve_range(self.reader(end.vbid), start, end).after_seqno

    def check_since(self, token: Token) -> None:
        """Raise ViewInvalidated if `changes` would refuse this token."""
        events.resolve_range(self.reader(token.vbid), token, None)

    def check_followed(self, collection: CollectionName, vbids: Iterable[int], since: Iterable[Token]) -> None:
        """Raise UnknownCollection unless one of some vbuckets has the collection, or had it at its token in `since`: a
        follower from there must get the collection's end. Raises what `changes` raises.
        """
        try:
            self.reading(vbids).collection_id(collection)
        except UnknownCollection:
            if not any(events.had_collection(self.reader(each.vbid), each, collection) for each in since):
                raise

    def retracted_by(
        self, vbid: int, to_seqno: int, *, raw: bool = False
    ) -> tuple[Boundary, Iterator[tuple[str, Document]]]:
        """Return the boundary that a rollback to `to_seqno` would go to now, and the rollback's retractions and
        restorations.

        Raises what the rollback would raise: NoSuchBoundary if `to_seqno` is below the history floor, StorageError
        during a resync or deferred rollback.
        """
        return retractions.retracted_by(self.reader(vbid), to_seqno, raw)
