"""The answer to a GET that finds its document and needs nothing done to it: most requests by far, so written out.

For all other requests, and for all that is not plain about this one, `mirror.server.document_requests` decides; what
comes from here is byte for byte what comes from there, but for the duration (kv_engine docs/BinaryProtocol.md).
"""

from __future__ import annotations

from time import perf_counter

from mirror.serve.kv_session import KvSession
from mirror.serve.large import LARGE_BYTES
from mirror.serve.latency import Latencies
from mirror.wire import codec_kv
from mirror.wire.constants import HEADER_SIZE, Datatype, Magic, Opcode
from mirror.wire.frame import HEADER
from storage.errors import StorageError

_REQUEST = int(Magic.REQUEST)
_GET = int(Opcode.GET)
_JSON, _XATTR = int(Datatype.JSON), int(Datatype.XATTR)
_NOT_PLAIN = int(Datatype.XATTR | Datatype.SNAPPY)


class Counters:
    """What one process has done for its readers."""

    __slots__ = ("bytes_sent", "errors", "hits", "latencies", "misses", "refused", "requests")

    def __init__(self) -> None:
        """All zero."""
        self.requests = self.hits = self.misses = self.refused = self.errors = self.bytes_sent = 0
        self.latencies = Latencies()


def fast_get(session: KvSession, counters: Counters, data: bytes, pos: int, size: int) -> bytes:
    """The answer to the GET of `size` bytes at `pos`. Empty: the one who handles all requests knows what to say."""
    magic, _, key_length, extras_length, _, vbucket, body_length, opaque, _ = HEADER.unpack_from(data, pos)
    reader = session.reader
    if magic != _REQUEST or extras_length or key_length != body_length or reader is None or not reader.reads_all:
        return b""
    key = data[pos + HEADER_SIZE : pos + size]
    if session.collections:
        if not 2 <= key_length <= 251 or key[0] >= 0x80:
            return b""
    elif 1 <= key_length <= 250:
        key = b"\0" + key
    else:
        return b""
    began = perf_counter()
    try:
        found = session.bucket.view.find(key, large_bytes=LARGE_BYTES)
    except StorageError:
        return b""
    document = found.document
    if document is None or found.stale or (session.bucket_selected and vbucket != document.vbid):
        return b""
    datatype, value = document.datatype, document.value
    if datatype & _NOT_PLAIN and (datatype & _XATTR or not session.snappy):
        return b""
    if not session.json:
        datatype &= ~_JSON
    counters.requests += 1
    counters.hits += 1
    if session.tracing:
        framing = codec_kv.encode_server_duration((perf_counter() - began) * 1e6)
        key_field = len(framing) << 8
        head = HEADER.pack(0x18, _GET, key_field, 4, datatype, 0, 7 + len(value), opaque, document.cas) + framing
    else:
        head = HEADER.pack(0x81, _GET, 0, 4, datatype, 0, 4 + len(value), opaque, document.cas)
    return b"%b%b%b" % (head, document.flags.to_bytes(4), value)
