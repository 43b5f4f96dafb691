"""Keys and fixed structs (FORMAT.md, "Keyspaces"). Numbers are big-endian, so LMDB sorts them by value.

A boundary key is the row key of its seqno and one byte 0x01, so a boundary sorts directly after the row of its seqno.
"""

from __future__ import annotations

import struct
import zlib

ROW = struct.Struct(">IQ")
"""branch u32, seqno u64: key of a row in the tree (LMDB database) `v<vbid>`, and the first 12 bytes of a reference."""
DUP = struct.Struct(">IQB")
"""branch u32, seqno u64, kind u8: a reference to a row: a value ("dup" in LMDB) of a document's key in `k<vbid>`."""
DUP_SIZE = DUP.size
PREFIX = struct.Struct(">I")
BRANCH_KEY = struct.Struct(">HI")
MANIFEST_KEY = struct.Struct(">HIQ")
ROLLBACK_KEY = struct.Struct(">HI")
VBID_KEY = struct.Struct(">H")
PUB = struct.Struct(">IQQIQB")
"""served branch u32, published_seqno u64, history_floor u64, manifest branch u32, manifest seqno u64, flags u8."""
PUB_MANIFEST = slice(20, 32)
"""Manifest branch and seqno in a row of `pub`, packed like a `MANIFEST_KEY` without the vbid."""
PURGE = struct.Struct(">QQQI")
"""purged seqno u64 (last row that the purger examined), local_purge_seqno u64, chain id u64, count of forgotten resyncs
u32.
"""
SPAN_KEY = struct.Struct(">HIQ")
"""vbid u16, branch u32, end seqno u64: key of a row of `span`."""
SEQNO = struct.Struct(">Q")
BOUNDARY = struct.Struct(">QQQQQQ")
"""snap_start_seqno, vbuuid, time_ms, history_ms, ordinal, row_bytes, each u64: value of a boundary row."""
BOUNDARY_SUFFIX = b"\x01"
ROW_KEY_SIZE = ROW.size
BOUNDARY_KEY_SIZE = ROW_KEY_SIZE + 1

PUB_STALE = 1
"""Flag of `pub`: a resync is under way, and the served copy is the old one."""
PUB_UNAVAILABLE = 2
"""Flag of `pub`, only with PUB_STALE: readers are refused during the resync."""

DB_BRANCH = b"branch"
DB_PUB = b"pub"
DB_STATE = b"state"
DB_MANIFEST = b"manifest"
DB_ROLLBACK = b"rollback"
DB_PURGE = b"purge"
DB_SPAN = b"span"
DB_META = b"meta"
SHARED_DBS = (DB_BRANCH, DB_PUB, DB_STATE, DB_MANIFEST, DB_ROLLBACK, DB_PURGE, DB_SPAN, DB_META)


def rows_db(vbid: int) -> bytes:
    return b"v%d" % vbid


def keys_db(vbid: int) -> bytes:
    return b"k%d" % vbid


def encode_collection_id(collection_id: int) -> bytes:
    """Return the canonical unsigned LEB128 of a collection id (kv_engine's docs/Collections.md, "Encoding")."""
    if not 0 <= collection_id < 2**32:
        raise ValueError(f"collection id {collection_id} is not a 32 bit number")
    out = bytearray()
    while collection_id > 0x7F:
        out.append(collection_id & 0x7F | 0x80)
        collection_id >>= 7
    out.append(collection_id)
    return bytes(out)


def split_key(wire_key: bytes) -> tuple[int, bytes]:
    """Return collection id and document key of a prefixed key. Raises ValueError if 5 bytes do not end the prefix."""
    collection_id = shift = 0
    for index, byte in enumerate(wire_key[:5]):
        collection_id |= (byte & 0x7F) << shift
        if byte < 0x80:
            return collection_id, wire_key[index + 1 :]
        shift += 7
    raise ValueError(f"collection id prefix of key {wire_key[:8].hex()} does not end within 5 bytes")


def vbid_of(key: bytes, vbucket_count: int) -> int:
    """Return the vbucket of a document key as every Couchbase SDK does: CRC-32, bits 16 to 30, modulo the count."""
    return ((zlib.crc32(key) >> 16) & 0x7FFF) % vbucket_count
