"""The content of system events: scopes and collections that begin, change and end.

Knows the three forms of key and value: version 0 and 1 (fixed fields) and 2 (FlatBuffers); must never know the existing
collections. Invariants: `decode_system_event(encode_system_event(c, ...)) == c` for what the version can carry; no
offset of a FlatBuffers value is followed unchecked. A begin of a known collection is a flush: the owner of the manifest
decides, because older forms do not say. Sources: kv_engine docs/dcp/documentation/commands/system_event.md (its example
has scope and collection swapped; the field lists and real servers have the scope first) and
engines/ep/src/collections/events.fbs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from mirror.wire.constants import Opcode, SystemEventId
from mirror.wire.errors import LocalProtocolError, RemoteProtocolError
from mirror.wire.events import (
    CollectionCreated,
    CollectionDropped,
    CollectionModified,
    ScopeCreated,
    ScopeDropped,
    SystemEvent,
    SystemEventContent,
)

_BEGIN_V0 = struct.Struct(">QII")
_BEGIN_V1 = struct.Struct(">QIII")
_END = struct.Struct(">QII")
_SCOPE = struct.Struct(">QI")

_FLATBUFFERS_VERSION = 2


def decode_system_event(event: SystemEvent) -> SystemEventContent:
    """Return the event's content. Unknown kinds or versions are a RemoteProtocolError: skipping one would lose data (a
    collection that ends takes its documents with it).
    """
    decode = _DECODERS.get((event.event, event.version))
    if decode is None:
        raise _error(event, f"no such system event: {event.event} in version {event.version}")
    return decode(event)


def encode_system_event(
    content: SystemEventContent,
    *,
    vbid: int,
    seqno: int,
    version: int = 1,
    opaque: int = 0,
    stream_id: int | None = None,
) -> SystemEvent:
    """Return the event of `content`. Version 1 falls to 0 if the kind has no version 1; a modification exists in
    version 2 only.
    """
    kind, write_fixed, write_table = _ENCODERS[type(content)]
    if version == _FLATBUFFERS_VERSION:
        key, value = write_table(content)
    elif write_fixed is None:
        raise LocalProtocolError(
            f"{type(content).__name__} exists in version 2 only", op=Opcode.DCP_SYSTEM_EVENT, vbid=vbid
        )
    else:
        key, value, version = write_fixed(content)
    return SystemEvent(vbid, seqno, int(kind), version, key, value, opaque=opaque, stream_id=stream_id)


def _error(event: SystemEvent, detail: str) -> RemoteProtocolError:
    return RemoteProtocolError(detail, op=Opcode.DCP_SYSTEM_EVENT, vbid=event.vbid)


def _name(event: SystemEvent, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise _error(event, f"a name that is not UTF-8: {raw!r}") from None


def _fixed(event: SystemEvent, layout: struct.Struct) -> tuple[int, ...]:
    if len(event.value) != layout.size:
        raise _error(event, f"a value of {len(event.value)} bytes, not {layout.size} (event {event.event})")
    return layout.unpack(event.value)


# Versions 0 and 1.


def _begin_v0(event: SystemEvent) -> SystemEventContent:
    uid, scope_id, collection_id = _fixed(event, _BEGIN_V0)
    return CollectionCreated(uid, scope_id, collection_id, _name(event, event.key))


def _begin_v1(event: SystemEvent) -> SystemEventContent:
    uid, scope_id, collection_id, max_ttl = _fixed(event, _BEGIN_V1)
    return CollectionCreated(uid, scope_id, collection_id, _name(event, event.key), max_ttl)


def _end_v0(event: SystemEvent) -> SystemEventContent:
    uid, scope_id, collection_id = _fixed(event, _END)
    return CollectionDropped(uid, scope_id, collection_id)


def _scope_create_v0(event: SystemEvent) -> SystemEventContent:
    uid, scope_id = _fixed(event, _SCOPE)
    return ScopeCreated(uid, scope_id, _name(event, event.key))


def _scope_drop_v0(event: SystemEvent) -> SystemEventContent:
    uid, scope_id = _fixed(event, _SCOPE)
    return ScopeDropped(uid, scope_id)


def _write_begin(content: CollectionCreated) -> tuple[bytes, bytes, int]:
    fields = (content.manifest_uid, content.scope_id, content.collection_id)
    if content.max_ttl is None:
        return content.name.encode(), _BEGIN_V0.pack(*fields), 0
    return content.name.encode(), _BEGIN_V1.pack(*fields, content.max_ttl), 1


def _write_end(content: CollectionDropped) -> tuple[bytes, bytes, int]:
    return b"", _END.pack(content.manifest_uid, content.scope_id, content.collection_id), 0


def _write_scope_create(content: ScopeCreated) -> tuple[bytes, bytes, int]:
    return content.name.encode(), _SCOPE.pack(content.manifest_uid, content.scope_id), 0


def _write_scope_drop(content: ScopeDropped) -> tuple[bytes, bytes, int]:
    return b"", _SCOPE.pack(content.manifest_uid, content.scope_id), 0


# Version 2. A FlatBuffers value starts with the offset of its table; a table starts with the (backward) offset of its
# vtable, which says for each field how far from the table's start it stands, or 0 for a field that has its default.

_FB_U16 = struct.Struct("<H")
_FB_U32 = struct.Struct("<I")
_FB_I32 = struct.Struct("<i")
_FB_U64 = struct.Struct("<Q")
_FB_BOOL = struct.Struct("<?")

_STRING = "string"
_Kind = struct.Struct | str

_COLLECTION: tuple[tuple[str, _Kind], ...] = (
    ("manifest_uid", _FB_U64),
    ("scope_id", _FB_U32),
    ("collection_id", _FB_U32),
    ("ttl_valid", _FB_BOOL),
    ("max_ttl", _FB_U32),
    ("name", _STRING),
    ("history", _FB_BOOL),
    ("default_collection_mvs", _FB_U64),
    ("metered", _FB_BOOL),
    ("flush_uid", _FB_U64),
)
_DROPPED_COLLECTION: tuple[tuple[str, _Kind], ...] = (
    ("manifest_uid", _FB_U64),
    ("scope_id", _FB_U32),
    ("collection_id", _FB_U32),
    ("system_collection", _FB_BOOL),
)
_SCOPE_TABLE: tuple[tuple[str, _Kind], ...] = (("manifest_uid", _FB_U64), ("scope_id", _FB_U32), ("name", _STRING))
_DROPPED_SCOPE: tuple[tuple[str, _Kind], ...] = (
    ("manifest_uid", _FB_U64),
    ("scope_id", _FB_U32),
    ("system_scope", _FB_BOOL),
)


def _read_table(event: SystemEvent, layout: tuple[tuple[str, _Kind], ...]) -> dict[str, Any]:
    """Return the fields of a FlatBuffers table; missing ones have their default."""
    value = event.value

    def at(kind: struct.Struct, pos: int) -> Any:
        if not 0 <= pos <= len(value) - kind.size:
            raise _error(event, f"a FlatBuffers offset of {pos} in a value of {len(value)} bytes")
        return kind.unpack_from(value, pos)[0]

    table = at(_FB_U32, 0)
    vtable = table - at(_FB_I32, table)
    vtable_size = at(_FB_U16, vtable)
    fields: dict[str, Any] = {}
    for index, (name, kind) in enumerate(layout):
        slot = 4 + 2 * index
        offset = at(_FB_U16, vtable + slot) if slot + 2 <= vtable_size else 0
        if isinstance(kind, str):
            fields[name] = ""
            if offset:
                start = table + offset + at(_FB_U32, table + offset)
                length = at(_FB_U32, start)
                if length > len(value) - start - 4:
                    raise _error(event, f"a FlatBuffers string of {length} bytes in a value of {len(value)}")
                fields[name] = _name(event, value[start + 4 : start + 4 + length])
        else:
            fields[name] = at(kind, table + offset) if offset else kind.unpack(bytes(kind.size))[0]
    return fields


def _write_table(layout: tuple[tuple[str, _Kind], ...], fields: dict[str, Any]) -> bytes:
    vtable_size = 4 + 2 * len(layout)
    vtable_pos = 4
    table_pos = -(-(vtable_pos + vtable_size) // 8) * 8
    offsets: list[int] = []
    pos = 4
    for _, kind in layout:
        size = kind.size if isinstance(kind, struct.Struct) else 4
        pos = -(-pos // size) * size
        offsets.append(pos)
        pos += size
    body = bytearray(-(-pos // 4) * 4)
    _FB_I32.pack_into(body, 0, table_pos - vtable_pos)
    strings = b""
    for (name, kind), offset in zip(layout, offsets, strict=True):
        if isinstance(kind, struct.Struct):
            kind.pack_into(body, offset, fields[name])
        else:
            raw = fields[name].encode()
            _FB_U32.pack_into(body, offset, len(body) + len(strings) - offset)
            padding = 4 - len(raw) % 4
            strings += _FB_U32.pack(len(raw)) + raw + bytes(padding)
    vtable = struct.pack(f"<{2 + len(offsets)}H", vtable_size, len(body), *offsets)
    head = _FB_U32.pack(table_pos) + vtable
    return head + bytes(table_pos - len(head)) + bytes(body) + strings


def _collection_v2(kind: type[Any]) -> Callable[[SystemEvent], SystemEventContent]:
    def decode(event: SystemEvent) -> SystemEventContent:
        fields = _read_table(event, _COLLECTION)
        if not fields.pop("ttl_valid"):
            fields["max_ttl"] = None
        content: SystemEventContent = kind(**fields)
        return content

    return decode


def _write_collection_table(content: CollectionCreated | CollectionModified) -> tuple[bytes, bytes]:
    fields = {name: getattr(content, name) for name, _ in _COLLECTION if name != "ttl_valid"}
    fields |= {"ttl_valid": content.max_ttl is not None, "max_ttl": content.max_ttl or 0}
    return content.name.encode(), _write_table(_COLLECTION, fields)


def _table_writer(layout: tuple[tuple[str, _Kind], ...]) -> Callable[[Any], tuple[bytes, bytes]]:
    def write(content: Any) -> tuple[bytes, bytes]:
        fields = {name: getattr(content, name) for name, _ in layout}
        return str(fields.get("name", "")).encode(), _write_table(layout, fields)

    return write


_DECODERS: dict[tuple[int, int], Callable[[SystemEvent], SystemEventContent]] = {
    (SystemEventId.COLLECTION_BEGIN, 0): _begin_v0,
    (SystemEventId.COLLECTION_BEGIN, 1): _begin_v1,
    (SystemEventId.COLLECTION_BEGIN, 2): _collection_v2(CollectionCreated),
    (SystemEventId.COLLECTION_END, 0): _end_v0,
    (SystemEventId.COLLECTION_END, 1): _end_v0,
    (SystemEventId.COLLECTION_END, 2): lambda e: CollectionDropped(**_read_table(e, _DROPPED_COLLECTION)),
    (SystemEventId.SCOPE_CREATE, 0): _scope_create_v0,
    (SystemEventId.SCOPE_CREATE, 1): _scope_create_v0,
    (SystemEventId.SCOPE_CREATE, 2): lambda e: ScopeCreated(**_read_table(e, _SCOPE_TABLE)),
    (SystemEventId.SCOPE_DROP, 0): _scope_drop_v0,
    (SystemEventId.SCOPE_DROP, 1): _scope_drop_v0,
    (SystemEventId.SCOPE_DROP, 2): lambda e: ScopeDropped(**_read_table(e, _DROPPED_SCOPE)),
    (SystemEventId.COLLECTION_MODIFY, 2): _collection_v2(CollectionModified),
}

_Fixed = Callable[[Any], tuple[bytes, bytes, int]]
_ENCODERS: dict[type[Any], tuple[SystemEventId, _Fixed | None, Callable[[Any], tuple[bytes, bytes]]]] = {
    CollectionCreated: (SystemEventId.COLLECTION_BEGIN, _write_begin, _write_collection_table),
    CollectionModified: (SystemEventId.COLLECTION_MODIFY, None, _write_collection_table),
    CollectionDropped: (SystemEventId.COLLECTION_END, _write_end, _table_writer(_DROPPED_COLLECTION)),
    ScopeCreated: (SystemEventId.SCOPE_CREATE, _write_scope_create, _table_writer(_SCOPE_TABLE)),
    ScopeDropped: (SystemEventId.SCOPE_DROP, _write_scope_drop, _table_writer(_DROPPED_SCOPE)),
}
"""Content -> kind, writer of the fixed form (key, value, version), writer of the table (key, value)."""
