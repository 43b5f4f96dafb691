"""One vbucket as a reader of a mirror sees it: its trees, what it serves, its chains and manifests, and its rows.

Knows one vbucket's trees in one environment; never keys of other vbuckets or where the environment came from. Each
method works in a transaction that the caller has opened. Invariant: what is remembered between transactions (chains,
manifests) is used only while the vbucket's chain id is the one that it was read with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lmdb
from google_crc32c import value as crc32c

from storage.env.environment import Environment, storage_error
from storage.env.transaction import Transaction
from storage.errors import CorruptedError, NoSuchBoundary, StorageError, Unavailable, ViewInvalidated
from storage.format import keys, records, seal
from storage.format.records import BRANCH, KIND, ROW_KEY, SEQNO
from storage.format.seal import RESIDUE
from storage.format.tokens import AsOf, Time
from storage.history import branches, chain
from storage.model import DEFAULT_COLLECTION, SEQNO_MAX, Boundary, Branch, Document, Kind, Manifest, Vbid

KINDS = frozenset(map(int, (Kind.MUTATION, Kind.DELETION, Kind.EXPIRATION)))
"""Of rows that have a reference. No two of them that differ in one bit mean different things to a reader."""
CHAINS_MAX = 8
"""Chains of a vbucket that are remembered: the one that is served, and those of a few positions."""
MANIFESTS_MAX = 2
"""Manifests of a vbucket that are remembered; each holds every collection."""

Visible = tuple[int, Branch, bytes, bytes, int, int, Manifest]
"""What a vbucket serves in one commit of its environment, as point reads need it: the commit's number, served branch,
`above` and `up_to` of the default collection, published seqno, flags of `pub`, manifest. A reference to a row of the
default collection on the served branch that is visible sorts above `above`, and not above `up_to`; `above` is empty
where that collection is not simply there to be read: it was dropped, or readers wait for a resync.
"""
_INITIAL = Manifest.initial()
_UNKNOWN: Visible = (-1, Branch(0), b"", b"", 0, 0, _INITIAL)


def end_of_references(branch: int, seqno: int) -> bytes:
    """What sorts behind each reference to a row of a branch at or below a seqno, and before those above it."""
    return keys.DUP.pack(branch, seqno, 0xFF)


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
    survives_rollback: bool = False
    """Valid while all of it is kept, also when a rollback or resync has left its chain."""


class _Memory:
    """Chains and manifests that were read while the vbucket had one chain id (`branches.PurgeRow`)."""

    __slots__ = ("chain_id", "chains", "manifests")

    def __init__(self, chain_id: int) -> None:
        self.chain_id = chain_id
        self.chains: dict[int, chain.Chain] = {}
        self.manifests: dict[tuple[int, int], Manifest] = {}


class VbucketReader:
    """Reads one vbucket. Its attributes are public for the loops that read rows one by one."""

    __slots__ = (
        "_memory",
        "begin",
        "environment",
        "keys",
        "pub",
        "rows",
        "running",
        "stale_reads",
        "vbid",
        "vbid_key",
        "verify_reads",
        "visible",
    )

    def __init__(self, environment: Environment, vbid: int, *, stale_reads: bool, verify_reads: bool) -> None:
        """`stale_reads`, `verify_reads`: as for `open_view`."""
        self.environment = environment
        self.vbid = Vbid(vbid)
        self.stale_reads = stale_reads
        self.verify_reads = verify_reads
        self.pub: Any = environment.db(keys.DB_PUB)
        self.keys: Any = environment.db(keys.keys_db(vbid))
        self.rows: Any = environment.db(keys.rows_db(vbid))
        self.vbid_key = keys.VBID_KEY.pack(vbid)
        self.begin: Any = environment.env.begin
        """LMDB's own begin, without `Environment.begin` around it: for point reads."""
        self.running: list[None] = environment.running
        self._memory: _Memory | None = None
        self.visible = _UNKNOWN
        """Of the commit that was looked at last. In a transaction of the same commit it is true; `look` replaces it."""

    def begin_read(self) -> Any:
        """An lmdb.Transaction to read in, begun at the least cost; the caller ends it by `Environment.end`."""
        running = self.running
        running.append(None)
        try:
            if not self.environment.remapping:
                return self.begin()
        except lmdb.Error:
            pass  # `Environment.begin` knows what to do about it
        running.pop()
        return self.environment.begin()

    def served_in(self, txn: Any) -> Visible:
        """What a transaction (an lmdb.Transaction) sees. `PointReads.get` has this written out."""
        visible = self.visible
        return visible if visible[0] == txn.id() else self.look(txn)

    def look(self, txn: Any) -> Visible:
        """The same, read."""
        branch, seqno, _, m_branch, m_seqno, flags = keys.PUB.unpack(txn.get(self.vbid_key, b"", self.pub))
        manifest = _INITIAL
        if m_branch:
            manifest = self.manifest(Transaction(self.environment, txn), (m_branch, m_seqno))
        above = b""
        default = manifest.collections.get(DEFAULT_COLLECTION)
        if default is not None and flags < keys.PUB_UNAVAILABLE:
            above = end_of_references(branch, default.begin_seqno)
        up_to = end_of_references(branch, seqno)
        self.visible = visible = (txn.id(), branch, above, up_to, seqno, flags, manifest)
        return visible

    # -- chains and manifests -------------------------------------------------------------------------------------

    def _remembered(self, txn: Transaction) -> _Memory:
        """What is remembered and is true in this transaction."""
        chain_id = branches.purge_row(txn, self.vbid).chain_id
        memory = self._memory
        if memory is None or memory.chain_id != chain_id:
            memory = self._memory = _Memory(chain_id)
        return memory

    def forget(self) -> None:
        """Forget what is remembered."""
        self._memory = None
        self.visible = _UNKNOWN

    def whole_chain(self, txn: Transaction, branch: int) -> chain.Chain:
        """The chain of a branch, not cut at its tip. It changes with the chain id alone, so it is read once."""
        chains = self._remembered(txn).chains
        links = chains.get(branch)
        if links is None:
            if len(chains) >= CHAINS_MAX:
                chains.clear()
            links = chains[branch] = chain.load(txn, self.vbid, branch, SEQNO_MAX)
        return links

    def chain_at(self, txn: Transaction, branch: int, seqno: int) -> chain.Chain:
        """The chain of a branch, cut at a seqno."""
        return chain.recut(self.whole_chain(txn, branch), seqno)

    def chain_of_position(self, txn: Transaction, branch: int, seqno: int, history_id: int) -> chain.Chain:
        """The chain up to a position that a caller was given. Raises ViewInvalidated where the position is not of a
        history that this mirror has.
        """
        try:
            whole = self.whole_chain(txn, branch)
        except CorruptedError as error:
            raise ViewInvalidated(
                f"this mirror knows no branch {branch} (any more)", vbid=self.vbid, hint="start the read again"
            ) from error
        if whole[0].history_id(seqno) != history_id:
            raise ViewInvalidated(
                f"the position {branch}:{seqno} is of a history that this mirror does not have (any more)",
                vbid=self.vbid,
                hint="start the read again",
            )
        return chain.recut(whole, seqno)

    def manifest(self, txn: Transaction, key: tuple[int, int]) -> Manifest:
        """The manifest of a row of `manifest`."""
        manifests = self._remembered(txn).manifests
        manifest = manifests.get(key)
        if manifest is None:
            manifest = branches.read_manifest(txn, self.vbid, key, manifests)[0]
            if len(manifests) >= MANIFESTS_MAX:
                manifests.clear()
            manifests[key] = manifest
        return manifest

    def manifest_on(self, txn: Transaction, links: chain.Chain) -> Manifest:
        """The newest manifest that a chain sees."""
        return self.manifest(txn, branches.manifest_key_on(txn, self.vbid, links))

    def remembered_manifests(self, txn: Transaction) -> dict[tuple[int, int], Manifest]:
        """The manifests that need not be read again."""
        return self._remembered(txn).manifests

    # -- what is served -------------------------------------------------------------------------------------------

    def served(self, txn: Transaction) -> Served:
        """What is served now."""
        pub = txn.pub(self.vbid)
        links = self.chain_at(txn, pub.branch, pub.seqno)
        unavailable = pub.is_unavailable and not self.stale_reads
        return Served(pub.branch, pub.seqno, pub.floor_seqno, pub.manifest_key, pub.is_stale, links, unavailable)

    def readable(self, txn: Transaction) -> Served:
        """What is served now. Raises Unavailable where readers must wait for a resync."""
        served = self.served(txn)
        if served.unavailable:
            raise Unavailable(
                "temporarily unavailable: it is being resynced",
                vbid=self.vbid,
                hint="wait, or set resync_reads to stale to have the old copy meanwhile",
            )
        return served

    def as_of(self, txn: Transaction, as_of: AsOf) -> tuple[Served, Boundary | None]:
        """What is served as of a seqno or a time: the newest kept boundary not after it."""
        served = self.readable(txn)
        if as_of is None or (isinstance(as_of, Time) and not served.seqno):  # nothing was ever published
            return served, None
        boundary = None
        if isinstance(as_of, Time):
            for candidate in chain.boundaries(txn, self.vbid, served.links):
                if candidate.time_ms <= as_of.ms:
                    boundary = candidate
                    break
        else:
            boundary = chain.newest_boundary(txn, self.vbid, served.links, as_of)
        if boundary is None or boundary.seqno < served.floor_seqno:
            raise NoSuchBoundary(
                f"nothing is kept as of {as_of}; history begins at seqno {served.floor_seqno}",
                vbid=self.vbid,
                hint="ask for a later point, or keep more history",
            )
        links = chain.recut(served.links, boundary.seqno)
        manifest_key = branches.manifest_key_on(txn, self.vbid, links)
        return Served(served.branch, boundary.seqno, served.floor_seqno, manifest_key, served.stale, links), boundary

    # -- rows -----------------------------------------------------------------------------------------------------

    def document(
        self, txn: Transaction, wire_key: bytes, reference: bytes, raw: bool, lenient: bool = False
    ) -> Document:
        """The document of the row that a reference of a key names. Raises CorruptedError."""
        row_key = reference[ROW_KEY]
        stored = txn.raw.get(row_key, b"", self.rows)
        if self.verify_reads and crc32c(stored) != RESIDUE:
            raise seal.damaged(stored, row_key, self.vbid, self.environment.path)
        branch: Any = int.from_bytes(reference[BRANCH], "big")
        document = records.decode_row(self.vbid, branch, stored, raw, lenient, seal.SIZE)
        if document.key != wire_key[1:] or document.collection_id != wire_key[0] or stored[24:32] != reference[SEQNO]:
            self.check_row(stored, wire_key, reference)
        return document

    def verify(self, row_key: bytes, stored: bytes) -> None:
        """Raise CorruptedError unless a stored row is what was stored at its position."""
        if (self.verify_reads and crc32c(stored) != RESIDUE) or stored[24:32] != row_key[SEQNO]:
            raise seal.damaged(stored, row_key, self.vbid, self.environment.path)

    def check_row(self, stored: bytes, wire_key: bytes, reference: bytes) -> None:
        """Raise CorruptedError unless a row is of the key and seqno that a reference to it says."""
        if stored[24:32] != reference[SEQNO]:  # also where there is none
            raise self.mismatch(wire_key)
        start = 24 + stored[4]
        if stored[start : start + (stored[2] << 8 | stored[3])] != wire_key:
            raise self.mismatch(wire_key)

    def mismatch(self, wire_key: bytes) -> CorruptedError:
        """The error of a key whose references are not what was stored."""
        return CorruptedError(
            f"the references of key {wire_key[1:250]!r} are damaged",
            path=self.environment.path,
            vbid=self.vbid,
            hint="`dcp-mirror verify --repair` fetches the vbucket again",
        )

    def newest(self, cursor: Any, wire_key: bytes) -> bytes:
        """The last reference of a key that has several, where the cursor is. Raises CorruptedError unless it is above
        the one before it.
        """
        cursor.last_dup()
        reference: bytes = cursor.value()
        cursor.prev_dup()
        if cursor.value() >= reference:
            raise self.mismatch(wire_key)
        return reference

    def check_kind(self, wire_key: bytes, reference: bytes) -> None:
        """Raise CorruptedError unless a reference is of a known kind."""
        if reference[KIND] not in KINDS:
            raise self.mismatch(wire_key)

    def newest_visible(self, txn: Any, cursor: Any, wire_key: bytes, newest: bytes, links: chain.Chain) -> bytes | None:
        """The newest reference of a key that a chain sees, where that is not its `newest` one. Raises CorruptedError
        if one that is passed over names no row of the key.
        """
        self.check_named(txn, wire_key, newest)
        found = chain.newest_version(cursor, wire_key, links)
        if cursor.next_dup() if found is not None else cursor.set_key(wire_key):
            self.check_named(txn, wire_key, cursor.value())
        return found

    def check_named(self, txn: Any, wire_key: bytes, reference: bytes) -> None:
        """Raise CorruptedError unless a reference names a row of its key; its checksum is not compared."""
        self.check_row(txn.get(reference[ROW_KEY], b"", self.rows), wire_key, reference)

    def check_absent(self, txn: Any, cursor: Any, wire_key: bytes) -> None:
        """Raise CorruptedError unless the keys before and behind one that is not there are in order, and are those of
        their rows: a key that a flipped bit made another one is next to where it was.
        """
        if there := cursor.set_range(wire_key):
            behind, reference = cursor.item()
            self.check_row(txn.get(reference[ROW_KEY], b"", self.rows), behind, reference)
            if behind <= wire_key:
                raise self.mismatch(wire_key)
        if cursor.prev() if there else cursor.last():
            before, reference = cursor.item()
            self.check_row(txn.get(reference[ROW_KEY], b"", self.rows), before, reference)
            if before >= wire_key:
                raise self.mismatch(wire_key)

    def damaged(self, error: Exception) -> StorageError:
        """What a struct.error, IndexError or lmdb.Error says about this vbucket."""
        if isinstance(error, lmdb.Error):
            return storage_error(error, self.environment.path)
        return CorruptedError(f"a record is damaged: {error}", path=self.environment.path, vbid=self.vbid)
