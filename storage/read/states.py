"""Where a vbucket stands: its published position, floor, boundaries, resyncs, and its stored state.

Knows the small records and boundary rows; walks no documents. Invariant: each answer is read in one transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from storage.env.environment import Environment
from storage.env.transaction import Transaction
from storage.errors import CorruptedError, UnknownCollection
from storage.format import keys, records
from storage.format.tokens import Pin, Token
from storage.history import branches, chain
from storage.model import Boundary, Branch, Manifest, Seqno, VbucketState
from storage.read import validity
from storage.read.groups import Groups
from storage.read.highs import newest_of_collection
from storage.read.vbucket_reader import VbucketReader


class ServedPosition(NamedTuple):
    """What one vbucket serves now."""

    branch: Branch
    seqno: Seqno
    floor_seqno: Seqno
    stale: bool
    history_id: int


@dataclass(frozen=True, slots=True)
class Past:
    """How far back a vbucket can be read, and how often it was resynced."""

    floor: Boundary | None
    """The oldest kept boundary; None: nothing was published yet."""
    resyncs_ms: tuple[int, ...]
    """When readers first saw a resynced copy, milliseconds since 1970, oldest first: the one that is served, and those
    whose old copies are not gone yet.
    """
    resync_count: int
    """All of them."""


def state(reader: VbucketReader) -> VbucketState:
    """The stored state of a vbucket."""
    with reader.environment.read() as txn:
        reader.manifest(txn, reader.served(txn).manifest_key)  # so that it is remembered
        return branches.load(txn, reader.vbid, reader.remembered_manifests(txn)).state


KnownPositions = dict[int, tuple[Environment, int, dict[bytes, tuple[bytes, bytes | None, ServedPosition]]]]
"""By group: the commit that was read, and by vbucket the rows of `pub` and `purge` and the position that they mean."""


def published(groups: Groups, known: KnownPositions) -> list[ServedPosition]:
    """What every vbucket of the mirror serves now, in rising vbid. `known` of an earlier call makes it cheap: only what
    changed since is read.
    """
    found = {}
    for first in groups.vbids[: groups.count]:  # one of each group
        environment = groups.environment(first)
        with environment.read() as txn:
            kept, commit, before = known.get(first, (None, -1, {}))
            positions = before
            if kept is not environment or commit != txn.raw.id():
                positions = {}  # not the same one: other threads may be reading it
                purges = environment.db(keys.DB_PURGE)
                for key, data in txn.cursor(keys.DB_PUB).iternext():
                    purge = txn.raw.get(key, None, purges)
                    seen = before.get(key) if kept is environment else None
                    if seen is None or seen[0] != data or seen[1] != purge:
                        seen = data, purge, _position(groups, txn, key, data)
                    positions[key] = seen
                known[first] = environment, txn.raw.id(), positions
        for key, (_, _, position) in positions.items():
            found[int.from_bytes(key)] = position
    return [found[vbid] for vbid in groups.vbids]


def _position(groups: Groups, txn: Transaction, key: bytes, data: bytes) -> ServedPosition:
    vbid = int.from_bytes(key)
    pub = txn.pub_of(vbid, data)
    history_id = groups.reader(vbid).whole_chain(txn, pub.branch)[0].history_id(pub.seqno)
    return ServedPosition(Branch(pub.branch), Seqno(pub.seqno), Seqno(pub.floor_seqno), pub.is_stale, history_id)


KnownUids = dict[int, tuple[Environment, dict[bytes, tuple[bytes, int]]]]
"""By group: by vbucket, where in the file the row of its manifest lies, and the uid in it."""


def manifest_uids(groups: Groups, known: KnownUids) -> dict[int, int]:
    """The uid of the manifest that each vbucket serves. `known` of an earlier call makes it cheap: the row of a
    manifest is read only where it is another one now, and decoded as far as its uid.
    """
    found = {}
    for first in groups.vbids[: groups.count]:  # one of each group
        environment = groups.environment(first)
        if first not in known or known[first][0] is not environment:
            known[first] = environment, {}
        uids = known[first][1]
        with environment.read() as txn:
            for key, data in txn.cursor(keys.DB_PUB).iternext():
                at = data[keys.PUB_MANIFEST]
                seen = uids.get(key)
                if seen is None or seen[0] != at:
                    seen = uids[key] = at, _manifest_uid(txn, key, at)
                found[int.from_bytes(key)] = seen[1]
    return found


def _manifest_uid(txn: Transaction, vbid_key: bytes, at: bytes) -> int:
    if not any(at):
        return Manifest.initial().uid
    try:
        return records.manifest_uid(txn.get(keys.DB_MANIFEST, vbid_key + at))
    except CorruptedError as error:
        vbid = int.from_bytes(vbid_key)
        raise CorruptedError(error.message, path=txn.path, vbid=vbid, hint=error.hint) from error


def token(reader: VbucketReader, branch: int | None = None, seqno: int | None = None) -> Token:
    """The position (branch, seqno) as a token; without them, what is published now."""
    with reader.environment.read() as txn:
        if branch is None or seqno is None:
            served = reader.readable(txn)
            branch, seqno = served.branch, served.seqno
        history_id = reader.whole_chain(txn, branch)[0].history_id(seqno)
    return Token(reader.vbid, Branch(branch), Seqno(seqno), history_id)


def history_ids(reader: VbucketReader, branch: int) -> tuple[int, ...]:
    """The histories that positions on a branch are of, oldest first; empty for a branch that is not there."""
    with reader.environment.read() as txn:
        try:
            whole = reader.whole_chain(txn, branch)
        except CorruptedError:
            return ()
    return tuple(history_id for history_id, _ in whole[0].history_ids)


def newest_of(
    reader: VbucketReader, pin: Pin, collection_id: int, below: int | None, rows_max: int
) -> tuple[Seqno, int]:
    """Seqno of the newest event of a collection as `pin` sees it, and where to go on (`View.newest_of`)."""
    with reader.environment.read() as txn:
        served = validity.served_at(reader, txn, pin, survives_rollback=False)
        collection = reader.manifest(txn, served.manifest_key).collections.get(collection_id)
        if collection is None:
            raise UnknownCollection(f"no collection {collection_id:#x}", vbid=pin.vbid)
        below = pin.seqno if below is None else below
        found, following = newest_of_collection(
            txn, pin.vbid, served.links, collection_id, below, collection.begin_seqno, rows_max
        )
    return Seqno(found or collection.begin_seqno), following


def past(reader: VbucketReader) -> Past:
    """How far back a vbucket can be read, and when it was resynced."""
    with reader.environment.read() as txn:
        served = reader.served(txn)
        floor = chain.newest_boundary(txn, reader.vbid, served.links, served.floor_seqno)
        resyncs_ms, resync_count = branches.resyncs(txn, reader.vbid)
    return Past(floor, resyncs_ms, resync_count)


def boundaries(reader: VbucketReader) -> list[Boundary]:
    """The kept boundaries of the served history, newest first."""
    with reader.environment.read() as txn:
        served = reader.served(txn)
        found = chain.boundaries(txn, reader.vbid, served.links)
        return [boundary for boundary in found if boundary.seqno >= served.floor_seqno]
