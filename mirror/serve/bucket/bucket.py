"""The mirrored bucket for KV and DCP clients: documents, manifests and seqnos; a refusal is a status with its reason.

Before a vbucket's first copy is complete, and during its resync, the answer is a temporary failure, never `no such
document`. A reader without the right to a collection is refused, even if the document does not exist.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import TypeVar

from mirror.clock import Clock
from mirror.log import get_logger
from mirror.serve.access.auth import Reader, visible
from mirror.server.cluster_config import render_manifest
from mirror.server.errors import NeedsMemory, Refused, unknown_collection
from mirror.wire.constants import Status
from storage.env import directory
from storage.errors import AnswerTooLarge, NotHeld, StorageError, Unavailable, UnknownCollection, ViewInvalidated
from storage.format.keys import split_key
from storage.model import DEFAULT_COLLECTION, Document, Manifest, VbucketState
from storage.read import states, stream_reads
from storage.read.scan import KeySelection
from storage.read.states import Unreadable
from storage.read.stream_reads import ServedState
from storage.read.view import Pin, Served, View, open_view

MANIFEST_FRESH_S = 0.5
"""Seconds for which the newest manifest is kept, because finding and decoding it takes up to 12 ms."""

VISIBLE_MAX = 32
"""Limit of kept `VisibleManifest` objects, one for each set of rights. One more drops the others."""

COUNT_KEYS = 2000
"""Keys counted in one transaction."""

T = TypeVar("T")

log = get_logger("kv")


class VisibleManifest:
    """The newest manifest as a reader sees it. Each form is made when first requested."""

    def __init__(self, manifest: Manifest, reader: Reader) -> None:
        self._manifest = manifest if reader.reads_all else visible(manifest, reader)

    @cached_property
    def text(self) -> bytes:
        found = self._manifest
        return render_manifest(found.uid, found.scopes, found.collections.values())

    @cached_property
    def scope_ids(self) -> dict[str, int]:
        return {name: scope_id for scope_id, name in self._manifest.scopes.items()}

    @cached_property
    def collection_ids(self) -> dict[tuple[str, str], int]:
        scopes = self._manifest.scopes
        entries = self._manifest.collections.values()
        return {(scopes.get(entry.scope_id, ""), entry.name): entry.collection_id for entry in entries}


class ServedBucket:
    def __init__(
        self,
        data: str,
        clock: Clock,
        *,
        verify_reads: bool = True,
        publishes_persisted: bool = False,
    ) -> None:
        self._data = data
        self.clock = clock
        self.publishes_persisted = publishes_persisted
        """True if all published rows are persisted on every copy at the source (`publish=persisted`)."""
        self._open = partial(open_view, data, verify_reads=verify_reads)
        self.view: View = self._open()
        self.view.published({})  # takes 30 ms, so not in the first request
        self._files = directory.group_files(self._data, self.view.identity.group_count)
        identity = self.view.identity
        self.name = identity.bucket_name
        self.identity = identity
        self._manifest: tuple[float, Manifest] | None = None
        self._manifest_vbid = self.view.vbids[0]
        self._visible: tuple[Manifest | None, dict[frozenset[str], VisibleManifest]] = (None, {})

    def close(self) -> None:
        self.view.close()

    # -- documents

    def find(
        self,
        wire_key: bytes,
        vbid: int | None,
        reader: Reader,
        *,
        deletions: bool = False,
        bytes_max: int | None = None,
    ) -> Document | None:
        """Return a document by its wire key; None if there is none, or not in the client's `vbid`. Raises Refused, and
        NeedsMemory if the document has more than `bytes_max` bytes.
        """

        collection_id = split_key(wire_key)[0]

        def admit(manifest: Manifest) -> None:
            if not reader.reads_all or collection_id not in manifest.collections:
                _check_collection(collection_id, manifest, reader)

        try:
            found = self.view.find(wire_key, deletions=deletions, bytes_max=bytes_max, admit=admit)
        except AnswerTooLarge as error:
            raise NeedsMemory(error.byte_count) from error
        except NotHeld as error:
            raise Refused(Status.NOT_MY_VBUCKET) from error
        except StorageError as error:
            raise self.failed(error) from error
        return None if found is None or vbid not in (None, found.vbid) else found

    # -- scans

    def check_collection(self, vbid: int, collection_id: int, reader: Reader) -> None:
        """Raise Refused if the collection does not exist in a vbucket, or is forbidden to the reader."""
        self.check_readable(vbid)
        with self._reading():
            manifest = self.view.manifest(vbid)
        _check_collection(collection_id, manifest, reader)

    def check_newest_collection(self, collection_id: int, reader: Reader) -> None:
        """Raise Refused if the collection is not in the newest manifest, or is forbidden to the reader."""
        _check_collection(collection_id, self.manifest(), reader)

    def pin(self, vbid: int) -> Pin:
        with self._reading():
            return self.view.pin(vbid)

    def page(
        self,
        pin: Pin,
        collection_id: int,
        start: bytes,
        end: bytes | None,
        items_max: int,
        bytes_max: int,
        document_bytes_max: int,
    ) -> tuple[list[Document], bytes]:
        """Return documents from `start` on, and the key to continue at (empty: the end). Raises Refused, and
        NeedsMemory if the first document has more than `document_bytes_max` bytes.
        """
        with self._reading(Status.RANGE_SCAN_CANCELLED):
            return self.view.reading(pins=(pin,)).page(
                pin.vbid,
                collection_id,
                KeySelection(start=start, end=end, raw=True),
                limit=items_max,
                bytes_max=bytes_max,
                document_bytes_max=document_bytes_max,
            )

    def count_keys(self, pin: Pin, collection_id: int) -> int:
        """Count documents, expired ones too. Raises Refused."""
        count, start = 0, b""
        with self._reading(Status.RANGE_SCAN_CANCELLED):
            while True:
                more, start = self.view.reading(pins=(pin,)).count_keys(pin.vbid, collection_id, start, COUNT_KEYS)
                count += more
                if not start:
                    return count

    def holds_seqno(self, vbid: int, seqno: int) -> bool:
        """Return True if the newest version of some document has this seqno."""
        with self._reading(), contextlib.suppress(UnknownCollection):
            wire_key = self.view.key_at(vbid, seqno)
            found = None if wire_key is None else self.view.find(wire_key, deletions=True)
            return found is not None and found.seqno == seqno
        return False

    def newest_of(self, pin: Pin, collection_id: int) -> int | None:
        """Return the seqno of a collection's newest document event; None if the vbucket lacks the collection. Raises
        Refused.
        """
        seqno, below = 0, None
        with self._reading(Status.ETMPFAIL), contextlib.suppress(UnknownCollection):
            while below != 0:
                seqno, below = states.newest_of(self.view.reader(pin.vbid), pin, collection_id, below=below)
            return seqno
        return None

    # -- vbuckets

    def published(self) -> dict[int, Served]:
        """Return the served state of each readable vbucket, read once per group. Raises Refused if none is readable."""
        return self._of_readable_groups(self.view.published)

    def state(self, vbid: int) -> VbucketState:
        if vbid not in self.view.vbids:
            raise Refused(Status.NOT_MY_VBUCKET)
        with self._reading():
            return self.view.state(vbid)

    def check_readable(self, vbid: int, refusal: Status = Status.ETMPFAIL) -> None:
        """Raise Refused while the vbucket is being filled, or withheld during a resync."""
        if vbid not in self.view.vbids:
            raise Refused(Status.NOT_MY_VBUCKET)
        with self._reading(refusal):
            self.view.check_readable((vbid,))

    def history_state(self, vbid: int) -> VbucketState:
        """Return the state, for answers that give its failover log and its served seqno together. Raises Refused while
        they are of two histories.
        """
        self.check_readable(vbid)
        state = self.state(vbid)
        if not state.has_served_log:
            raise Refused(Status.ETMPFAIL, "the source has another history, of which nothing is published yet")
        return state

    def served_vbuuid(self, vbid: int) -> int:
        with self._reading():
            return states.vbuuid_at(self.view.reader(vbid), self.view.pin(vbid))

    def state_for_dcp(self, vbid: int) -> ServedState:
        """Return a vbucket's state for DCP clients. Raises Refused with NOT_MY_VBUCKET before the first snapshot is
        complete, and during a resync: clients repeat the request after this status, but give up after a temporary
        failure (docs/protocol.md 4.1). The refusal has no map, because no map names another node for the vbucket.
        """
        if vbid not in self.view.vbids:
            raise Refused(Status.NOT_MY_VBUCKET)
        with self._reading():
            found = stream_reads.served_state(self.view.reader(vbid))
        if not found.whole:
            raise Refused(Status.NOT_MY_VBUCKET, bare=True)
        return found

    # -- collections

    def manifest(self) -> Manifest:
        now = self.clock.monotonic()
        if self._manifest is None or now - self._manifest[0] > MANIFEST_FRESH_S:
            uids = self._of_readable_groups(self.view.manifest_uids)
            newest = max(uids.values())
            if uids.get(self._manifest_vbid) != newest:
                self._manifest_vbid = next(vbid for vbid, uid in uids.items() if uid == newest)
            with self._reading():
                self._manifest = (now, self.view.manifest(self._manifest_vbid))
        return self._manifest[1]

    def visible(self, reader: Reader) -> VisibleManifest:
        manifest = self.manifest()
        if self._visible[0] is not manifest:
            self._visible = (manifest, {})
        kept = self._visible[1]
        found = kept.get(reader.patterns)
        if found is None:
            if len(kept) >= VISIBLE_MAX:
                kept.clear()
            found = kept[reader.patterns] = VisibleManifest(manifest, reader)
        return found

    # -- the store below

    def _of_readable_groups(self, look: Callable[[Unreadable], dict[int, T]]) -> dict[int, T]:
        """Return `look`'s results by vbid, without unreadable groups (one is logged). Raises Refused if all are."""
        unreadable: Unreadable = {}
        found = look(unreadable)
        if unreadable:
            refused = self.failed(next(iter(unreadable.values())))
            if not found:
                raise refused
        return found

    @contextlib.contextmanager
    def _reading(self, invalidated: Status | None = None) -> Iterator[None]:
        """Raise Refused if the store cannot be read. `invalidated`: the status if a Pin's rows are gone or withheld."""
        try:
            yield
        except AnswerTooLarge as error:
            raise NeedsMemory(error.byte_count) from error
        except StorageError as error:
            if invalidated is not None and isinstance(error, ViewInvalidated | Unavailable):
                raise Refused(invalidated, error.message) from error
            raise self.failed(error) from error

    def failed(self, error: StorageError) -> Refused:
        if isinstance(error, Unavailable):
            return Refused(Status.ETMPFAIL, error.message)
        log.error("read-failed", error=str(error))
        return Refused(Status.ETMPFAIL, "the store cannot be read")

    def reopen_if_replaced(self) -> bool:
        """If a damaged group was recreated, open the mirror again and return True."""
        now = directory.group_files(self._data, self.view.identity.group_count)
        if now == self._files or (0, 0) in now:
            return False
        log.warning("group-recreated")
        try:
            fresh = self._open()
        except StorageError as error:
            log.error("mirror-not-reopened", error=str(error))
            return False
        self.view.close()
        self.view, self._files, self._manifest = fresh, now, None
        return True


def _check_collection(collection_id: int, manifest: Manifest, reader: Reader) -> None:
    """Refuse a collection that the reader may not read as one that does not exist, so that numbers say nothing. The
    default collection is known to all.
    """
    name = manifest.name_of(collection_id)
    if name is not None and reader.may_read(name):
        return
    if collection_id == DEFAULT_COLLECTION and not reader.reads_all:
        raise Refused(Status.EACCESS, f"{reader.name or 'anonymous'} may not read this collection")
    raise unknown_collection(manifest.uid)
