"""Documents in bulk: every document of a vbucket at one boundary as rows that nobody has taken apart, for readers that
make columns of them.

Knows the key and row trees and who is visible; must never know what becomes of the rows. Invariants: the same documents
as `View.scan` of the boundary finds, whatever is written, purged or rolled back meanwhile, or ViewInvalidated; a chunk
is read in one transaction and holds `rows_max` rows or `CHUNK_BYTES` at most (and a run of `GET_ROWS` rows), so neither
the purger nor memory is held up by a long read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from typing import NamedTuple

from storage import keys
from storage.errors import CorruptedError
from storage.view import CHUNK_BYTES, Pin, View

ROWS_MAX = 2_000
"""Rows of a chunk: more cost the processor's caches more than they save."""
GET_ROWS = 128
"""Rows fetched between two looks at how many bytes they are."""
_FOREVER = b"\xff"


class KeyRange(NamedTuple):
    """Document keys from `start` on, with `prefix`, below `end` (None: no end)."""

    start: bytes = b""
    prefix: bytes = b""
    end: bytes | None = None


EVERY_KEY = KeyRange()


class Chunk(NamedTuple):
    """Documents of one collection: their keys as they stand on the wire, and their rows, in the same order."""

    collection_id: int
    keys: list[bytes]
    frames: list[bytes]


def documents(
    view: View,
    pin: Pin,
    collection_ids: Collection[int] | None = None,
    wanted: KeyRange = EVERY_KEY,
    *,
    rows_max: int = ROWS_MAX,
) -> Iterator[Chunk]:
    """Every document that `pin` sees, expired ones too, in key order within each collection.

    Raises ViewInvalidated once the purger has been at what `pin` sees. A rollback does not end it.
    """
    opened = view._open(pin.vbid)
    environment = opened.environment
    standing = view.standing(pin)
    with environment.read() as txn:
        manifest = view._manifest(environment, txn, pin.vbid, standing.manifest_key)
    limits = {keys.PREFIX.pack(each.branch): keys.ROW.pack(each.branch, each.cut) + _FOREVER for each in standing.links}
    asked = manifest.collections if collection_ids is None else manifest.collections.keys() & set(collection_ids)
    for collection_prefix, collection_id in sorted((keys.encode_collection_id(each), each) for each in asked):
        begin_seqno = manifest.collections[collection_id].begin_seqno.to_bytes(8, "big")
        prefix = collection_prefix + wanted.prefix
        end = None if wanted.end is None else collection_prefix + wanted.end
        position = collection_prefix + max(wanted.prefix, wanted.start)
        while position:
            with environment.read() as txn:
                view._revalidate(environment, txn, pin.vbid, standing)
                cursor = txn.cursor(opened.keys)
                pairs: list[tuple[bytes, bytes]] = []
                following = b""
                if cursor.set_range(position):
                    entries = cursor.iternext()
                    pairs = list(islice(entries, rows_max))
                    if len(pairs) == rows_max:  # the last key with all of its versions
                        last = pairs[-1][0]
                        for pair in entries:
                            if pair[0] != last:
                                following = pair[0]
                                break
                            pairs.append(pair)
                if pairs and not (pairs[-1][0].startswith(prefix) and (end is None or pairs[-1][0] < end)):
                    pairs = [each for each in pairs if each[0].startswith(prefix) and (end is None or each[0] < end)]
                    following = b""
                # The versions of a key rise along the chain, so the last visible one is the newest.
                newest = {key: dup for key, dup in pairs if dup <= limits.get(dup[:4], b"")}
                found = [key for key, dup in newest.items() if dup[12] == 0x57 and dup[4:12] > begin_seqno]
                frames: list[bytes] = []
                byte_count = 0
                rows = txn.cursor(opened.rows)
                while len(frames) < len(found):
                    run = found[len(frames) : len(frames) + GET_ROWS]
                    got = rows.getmulti([newest[key][:12] for key in run])
                    if len(got) != len(run):
                        raise CorruptedError(
                            "a key points to a row that is missing", path=environment.path, vbid=pin.vbid
                        )
                    frames += [frame for _, frame in got]
                    byte_count += sum(map(len, frames[-len(run) :]))
                    if byte_count > CHUNK_BYTES and len(frames) < len(found):
                        following = found[len(frames)]
                        break
            position = following
            if frames:
                yield Chunk(collection_id, found[: len(frames)], frames)


def collection_names(view: View, pin: Pin) -> dict[int, str]:
    """`scope.collection` of each collection that `pin` sees, by id."""
    opened = view._open(pin.vbid)
    with opened.environment.read() as txn:
        standing = view._standing(opened, txn, pin.vbid, pin.branch, pin.seqno)
        manifest = view._manifest(opened.environment, txn, pin.vbid, standing.manifest_key)
    return {
        each.collection_id: f"{manifest.scopes.get(each.scope_id, '?')}.{each.name}"
        for each in manifest.collections.values()
    }
