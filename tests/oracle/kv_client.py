"""The client's half of the KV protocol, which only tests need; the server's half is `mirror.wire.codec_kv`.

Layouts are written out here once more, so that a server is held against a second reading of them. Sources: those of
`mirror.wire.codec_kv`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mirror.wire.codec_kv import LookupSpec, Meta, ScanItem, ScanLimits, Store
from mirror.wire.constants import Datatype, Opcode
from mirror.wire.events import Response
from mirror.wire.frame import Frame, frame_infos, request
from mirror.wire.keys import decode_leb128

DURATION_POWER = 1.74


class LookupResult(NamedTuple):
    """Answer for one path of SUBDOC_MULTI_LOOKUP."""

    status: int
    value: bytes = b""


# Session.


def response(frame: Frame) -> Response:
    """The plain answer that a response frame is."""
    return Response(
        frame.opcode, frame.status, frame.value, frame.extras, frame.key, frame.datatype, frame.cas, opaque=frame.opaque
    )


def error_context(value: bytes, datatype: int) -> str:
    """The text of an error in the value of an answer; empty if it has none."""
    if not datatype & Datatype.JSON:
        return ""
    error = json.loads(value).get("error", {})
    return " ".join(str(error[name]) for name in ("context", "ref") if name in error)


def server_duration_us(framing: bytes) -> float | None:
    """The server's own duration in microseconds, if HELLO granted TRACING."""
    for info_id, content in frame_infos(framing):
        if info_id == 0 and len(content) == 2:
            return float(int.from_bytes(content) ** DURATION_POWER / 2)
    return None


def hello(agent: bytes, features: Iterable[int], *, opaque: int = 0) -> Frame:
    value = b"".join(feature.to_bytes(2) for feature in features)
    return request(Opcode.HELLO, opaque=opaque, key=agent, value=value)


def sasl_auth(mechanism: bytes, data: bytes) -> Frame:
    return request(Opcode.SASL_AUTH, key=mechanism, value=data)


def select_bucket(name: bytes) -> Frame:
    return request(Opcode.SELECT_BUCKET, key=name)


def decode_collection_id(extras: bytes) -> tuple[int, int]:
    """The manifest's uid and the collection's id, in the answer to GET_COLLECTION_ID."""
    manifest_uid, collection_id = struct.unpack(">QI", extras)
    return manifest_uid, collection_id


def noop(*, opaque: int = 0) -> Frame:
    """The plain NOOP."""
    return request(Opcode.NOOP, opaque=opaque)


def sasl_list_mechs(*, opaque: int = 0) -> Frame:
    """SASL_LIST_MECHS."""
    return request(Opcode.SASL_LIST_MECHS, opaque=opaque)


def sasl_step(mechanism: bytes, data: bytes, *, opaque: int = 0) -> Frame:
    """SASL_STEP: the next message of a mechanism."""
    return request(Opcode.SASL_STEP, opaque=opaque, key=mechanism, value=data)


def get_error_map(version: int = 2, *, opaque: int = 0) -> Frame:
    """GET_ERROR_MAP in at most this version."""
    return request(Opcode.GET_ERROR_MAP, opaque=opaque, value=struct.pack(">H", version))


def get_collections_manifest(*, opaque: int = 0) -> Frame:
    """GET_COLLECTIONS_MANIFEST."""
    return request(Opcode.GET_COLLECTIONS_MANIFEST, opaque=opaque)


def get_collection_id(path: bytes, *, opaque: int = 0) -> Frame:
    """GET_COLLECTION_ID of `scope.collection`."""
    return request(Opcode.GET_COLLECTION_ID, opaque=opaque, value=path)


def get_scope_id(path: bytes, *, opaque: int = 0) -> Frame:
    """GET_SCOPE_ID of `scope`."""
    return request(Opcode.GET_SCOPE_ID, opaque=opaque, value=path)


# Documents.


def encode_store(store: Store) -> bytes:
    """Extras of SET, ADD, REPLACE."""
    return struct.pack(">II", store.flags, store.expiry)


def decode_mutation_token(extras: bytes) -> tuple[int, int]:
    """(vbuuid, seqno) of a write, where HELLO granted MUTATION_SEQNO."""
    vbuuid, seqno = struct.unpack(">QQ", extras)
    return vbuuid, seqno


def get_meta(vbid: int, key: bytes, version: int = 2, *, opaque: int = 0) -> Frame:
    """GET_META; version 2 asks for the datatype too."""
    return request(Opcode.GET_META, vbucket=vbid, opaque=opaque, extras=bytes((version,)), key=key)


def decode_meta(extras: bytes) -> Meta:
    """Decode the answer to GET_META."""
    deleted, flags, expiry, rev_seqno, *datatype = struct.unpack(">IIIQB" if len(extras) == 21 else ">IIIQ", extras)
    return Meta(bool(deleted), flags, expiry, rev_seqno, *datatype)


# Sub-documents.


def encode_lookup_specs(specs: Iterable[LookupSpec]) -> bytes:
    """Value of SUBDOC_MULTI_LOOKUP."""
    return b"".join(struct.pack(">BBH", spec.opcode, spec.flags, len(spec.path)) + spec.path for spec in specs)


def decode_lookup_results(value: bytes) -> list[LookupResult]:
    """Decode the answer to SUBDOC_MULTI_LOOKUP, in the order of the paths."""
    results = []
    while value:
        status, length = struct.unpack_from(">HI", value)
        assert len(value) >= 6 + length
        results.append(LookupResult(status, value[6 : 6 + length]))
        value = value[6 + length :]
    return results


# Range scans.


def encode_scan_continue(limits: ScanLimits) -> bytes:
    """Extras of RANGE_SCAN_CONTINUE."""
    assert len(limits.uuid) == 16
    return limits.uuid + struct.pack(">III", limits.item_limit, 0, limits.byte_limit)


def decode_scan_items(value: bytes, *, keys_only: bool) -> list[ScanItem]:
    """Items of an answer to RANGE_SCAN_CONTINUE; its extras say whether they are keys only."""
    return list(_keys(value) if keys_only else _documents(value))


def _keys(value: bytes) -> Iterator[ScanItem]:
    pos = 0
    while pos < len(value):
        key, pos = _measured(value, pos)
        yield ScanItem(key)


def _documents(value: bytes) -> Iterator[ScanItem]:
    pos = 0
    while pos < len(value):
        flags, expiry, seqno, cas, datatype = struct.unpack_from(">IIQQB", value, pos)
        key, pos = _measured(value, pos + 25)
        content, pos = _measured(value, pos)
        yield ScanItem(key, content, flags, expiry, seqno, cas, datatype)


def _measured(value: bytes, pos: int) -> tuple[bytes, int]:
    """A field that begins with its length, and where the next one begins."""
    length, start = decode_leb128(value, pos)
    assert start + length <= len(value)
    return value[start : start + length], start + length


def decode_clustermap_notification(frame: Frame) -> tuple[int, int, bytes, bytes]:
    """Return epoch, revision, bucket name and configuration (empty in the brief form)."""
    epoch, revision = struct.unpack(">qq", frame.extras)
    return epoch, revision, frame.key, frame.value
