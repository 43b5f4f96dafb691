"""Converts frames to DCP events and back. A table has one row per opcode.

Sources: kv_engine docs/dcp/documentation/commands/* (one file per opcode); if they contradict each other, recordings of
real servers decide (see the table in tests/wire/goldens.py).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from mirror.wire import events as ev
from mirror.wire import frame as fr
from mirror.wire.constants import (
    BODY_LENGTH_MAX,
    DCP_NAME_LENGTH_MAX,
    FAILOVER_LOG_LENGTH_MAX,
    Magic,
    MarkerVersion,
    Opcode,
    Status,
    VbucketRole,
)
from mirror.wire.errors import LocalProtocolError, RemoteProtocolError
from mirror.wire.frame import MAY, MUST, NONE, Frame, Shape, check_shape, fits, refusal

_U8 = struct.Struct(">B")
_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_OPEN = struct.Struct(">4xI")
_MARKER_V1 = struct.Struct(">QQI")
_MARKER_V2_0 = struct.Struct(">QQIQQ")
_MARKER_V2_1 = struct.Struct(">QQIQQQ")
_MARKER_V2_2 = struct.Struct(">QQIQQQQ")
_MARKER_V2_2_SHORT = struct.Struct(">QQIQQQ")
_MUTATION = struct.Struct(">QQIIIHB")
_DELETION_V1 = struct.Struct(">QQH")
_DELETION_V2 = struct.Struct(">QQIx")
_FAILOVER_ENTRY = struct.Struct(">QQ")
_VB_SEQNO = struct.Struct(">HQ")


_Parts = tuple[bytes, bytes, bytes]


@dataclass(frozen=True, slots=True)
class _Row:
    event: type[Any]
    shape: Shape
    decode: Callable[[Frame], Any]
    encode: Callable[[Any], _Parts]


def _stream(frame: Frame) -> dict[str, Any]:
    return {"opaque": frame.opaque, "stream_id": frame.stream_id}


# Snapshot markers (see `MarkerVersion`).

_MARKERS: dict[tuple[int, int], tuple[MarkerVersion, struct.Struct, tuple[str, ...]]] = {
    (0, 36): (MarkerVersion.V2_0, _MARKER_V2_0, ()),
    (1, 44): (MarkerVersion.V2_1, _MARKER_V2_1, ("timestamp",)),
    (2, 52): (MarkerVersion.V2_2, _MARKER_V2_2, ("purge_seqno", "high_prepared_seqno")),
    (2, 44): (MarkerVersion.V2_2_SHORT, _MARKER_V2_2_SHORT, ("purge_seqno",)),
}
"""(version byte, value length) -> version, layout, and the names of the layout's fields after the five common fields.
"""

_MARKER_BY_VERSION = {int(version): (byte, layout, more) for (byte, _), (version, layout, more) in _MARKERS.items()}


def _decode_marker(frame: Frame) -> ev.SnapshotMarker:
    if len(frame.extras) == _MARKER_V1.size:
        if frame.value:
            raise refusal(frame, f"a V1 marker with a value of {len(frame.value)} bytes")
        start, end, flags = _MARKER_V1.unpack(frame.extras)
        return ev.SnapshotMarker(frame.vbucket, start, end, flags, **_stream(frame))
    found = _MARKERS.get((frame.extras[0], len(frame.value)))
    if found is None:
        raise refusal(frame, f"no marker version has byte {frame.extras[0]} and a value of {len(frame.value)} bytes")
    version, layout, more = found
    start, end, flags, visible, completed, *rest = layout.unpack(frame.value)
    return ev.SnapshotMarker(
        frame.vbucket,
        start,
        end,
        flags,
        visible,
        completed,
        version=int(version),
        **dict(zip(more, rest, strict=True)),
        **_stream(frame),
    )


def _encode_marker(e: ev.SnapshotMarker) -> _Parts:
    if e.version == MarkerVersion.V1:
        return _MARKER_V1.pack(e.start_seqno, e.end_seqno, e.flags), b"", b""
    found = _MARKER_BY_VERSION.get(e.version)
    if found is None:
        raise LocalProtocolError(f"no such marker version: {e.version}", op=Opcode.DCP_SNAPSHOT_MARKER, vbid=e.vbid)
    byte, layout, more = found
    rest = (getattr(e, name) for name in more)
    value = layout.pack(e.start_seqno, e.end_seqno, e.flags, e.max_visible_seqno, e.high_completed_seqno, *rest)
    return _U8.pack(byte), b"", value


# Documents.


def _split_metadata(frame: Frame, length: int) -> tuple[bytes, bytes]:
    if length == 0:
        return frame.value, b""
    if length > len(frame.value):
        raise refusal(frame, f"metadata of {length} bytes in {len(frame.value)} bytes of value")
    return frame.value[:-length], frame.value[-length:]


def _decode_mutation(frame: Frame) -> ev.Mutation:
    seqno, rev_seqno, flags, expiry, lock_time, metadata_length, nru = _MUTATION.unpack(frame.extras)
    value, metadata = _split_metadata(frame, metadata_length)
    return ev.Mutation(
        frame.vbucket,
        frame.key,
        seqno,
        rev_seqno,
        frame.cas,
        flags,
        expiry,
        lock_time,
        frame.datatype,
        value,
        nru,
        metadata,
        **_stream(frame),
    )


def _encode_mutation(e: ev.Mutation) -> _Parts:
    extras = _MUTATION.pack(e.seqno, e.rev_seqno, e.flags, e.expiry, e.lock_time, len(e.metadata), e.nru)
    return extras, e.key, e.value + e.metadata


def _decode_deletion(frame: Frame) -> ev.Deletion:
    metadata_length, delete_time = 0, None
    if len(frame.extras) == _DELETION_V1.size:
        seqno, rev_seqno, metadata_length = _DELETION_V1.unpack(frame.extras)
    else:
        seqno, rev_seqno, delete_time = _DELETION_V2.unpack(frame.extras)
    value, metadata = _split_metadata(frame, metadata_length)
    return ev.Deletion(
        frame.vbucket,
        frame.key,
        seqno,
        rev_seqno,
        frame.cas,
        frame.datatype,
        value,
        delete_time,
        metadata,
        **_stream(frame),
    )


def _encode_deletion(e: ev.Deletion) -> _Parts:
    if e.delete_time is None:
        return _DELETION_V1.pack(e.seqno, e.rev_seqno, len(e.metadata)), e.key, e.value + e.metadata
    if e.metadata:
        raise LocalProtocolError("a deletion with a time has no metadata", op=Opcode.DCP_DELETION, vbid=e.vbid)
    return _DELETION_V2.pack(e.seqno, e.rev_seqno, e.delete_time), e.key, e.value


# Messages of a consumer.


def _decode_open(frame: Frame) -> ev.DcpOpen:
    if len(frame.key) > DCP_NAME_LENGTH_MAX:
        raise refusal(frame, f"a name of {len(frame.key)} bytes, {DCP_NAME_LENGTH_MAX} are allowed")
    return ev.DcpOpen(frame.key, _OPEN.unpack(frame.extras)[0], frame.value, opaque=frame.opaque)


def _encode_open(e: ev.DcpOpen) -> _Parts:
    if not 0 < len(e.name) <= DCP_NAME_LENGTH_MAX:
        raise LocalProtocolError(f"a name of {len(e.name)} bytes", op=Opcode.DCP_OPEN)
    return _OPEN.pack(e.flags), e.name, e.value


_FROM_FRAME: dict[str, Callable[[Frame], Any]] = {
    "vbid": lambda frame: frame.vbucket,
    **{name: attrgetter(name) for name in ("key", "value", "cas", "datatype", "opaque", "stream_id")},
    "name": lambda frame: frame.key,
}


def _row(event: type[Any], layout: str = "", *names: str, key: str = NONE, value: str = NONE) -> _Row:
    """Return the row of a message. `names` are its fields in the extras. Other fields are in key, value and header."""
    extras = struct.Struct(f">{layout}")
    own = [(each.name, _FROM_FRAME[each.name]) for each in fields(event) if each.name in _FROM_FRAME]
    key_name = "name" if any(name == "name" for name, _ in own) else "key"

    def decode_one(frame: Frame) -> Any:
        numbers = dict(zip(names, extras.unpack(frame.extras), strict=True))
        return event(**numbers, **{name: take(frame) for name, take in own})

    def encode_one(e: Any) -> _Parts:
        packed = extras.pack(*[getattr(e, name) for name in names])
        return packed, getattr(e, key_name) if key != NONE else b"", e.value if value != NONE else b""

    return _Row(event, ((extras.size,), key, value), decode_one, encode_one)


_ROWS: dict[int, _Row] = {
    Opcode.DCP_OPEN: _Row(ev.DcpOpen, ((8,), MUST, MAY), _decode_open, _encode_open),
    Opcode.DCP_CLOSE_STREAM: _row(ev.CloseStream),
    Opcode.DCP_STREAM_REQ: _row(
        ev.StreamRequest, "I4xQQQQQ",
        "flags", "start_seqno", "end_seqno", "vbuuid", "snap_start_seqno", "snap_end_seqno", value=MAY,
    ),
    Opcode.DCP_GET_FAILOVER_LOG: _row(ev.GetFailoverLog),
    Opcode.DCP_STREAM_END: _row(ev.StreamEnd, "I", "reason"),
    Opcode.DCP_SNAPSHOT_MARKER: _Row(ev.SnapshotMarker, ((20, 1), NONE, MAY), _decode_marker, _encode_marker),
    Opcode.DCP_MUTATION: _Row(ev.Mutation, ((31,), MUST, MAY), _decode_mutation, _encode_mutation),
    Opcode.DCP_DELETION: _Row(ev.Deletion, ((18, 21), MUST, MAY), _decode_deletion, _encode_deletion),
    Opcode.DCP_EXPIRATION: _row(ev.Expiration, "QQI", "seqno", "rev_seqno", "delete_time", key=MUST, value=MAY),
    Opcode.DCP_NOOP: _row(ev.DcpNoop),
    Opcode.DCP_BUFFER_ACK: _row(ev.BufferAck, "I", "count"),
    Opcode.DCP_CONTROL: _row(ev.DcpControl, key=MUST, value=MUST),
    Opcode.DCP_SYSTEM_EVENT: _row(ev.SystemEvent, "QIB", "seqno", "event", "version", key=MAY, value=MAY),
    Opcode.DCP_PREPARE: _row(
        ev.Prepare, "QQIIIBBB",
        "seqno", "rev_seqno", "flags", "expiry", "lock_time", "nru", "deleted", "durability", key=MUST, value=MAY,
    ),
    Opcode.DCP_COMMIT: _row(ev.Commit, "QQ", "prepared_seqno", "seqno", key=MUST),
    Opcode.DCP_ABORT: _row(ev.Abort, "QQ", "prepared_seqno", "seqno", key=MUST),
    Opcode.DCP_SEQNO_ADVANCED: _row(ev.SeqnoAdvanced, "Q", "seqno"),
    Opcode.DCP_OSO_SNAPSHOT: _row(ev.OsoSnapshot, "I", "flags"),
}  # fmt: skip

DECODED = frozenset(map(int, _ROWS))
"""The opcodes of the table. The other DCP opcodes are unused, or only sent between nodes of a cluster."""

_OPCODE_OF = {row.event: int(opcode) for opcode, row in _ROWS.items()}
_WITH_CAS = frozenset(
    int(opcode) for opcode in (Opcode.DCP_MUTATION, Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION, Opcode.DCP_PREPARE)
)


# Answers.


def _decode_response(frame: Frame) -> ev.Response:
    """Return the answer, with its failover log or rollback seqno decoded from the body."""
    common = {name: getattr(frame, name) for name in ("status", "value", "extras", "key", "datatype", "cas", "opaque")}
    common["op"] = frame.opcode
    accepted = frame.status == Status.SUCCESS
    if frame.opcode == Opcode.DCP_STREAM_REQ:
        log = tuple(decode_failover_log(frame.value)) if accepted else ()
        seqno = decode_rollback_seqno(frame.value) if frame.status == Status.ROLLBACK else None
        return ev.StreamResponse(**common, failover_log=log, rollback_seqno=seqno)
    if frame.opcode == Opcode.DCP_GET_FAILOVER_LOG:
        return ev.FailoverLogResponse(
            **common, failover_log=tuple(decode_failover_log(frame.value)) if accepted else ()
        )
    return ev.Response(**common)


def _response_body(e: ev.Response) -> bytes:
    if isinstance(e, ev.StreamResponse) and e.status == Status.ROLLBACK and e.rollback_seqno is not None:
        return encode_rollback_seqno(e.rollback_seqno)
    if isinstance(e, (ev.StreamResponse, ev.FailoverLogResponse)) and e.failover_log:
        return encode_failover_log(e.failover_log)
    return e.value


# Frames to events and back.


def decode(frame: Frame) -> ev.DcpEvent:
    """Return a frame's event. Raises RemoteProtocolError for an unknown opcode or a wrong shape."""
    row = _ROWS.get(frame.opcode)
    if row is None or frame.magic in (Magic.SERVER_REQUEST, Magic.SERVER_RESPONSE):
        raise refusal(frame, f"not a message of DCP (opcode 0x{frame.opcode:02x})", Status.UNKNOWN_COMMAND)
    if frame.is_response:
        return _decode_response(frame)
    check_shape(frame, row.shape)
    event: ev.DcpEvent = row.decode(frame)
    return event


def opcode_of(event: ev.Event) -> int:
    if isinstance(event, ev.Response):
        return event.op
    opcode = _OPCODE_OF.get(type(event))
    if opcode is None:
        raise LocalProtocolError(f"{type(event).__name__} is not a message of DCP")
    return opcode


def to_frame(event: ev.Event, *, opaque: int | None = None) -> Frame:
    """Return an event's frame; `opaque` replaces the event's opaque."""
    opcode = opcode_of(event)
    opaque = event.opaque if opaque is None else opaque
    if isinstance(event, ev.Response):
        magic = int(Magic.RESPONSE)
        value = _response_body(event)
        return Frame(
            magic, opcode, event.datatype, event.status, opaque, event.cas, b"", event.extras, event.key, value
        )
    row = _ROWS[opcode]
    try:
        extras, key, value = row.encode(event)
    except struct.error as error:
        raise LocalProtocolError(f"a field does not fit: {error}", op=opcode) from None
    if len(value) > BODY_LENGTH_MAX:
        raise LocalProtocolError(f"a value of {len(value)} bytes", op=opcode)
    if not (fits(key, row.shape[1]) and fits(value, row.shape[2])):
        raise LocalProtocolError(f"this message has {row.shape[1]} key and {row.shape[2]} value", op=opcode)
    cas, datatype = (event.cas, event.datatype) if opcode in _WITH_CAS else (0, 0)  # type: ignore[attr-defined]
    return fr.request(
        opcode,
        datatype=datatype,
        vbucket=getattr(event, "vbid", 0),
        opaque=opaque,
        cas=cas,
        framing=fr.stream_id_framing(getattr(event, "stream_id", None)),
        extras=extras,
        key=key,
        value=value,
    )


def encode(event: ev.Event, *, opaque: int | None = None) -> bytes:
    return fr.encode(to_frame(event, opaque=opaque))


# Bodies of answers.


def decode_failover_log(body: bytes) -> list[tuple[int, int]]:
    count, rest = divmod(len(body), _FAILOVER_ENTRY.size)
    if rest or count > FAILOVER_LOG_LENGTH_MAX:
        raise RemoteProtocolError(f"a failover log of {len(body)} bytes", op=Opcode.DCP_GET_FAILOVER_LOG)
    return list(_FAILOVER_ENTRY.iter_unpack(body))


def encode_failover_log(log: ev.FailoverLog | list[tuple[int, int]]) -> bytes:
    return b"".join(_FAILOVER_ENTRY.pack(vbuuid, seqno) for vbuuid, seqno in log)


def decode_rollback_seqno(body: bytes) -> int:
    if len(body) != _U64.size:
        raise RemoteProtocolError(f"a rollback seqno of {len(body)} bytes", op=Opcode.DCP_STREAM_REQ)
    seqno: int = _U64.unpack(body)[0]
    return seqno


def encode_rollback_seqno(seqno: int) -> bytes:
    return _U64.pack(seqno)


def decode_all_vb_seqnos(body: bytes) -> list[tuple[int, int]]:
    if len(body) % _VB_SEQNO.size:
        raise RemoteProtocolError(f"seqnos of vbuckets in {len(body)} bytes", op=Opcode.GET_ALL_VB_SEQNOS)
    return list(_VB_SEQNO.iter_unpack(body))


def encode_all_vb_seqnos(seqnos: list[tuple[int, int]]) -> bytes:
    return b"".join(_VB_SEQNO.pack(vbid, seqno) for vbid, seqno in seqnos)


def encode_all_vb_seqnos_request(state: int | None = None, collection_id: int | None = None) -> bytes:
    """Return the extras: empty, a VbucketRole, or a role and a collection id."""
    if collection_id is not None:
        return _U32.pack(state or VbucketRole.ALIVE) + _U32.pack(collection_id)
    return b"" if state is None else _U32.pack(state)


def decode_all_vb_seqnos_request(frame: Frame) -> tuple[int, int | None]:
    if len(frame.extras) not in (0, 4, 8) or frame.key or frame.value:
        raise refusal(frame, f"extras of {len(frame.extras)} bytes, not 0, 4 or 8, or a key or a value")
    state, collection_id = int(VbucketRole.ALIVE), None
    if frame.extras:
        state = _U32.unpack_from(frame.extras)[0]
    if len(frame.extras) == 8:
        collection_id = _U32.unpack_from(frame.extras, 4)[0]
    if state not in frozenset(VbucketRole):
        raise refusal(frame, f"no such vbucket state: {state}")
    return state, collection_id
