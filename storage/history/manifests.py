"""The collections of a vbucket at each of its seqnos, read from the tree `manifest`.

Each row belongs to a system event and holds the event's change. Some rows hold the whole manifest instead, so that a
read needs few rows. Knows this tree, `pub` and chains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import NamedTuple

from storage.env.transaction import Transaction, seek_before
from storage.errors import RUN_CHECK, CorruptedError
from storage.format import keys, records
from storage.history import chain
from storage.model import Manifest, ManifestChange

SHARED_MAX = 8
_shared: dict[int, Manifest] = {}
"""Recently read manifests, by uid, shared by vbuckets with equal collections. Without sharing, 1,000 collections in
1,024 vbuckets would be a million objects, and each garbage collection would take 0.2 s.
"""

Key = tuple[int, int]
"""(branch, seqno) of a manifest row; (0, 0): the initial manifest, which has no row."""


class StagingRows(NamedTuple):
    """The `manifest` rows that make up the newest manifest of a staging branch."""

    key: Key
    """Key of the newest row at or below the published seqno."""
    above: list[Key]
    """Keys of the rows above the published seqno, rising."""
    depth: int
    """Number of rows from the newest back to one with a whole manifest, both included."""


def read(txn: Transaction, vbid: int, key: Key, known: Mapping[Key, Manifest] | None = None) -> tuple[Manifest, int]:
    """Return the manifest as of a row, and the number of rows read. `known`: manifests that the caller has."""
    base, known = Manifest.initial(), known or {}
    if key == (0, 0) or key in known:
        return known.get(key, base), 0
    changes: list[ManifestChange] = []
    for at, value in rows(txn, vbid, chain.load(txn, vbid, *key)):
        if not changes and at != key:
            break
        if at in known:
            base = known[at]
            break
        changes.append(records.decode_manifest(value))
        if changes[-1].whole:
            break
    if not changes:
        raise CorruptedError(
            f"the manifest record {key[0]}:{key[1]} is missing", path=txn.path, vbid=vbid, hint=RUN_CHECK
        )
    manifest = base.changed(*reversed(changes))
    if (shared := _shared.get(manifest.uid)) is not None and shared == manifest:
        return shared, len(changes)
    if len(_shared) >= SHARED_MAX:
        _shared.clear()
    _shared[manifest.uid] = manifest
    return manifest, len(changes)


def rows(txn: Transaction, vbid: int, links: chain.Chain) -> Iterator[tuple[Key, bytes]]:
    """Yield the manifest rows that a chain sees, newest first."""
    cursor = txn.cursor(keys.DB_MANIFEST)
    for link in links:
        limit = keys.MANIFEST_KEY.pack(vbid, link.branch, link.cut)
        found = seek_before(cursor, limit + b"\x00")
        while found and cursor.key()[:6] == limit[:6]:
            _, branch, seqno = keys.MANIFEST_KEY.unpack(cursor.key())
            yield (branch, seqno), cursor.value()
            found = cursor.prev()


def key_on(txn: Transaction, vbid: int, links: chain.Chain) -> Key:
    """Return the key of the newest manifest row that a chain sees, or (0, 0)."""
    return next((key for key, _ in rows(txn, vbid, links)), (0, 0))


def between(
    txn: Transaction, vbid: int, branch: int, after_seqno: int, to_seqno: int
) -> Iterator[tuple[Key, ManifestChange]]:
    """Yield the manifest rows of one branch in (after_seqno, to_seqno], rising."""
    cursor = txn.cursor(keys.DB_MANIFEST)
    last = keys.MANIFEST_KEY.pack(vbid, branch, to_seqno)
    if cursor.set_range(keys.MANIFEST_KEY.pack(vbid, branch, after_seqno + 1)):
        for key, value in takewhile(lambda row: row[0] <= last, cursor.iternext()):
            yield keys.MANIFEST_KEY.unpack(key)[1:], records.decode_manifest(value)


def forget_before(txn: Transaction, vbid: int, links: chain.Chain, key: Key) -> bool:
    """If row `key` is whole, remove the chain's older rows, which no read needs. Return True if rows were removed."""
    data = txn.get(keys.DB_MANIFEST, keys.MANIFEST_KEY.pack(vbid, *key))
    if data is None or not records.decode_manifest(data).whole:
        return False
    older = [at for at, _ in rows(txn, vbid, chain.recut(links, key[1] - 1))]
    for at in older:
        txn.delete(keys.DB_MANIFEST, keys.MANIFEST_KEY.pack(vbid, *at))
    return bool(older)


def move(txn: Transaction, vbid: int, branch: int, parent: int, base_seqno: int, to_seqno: int) -> None:
    """Move a branch's manifest rows up to `to_seqno` to its parent (`merge`). First remove the parent's own rows above
    `base_seqno`: they belong to a lost history.
    """
    cursor = txn.cursor(keys.DB_MANIFEST)
    there = cursor.set_range(keys.MANIFEST_KEY.pack(vbid, parent, base_seqno + 1))
    while there and cursor.key()[:6] == keys.BRANCH_KEY.pack(vbid, parent):
        there = cursor.delete()
    first, last = (keys.MANIFEST_KEY.pack(vbid, branch, seqno) for seqno in (0, to_seqno))
    moved = []
    there = cursor.set_range(first)
    while there and first <= cursor.key() <= last:
        moved.append((keys.BRANCH_KEY.pack(vbid, parent) + cursor.key()[6:], cursor.value()))
        there = cursor.delete()
    for key, value in moved:
        txn.put(keys.DB_MANIFEST, key, value)
    pub = txn.pub(vbid)
    if pub.manifest_key[0] == branch and pub.manifest_key[1] <= to_seqno:
        txn.put_pub(vbid, pub._replace(manifest_key=(parent, pub.manifest_key[1])))
