"""Fast answers to plain GETs of existing documents, which are most requests.

The general path (`mirror.server.document_requests`) would give the same bytes, except for the request's duration
(kv_engine docs/BinaryProtocol.md).
"""

from __future__ import annotations

import contextlib
import struct
from time import perf_counter
from zlib import crc32

from mirror.serve.bucket.mirror_session import MirrorSession
from mirror.server.connection import BYTES_MAX, Counters
from mirror.server.turns import LARGE_BYTES
from mirror.wire import codec_kv
from mirror.wire.constants import HEADER_SIZE, Datatype, Magic, Opcode
from mirror.wire.frame import HEADER
from storage.errors import StorageError
from storage.format.records import answer_fields
from storage.format.seal import SIZE as SEAL_BYTES
from storage.format.tokens import has_expired
from storage.read.point_reads import ReadRun

_REQUEST = int(Magic.REQUEST)
_GET = int(Opcode.GET)
_JSON, _XATTR = int(Datatype.JSON), int(Datatype.XATTR)
_NOT_PLAIN = int(Datatype.XATTR | Datatype.SNAPPY)
_ALL_BITS = 0xFF
_header_of = HEADER.unpack_from
_plain_head = struct.Struct(HEADER.format + "I").pack


def answer_gets(
    session: MirrorSession,
    counters: Counters,
    data: bytes,
    pos: int,
    out: list[bytes],
    count_max: int,
    turn_ends: float,
) -> tuple[int, int, int]:
    """Do `ServedSession.answer_gets`. A transaction ends before the return, so later answers show no older state."""
    reader = session.reader
    if reader is None or not reader.reads_all:
        return pos, 0, 0
    reader_of, vbucket_count = session.bucket.view.reader, session.bucket.view.identity.vbucket_count
    collections, selected = session.collections, session.bucket_selected
    snappy, tracing = session.snappy, session.tracing
    datatypes = _ALL_BITS if session.json else _ALL_BITS & ~_JSON
    head_bytes = HEADER_SIZE + (7 if tracing else 4)
    end, count, byte_count = len(data), 0, 0
    with ReadRun() as run, contextlib.suppress(StorageError):
        began = perf_counter()
        while count < count_max and byte_count <= BYTES_MAX and began <= turn_ends and end - pos >= HEADER_SIZE:
            magic, opcode, key_length, extras_length, _, vbucket, body_length, opaque, _ = _header_of(data, pos)
            key_at = pos + HEADER_SIZE
            stop = key_at + key_length
            if magic != _REQUEST or opcode != _GET or extras_length or key_length != body_length or stop > end:
                break
            if collections:
                if not 2 <= key_length <= 251 or data[key_at] >= 0x80:
                    break
                wire_key, key = data[key_at:stop], data[key_at + 1 : stop]
            elif 1 <= key_length <= 250:
                key = data[key_at:stop]
                wire_key = b"\0" + key
            else:
                break
            vbid = ((crc32(key) >> 16) & 0x7FFF) % vbucket_count
            if selected and vbucket != vbid:
                break
            stored = run.row(reader_of(vbid), wire_key, LARGE_BYTES)
            if stored is None:
                break
            datatype, cas, flags, expiry, value = answer_fields(stored, SEAL_BYTES)
            if (datatype & _NOT_PLAIN and (datatype & _XATTR or not snappy)) or has_expired(expiry):
                break
            size = len(value)
            ended = perf_counter()
            if tracing:
                framing = codec_kv.encode_server_duration((ended - began) * 1e6)
                head = HEADER.pack(0x18, _GET, len(framing) << 8, 4, datatype & datatypes, 0, 7 + size, opaque, cas)
                out += (head, framing, flags.to_bytes(4), value)
            else:
                out += (_plain_head(0x81, _GET, 0, 4, datatype & datatypes, 0, 4 + size, opaque, cas, flags), value)
            began = ended
            count += 1
            byte_count += head_bytes + size
            pos = stop
    counters.requests += count
    counters.hits += count
    return pos, count, byte_count
