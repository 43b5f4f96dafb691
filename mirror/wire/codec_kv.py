"""Encodes and decodes the key-value messages of mirrors, readers and the sandbox.

A request that passes `check_request` has extras, key and value of the lengths its opcode allows. Sources: kv_engine
docs/BinaryProtocol.md, docs/SubDocument.md, docs/Collections.md, docs/range_scans/*,
engines/ep/docs/protocol/*_with_meta.md, and the recordings of the official SDK.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from mirror.wire.constants import SUBDOC_CHANGES, Datatype, Magic, Opcode, ServerOpcode, Status
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.frame import MAY, MUST, NONE, Frame, Shape, check_shape, refusal, request
from mirror.wire.keys import encode_leb128

_U8 = struct.Struct(">B")
_U16 = struct.Struct(">H")
_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_STORE = struct.Struct(">II")
_TOKEN = struct.Struct(">QQ")
_REVISION = struct.Struct(">qq")
_COLLECTION = struct.Struct(">QI")
_META = struct.Struct(">IIIQ")
_OBSERVED = struct.Struct(">BHQQQ")
_OBSERVED_FAILOVER = struct.Struct(">BHQQQQQ")
_LOOKUP = struct.Struct(">BBH")
_LOOKUP_RESULT = struct.Struct(">HI")
_SCAN_CONTINUE = struct.Struct(">16sIII")
_SCAN_ITEM = struct.Struct(">IIQQB")

SUBDOC_PATHS_MAX = 16

_DURATION_POWER = 1.74
_DURATION_MAX = 0xFFFF


# Shapes.

_ROWS: tuple[tuple[Shape, tuple[int, ...]], ...] = (
    (((0,), MUST, NONE), (Opcode.GET, Opcode.GETQ, Opcode.GETK, Opcode.GETKQ, Opcode.GET_REPLICA)),
    (((0,), MUST, NONE), (Opcode.DELETE, Opcode.DELETEQ, Opcode.UNLOCK_KEY)),
    (((8,), MUST, MAY), (Opcode.SET, Opcode.SETQ, Opcode.ADD, Opcode.ADDQ, Opcode.REPLACE, Opcode.REPLACEQ)),
    (((0,), MUST, MAY), (Opcode.APPEND, Opcode.APPENDQ, Opcode.PREPEND, Opcode.PREPENDQ)),
    (((20,), MUST, NONE), (Opcode.INCREMENT, Opcode.INCREMENTQ, Opcode.DECREMENT, Opcode.DECREMENTQ)),
    (((4,), MUST, NONE), (Opcode.TOUCH, Opcode.GAT, Opcode.GATQ)),
    (((0, 4), MUST, NONE), (Opcode.GET_LOCKED,)),
    (((0,), NONE, NONE), (Opcode.QUIT, Opcode.QUITQ, Opcode.NOOP, Opcode.VERSION, Opcode.SASL_LIST_MECHS)),
    (((0,), NONE, NONE), (Opcode.GET_FAILOVER_LOG, Opcode.GET_VBUCKET, Opcode.GET_COLLECTIONS_MANIFEST)),
    (((0, 4), NONE, NONE), (Opcode.FLUSH, Opcode.FLUSHQ)),
    (((4,), NONE, NONE), (Opcode.VERBOSITY,)),
    (((0,), MAY, MAY), (Opcode.STAT, Opcode.HELLO, Opcode.GET_COLLECTION_ID, Opcode.GET_SCOPE_ID)),
    (((0,), MUST, MAY), (Opcode.SASL_AUTH, Opcode.SASL_STEP)),
    (((0,), MAY, NONE), (Opcode.SELECT_BUCKET,)),
    (((0,), NONE, MUST), (Opcode.GET_ERROR_MAP, Opcode.OBSERVE_SEQNO, Opcode.OBSERVE)),
    (((0,), NONE, MUST), (Opcode.SET_COLLECTIONS_MANIFEST, Opcode.RANGE_SCAN_CREATE)),
    (((0, 16), NONE, NONE), (Opcode.GET_CLUSTER_CONFIG,)),
    (((0, 4, 8), NONE, NONE), (Opcode.GET_ALL_VB_SEQNOS,)),
    (((0, 1), MUST, NONE), (Opcode.GET_META, Opcode.GETQ_META)),
    (((24, 26, 28, 30), MUST, MAY), (Opcode.SET_WITH_META, Opcode.SETQ_WITH_META, Opcode.ADD_WITH_META)),
    (((24, 26, 28, 30), MUST, MAY), (Opcode.ADDQ_WITH_META, Opcode.DEL_WITH_META, Opcode.DELQ_WITH_META)),
    (((0, 4, 5), NONE, NONE), (Opcode.GET_RANDOM_KEY,)),
    (((8,), NONE, NONE), (Opcode.SEQNO_PERSISTENCE,)),
    (((0, 4), MAY, NONE), (Opcode.GET_KEYS,)),
    (((3, 4), MUST, MAY), (Opcode.SUBDOC_GET, Opcode.SUBDOC_EXISTS, Opcode.SUBDOC_GET_COUNT)),
    (((3, 4, 7, 8), MUST, MAY), SUBDOC_CHANGES),
    (((0, 1), MUST, MUST), (Opcode.SUBDOC_MULTI_LOOKUP,)),
    (((0, 1, 4, 5), MUST, MUST), (Opcode.SUBDOC_MULTI_MUTATION,)),
    (((28,), NONE, NONE), (Opcode.RANGE_SCAN_CONTINUE,)),
    (((16,), NONE, NONE), (Opcode.RANGE_SCAN_CANCEL,)),
)
_SHAPES = {int(opcode): shape for shape, opcodes in _ROWS for opcode in opcodes}


def check_request(frame: Frame) -> Frame:
    """Return the frame. If opcode or shape is wrong, raises RemoteProtocolError with the status for the answer."""
    shape = None if frame.magic == Magic.SERVER_REQUEST else _SHAPES.get(frame.opcode)
    if shape is None:
        raise refusal(frame, "unknown command", Status.UNKNOWN_COMMAND)
    check_shape(frame, shape)
    return frame


def _exactly(layout: struct.Struct, data: bytes, op: int, what: str) -> tuple[int, ...]:
    if len(data) != layout.size:
        raise RemoteProtocolError(f"{what} of {len(data)} bytes, not {layout.size}", op=op)
    return layout.unpack(data)


# Session.


def decode_hello(frame: Frame) -> tuple[bytes, tuple[int, ...]]:
    return frame.key, decode_features(frame.value)


def encode_features(features: Iterable[int]) -> bytes:
    return b"".join(_U16.pack(feature) for feature in features)


def decode_features(value: bytes) -> tuple[int, ...]:
    if len(value) % _U16.size:
        raise RemoteProtocolError(f"a list of features of {len(value)} bytes", op=Opcode.HELLO)
    return tuple(feature for (feature,) in _U16.iter_unpack(value))


def decode_sasl(frame: Frame) -> tuple[bytes, bytes]:
    return frame.key, frame.value


def decode_error_map_request(frame: Frame) -> int:
    return _exactly(_U16, frame.value, frame.opcode, "an error map version")[0]


# Cluster configuration.


def get_cluster_config(known: tuple[int, int] | None = None) -> Frame:
    """Request the cluster map, or only a map newer than `known` (epoch, revision; feature
    GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION).
    """
    return request(Opcode.GET_CLUSTER_CONFIG, extras=b"" if known is None else _REVISION.pack(*known))


def decode_cluster_config_request(frame: Frame) -> tuple[int, int] | None:
    if not frame.extras:
        return None
    epoch, revision = _exactly(_REVISION, frame.extras, frame.opcode, "a known revision")
    return epoch, revision


def clustermap_notification(epoch: int, revision: int, bucket: bytes, config: bytes = b"", *, opaque: int = 0) -> Frame:
    """Return the announcement of a new cluster map. The brief form has no `config`."""
    opcode = int(ServerOpcode.CLUSTERMAP_CHANGE_NOTIFICATION)
    datatype = int(Datatype.JSON if config else Datatype.RAW)
    extras = _REVISION.pack(epoch, revision)
    return Frame(int(Magic.SERVER_REQUEST), opcode, datatype, 0, opaque, 0, b"", extras, bucket, config)


# Documents.


@dataclass(frozen=True, slots=True)
class Store:
    flags: int = 0
    expiry: int = 0


@dataclass(frozen=True, slots=True)
class Meta:
    """Extras of the answer to GET_META; `datatype` is set only if the request asks for version 2 of these extras."""

    deleted: bool
    flags: int
    expiry: int
    rev_seqno: int
    datatype: int | None = None


def decode_store(extras: bytes) -> Store:
    return Store(*_exactly(_STORE, extras, Opcode.SET, "extras"))


def encode_mutation_token(vbuuid: int, seqno: int) -> bytes:
    return _TOKEN.pack(vbuuid, seqno)


def encode_meta(meta: Meta) -> bytes:
    extras = _META.pack(meta.deleted, meta.flags, meta.expiry, meta.rev_seqno)
    return extras if meta.datatype is None else extras + _U8.pack(meta.datatype)


# Collections.


def encode_collection_id(manifest_uid: int, collection_id: int) -> bytes:
    return _COLLECTION.pack(manifest_uid, collection_id)


# Durability of a vbucket.


@dataclass(frozen=True, slots=True)
class ObservedSeqno:
    """Answer to OBSERVE_SEQNO. The last two fields are set only if the client's vbuuid is from before a failover."""

    vbid: int
    vbuuid: int
    persisted_seqno: int
    current_seqno: int
    old_vbuuid: int | None = None
    last_seqno_received: int | None = None


def observe_seqno(vbid: int, vbuuid: int, *, opaque: int = 0) -> Frame:
    return request(Opcode.OBSERVE_SEQNO, vbucket=vbid, opaque=opaque, value=_U64.pack(vbuuid))


def decode_observe_seqno_request(frame: Frame) -> int:
    return _exactly(_U64, frame.value, frame.opcode, "a vbuuid")[0]


def encode_observe_seqno(seen: ObservedSeqno) -> bytes:
    common = (seen.vbid, seen.vbuuid, seen.persisted_seqno, seen.current_seqno)
    if seen.old_vbuuid is None:
        return _OBSERVED.pack(0, *common)
    return _OBSERVED_FAILOVER.pack(1, *common, seen.old_vbuuid, seen.last_seqno_received or 0)


def decode_observe_seqno(value: bytes) -> ObservedSeqno:
    if value[:1] == b"\1":
        return ObservedSeqno(*_exactly(_OBSERVED_FAILOVER, value, Opcode.OBSERVE_SEQNO, "an answer")[1:])
    if value[:1] != b"\0":
        raise RemoteProtocolError(f"unknown form of an answer: {value[:1].hex() or 'empty'}", op=Opcode.OBSERVE_SEQNO)
    return ObservedSeqno(*_exactly(_OBSERVED, value, Opcode.OBSERVE_SEQNO, "an answer")[1:])


# Sub-documents.


@dataclass(frozen=True, slots=True)
class LookupSpec:
    opcode: int
    path: bytes
    flags: int = 0


def decode_lookup_specs(value: bytes) -> list[LookupSpec]:
    cutter = _Cutter(value, Opcode.SUBDOC_MULTI_LOOKUP)
    specs = []
    while cutter:
        opcode, flags, length = cutter.fields(_LOOKUP)
        specs.append(LookupSpec(opcode, cutter.bytes(length), flags))
    if not 0 < len(specs) <= SUBDOC_PATHS_MAX:
        raise RemoteProtocolError(
            f"{len(specs)} paths, 1 to {SUBDOC_PATHS_MAX} are allowed",
            op=Opcode.SUBDOC_MULTI_LOOKUP,
            status=Status.SUBDOC_INVALID_COMBO,
        )
    return specs


def encode_lookup_head(status: int, value_bytes: int) -> bytes:
    return _LOOKUP_RESULT.pack(status, value_bytes)


def decode_subdoc(frame: Frame) -> tuple[bytes, bytes, int, int | None, int]:
    """Return path, fragment, path flags, expiry (None: unchanged) and document flags of a request with one path."""
    if len(frame.extras) not in (3, 4, 7, 8):
        raise refusal(frame, f"extras of {len(frame.extras)} bytes")
    path_length = _U16.unpack_from(frame.extras)[0]
    if path_length > len(frame.value):
        raise refusal(frame, f"a path of {path_length} bytes in a value of {len(frame.value)}")
    expiry = _U32.unpack_from(frame.extras, 3)[0] if len(frame.extras) >= 7 else None
    document_flags = frame.extras[-1] if len(frame.extras) in (4, 8) else 0
    return frame.value[:path_length], frame.value[path_length:], frame.extras[2], expiry, document_flags


# Range scans.


@dataclass(frozen=True, slots=True)
class ScanLimits:
    """Extras of RANGE_SCAN_CONTINUE except the time limit. 0 means no limit."""

    uuid: bytes
    item_limit: int = 0
    byte_limit: int = 0


@dataclass(frozen=True, slots=True)
class ScanItem:
    key: bytes
    value: bytes | None = None
    flags: int = 0
    expiry: int = 0
    seqno: int = 0
    cas: int = 0
    datatype: int = 0


def decode_scan_continue(extras: bytes) -> ScanLimits:
    if len(extras) != _SCAN_CONTINUE.size:
        raise RemoteProtocolError(f"extras of {len(extras)} bytes", op=Opcode.RANGE_SCAN_CONTINUE)
    uuid, item_limit, _time_limit_ms, byte_limit = _SCAN_CONTINUE.unpack(extras)
    return ScanLimits(uuid, item_limit, byte_limit)


def encode_scan_items(items: Iterable[ScanItem]) -> bytes:
    parts = []
    for item in items:
        if item.value is None:
            parts += [encode_leb128(len(item.key)), item.key]
        else:
            fields = _SCAN_ITEM.pack(item.flags, item.expiry, item.seqno, item.cas, item.datatype)
            parts += [fields, encode_leb128(len(item.key)), item.key, encode_leb128(len(item.value)), item.value]
    return b"".join(parts)


# Server duration: framing extras of an answer (feature TRACING).


def encode_server_duration(duration_us: float) -> bytes:
    encoded = min(_DURATION_MAX, round((max(duration_us, 0) * 2) ** (1 / _DURATION_POWER)))
    return b"\x02" + _U16.pack(encoded)


class _Cutter:
    """Reads the fields of a body in order. Raises RemoteProtocolError if a field goes beyond the body's end."""

    __slots__ = ("_data", "_op", "_pos")

    def __init__(self, data: bytes, op: int) -> None:
        self._data = data
        self._op = op
        self._pos = 0

    def __bool__(self) -> bool:
        return self._pos < len(self._data)

    def bytes(self, length: int) -> bytes:
        left = len(self._data) - self._pos
        if length > left:
            raise RemoteProtocolError(f"a field of {length} bytes, {left} are left", op=self._op)
        start = self._pos
        self._pos += length
        return self._data[start : self._pos]

    def fields(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.bytes(layout.size))
