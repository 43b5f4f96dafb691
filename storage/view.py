"""Reading a mirror: point reads, scans by key and by seqno, changes, boundaries; from any process, at any time.

Knows the format and nothing of the service. Invariants: one answer is read in one LMDB transaction (served branch,
published_seqno and rows together); a scan keeps the boundary it began with and renews its transaction between chunks,
so it neither blocks the purger nor makes the file grow, and raises ViewInvalidated when a rollback or the purger has
passed it. A View may be used by many threads; a generator it returned by one at a time. After fork open a new one.
"""

from __future__ import annotations

import os
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import lmdb
from google_crc32c import value as crc32c

from storage import branches, chain, directory, history, index, keys, records, seal, wait
from storage.environment import MAP_SIZE, SHARED, Environment, storage_error
from storage.errors import (
    AnswerTooLarge,
    Closed,
    CorruptedError,
    NoSuchBoundary,
    NotHeld,
    StorageError,
    Unavailable,
    UnknownCollection,
    ViewInvalidated,
)
from storage.highs import newest_of_collection
from storage.history import History
from storage.model import (
    DEFAULT_COLLECTION,
    SEQNO_MAX,
    Boundary,
    Branch,
    Document,
    Identity,
    Manifest,
    Seqno,
    Vbid,
    VbucketState,
    Vbuuid,
)
from storage.transaction import Transaction

CHUNK_ROWS = 2_000
"""Rows that a scan reads in one transaction."""

UNDONE_BYTES = 1024
"""What the positions of a row that was rolled back, and of the one in its place, take in memory: their key is twice 250
bytes at most."""

CHUNK_BYTES = 8 * 1024 * 1024
"""Row bytes that a scan holds at once; one document may be larger, so at least one is always read."""

TOKEN_LENGTH_MAX = 80
"""Characters of a token: 5 digits, 10, 20 and 16, with room for leading zeros."""


@dataclass(slots=True)
class Pieces:
    """How a reader of changes is given them that may have to let go of one which it cannot hold for now."""

    bytes_max: int
    """Row bytes that are read at once; one document may be larger."""
    again: bool = False
    """Set by the reader: the last change is read and returned again."""


CollectionName = str | int

unpack_pub = keys.PUB.unpack
unpack_dup = keys.DUP.unpack


@dataclass(frozen=True, slots=True)
class Time:
    """An `as_of` by wall clock: the newest kept boundary published at or before `ms` milliseconds since 1970."""

    ms: int

    def __str__(self) -> str:
        """In ISO 8601."""
        return datetime.fromtimestamp(self.ms / 1000, UTC).isoformat(timespec="milliseconds")


AsOf = int | Time | None


@dataclass(frozen=True, slots=True)
class Token:
    """A position in the changes of a vbucket: everything up to `seqno` on `branch` was seen.

    `str(token)` is its text, for a file or a URL, and `Token.parse` the inverse.
    """

    vbid: Vbid
    branch: Branch
    seqno: Seqno
    history_id: int
    """Drawn at random, 64 bits: the numbers alone come again where a group is filled again after its folder was set
    aside, where a power cut undoes a commit, and where another mirror is made at the same path. `View.token` knows it.
    """

    def __str__(self) -> str:
        """`vbid:branch:seqno:history`, the last in hexadecimal."""
        return f"{self.vbid}:{self.branch}:{self.seqno}:{self.history_id:016x}"

    @staticmethod
    def parse(text: str) -> Token:
        """The inverse of str(); ValueError says what is wrong."""
        *parts, history = text.split(":") if len(text) <= TOKEN_LENGTH_MAX else ("",)
        if len(parts) == 2 and all(part.isascii() and part.isdigit() for part in (*parts, history)):
            raise ValueError(
                f"{text!r} is a token of an earlier version, which does not say of which history it is; begin again "
                "without it"
            )
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts) or not _is_hex16(history):
            raise ValueError(f"{text[:TOKEN_LENGTH_MAX]!r} is not a token; expected vbid:branch:seqno:history")
        vbid, branch, seqno = map(int, parts)
        if vbid > 0xFFFF or branch >= 2**32 or seqno > SEQNO_MAX:
            raise ValueError(f"{text!r} is not a token; a number is too large")
        return Token(Vbid(vbid), Branch(branch), Seqno(seqno), int(history, 16))


def _is_hex16(text: str) -> bool:
    return len(text) == 16 and set(text) <= set("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Pin:
    """One vbucket as it was served at one published seqno: what the pages of one scan have in common."""

    vbid: Vbid
    branch: Branch
    seqno: Seqno
    history_id: int
    """As in a `Token`."""
    now_ms: int
    """The moment that decides expiry, milliseconds since 1970."""

    def __str__(self) -> str:
        """As a `Token`."""
        return str(Token(self.vbid, self.branch, self.seqno, self.history_id))


class Published(NamedTuple):
    """What one vbucket serves now."""

    branch: Branch
    seqno: Seqno
    floor_seqno: Seqno
    stale: bool
    history_id: int


class Found(NamedTuple):
    """What a lookup by wire key gives: a document, or why there is none."""

    document: Document | None
    collection_exists: bool
    """False: the key's collection is unknown, or was dropped."""
    published_seqno: int
    stale: bool
    """True while the vbucket is being resynced next to what is served."""
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Past:
    """How far back a vbucket can be read, and how often it was resynced."""

    floor: Boundary | None
    """The oldest kept boundary; None: nothing was published yet."""
    refills_ms: tuple[int, ...]
    """When readers first saw a refilled copy, milliseconds since 1970, oldest first: the one that is served, and those
    whose old copies are not gone yet.
    """
    refill_count: int
    """All of them."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """A rollback that readers went through: from (branch, seqno) to a new branch that begins at `to_seqno`.

    A deferred one (`publish=persisted`) took them in one step to `reached_seqno` of that branch: of what they had seen
    above `to_seqno` it retracts only what the new history up to there has no version of.
    """

    vbid: Vbid
    from_branch: Branch
    from_seqno: Seqno
    to_branch: Branch
    to_seqno: Seqno
    from_vbuuid: Vbuuid
    to_vbuuid: Vbuuid
    time_ms: int
    reached_seqno: Seqno | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """One published event. `kind` is mutation, deletion, expiration, system_event, rollback, retraction or restoration.

    A rollback comes first on its new branch, then what it retracted (each newest retracted version) and restored (the
    version that is visible again, if any). `token` resumes after this event.
    """

    kind: str
    token: Token
    document: Document | None = None
    rollback: Rollback | None = None


class Undone(NamedTuple):
    """A version that a rollback took back (`retraction`), or made visible again (`restoration`): where its row is."""

    kind: str
    wire_key: bytes
    dup: bytes


@dataclass(frozen=True, slots=True)
class Served:
    """What one vbucket serves, now or as of a boundary. `links` is its chain, newest first."""

    branch: int
    seqno: int
    floor_seqno: int
    manifest_key: tuple[int, int]
    stale: bool
    links: chain.Chain
    unavailable: bool = False
    anywhere: bool = False
    """Good for as long as all of it is kept, also when a rollback or refill has left its chain."""


CHAINS_MAX = 8
"""Chains of a vbucket that a view remembers: the one that is served, and those of a few positions."""
MANIFESTS_MAX = 2
"""The same of manifests, which hold every collection."""


class Known:
    """What a view remembers of one vbucket, for as long as its chains are called the same (`branches.PurgeRow`)."""

    __slots__ = ("chain_id", "chains", "manifests")

    def __init__(self, chain_id: int) -> None:
        """Nothing was read yet."""
        self.chain_id = chain_id
        self.chains: dict[int, chain.Chain] = {}
        self.manifests: dict[tuple[int, int], Manifest] = {}


class Opened(NamedTuple):
    """What reading a vbucket needs again and again: its environment and the handles of its trees."""

    environment: Environment
    pub: Any
    keys: Any
    rows: Any
    vbid_key: bytes
    begin: Any
    """LMDB's own begin, without `Environment.begin` around it: for the read that happens a million times."""
    running: list[None]
    """Of the environment."""


def _begin(opened: Opened) -> Any:
    """A read transaction, at the least cost; `Environment.end` or the like follows."""
    running = opened.running
    running.append(None)
    try:
        if not opened.environment.remapping:
            return opened.begin()
    except lmdb.Error:
        pass  # `Environment.begin` knows what to do about it
    running.pop()
    return opened.environment.begin()


def open_view(
    path: str | os.PathLike[str], *, map_size: int = MAP_SIZE, stale_reads: bool = False, verify_reads: bool = True
) -> View:
    """Open the mirror in the data directory `path` for reading, whether its service runs or not.

    `map_size` is how much address space each group gets at first, in bytes; it grows by itself. With `stale_reads` a
    vbucket that is resynced is read from its old copy, also where the setting `refill_reads` withholds that.

    `verify_reads`: compare the checksum of each row that is read, and raise CorruptedError where it does not match.

    Raises NotAMirror, ReadOnly (no write access to a lock file), CorruptedError, FormatTooNew, WrongBucket.
    """
    return View(os.fspath(path), map_size=map_size, stale_reads=stale_reads, verify_reads=verify_reads)


_views: weakref.WeakSet[View] = weakref.WeakSet()


def _after_fork() -> None:
    for view in list(_views):
        view.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


class View:
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
        self.path = path
        self._stale_reads = stale_reads
        self._verify_reads = verify_reads
        self.identity: Identity = directory.load(path)
        self._map_size = map_size
        self._environments: dict[int, Environment] = {}
        self._known: dict[int, Known] = {}
        self._groups = self.identity.group_count
        self._count = self.identity.vbucket_count
        self.vbids = self.identity.vbids
        """The vbuckets that this mirror holds: all of the bucket's, unless several mirrors share them."""
        self._closed: str | None = None
        self._opened: dict[int, Opened] = {}
        _views.add(self)

    def __enter__(self) -> View:
        """Return the view itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Release the environments. Generators of this view must not be used afterwards; calls raise Closed."""
        self._closed = self._closed or "the view is closed"
        self._opened.clear()
        for environment in self._environments.values():
            SHARED.release(environment)
        self._environments.clear()

    def leave_to_parent(self) -> None:
        """Close without touching LMDB, in a forked child: transactions and reader slots belong to the parent."""
        self._closed = "opened before fork; open another view in the child"
        self._opened.clear()
        self._environments.clear()

    def history_ids(self, vbid: int, branch: int) -> tuple[int, ...]:
        """The histories that positions on a branch are of, oldest first: more than one where a power cut may have
        undone some that were given out. Empty for a branch that this mirror does not have.
        """
        opened = self._open(vbid)
        with opened.environment.read() as txn:
            try:
                whole = self._whole_chain(txn, vbid, branch)
            except CorruptedError:
                return ()
        return tuple(history_id for history_id, _ in whole[0].history_ids)

    # -- plumbing -------------------------------------------------------------------------------------------------

    def vbid_of(self, key: bytes) -> Vbid:
        """The vbucket of a document key."""
        return Vbid(keys.vbid_of(key, self._count))

    def _environment(self, vbid: int) -> Environment:
        if self._closed:
            raise Closed(self._closed, path=self.path)
        if vbid not in self.vbids:
            if not 0 <= vbid < self._count:
                raise StorageError(f"there is no vbucket {vbid}; this bucket has {self._count}", path=self.path)
            raise NotHeld(
                f"this mirror holds vbuckets {self.vbids[0]} to {self.vbids[-1]}",
                vbid=vbid,
                hint="ask the mirror that holds it",
            )
        group = vbid % self._groups
        environment = self._environments.get(group)
        if environment is not None and environment.look():
            self._leave_replaced()
            environment = None
        if environment is None:
            path = directory.group_path(self.path, group)
            environment = SHARED.acquire(path, directory.group_vbids(self.identity, group), self._map_size)
            try:
                environment.open_all()
                with environment.read() as txn:
                    stored = txn.get(keys.DB_META, b"identity")
                    directory.check_identity(stored, self.identity, group, environment.path)
            except BaseException:
                SHARED.release(environment)
                raise
            self._environments[group] = environment
        return environment

    def _leave_replaced(self) -> None:
        """Let go of files that were moved, removed or replaced; what is at their path now is opened at the next use.

        Other threads may be reading the old ones, so these are closed when nobody holds them any more.
        """
        identity = directory.load(self.path)
        if identity != self.identity:
            self._closed = "another mirror is at this path now; open another view"
            raise Closed(self._closed, path=self.path)
        for group, environment in list(self._environments.items()):
            if environment.look_now():
                del self._environments[group]
                SHARED.release(environment)
        self._opened.clear()
        self._known.clear()

    def _open(self, vbid: int) -> Opened:
        opened = self._opened.get(vbid)
        if opened is None or (not opened.environment.writable and opened.environment.look()):
            environment = self._environment(vbid)
            trees = (keys.DB_PUB, keys.keys_db(vbid), keys.rows_db(vbid))
            pub, key_tree, row_tree = (environment.db(tree) for tree in trees)
            vbid_key = keys.VBID_KEY.pack(vbid)
            opened = Opened(environment, pub, key_tree, row_tree, vbid_key, environment.env.begin, environment.running)
            self._opened[vbid] = opened
        return opened

    def _served(self, txn: Transaction, vbid: int) -> Served:
        pub = txn.pub(vbid)
        links = chain.recut(self._whole_chain(txn, vbid, pub.branch), pub.seqno)
        unavailable = pub.is_unavailable and not self._stale_reads
        return Served(pub.branch, pub.seqno, pub.floor_seqno, pub.manifest_key, pub.is_stale, links, unavailable)

    def _readable(self, txn: Transaction, vbid: int) -> Served:
        """What is served, unless readers are to wait for a refill."""
        served = self._served(txn, vbid)
        if served.unavailable:
            raise Unavailable(
                "temporarily unavailable: it is being resynced",
                vbid=vbid,
                hint="wait, or set refill_reads to stale to have the old copy meanwhile",
            )
        return served

    def _known_of(self, txn: Transaction, vbid: int) -> Known:
        """What is remembered of a vbucket and is true in this transaction."""
        chain_id = branches.purge_row(txn, vbid).chain_id
        known = self._known.get(vbid)
        if known is None or known.chain_id != chain_id:
            known = self._known[vbid] = Known(chain_id)
        return known

    def _whole_chain(self, txn: Transaction, vbid: int, branch: int) -> chain.Chain:
        """A branch's chain never changes but for its chain id, so it is read once."""
        chains = self._known_of(txn, vbid).chains
        links = chains.get(branch)
        if links is None:
            if len(chains) >= CHAINS_MAX:
                chains.clear()
            links = chains[branch] = chain.load(txn, vbid, branch, SEQNO_MAX)
        return links

    def _manifest(self, txn: Transaction, vbid: int, key: tuple[int, int]) -> Manifest:
        manifests = self._known_of(txn, vbid).manifests
        manifest = manifests.get(key)
        if manifest is None:
            manifest = branches.read_manifest(txn, vbid, key, manifests)[0]
            if len(manifests) >= MANIFESTS_MAX:
                manifests.clear()
            manifests[key] = manifest
        return manifest

    def _as_of(self, txn: Transaction, vbid: int, as_of: AsOf) -> tuple[Served, Boundary | None]:
        """What is served as of a seqno or a time: the newest kept boundary not after it."""
        served = self._readable(txn, vbid)
        if as_of is None or (isinstance(as_of, Time) and not served.seqno):  # nothing published: never was anything
            return served, None
        boundary = None
        if isinstance(as_of, Time):
            for candidate in chain.boundaries(txn, Vbid(vbid), served.links):
                if candidate.time_ms <= as_of.ms:
                    boundary = candidate
                    break
        else:
            boundary = chain.newest_boundary(txn, Vbid(vbid), served.links, as_of)
        if boundary is None or boundary.seqno < served.floor_seqno:
            raise NoSuchBoundary(
                f"nothing is kept as of {as_of}; history begins at seqno {served.floor_seqno}",
                vbid=vbid,
                hint="ask for a later point, or keep more history",
            )
        links = chain.recut(served.links, boundary.seqno)
        manifest_key = branches.manifest_key_on(txn, vbid, links)
        return Served(served.branch, boundary.seqno, served.floor_seqno, manifest_key, served.stale, links), boundary

    # -- collections ----------------------------------------------------------------------------------------------

    def manifest(self, vbid: int | None = None) -> Manifest:
        """Scopes and collections as one vbucket (the first, unless told) knows them now."""
        vbid = self.vbids[0] if vbid is None else vbid
        environment = self._environment(vbid)
        with environment.read() as txn:
            return self._manifest(txn, vbid, self._served(txn, vbid).manifest_key)

    def manifest_of(self, pin: Pin) -> Manifest:
        """Scopes and collections as they were at the boundary of a pin. Raises ViewInvalidated."""
        opened = self._open(pin.vbid)
        with opened.environment.read() as txn:
            key = branches.manifest_key_on(txn, pin.vbid, self._chain_of(opened, txn, pin))
            return self._manifest(txn, pin.vbid, key)

    def _collection_id(self, manifest: Manifest, name: CollectionName | None) -> int:
        if name is None:
            return DEFAULT_COLLECTION
        if isinstance(name, int):
            return name
        scope, _, collection = name.rpartition(".")
        scope = scope or "_default"
        for entry in manifest.collections.values():
            if entry.name == collection and manifest.scopes.get(entry.scope_id) == scope:
                return entry.collection_id
        known = sorted(
            f"{manifest.scopes.get(entry.scope_id, '?')}.{entry.name}" for entry in manifest.collections.values()
        )
        raise UnknownCollection(
            f"no collection {name!r}", path=self.path, hint=f"known here: {', '.join(known[:20]) or 'none'}"
        )

    @staticmethod
    def _alive(manifest: Manifest, collection_id: int, seqno: int) -> bool:
        """False for rows of a collection that was dropped, or flushed after the row."""
        collection = manifest.collections.get(collection_id)
        return collection is not None and seqno > collection.begin_seqno

    # -- point reads ----------------------------------------------------------------------------------------------

    def get(
        self,
        key: bytes | str,
        collection: CollectionName | None = None,
        *,
        as_of: AsOf = None,
        now: float | None = None,
        raw: bool = False,
    ) -> Document | None:
        """Return a document, or None when it is absent, deleted or expired.

        `collection` is a name (`scope.collection`) or an id, by default `_default._default`. `as_of` is a seqno of the
        key's vbucket or a `Time`. `now` (seconds since 1970) decides expiry; by default it is the clock's, and with
        `as_of` the boundary's time. `raw` leaves the value compressed and with its xattrs.

        Raises UnknownCollection, NoSuchBoundary (`as_of` is before what is kept), Unavailable (the vbucket is resynced)
        and NotHeld (another mirror holds the vbucket).
        """
        if isinstance(key, str):
            key = key.encode()
        vbid = ((crc32(key) >> 16) & 0x7FFF) % self._count
        opened = self._open(vbid)
        environment, pub, key_tree, row_tree, vbid_key, _, running = opened
        txn = _begin(opened)
        try:
            # The common case, written out: newest version of a key of the default collection, on the served branch.
            if as_of is None and collection is None:
                branch, seqno, _, m_branch, _, flags = unpack_pub(txn.get(vbid_key, b"", pub))
                if not m_branch and flags < keys.PUB_UNAVAILABLE:
                    cursor = txn.cursor(key_tree)
                    if not cursor.set_key(b"\x00" + key) or not cursor.last_dup():
                        return None
                    dup = cursor.value()
                    dup_branch, dup_seqno, kind = unpack_dup(dup)
                    if dup_branch == branch and dup_seqno <= seqno:
                        if kind != 0x57:
                            return None
                        stored = txn.get(dup[:12], b"", row_tree)
                        if self._verify_reads and crc32c(stored) != seal.RESIDUE:
                            seal.frame_of(stored, dup[:12], vbid, environment.path)
                        document = records.decode_row(vbid, branch, stored[:-4], raw=raw)  # type: ignore[arg-type]
                        if document.expiry and document.expiry <= (time.time() if now is None else now):
                            return None
                        return document
            return self._get(Transaction(environment, txn), opened, vbid, key, collection, as_of, now, raw)
        except (struct.error, lmdb.Error) as error:
            raise self._damaged(error, opened, vbid) from error
        finally:
            txn.abort()
            running.pop()

    def get_many(
        self,
        document_keys: Iterable[bytes | str],
        collection: CollectionName | None = None,
        *,
        as_of: AsOf = None,
        now: float | None = None,
        raw: bool = False,
        bytes_max: int | None = None,
    ) -> dict[bytes, Document]:
        """Return those of the documents that exist, by key. Arguments and errors are those of `get`.

        Documents of one group of vbuckets are read in one transaction, in the order of their keys. A value that cannot
        be decompressed, or would be larger than 32 MiB, is returned as it is stored: its `datatype` then has bit 2 or
        4. Raises AnswerTooLarge as soon as the values together are more than `bytes_max`.
        """
        by_group: dict[int, dict[int, list[bytes]]] = {}
        for key in document_keys:
            if isinstance(key, str):
                key = key.encode()
            vbid = ((crc32(key) >> 16) & 0x7FFF) % self._count
            by_group.setdefault(vbid % self._groups, {}).setdefault(vbid, []).append(key)
        found: dict[bytes, Document] = {}
        byte_count = 0
        for by_vbid in by_group.values():
            with self._open(next(iter(by_vbid))).environment.read() as txn:
                for vbid, wanted in by_vbid.items():
                    documents = self._get_some(txn, vbid, wanted, collection, as_of, now, raw)
                    if bytes_max is None:
                        found.update(documents)
                        continue
                    for key, document in documents:
                        found[key] = document
                        byte_count += len(document.value)
                        if byte_count > bytes_max:
                            raise AnswerTooLarge(
                                f"the documents asked for are more than {bytes_max} bytes", hint="ask for fewer at once"
                            )
        return found

    def _get_some(
        self,
        txn: Transaction,
        vbid: int,
        wanted: list[bytes],
        collection: CollectionName | None,
        as_of: AsOf,
        now: float | None,
        raw: bool,
    ) -> Iterator[tuple[bytes, Document]]:
        """Documents of one vbucket, in the order of their keys; what is common is written out as in `get`."""
        opened = self._open(vbid)
        environment, pub, key_tree, row_tree, vbid_key, _, _ = opened
        wanted.sort()
        get, verify, cursor = txn.raw.get, self._verify_reads, None
        try:
            if as_of is None and collection is None:
                branch, seqno, _, m_branch, _, flags = unpack_pub(get(vbid_key, b"", pub))
                if not m_branch and flags < keys.PUB_UNAVAILABLE:
                    cursor = txn.raw.cursor(key_tree)
            for key in wanted:
                if cursor is not None:
                    if not cursor.set_key(b"\x00" + key) or not cursor.last_dup():
                        continue
                    dup = cursor.value()
                    dup_branch, dup_seqno, kind = unpack_dup(dup)
                    if dup_branch == branch and dup_seqno <= seqno:
                        if kind != 0x57:
                            continue
                        stored = get(dup[:12], b"", row_tree)
                        if verify and crc32c(stored) != seal.RESIDUE:
                            seal.frame_of(stored, dup[:12], vbid, environment.path)
                        document = records.decode_row(vbid, branch, stored[:-4], raw=raw, lenient=True)  # type: ignore[arg-type]
                        if not document.expiry or document.expiry > (time.time() if now is None else now):
                            yield key, document
                        continue
                other = self._get(txn, opened, vbid, key, collection, as_of, now, raw, lenient=True)
                if other is not None:
                    yield key, other
        except (struct.error, lmdb.Error) as error:
            raise self._damaged(error, opened, vbid) from error

    def exists(self, key: bytes | str, collection: CollectionName | None = None) -> bool:
        """Return whether `get` would return a document."""
        return self.get(key, collection, raw=True) is not None

    def find(self, wire_key: bytes, *, deletions: bool = False, now: float | None = None) -> Found:
        """One document (raw) by collection id and key as they stand on the wire, and what else an answer to it needs,
        all of one moment. `deletions`: a tombstone counts as a document.
        """
        collection_id, key = wire_key[0], wire_key[1:]
        if collection_id >= 0x80:
            collection_id, key = keys.split_key(wire_key)
        vbid = ((crc32(key) >> 16) & 0x7FFF) % self._count
        opened = self._open(vbid)
        txn = Transaction(opened.environment, _begin(opened))
        try:
            branch, seqno, _, m_branch, m_seqno, flags = unpack_pub(txn.raw.get(opened.vbid_key, b"", opened.pub))
            manifest = self._manifest(txn, vbid, (m_branch, m_seqno))
            collection = manifest.collections.get(collection_id)
            stale = bool(flags & keys.PUB_STALE)
            document = None
            if collection is not None:
                dup = self._newest(txn, opened, vbid, wire_key, branch, seqno)
                if dup is not None and (dup[12] == 0x57 or deletions) and unpack_dup(dup)[1] > collection.begin_seqno:
                    document = self._row(txn, opened, vbid, dup, True)
                    if dup[12] == 0x57 and document.expiry and document.expiry <= (time.time() if now is None else now):
                        document = None
            return Found(document, collection is not None, seqno, stale, manifest)
        except (struct.error, lmdb.Error) as error:
            raise self._damaged(error, opened, vbid) from error
        finally:
            opened.environment.end(txn.raw)

    def _newest(
        self, txn: Transaction, opened: Opened, vbid: int, wire_key: bytes, branch: int, seqno: int
    ) -> bytes | None:
        """The newest version of a key that a view at (branch, seqno) sees."""
        cursor = txn.raw.cursor(opened.keys)
        if not cursor.set_key(wire_key) or not cursor.last_dup():
            return None
        dup: bytes = cursor.value()
        dup_branch, dup_seqno, _ = unpack_dup(dup)
        if dup_branch == branch and dup_seqno <= seqno:
            return dup
        links = chain.recut(self._whole_chain(txn, vbid, branch), seqno)
        return chain.newest_version(cursor, wire_key, links)

    def _get(
        self,
        txn: Transaction,
        opened: Opened,
        vbid: int,
        key: bytes,
        collection: CollectionName | None,
        as_of: AsOf,
        now: float | None,
        raw: bool,
        lenient: bool = False,
    ) -> Document | None:
        links: chain.Chain | None = None
        if as_of is None:
            branch, seqno, _, m_branch, m_seqno, flags = keys.PUB.unpack(txn.raw.get(opened.vbid_key, b"", opened.pub))
            if flags & keys.PUB_UNAVAILABLE:
                self._readable(txn, vbid)
            manifest_key = (m_branch, m_seqno)
        else:
            served, boundary = self._as_of(txn, vbid, as_of)
            branch, seqno, links, manifest_key = served.links[0].branch, served.seqno, served.links, served.manifest_key
            if now is None and boundary is not None:
                now = boundary.time_ms / 1000
        if collection is None and not manifest_key[0]:
            manifest = None
            wire_key = b"\x00" + key
        else:
            manifest = self._manifest(txn, vbid, manifest_key)
            collection_id = self._collection_id(manifest, collection)
            wire_key = keys.encode_collection_id(collection_id) + key
        cursor = txn.raw.cursor(opened.keys)
        if not cursor.set_key(wire_key) or not cursor.last_dup():
            return None
        dup: bytes | None = cursor.value()
        dup_branch, dup_seqno, kind = keys.DUP.unpack(dup or b"")
        if dup_branch != branch or dup_seqno > seqno:  # there are rows that this view does not see: look further
            if links is None:
                links = chain.recut(self._whole_chain(txn, vbid, branch), seqno)
            dup = chain.newest_version(cursor, wire_key, links)
            if dup is None:
                return None
            dup_branch, dup_seqno, kind = keys.DUP.unpack(dup)
        if kind != 0x57 or (manifest is not None and not self._alive(manifest, collection_id, dup_seqno)):
            return None
        document = self._row(txn, opened, vbid, dup or b"", raw, lenient)
        if document.expiry and document.expiry <= (time.time() if now is None else now):
            return None
        return document

    def _row(
        self, txn: Transaction, opened: Opened, vbid: int, dup: bytes, raw: bool, lenient: bool = False
    ) -> Document:
        frame = txn.raw.get(dup[:12], db=opened.rows)
        if frame is None:
            raise CorruptedError("a key points to a row that is missing", path=opened.environment.path, vbid=vbid)
        if self._verify_reads and crc32c(frame) != seal.RESIDUE:  # written out here too: a scan does it for each row
            seal.frame_of(frame, dup[:12], vbid, opened.environment.path)
        branch = Branch(int.from_bytes(dup[:4], "big"))
        return records.decode_row(Vbid(vbid), branch, frame[:-4], raw=raw, lenient=lenient)

    def _frame(self, environment: Environment, vbid: int, row_key: bytes, stored: bytes) -> bytes:
        """The message of a stored row, verified."""
        return seal.frame_of(stored, row_key, vbid, environment.path) if self._verify_reads else stored[: -seal.SIZE]

    @staticmethod
    def _damaged(error: Exception, opened: Opened, vbid: int) -> StorageError:
        if isinstance(error, lmdb.Error):
            return storage_error(error, opened.environment.path)
        return CorruptedError(f"a record is damaged: {error}", path=opened.environment.path, vbid=vbid)

    # -- scans ----------------------------------------------------------------------------------------------------

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
        left = limit if limit is not None else -1
        for each in self.vbids if vbid is None else (vbid,):
            if left == 0:
                return
            for document in self._scan_vbucket(each, prefix, start, stop, collection, as_of, now, deletions, raw):
                yield document
                left -= 1
                if left == 0:
                    return

    def _scan_vbucket(
        self,
        vbid: int,
        prefix: bytes,
        start: bytes,
        end: bytes | None,
        collection: CollectionName | None,
        as_of: AsOf,
        now: float | None,
        deletions: bool,
        raw: bool,
    ) -> Iterator[Document]:
        opened = self._open(vbid)
        with opened.environment.read() as txn:
            served, boundary = self._as_of(txn, vbid, as_of)
            manifest = self._manifest(txn, vbid, served.manifest_key)
        if now is None:
            now = boundary.time_ms / 1000 if boundary is not None else time.time()
        ids = list(manifest.collections) if collection is None else [self._collection_id(manifest, collection)]
        for collection_prefix, collection_id in sorted((keys.encode_collection_id(each), each) for each in ids):
            if collection_id not in manifest.collections:
                continue
            position = collection_prefix + max(prefix, start)
            begin_seqno = manifest.collections[collection_id].begin_seqno
            wanted = collection_prefix + prefix
            stop = None if end is None else collection_prefix + end
            while position:
                chunk, position = self._scan_chunk(
                    opened, vbid, served, position, wanted, stop, begin_seqno, deletions, raw
                )
                for document in chunk:
                    if deletions or not document.expiry or document.expiry > now:
                        yield document

    def pin(self, vbid: int, as_of: AsOf = None, *, now: float | None = None) -> Pin:
        """Name what a vbucket serves (now, or as of a boundary), for `scan_page`. Raises NoSuchBoundary."""
        opened = self._open(vbid)
        with opened.environment.read() as txn:
            served, boundary = self._as_of(txn, vbid, as_of)
        if boundary is not None and now is None:
            now_ms = boundary.time_ms
        else:
            now_ms = int((time.time() if now is None else now) * 1000)
        history_id = served.links[0].history_id(served.seqno)
        return Pin(Vbid(vbid), Branch(served.branch), Seqno(served.seqno), history_id, now_ms)

    def token(self, vbid: int, branch: int | None = None, seqno: int | None = None) -> Token:
        """The position (branch, seqno) of a vbucket as a token; without them, what is published now."""
        opened = self._open(vbid)
        with opened.environment.read() as txn:
            if branch is None or seqno is None:
                served = self._readable(txn, vbid)
                branch, seqno = served.branch, served.seqno
            history_id = self._whole_chain(txn, vbid, branch)[0].history_id(seqno)
        return Token(Vbid(vbid), Branch(branch), Seqno(seqno), history_id)

    def scan_page(
        self,
        pin: Pin,
        collection: CollectionName | None = None,
        *,
        start: bytes = b"",
        prefix: bytes = b"",
        end: bytes | None = None,
        limit: int = CHUNK_ROWS,
        bytes_max: int | None = None,
        deletions: bool = False,
        raw: bool = False,
    ) -> tuple[list[Document], bytes]:
        """At most `limit` documents from `start` on as `pin` sees them, and the next page's start (empty: the end).

        One transaction and bounded work, so a page may hold fewer documents than `limit`, even none, before the end;
        their values are no more than `bytes_max`, but for a first one that is larger by itself.
        Raises ViewInvalidated when a rollback, a refill or the purger passed the pin.
        """
        opened = self._open(pin.vbid)
        with opened.environment.read() as txn:
            links = self._chain_of(opened, txn, pin)
            manifest_key = branches.manifest_key_on(txn, pin.vbid, links)
            manifest = self._manifest(txn, pin.vbid, manifest_key)
        collection_id = self._collection_id(manifest, collection)
        if collection_id not in manifest.collections:
            return [], b""
        served = Served(pin.branch, pin.seqno, 0, manifest_key, False, links)
        wire_prefix = keys.encode_collection_id(collection_id)
        chunk, position = self._scan_chunk(
            opened,
            pin.vbid,
            served,
            wire_prefix + max(prefix, start),
            wire_prefix + prefix,
            None if end is None else wire_prefix + end,
            manifest.collections[collection_id].begin_seqno,
            deletions,
            raw,
            limit,
            bytes_max,
        )
        found = [each for each in chunk if deletions or not each.expiry or each.expiry * 1000 > pin.now_ms]
        return found, position[len(wire_prefix) :]

    def _scan_chunk(
        self,
        opened: Opened,
        vbid: int,
        served: Served,
        position: bytes,
        wanted: bytes,
        stop: bytes | None,
        begin_seqno: int,
        deletions: bool,
        raw: bool,
        rows_max: int | None = None,
        bytes_max: int | None = None,
    ) -> tuple[list[Document], bytes]:
        """Documents from `position` on, and where to go on (empty: the end)."""
        rows_max = CHUNK_ROWS if rows_max is None else rows_max
        bytes_max = CHUNK_BYTES if bytes_max is None else bytes_max
        with opened.environment.read() as txn:
            found, next_position = self._scan_keys(
                txn, opened, vbid, served, position, wanted, stop, begin_seqno, deletions, rows_max
            )
            documents: list[Document] = []
            byte_count = 0
            for key, dup in found:
                document = self._row(txn, opened, vbid, dup, raw, lenient=True)
                byte_count += len(document.value)
                if documents and byte_count > bytes_max:
                    return documents, key
                documents.append(document)
            return documents, next_position

    def _scan_keys(
        self,
        txn: Transaction,
        opened: Opened,
        vbid: int,
        served: Served,
        position: bytes,
        wanted: bytes,
        stop: bytes | None,
        begin_seqno: int,
        deletions: bool,
        rows_max: int,
    ) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Keys from `position` on with the version that `served` sees, and where to go on (empty: the end)."""
        cuts = {link.branch: link.cut for link in served.links}
        found: list[tuple[bytes, bytes]] = []
        current = position
        best: bytes | None = None
        next_position = b""
        self._revalidate(txn, vbid, served)
        cursor = txn.raw.cursor(opened.keys)
        if not cursor.set_range(position):
            return [], b""
        for seen, (key, dup) in enumerate(cursor.iternext()):
            if key != current:
                if best is not None:
                    found.append((current, best))
                    best = None
                if key[: len(wanted)] != wanted or (stop is not None and key >= stop):
                    break
                if seen >= rows_max:
                    next_position = key
                    break
                current = key
            elif key[: len(wanted)] != wanted or (stop is not None and key >= stop):
                break  # the very first key, equal to `position`
            branch, seqno, kind = keys.DUP.unpack(dup)
            if seqno <= cuts.get(branch, -1):
                best = dup if seqno > begin_seqno and (kind == 0x57 or deletions) else None
        if best is not None:
            found.append((current, best))
        return found, next_position

    def _revalidate(self, txn: Transaction, vbid: int, pinned: Served) -> None:
        """Raise ViewInvalidated unless everything that `pinned` sees is still on the served chain and kept."""
        branch, seqno, floor, *_ = txn.pub(vbid)
        self.check_unmoved(txn, vbid, pinned.links)
        if pinned.anywhere:
            return self._check_kept(txn, vbid, pinned, branch, seqno, floor)
        tip = pinned.links[0]
        if branch != tip.branch or seqno < pinned.seqno:
            links = chain.recut(self._whole_chain(txn, vbid, branch), seqno)
            if not chain.sees(links, tip.branch, pinned.seqno):
                raise ViewInvalidated(
                    f"a rollback or refill passed seqno {pinned.seqno}", vbid=vbid, hint="start the read again"
                )
        if floor > pinned.seqno:
            raise ViewInvalidated(f"history before seqno {floor} is gone", vbid=vbid, hint="start the read again")
        return None

    def check_unmoved(self, txn: Transaction, vbid: int, links: chain.Chain) -> None:
        """Raise ViewInvalidated where branches of a chain were merged or removed since it was read."""
        try:
            whole = self._whole_chain(txn, vbid, links[0].branch)
        except CorruptedError:
            whole = ()
        if not chain.same(links, chain.recut(whole, links[0].cut)):
            raise ViewInvalidated(
                "the branches that it reads were merged or removed meanwhile", vbid=vbid, hint="start the read again"
            )

    def _check_kept(self, txn: Transaction, vbid: int, pinned: Served, branch: int, seqno: int, floor: int) -> None:
        """Raise ViewInvalidated unless everything that `pinned` sees is there, on whatever chain."""
        served = chain.recut(self._whole_chain(txn, vbid, branch), seqno)
        common = chain.common_seqno(served, pinned.links)
        if common is not None and floor > common:
            raise ViewInvalidated(f"history before seqno {floor} is gone", vbid=vbid, hint="start the read again")
        if common is None:
            self._check_left(txn, vbid, pinned)
        for link in pinned.links:
            if link.cut <= link.base_seqno:
                continue  # nothing of it is seen, and it may be forgotten
            kept_seqno = branches.get_branch(txn, vbid, link.branch).kept_seqno
            if kept_seqno < link.cut and (common is None or common < link.cut):
                raise ViewInvalidated(
                    "what was rolled back is gone from history", vbid=vbid, hint="start the read again"
                )

    @staticmethod
    def _check_left(txn: Transaction, vbid: int, pinned: Served) -> None:
        """Raise ViewInvalidated if the purger was at what `pinned` sees before a refill took the place of its chain.

        The floor of then is forgotten. But a boundary goes before, or together with, the first version that is not
        seen above it. So the one is looked for up to which the last chain before the refill had this history.
        """
        seqno = pinned.seqno
        below = [link.branch for link in pinned.links if link.base_seqno < seqno]
        shared = {pinned.branch, *below[:1]}  # a branch that nothing was published on is nobody's parent
        for branch, row in branches.all_branches(txn, vbid).items():
            if branch > pinned.branch and row.parent in shared:
                shared.add(branch)
                seqno = min(seqno, row.base_seqno)
        if not seqno:
            return
        owner = next(link.branch for link in pinned.links if link.base_seqno < seqno)
        key = keys.ROW.pack(owner, seqno) + keys.BOUNDARY_SUFFIX
        if txn.get(keys.rows_db(vbid), key) is None:
            raise ViewInvalidated(f"history at seqno {seqno} is gone", vbid=vbid, hint="start the read again")

    def standing(self, pin: Pin) -> Served:
        """What `pin` sees, for as long as all of it is kept: a rollback does not end it, the purger does.

        Raises ViewInvalidated when it is not kept any more.
        """
        opened = self._open(pin.vbid)
        with opened.environment.read() as txn:
            return self._standing(opened, txn, pin)

    def _standing(self, opened: Opened, txn: Transaction, at: Pin | Token) -> Served:
        links = self._chain_of(opened, txn, at)
        manifest_key = branches.manifest_key_on(txn, at.vbid, links)
        pinned = Served(at.branch, at.seqno, 0, manifest_key, False, links, anywhere=True)
        self._revalidate(txn, at.vbid, pinned)
        return pinned

    def _chain_of(self, opened: Opened, txn: Transaction, at: Pin | Token) -> chain.Chain:
        return self._chain_to(txn, at.vbid, at.branch, at.seqno, at.history_id)

    def _chain_to(self, txn: Transaction, vbid: int, branch: int, seqno: int, history_id: int) -> chain.Chain:
        """The chain up to a position that somebody was given. Raises ViewInvalidated where it is not of a history that
        this mirror has.
        """
        try:
            whole = self._whole_chain(txn, vbid, branch)
        except CorruptedError as error:
            raise ViewInvalidated(
                f"this mirror knows no branch {branch} (any more)", vbid=vbid, hint="start the read again"
            ) from error
        if whole[0].history_id(seqno) != history_id:
            raise ViewInvalidated(
                f"the position {branch}:{seqno} is of a history that this mirror does not have (any more)",
                vbid=vbid,
                hint="start the read again",
            )
        return chain.recut(whole, seqno)

    def scan_seqno(
        self, vbid: int, after_seqno: int = 0, to_seqno: int = SEQNO_MAX, *, raw: bool = False
    ) -> Iterator[Document]:
        """Every kept event of a vbucket (all versions, tombstones, system events), rising in seqno, up to what is
        published now. Raises ViewInvalidated when a rollback passes it.
        """
        opened = self._open(vbid)
        with opened.environment.read() as txn:
            served = self._readable(txn, vbid)
        yield from self._rows_of(opened, vbid, served, after_seqno, min(to_seqno, served.seqno), raw)

    def _rows_of(
        self,
        opened: Opened,
        vbid: int,
        served: Served,
        after_seqno: int,
        to_seqno: int,
        raw: bool,
        pieces: Pieces | None = None,
    ) -> Iterator[Document]:
        pieces = pieces or Pieces(CHUNK_BYTES)

        def document(branch: int, row_key: bytes, stored: bytes) -> Document:
            frame = self._frame(opened.environment, vbid, row_key, stored)
            return records.decode_row(Vbid(vbid), Branch(branch), frame, raw=raw, lenient=True)

        for link in reversed(served.links):
            position, last = max(after_seqno, link.base_seqno), min(to_seqno, link.cut)
            prefix = keys.PREFIX.pack(link.branch)
            while position < last:
                with opened.environment.read() as txn:
                    self._revalidate(txn, vbid, served)
                    rows = index.rows_between(txn, vbid, prefix, position, last, CHUNK_ROWS, pieces.bytes_max)
                if not rows:
                    break
                rows.reverse()
                while rows:
                    seqno = int.from_bytes(rows[-1][0][4:], "big")
                    yield document(link.branch, *rows.pop())  # no variable keeps what the reader may let go of
                    if pieces.again:
                        pieces.again = False
                        rows.clear()
                    else:
                        position = seqno

    def count(self, vbid: int, *, now: float | None = None) -> int:
        """Live documents of a vbucket, counted by walking its keys (expiry is not looked at)."""
        opened = self._open(vbid)
        with opened.environment.read() as txn:
            served = self._served(txn, vbid)
            manifest = self._manifest(txn, vbid, served.manifest_key)
            begin = {cid: entry.begin_seqno for cid, entry in manifest.collections.items()}
            cuts = {link.branch: link.cut for link in served.links}
            total = 0
            current = b""
            alive = 0
            for key, dup in txn.raw.cursor(opened.keys).iternext():
                if key != current:
                    total += alive
                    alive, current = 0, key
                    cid = key[0] if key[0] < 0x80 else keys.split_key(key)[0]
                    begin_seqno = begin.get(cid, SEQNO_MAX)
                branch, seqno, kind = keys.DUP.unpack(dup)
                if seqno <= cuts.get(branch, -1):
                    alive = 1 if kind == 0x57 and seqno > begin_seqno else 0
            return total + alive

    # -- states, boundaries, changes ------------------------------------------------------------------------------

    def state(self, vbid: int) -> VbucketState:
        """The stored state of one vbucket."""
        environment = self._environment(vbid)
        with environment.read() as txn:
            served = self._served(txn, vbid)
            self._manifest(txn, vbid, served.manifest_key)  # to be remembered
            known = self._known_of(txn, vbid).manifests
            return branches.load(txn, Vbid(vbid), known).state

    def states(self) -> list[VbucketState]:
        """The stored states of all vbuckets, in rising vbid."""
        return [self.state(vbid) for vbid in self.vbids]

    def published(self) -> list[Published]:
        """Return what every vbucket of `vbids` serves now, in that order: the cheapest way to see that one moved."""
        found = {}
        for first in self.vbids[: self._groups]:  # one of each group
            environment = self._environment(first)
            with environment.read() as txn:
                for key, data in txn.cursor(keys.DB_PUB).iternext():
                    vbid = int.from_bytes(key, "big")
                    pub = txn.pub_of(vbid, data)
                    history_id = self._whole_chain(txn, vbid, pub.branch)[0].history_id(pub.seqno)
                    branch, seqno, floor = Branch(pub.branch), Seqno(pub.seqno), Seqno(pub.floor_seqno)
                    found[vbid] = Published(branch, seqno, floor, pub.is_stale, history_id)
        return [found[vbid] for vbid in self.vbids]

    def newest_of(
        self, pin: Pin, collection_id: int, *, below: int | None = None, rows_max: int = CHUNK_ROWS
    ) -> tuple[Seqno, int]:
        """Seqno of the newest event of a collection as `pin` sees it (its creation or flush, where there is none after
        it), and where to go on with looking: `below` of another call; 0: that was it. Raises ViewInvalidated,
        UnknownCollection.
        """
        opened = self._open(pin.vbid)
        with opened.environment.read() as txn:
            links = self._chain_of(opened, txn, pin)
            self._revalidate(txn, pin.vbid, Served(pin.branch, pin.seqno, 0, (0, 0), False, links))
            key = branches.manifest_key_on(txn, pin.vbid, links)
            collection = self._manifest(txn, pin.vbid, key).collections.get(collection_id)
            if collection is None:
                raise UnknownCollection(f"no collection {collection_id:#x}", vbid=pin.vbid)
            found, following = newest_of_collection(
                txn,
                pin.vbid,
                links,
                collection_id,
                pin.seqno if below is None else below,
                collection.begin_seqno,
                rows_max,
            )
        return Seqno(found or collection.begin_seqno), following

    def past(self, vbid: int) -> Past:
        """How far back a vbucket can be read, and when it was resynced."""
        environment = self._environment(vbid)
        with environment.read() as txn:
            served = self._served(txn, vbid)
            floor = chain.newest_boundary(txn, Vbid(vbid), served.links, served.floor_seqno)
            refills_ms, refill_count = branches.refills(txn, vbid)
        return Past(floor, refills_ms, refill_count)

    def history(self, vbid: int) -> History:
        """How far back a vbucket's history reaches and what it takes."""
        environment = self._environment(vbid)
        with environment.read() as txn:
            return history.of(txn, vbid)

    def stale(self, vbid: int) -> bool:
        """True while a refill from 0 is under way beside what is served."""
        environment = self._environment(vbid)
        with environment.read() as txn:
            return self._served(txn, vbid).stale

    def boundaries(self, vbid: int) -> list[Boundary]:
        """The kept boundaries of the served history, newest first."""
        opened = self._open(vbid)
        with opened.environment.read() as txn:
            served = self._served(txn, vbid)
            found = chain.boundaries(txn, Vbid(vbid), served.links)
            return [boundary for boundary in found if boundary.seqno >= served.floor_seqno]

    def rollbacks(self, vbid: int) -> list[Rollback]:
        """Rollbacks of a vbucket, oldest first."""
        environment = self._environment(vbid)
        found = []
        with environment.read() as txn:
            cursor = txn.cursor(keys.DB_ROLLBACK)
            if cursor.set_range(keys.ROLLBACK_KEY.pack(vbid, 0)):
                for key, value in cursor.iternext():
                    if key[:2] != keys.VBID_KEY.pack(vbid):
                        break
                    a, b, c, d, e, f, g, h = records.decode_rollback(value)
                    reached = None if h is None else Seqno(h)
                    found.append(
                        Rollback(Vbid(vbid), Branch(a), Seqno(b), Branch(c), Seqno(d), Vbuuid(e), Vbuuid(f), g, reached)
                    )
        return found

    def wait_for(self, token: wait.MutationToken, timeout_s: float) -> None:
        """Return once the write that `token` names can be read here.

        Raises WriteLost as soon as it is known that a failover of the source has undone it, and NotPublished after
        `timeout_s` seconds. It holds no transaction, and other threads may use the view meanwhile.
        """
        wait.wait_for(self, token, timeout_s)

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
        new history. Raises ViewInvalidated when the history the token stood on was replaced whole (a refill) or is no
        longer kept, or when a rollback happens while the generator runs.

        With `pieces` the generator holds no more than one piece, and none of the documents that it returned.
        """
        for each in self.vbids if vbid is None else (vbid,):
            token = since if since is not None and since.vbid == each else None
            yield from self._changes_of(each, token, raw, pieces=pieces)

    def check_since(self, token: Token) -> None:
        """Raise ViewInvalidated where `changes` since this token would at its beginning. Reads no document."""
        self._way(self._open(token.vbid), token.vbid, token, None)

    def changes_between(self, start: Token | None, end: Token, *, raw: bool = False) -> Iterator[Change]:
        """What leads from one published position (None: the beginning) to a later one: whenever it is asked, the same.

        `end` need not be on the history that is served now: rows and branches never change, so the two positions alone
        decide what is between them, as long as all of it is kept. Raises ViewInvalidated when it is not, or when a
        refill lies between.
        """
        return self._changes_of(end.vbid, start, raw, end)

    def check_way(self, start: Token | None, end: Token) -> int:
        """The seqno up to which both positions have one history. Raises ViewInvalidated where `changes_between` would
        at its beginning.
        """
        return self._way(self._open(end.vbid), end.vbid, start, end)[2]

    def _changes_of(
        self, vbid: int, token: Token | None, raw: bool, end: Token | None = None, pieces: Pieces | None = None
    ) -> Iterator[Change]:
        opened = self._open(vbid)
        served, lost, after = self._way(opened, vbid, token, end)
        replacing: chain.Chain = ()
        if token is not None and lost:
            record, replacing = self._rollback_from(vbid, served, token, after)
            yield from self._retractions(opened, vbid, served, lost, token, record, replacing, raw, pieces)
        links = {link.branch: link for link in served.links}
        overridden: set[tuple[int, bytes]] = set()
        """Keys of which the reader has just been given an older version, in place of one that it had."""

        def is_new(document: Document) -> bool:
            if document.seqno <= lost[0].cut:
                key = (document.collection_id, document.key)
                if key not in overridden and self._was_given(opened, lost, document, raw):
                    return False
                overridden.add(key)
            return True

        def change(document: Document) -> Change:
            branch, seqno = document.branch, document.seqno
            at = Token(Vbid(vbid), branch, seqno, links[branch].history_id(seqno))
            return Change(document.kind.name.lower(), at, document)

        documents = self._rows_of(opened, vbid, served, after, served.seqno, raw, pieces)
        # no loop here: its variable would keep a document for as long as the reader takes
        yield from map(change, filter(is_new, documents) if replacing else documents)

    def _way(
        self, opened: Opened, vbid: int, token: Token | None, end: Token | None
    ) -> tuple[Served, chain.Chain, Seqno]:
        """What is served (or stands at `end`), the chain that `token` stood on if it was left, and where both part."""
        with opened.environment.read() as txn:
            served = self._readable(txn, vbid) if end is None else self._standing(opened, txn, end)
            lost: chain.Chain = ()
            after = token.seqno if token else Seqno(0)
            if token is not None:
                self._chain_of(opened, txn, token)
                if not chain.sees(served.links, token.branch, token.seqno):
                    lost = chain.load(txn, vbid, token.branch, token.seqno)
                    if token.seqno < lost[0].base_seqno:
                        raise ViewInvalidated("the token was not given by this mirror", vbid=vbid)
                    cuts = {link.branch: link.cut for link in served.links}
                    after = Seqno(
                        max((min(link.cut, cuts[link.branch]) for link in lost if link.branch in cuts), default=-1)
                    )
                    if after < 0:
                        raise ViewInvalidated(
                            "the vbucket was resynced since this token", vbid=vbid, hint="read it from the beginning"
                        )
                    if not any(link.base_seqno == after and link.branch > token.branch for link in served.links):
                        raise ViewInvalidated(
                            "the token is ahead of what is published", vbid=vbid, hint="read it from the beginning"
                        )
                purged = branches.purge_row(txn, vbid).local_purge_seqno
                gap = any(link.kept_seqno < link.cut and after < link.cut for link in lost)
                if gap or (after < purged and token.seqno > 0):
                    what = "what was rolled back is" if gap else f"tombstones up to seqno {purged} are"
                    raise ViewInvalidated(f"{what} gone from history", vbid=vbid, hint="read it from the beginning")
        return served, lost, after

    def _rollback_from(self, vbid: int, served: Served, token: Token, common: int) -> tuple[Rollback, chain.Chain]:
        """The rollback that took readers from the history of `token` to the one that is served; and where it was a
        deferred one, the chain as they first saw it then, as far as it is still served.
        """
        rising = [link for link in reversed(served.links) if link.branch > token.branch]
        while rising[0].base_seqno != common:
            del rising[0]
        child = rising[0]
        records_of = {each.to_branch: each for each in self.rollbacks(vbid)}
        reached: int | None = None
        for link in rising:
            if reached is not None and link.base_seqno >= reached:
                break
            known = records_of.get(Branch(link.branch))
            if known is None or known.reached_seqno is None:
                reached = None if reached is None else link.base_seqno
                break
            reached = known.reached_seqno
        begin = Branch(child.branch)
        unknown = Rollback(Vbid(vbid), token.branch, token.seqno, begin, Seqno(common), Vbuuid(0), Vbuuid(0), 0)
        return records_of.get(begin, unknown), () if reached is None else chain.recut(served.links, reached)

    def _retractions(
        self,
        opened: Opened,
        vbid: int,
        served: Served,
        lost: chain.Chain,
        token: Token,
        record: Rollback,
        replacing: chain.Chain,
        raw: bool,
        pieces: Pieces | None,
    ) -> Iterator[Change]:
        """The rollback, then each retracted newest version and what is visible again in its place; last, what is
        visible again because its collection was dropped or flushed in the lost history alone.

        Nothing at all where a deferred rollback lost nothing of what the reader was given.
        """
        common = record.to_seqno
        child = next(link for link in served.links if link.branch == record.to_branch)
        end = Token(Vbid(vbid), record.to_branch, common, child.history_id(common))

        rows_max = CHUNK_ROWS if pieces is None else max(1, min(CHUNK_ROWS, pieces.bytes_max // UNDONE_BYTES))
        undone = self._undone(opened, vbid, served, lost, common, replacing, rows_max)
        following = next(undone, None)
        if following is None and replacing:
            return
        # Only the last event has a token of the new history, so one is looked ahead: as a position, not as a document.
        yield from _repeated(lambda: Change("rollback", token if following else end, rollback=record), pieces)
        while following is not None:
            each, following = following, next(undone, None)
            yield from _repeated(partial(self._undone_change, opened, each, token if following else end, raw), pieces)

    def _undone_change(self, opened: Opened, undone: Undone, at: Token, raw: bool) -> Change:
        return Change(undone.kind, at, self._undone_document(opened, at.vbid, undone, raw))

    def _undone_document(self, opened: Opened, vbid: int, undone: Undone, raw: bool) -> Document:
        """Raises ViewInvalidated where the purger has removed it since it was found."""
        with opened.environment.read() as txn:
            if txn.raw.get(undone.dup[:12], db=opened.rows) is None:
                cursor = txn.raw.cursor(opened.keys)
                if not cursor.set_key_dup(undone.wire_key, undone.dup):
                    raise ViewInvalidated(
                        "what was rolled back is gone from history", vbid=vbid, hint="read it from the beginning"
                    )
            return self._row(txn, opened, vbid, undone.dup, raw, lenient=True)

    def _was_given(self, opened: Opened, lost: chain.Chain, document: Document, raw: bool) -> bool:
        """True if the reader had this very version, at or below the end of the history that was left."""
        link = next(link for link in reversed(lost) if document.seqno <= link.cut)
        with opened.environment.read() as txn:
            frame = txn.raw.get(keys.ROW.pack(link.branch, document.seqno), db=opened.rows)
        if frame is None:
            return False
        frame = self._frame(opened.environment, document.vbid, keys.ROW.pack(link.branch, document.seqno), frame)
        known = records.decode_row(document.vbid, Branch(link.branch), frame, raw=raw, lenient=True)
        return known._replace(branch=document.branch) == document

    def undone_by(
        self, vbid: int, to_seqno: int, *, raw: bool = False
    ) -> tuple[Boundary, Iterator[tuple[str, Document]]]:
        """What a rollback to `to_seqno` would do now: its boundary, then its retractions and restorations.

        Raises NoSuchBoundary below the history floor.
        """
        opened = self._open(vbid)
        with opened.environment.read() as txn:
            served = self._served(txn, vbid)
            boundary = chain.newest_boundary(txn, Vbid(vbid), served.links, to_seqno)
        if boundary is None or boundary.seqno < served.floor_seqno:
            raise NoSuchBoundary(
                f"nothing is kept at or below seqno {to_seqno}; history begins at seqno {served.floor_seqno}",
                vbid=vbid,
                hint="give a later seqno; `dcp-mirror state` shows the kept boundaries",
            )
        undone = self._undone(opened, vbid, served, served.links, boundary.seqno)
        return boundary, ((each.kind, self._undone_document(opened, vbid, each, raw)) for each in undone)

    def _undone(
        self,
        opened: Opened,
        vbid: int,
        served: Served,
        lost: chain.Chain,
        common: int,
        replacing: chain.Chain = (),
        rows_max: int = CHUNK_ROWS,
    ) -> Iterator[Undone]:
        """Of each key that `lost` changed above `common` its newest version, and what is visible again in its place.

        With `replacing`, the chain that readers went to in one step, only of keys that it has no version of above
        `common`, and whose collection it has not dropped or flushed since.
        """
        restored_links = chain.recut(served.links, common)
        back = self._back_with_all_they_held(opened, vbid, lost, replacing or restored_links)
        for link in reversed(lost):
            position = max(link.base_seqno, common)
            prefix = keys.PREFIX.pack(link.branch)
            while position < link.cut:
                with opened.environment.read() as txn:
                    self._revalidate(txn, vbid, served)
                    rows, count, position, _ = index.key_rows_between(txn, vbid, prefix, position, link.cut, rows_max)
                    kept_seqno = branches.get_branch(txn, vbid, link.branch).kept_seqno
                    if kept_seqno < link.cut:
                        raise ViewInvalidated(
                            "what was rolled back is gone from history", vbid=vbid, hint="read it from the beginning"
                        )
                    found = self._retracted(txn, opened, vbid, rows, lost, restored_links, back, replacing)
                yield from found
                if not count:
                    break
        restored = replace(served, links=restored_links)
        for collection_id, begin_seqno in back.items():
            start = prefix = keys.encode_collection_id(collection_id)
            while start:
                with opened.environment.read() as txn:
                    held, start = self._scan_keys(
                        txn, opened, vbid, restored, start, prefix, None, begin_seqno, False, rows_max
                    )
                yield from (Undone("restoration", wire_key, dup) for wire_key, dup in held)

    def _back_with_all_they_held(
        self, opened: Opened, vbid: int, lost: chain.Chain, restored_links: chain.Chain
    ) -> dict[int, Seqno]:
        """Collections that the lost history had dropped or flushed, and where they begin: all that they hold is visible
        again, whether or not the lost history has an event of it.
        """
        with opened.environment.read() as txn:
            before, after = (
                self._manifest(txn, vbid, branches.manifest_key_on(txn, vbid, links))
                for links in (lost, restored_links)
            )
        return {
            collection_id: entry.begin_seqno
            for collection_id, entry in after.collections.items()
            if (known := before.collections.get(collection_id)) is None or known.begin_seqno > entry.begin_seqno
        }

    def _retracted(
        self,
        txn: Transaction,
        opened: Opened,
        vbid: int,
        rows: list[tuple[bytes, bytes]],
        lost: chain.Chain,
        restored_links: chain.Chain,
        back: dict[int, Seqno],
        replacing: chain.Chain,
    ) -> list[Undone]:
        """Each with what is visible again in its place; but for the collections of `back`, which come back whole."""
        found = []
        cursor = txn.raw.cursor(opened.keys)
        manifest_key = branches.manifest_key_on(txn, vbid, replacing or restored_links)
        manifest = self._manifest(txn, vbid, manifest_key)
        for wire_key, dup in rows:
            if chain.newest_version(cursor, wire_key, lost) != dup:
                continue  # superseded within the lost history: the reader's last word on this key comes later
            if replacing:
                newest = chain.newest_version(cursor, wire_key, replacing)
                replaced = newest is not None and unpack_dup(newest)[1] > restored_links[0].cut
                if replaced or not self._alive(manifest, keys.split_key(wire_key)[0], unpack_dup(dup)[1]):
                    continue
            found.append(Undone("retraction", wire_key, dup))
            again = chain.newest_version(cursor, wire_key, restored_links)
            if again is not None and again[12] == 0x57:
                collection_id = keys.split_key(wire_key)[0]
                if collection_id not in back and self._alive(manifest, collection_id, unpack_dup(again)[1]):
                    found.append(Undone("restoration", wire_key, again))
        return found


def _repeated(change: Callable[[], Change], pieces: Pieces | None) -> Iterator[Change]:
    """A change, and again for as long as its reader has to let go of it."""
    yield change()
    while pieces is not None and pieces.again:
        pieces.again = False
        yield change()
