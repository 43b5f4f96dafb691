"""The collections of a vbucket at each of its seqnos, read from the tree `manifest`.

A row holds the change of one system event. Now and then a row holds the whole manifest, so that a read needs few rows.
Knows that tree, `pub` and chains; `storage.write.pending` decides when to write a row.
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
"""Recently read manifests, by uid. Vbuckets with equal collections share one. Without sharing, 1,000 collections in
1,024 vbuckets are a million objects, and a garbage collection takes 0.2 s.
"""

Key = tuple[int, int]
"""(branch, seqno) of a manifest row; (0, 0): the initial manifest, which has no row."""


class StagingRows(NamedTuple):
    """The `manifest` rows that make up the newest manifest of a staging branch."""

    key: Key
    """The newest row at or below the published end."""
    above: list[Key]
    """The rows above it, in rising order."""
    depth: int
    """The number of rows back to and including a whole one."""


def read(txn: Transaction, vbid: int, key: Key, known: Mapping[Key, Manifest] | None = None) -> tuple[Manifest, int]:
    """Return the manifest as of a row, and the number of rows read for it. Reading stops at a whole row, or at a
    manifest that the caller remembers (`known`).
    """
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
    """Generate the manifest rows that a chain sees, newest first."""
    cursor = txn.cursor(keys.DB_MANIFEST)
    for link in links:
        limit = keys.MANIFEST_KEY.pack(vbid, link.branch, link.cut)
        found = seek_before(cursor, limit + b"\x00")
        while found and cursor.key()[:6] == limit[:6]:
            _, branch, seqno = keys.MANIFEST_KEY.unpack(cursor.key())
            yield (branch, seqno), cursor.value()
            found = cursor.prev()


def key_on(txn: Transaction, vbid: int, links: chain.Chain) -> Key:
    """Return the key of the newest manifest row that a chain sees."""
    return next((key for key, _ in rows(txn, vbid, links)), (0, 0))


def between(
    txn: Transaction, vbid: int, branch: int, after_seqno: int, to_seqno: int
) -> Iterator[tuple[Key, ManifestChange]]:
    """Generate the changes on a branch in (after_seqno, to_seqno], rising."""
    cursor = txn.cursor(keys.DB_MANIFEST)
    last = keys.MANIFEST_KEY.pack(vbid, branch, to_seqno)
    if cursor.set_range(keys.MANIFEST_KEY.pack(vbid, branch, after_seqno + 1)):
        for key, value in takewhile(lambda row: row[0] <= last, cursor.iternext()):
            yield keys.MANIFEST_KEY.unpack(key)[1:], records.decode_manifest(value)


def forget_before(txn: Transaction, vbid: int, links: chain.Chain, key: Key) -> bool:
    """Remove the rows before a whole manifest; no later read needs them. Return False if none was removed."""
    data = txn.get(keys.DB_MANIFEST, keys.MANIFEST_KEY.pack(vbid, *key))
    if data is None or not records.decode_manifest(data).whole:
        return False
    older = [at for at, _ in rows(txn, vbid, chain.recut(links, key[1] - 1))]
    for at in older:
        txn.delete(keys.DB_MANIFEST, keys.MANIFEST_KEY.pack(vbid, *at))
    return bool(older)


def move(txn: Transaction, vbid: int, branch: int, parent: int, base_seqno: int, to_seqno: int) -> None:
    """Move the rows of a branch up to `to_seqno` to its parent (`merge`). Remove the parent's own rows above the base
    of the branch: they belong to a lost history.
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
