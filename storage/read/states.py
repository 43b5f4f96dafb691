"""Positions of vbuckets: published positions, kept boundaries, and the newest seqnos of collections.

An answer about one group shows one commit. Only `newest_of` reads other rows, a bounded number in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice, takewhile
from typing import TypeVar

from storage.env.environment import Environment
from storage.env.transaction import Transaction
from storage.errors import CorruptedError, StorageError, UnknownCollection, ViewInvalidated
from storage.format import keys, records
from storage.format.tokens import Pin, Token
from storage.history import chain
from storage.model import NO_VBUUID, Boundary, Collection, Manifest, Vbuuid
from storage.read import validity
from storage.read.groups import Groups
from storage.read.vbucket_reader import Served, VbucketReader

KnownPositions = dict[
    int, tuple[Environment, int, dict[bytes, tuple[bytes, bytes | None, Served]], Mapping[int, Served]]
]
"""For each group, by its first vbucket: the environment, the number of the commit that was read last, a dict by `pub`
key (the vbucket's rows in the trees `pub` and `purge`, and the decoded state), and the states by vbid.
"""

KnownUids = dict[int, tuple[Environment, dict[bytes, tuple[bytes, int]]]]
"""For each group, by its first vbucket: the environment, and by `pub` key the position and uid of the manifest row."""


Unreadable = dict[int, StorageError]
"""The errors of unreadable groups, by group."""

T = TypeVar("T")


def _of_groups(groups: Groups, look: Callable[[int], Mapping[int, T]], unreadable: Unreadable | None) -> dict[int, T]:
    found: dict[int, T] = {}
    for first in groups.vbids[: groups.count]:
        try:
            found |= look(first)
        except StorageError as error:
            if unreadable is None:
                raise
            unreadable[first % groups.count] = error
    return found


def published(groups: Groups, known: KnownPositions, unreadable: Unreadable | None = None) -> dict[int, Served]:
    """Return the served state of every vbucket by vbid (`View.published`). `known` keeps the states for the next call,
    which then decodes only changed ones.
    """

    def look(first: int) -> Mapping[int, Served]:
        environment = groups.environment(first)
        with environment.read() as txn:
            kept, commit, before, serving = known.get(first, (None, -1, {}, {}))
            if kept is not environment or commit != txn.raw.id():
                positions = {}  # a new dict: other threads may be reading the old one
                purges = environment.db(keys.DB_PURGE)
                for key, data in txn.cursor(keys.DB_PUB).iternext():
                    purge = txn.raw.get(key, None, purges)
                    seen = before.get(key) if kept is environment else None
                    if seen is None or seen[0] != data or seen[1] != purge:
                        seen = data, purge, groups.reader(int.from_bytes(key)).served(txn)
                    positions[key] = seen
                serving = {int.from_bytes(key): served for key, (_, _, served) in positions.items()}
                known[first] = environment, txn.raw.id(), positions, serving
        return serving

    return _of_groups(groups, look, unreadable)


def manifest_uids(groups: Groups, known: KnownUids, unreadable: Unreadable | None = None) -> dict[int, int]:
    """Return the uid of each vbucket's manifest by vbid (`View.manifest_uids`). `known` keeps these uids."""

    def look(first: int) -> Mapping[int, int]:
        found = {}
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

    return _of_groups(groups, look, unreadable)


def _manifest_uid(txn: Transaction, vbid_key: bytes, at: bytes) -> int:
    if not any(at):
        return Manifest.initial().uid
    try:
        return records.manifest_uid(txn.get(keys.DB_MANIFEST, vbid_key + at))
    except CorruptedError as error:
        vbid = int.from_bytes(vbid_key)
        raise CorruptedError(error.message, path=txn.path, vbid=vbid, hint=error.hint) from error


def history_ids(reader: VbucketReader, branch: int) -> tuple[int, ...]:
    """Return the history ids of a branch (`branches.begin_history`), oldest first; none for an unknown branch."""
    with reader.environment.read() as txn:
        try:
            whole = reader.whole_chain(txn, branch)
        except CorruptedError:
            return ()
    return tuple(history_id for history_id, _ in whole[0].history_ids)


def newest(reader: VbucketReader, to_seqno: int) -> Boundary | None:
    """Return the newest kept boundary at or below a seqno. Raises Unavailable."""
    with reader.environment.read() as txn:
        served = reader.readable(txn)
        found = chain.newest_boundary(txn, reader.vbid, served.links, to_seqno)
        return found if found is not None and found.seqno >= served.pub.floor_seqno else None


def vbuuid_at(reader: VbucketReader, at: Pin) -> Vbuuid:
    """Return the vbuuid of the source's history at a served position, which the position's boundary has.
    `VbucketState.failover_log` is of another history during a resync or a deferred rollback.
    """
    with reader.environment.read() as txn:
        found = chain.boundary_at(txn, reader.vbid, at.branch, at.seqno)
    return NO_VBUUID if found is None else found.vbuuid


def following(reader: VbucketReader, after_seqno: int) -> Boundary | None:
    """Return the oldest kept boundary above a seqno. Raises Unavailable."""
    with reader.environment.read() as txn:
        served = reader.readable(txn)
        after = max(after_seqno, served.pub.floor_seqno - 1)
        return next(chain.boundaries_after(txn, reader.vbid, served.links, after), None)


def boundaries_between(reader: VbucketReader, branch: int, after_seqno: int, seqno: int) -> list[Boundary]:
    """Return the kept boundaries above `after_seqno` on the chain of (branch, seqno), rising."""
    with reader.environment.read() as txn:
        falling = chain.boundaries(txn, reader.vbid, reader.chain_at(txn, branch, seqno))
        return list(takewhile(lambda boundary: boundary.seqno > after_seqno, falling))[::-1]


def published_since(reader: VbucketReader, since: Token | None) -> tuple[Boundary | None, int | None]:
    """Return the newest boundary (None before the first publish), and the last seqno that the served history shares
    with the history of `since` (0 for None). If `since` was rolled back, this seqno is below `since.seqno`; if no
    history is shared, as after a resync, it is None. Raises Unavailable.
    """
    with reader.environment.read() as txn:
        served = reader.readable(txn)
        common: int | None = 0
        if since is not None and since.seqno:
            try:
                links = reader.chain_of_position(txn, since.branch, since.seqno, since.history_id)
                common = chain.common_seqno(served.links, links)
            except ViewInvalidated:
                common = None
        return chain.newest_boundary(txn, reader.vbid, served.links, served.pub.seqno), common


def newest_of(
    reader: VbucketReader, pin: Pin, collection_id: int, *, below: int | None = None, rows_max: int = 1_000
) -> tuple[int, int]:
    """Return the seqno of a collection's newest document row that `pin` (a served position) sees; the collection's
    begin_seqno if none was found. One call looks at `rows_max` rows. To look further, pass the second number of the
    answer as `below` (0: the search is over).

    Raises ViewInvalidated, UnknownCollection.
    """

    def look(txn: Transaction) -> tuple[Served, Collection | None]:
        served = validity.served_at(reader, txn, pin, survives_rollback=False)
        return served, reader.manifest(txn, served.pub.manifest_key).collections.get(collection_id)

    with reader.views(look) as (views, (served, collection)):
        if collection is None:
            raise UnknownCollection(f"no collection {collection_id:#x}", vbid=pin.vbid)
        begins = {collection_id: int(collection.begin_seqno)}
        rows = chain.rows_before(views, pin.vbid, served.links, 0, pin.seqno if below is None else below)
        seqno, below = newest_selected(rows, begins, rows_max)
    return seqno or collection.begin_seqno, below


def newest_selected(rows: Iterator[chain.Row], begins: Mapping[int, int], rows_max: int) -> tuple[int, int]:
    """Return the seqno of the first selected document row among the next `rows_max` rows, or 0. Return also the seqno
    of the next row (0: the search is over).
    """
    for key, stored in islice(rows, rows_max):
        head = bytes(stored[: records.HEAD_BYTES_MAX])
        if not records.is_system_event(head) and is_selected((key, head), begins):
            return records.seqno_of(key), 0
    left = next(rows, None)
    return 0, 0 if left is None else records.seqno_of(left[0])


def is_selected(row: chain.Row, begins: Mapping[int, int]) -> bool:
    """Return True for a system event, and for a document above the seqno at which its collection begins."""
    key, frame = row
    if frame[1] == records.SYSTEM_EVENT:
        return True
    start = 24 + frame[4]
    collection_id = frame[start]
    if collection_id >= 0x80:
        collection_id = keys.split_key(frame[start : start + 5])[0]
    begin = begins.get(collection_id)
    return begin is not None and records.seqno_of(key) > begin
