"""One vbucket as a reader sees it: its trees (LMDB's named databases), served state, chains, manifests and rows.

The methods work in the caller's transaction. Remembered chains and manifests are used only until the vbucket gets
another chain id (`branches.PurgeRow`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import lmdb
from google_crc32c import value as crc32c

from storage.env.environment import Environment
from storage.env.transaction import Transaction
from storage.errors import VERIFY, CorruptedError, NoSuchBoundary, StorageError, Unavailable, ViewInvalidated
from storage.format import keys, records, seal
from storage.format.records import BRANCH, KIND, ROW_KEY, SEQNO
from storage.format.seal import RESIDUE
from storage.format.tokens import AsOf, Time
from storage.history import branches, chain, manifests
from storage.model import DEFAULT_COLLECTION, SEQNO_MAX, Branch, Document, Kind, Manifest, Seqno, VbucketState

KINDS = frozenset(map(int, (Kind.MUTATION, Kind.DELETION, Kind.EXPIRATION)))
"""Kinds of rows to which references (`keys.DUP`) point. One flipped bit cannot turn a mutation's kind into a
tombstone's, or back, so a check for these kinds finds the damage.
"""
RESYNCED = "wait, or set resync_reads to stale to have the old copy meanwhile"
NOT_FILLED = "wait until `dcp-mirror status --ready` succeeds"
CHAINS_MAX = 8
"""Maximum number of remembered chains of a vbucket: the served chain, and the chains of a few positions."""
MANIFESTS_MAX = 2
"""Maximum number of remembered manifests of a vbucket; each holds every collection."""

Visible = tuple[int, Branch, bytes, bytes, int, bool, Manifest]
"""The served state of a vbucket in one commit, for point reads: commit, served branch, `above`, `up_to`, published
seqno, `is_plain`, manifest. A row of the default collection on the served branch is visible if `above` < the row's
reference <= `up_to`. `above` is empty if the default collection was dropped. If `is_plain` is false, `above` is empty,
too: call `readable`, which may refuse the read.
"""
T = TypeVar("T")
_INITIAL = Manifest.initial()
_UNKNOWN: Visible = (-1, Branch(0), b"", b"", 0, False, _INITIAL)


def end_of_references(branch: int, seqno: int) -> bytes:
    """Return an upper bound for the references of a branch up to a seqno."""
    return keys.DUP.pack(branch, seqno, 0xFF)


class ReadOptions(NamedTuple):
    path: str
    stale: bool = False
    verify_reads: bool = True
    partial: bool = False


@dataclass(frozen=True)
class Served:
    """The state of one vbucket that a read sees: the served one now, or an older one as of a boundary."""

    pub: records.Pub
    links: chain.Chain
    """The chain, cut at the seqno of `pub`."""
    survives_rollback: bool = False
    """True if the position stays valid after a rollback or resync, as long as all its rows are kept."""

    @property
    def position(self) -> tuple[Branch, Seqno, int]:
        """Branch, seqno and history id, as in a `Token`. The branch has the boundary at the seqno, and so differs from
        `pub.branch` if nothing was published on that. All 0 if nothing was published at all.
        """
        if not self.links:
            return Branch(0), Seqno(0), 0
        return Branch(self.links[0].branch), self.pub.seqno, self.links[0].history_id(self.pub.seqno)


class _Memory:
    """Chains and manifests that are valid while the vbucket has this `chain_id`."""

    def __init__(self, chain_id: int) -> None:
        self.chain_id = chain_id
        self.chains: dict[int, chain.Chain] = {}
        self.manifests: dict[tuple[int, int], Manifest] = {}


class VbucketReader:
    """The attributes are public for other modules' loops over rows."""

    def __init__(self, environment: Environment, vbid: int, reads: ReadOptions) -> None:
        self.environment = environment
        self.vbid = vbid
        self.reads = reads
        self.verify_reads = reads.verify_reads
        self.pub: Any = environment.db(keys.DB_PUB)
        self.keys: Any = environment.db(keys.keys_db(vbid))
        self.rows: Any = environment.db(keys.rows_db(vbid))
        self.vbid_key = keys.VBID_KEY.pack(vbid)
        self.begin: Any = environment.env.begin
        """`lmdb.Environment.begin`, for point reads: the `begin` of our Environment costs more."""
        self.running: list[None] = environment.running
        self._memory: _Memory | None = None
        self._purge = (-1, branches.PurgeRow())
        self.visible = _UNKNOWN
        """The served state in the commit that was read last; valid only in transactions of that commit."""

    def begin_read(self) -> Any:
        """Begin an lmdb.Transaction at the least cost; the caller must end it by `Environment.end`."""
        running = self.running
        running.append(None)
        try:
            if not self.environment.remapping:
                return self.begin()
        except lmdb.Error:
            pass  # `Environment.begin` below handles the cause
        running.pop()
        return self.environment.begin()

    def served_in(self, txn: Any) -> Visible:
        """Return the served state in an lmdb.Transaction. `PointReads.get` has this code inline."""
        visible = self.visible
        return visible if visible[0] == txn.id() else self.look(txn)

    def look(self, txn: Any) -> Visible:
        self.environment.check_map(txn)
        branch, seqno, _, m_branch, m_seqno, flags = keys.PUB.unpack(txn.get(self.vbid_key, b"", self.pub))
        manifest = _INITIAL
        if m_branch:
            manifest = self.manifest(Transaction(self.environment, txn), (m_branch, m_seqno))
        above = b""
        is_plain = flags < keys.PUB_UNAVAILABLE
        if not seqno:
            is_plain = is_plain and self.state(Transaction(self.environment, txn)).is_whole
        default = manifest.collections.get(DEFAULT_COLLECTION)
        if default is not None and is_plain:
            above = end_of_references(branch, default.begin_seqno)
        up_to = end_of_references(branch, seqno)
        self.visible = visible = (txn.id(), branch, above, up_to, seqno, is_plain, manifest)
        return visible

    @contextmanager
    def views(self, look: Callable[[Transaction], T]) -> Iterator[tuple[Transaction, T]]:
        """Call `look` in a transaction. Yield another transaction of the same commit, which returns buffers, and the
        result of `look`: after a merge of branches, the commit's chains would be wrong.
        """
        while True:
            with self.environment.read() as txn:
                commit, found = txn.raw.id(), look(txn)
            with self.environment.read(buffers=True) as views:
                if views.raw.id() == commit:
                    yield views, found
                    return

    def purge_row(self, txn: Transaction) -> branches.PurgeRow:
        """Return the vbucket's row in the tree `purge`, read once for each commit."""
        commit, row = self._purge
        if commit != (seen := txn.raw.id()):
            row = branches.purge_row(txn, self.vbid)
            self._purge = seen, row
        return row

    # -- chains and manifests -------------------------------------------------------------------------------------

    def remembered(self, txn: Transaction) -> _Memory:
        """Return the chains and manifests that are valid in this transaction."""
        chain_id = self.purge_row(txn).chain_id
        memory = self._memory
        if memory is None or memory.chain_id != chain_id:
            memory = self._memory = _Memory(chain_id)
        return memory

    def whole_chain(self, txn: Transaction, branch: int) -> chain.Chain:
        """Return the chain of a branch up to the branch's newest row. The chain is read once per chain id."""
        chains = self.remembered(txn).chains
        links = chains.get(branch)
        if links is None:
            if len(chains) >= CHAINS_MAX:
                chains.clear()
            links = chains[branch] = chain.load(txn, self.vbid, branch, SEQNO_MAX)
        return links

    def chain_at(self, txn: Transaction, branch: int, seqno: int) -> chain.Chain:
        return chain.recut(self.whole_chain(txn, branch), seqno) if seqno else ()

    def chain_of_position(self, txn: Transaction, branch: int, seqno: int, history_id: int) -> chain.Chain:
        """Return the chain up to a position. Raises ViewInvalidated if the position's history is unknown."""
        links = self.known_chain(txn, branch, seqno)
        if links and (links[0].branch, links[0].history_id(seqno)) != (branch, history_id):
            message = f"the position {branch}:{seqno} is of a history that this mirror does not have (any more)"
            raise ViewInvalidated(message, vbid=self.vbid, hint="start the read again")
        return links

    def known_chain(self, txn: Transaction, branch: int, seqno: int) -> chain.Chain:
        """As `chain_at`. Raises ViewInvalidated if the branch is gone."""
        try:
            return self.chain_at(txn, branch, seqno)
        except CorruptedError as error:
            message = f"this mirror knows no branch {branch} (any more)"
            raise ViewInvalidated(message, vbid=self.vbid, hint="start the read again") from error

    def manifest(self, txn: Transaction, key: tuple[int, int]) -> Manifest:
        known = self.remembered(txn).manifests
        manifest = known.get(key)
        if manifest is None:
            manifest = manifests.read(txn, self.vbid, key, known)[0]
            if len(known) >= MANIFESTS_MAX:
                known.clear()
            known[key] = manifest
        return manifest

    def manifest_on(self, txn: Transaction, links: chain.Chain) -> Manifest:
        return self.manifest(txn, manifests.key_on(txn, self.vbid, links))

    def state(self, txn: Transaction) -> VbucketState:
        self.manifest(txn, txn.pub(self.vbid).manifest_key)  # `load` then finds it in memory
        return branches.load(txn, self.vbid, self.remembered(txn).manifests)[0]

    # -- the served state -----------------------------------------------------------------------------------------

    def served(self, txn: Transaction) -> Served:
        pub = txn.pub(self.vbid)
        return Served(pub, self.chain_at(txn, pub.branch, pub.seqno))

    def readable(self, txn: Transaction) -> Served:
        """Return the served state. Raises Unavailable if a resync withholds it, or, unless the view is `partial`, if
        the vbucket is not filled yet.
        """
        served = self.served(txn)
        if served.pub.is_unavailable and not self.reads.stale:
            message = "temporarily unavailable: it is being resynced"
            raise Unavailable(message, path=self.reads.path, vbid=self.vbid, hint=RESYNCED)
        if not served.pub.seqno and not self.reads.partial and not self.state(txn).is_whole:
            raise Unavailable("not filled yet", path=self.reads.path, vbid=self.vbid, hint=NOT_FILLED)
        return served

    def refusal(self) -> Unavailable | None:
        """Return the error that reads of the vbucket raise now, or None."""
        txn = self.begin_read()
        try:
            if not self.served_in(txn)[5]:
                self.readable(Transaction(self.environment, txn))
        except Unavailable as error:
            return error
        finally:
            self.environment.end(txn)
        return None

    def as_of(self, txn: Transaction, as_of: AsOf) -> tuple[Served, int]:
        """Return the state at the newest kept boundary at or before `as_of` (None: the present state), and the time in
        milliseconds that decides expiry: the `Time`, but not the future; the time of a seqno's boundary; or the
        present. In a quiet vbucket the boundary may be hours older than the `Time`. Raises NoSuchBoundary, Unavailable.
        """
        served, now_ms = self.readable(txn), time.time_ns() // 1_000_000
        if as_of is None or (isinstance(as_of, Time) and not served.pub.seqno):  # nothing was ever published
            return served, now_ms
        if isinstance(as_of, Time):
            now_ms = min(as_of.ms, now_ms)
            candidates = chain.boundaries(txn, self.vbid, served.links)
            boundary = next((each for each in candidates if each.time_ms <= now_ms), None)
        else:
            boundary = chain.newest_boundary(txn, self.vbid, served.links, as_of)
        if boundary is None or boundary.seqno < served.pub.floor_seqno:
            raise NoSuchBoundary(
                f"nothing is kept as of {as_of}; history begins at seqno {served.pub.floor_seqno}: it was empty, "
                "or older history is purged",
                vbid=self.vbid,
                hint="ask for a later point",
            )
        return self.cut_at(txn, served, boundary.seqno), now_ms if isinstance(as_of, Time) else boundary.time_ms

    def cut_at(self, txn: Transaction, served: Served, seqno: Seqno) -> Served:
        links = chain.recut(served.links, seqno)
        key = manifests.key_on(txn, self.vbid, links)
        return Served(served.pub._replace(seqno=seqno, manifest_key=key), links)

    # -- rows -----------------------------------------------------------------------------------------------------

    def document(
        self, txn: Transaction, wire_key: bytes, reference: bytes, raw: bool, lenient: bool = False
    ) -> Document:
        """Return the document of `wire_key` (collection id and key) that `reference` names. Raises CorruptedError."""
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
        """Raise CorruptedError if a row is damaged or has another seqno than `row_key`."""
        if (self.verify_reads and crc32c(stored) != RESIDUE) or stored[24:32] != row_key[SEQNO]:
            raise seal.damaged(stored, row_key, self.vbid, self.environment.path)

    def check_row(self, stored: bytes, wire_key: bytes, reference: bytes) -> None:
        """Raise CorruptedError if a row has another key than `wire_key` or another seqno than `reference`."""
        if stored[24:32] != reference[SEQNO]:  # also if the row is missing (empty)
            raise self.mismatch(wire_key)
        start = 24 + stored[4]
        if stored[start : start + (stored[2] << 8 | stored[3])] != wire_key:
            raise self.mismatch(wire_key)

    def mismatch(self, wire_key: bytes) -> CorruptedError:
        return CorruptedError(
            f"the references of key {wire_key[1:250]!r} are damaged",
            path=self.environment.path,
            vbid=self.vbid,
            hint=VERIFY,
        )

    def newest(self, cursor: Any, wire_key: bytes) -> bytes:
        """Return the last reference of the cursor's key. The key must have at least two references. Raises
        CorruptedError if the last two are not in order.
        """
        cursor.last_dup()
        reference: bytes = cursor.value()
        cursor.prev_dup()
        if cursor.value() >= reference:
            raise self.mismatch(wire_key)
        return reference

    def check_kind(self, wire_key: bytes, reference: bytes) -> None:
        if reference[KIND] not in KINDS:
            raise self.mismatch(wire_key)

    def newest_visible(self, txn: Any, cursor: Any, wire_key: bytes, newest: bytes, links: chain.Chain) -> bytes | None:
        """Return the newest of a key's references that the chain `links` sees, or None. The chain must not see
        `newest`, the key's newest reference. Raises CorruptedError if the first or last skipped reference names no row
        of the key.
        """
        self.check_named(txn, wire_key, newest)
        found = chain.newest_version(cursor, wire_key, links)
        if cursor.next_dup() if found is not None else cursor.set_key(wire_key):
            self.check_named(txn, wire_key, cursor.value())
        return found

    def check_named(self, txn: Any, wire_key: bytes, reference: bytes) -> None:
        """Raise CorruptedError if a reference names no row of `wire_key`. Does not compare the row's checksum."""
        self.check_row(txn.get(reference[ROW_KEY], b"", self.rows), wire_key, reference)

    def check_absent(self, txn: Any, cursor: Any, wire_key: bytes) -> None:
        """Raise CorruptedError if `wire_key` may be absent only because of a flipped bit. A flipped bit does not move a
        key. So the keys next to the place of `wire_key` must be in order and match their rows.
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
        """Convert a struct.error, IndexError or lmdb.Error of a read to the error to raise."""
        if isinstance(error, lmdb.Error):
            return self.environment.error(error)
        return CorruptedError(f"a record is damaged: {error}", path=self.environment.path, vbid=self.vbid)
