"""The content of system events: changes of scopes and collections.

Key and value have three forms: versions 0 and 1 (fixed fields) and 2 (FlatBuffers). A CollectionCreated of a known
collection is a flush; versions 0 and 1 do not say so, but the owner of the manifest knows the collection. Sources:
kv_engine docs/dcp/documentation/commands/system_event.md (its example has scope and collection swapped; the field lists
and real servers have the scope first) and engines/ep/src/collections/events.fbs.
"""

from __future__ import annotations

import struct
from typing import Any, cast

from mirror.wire.constants import Opcode, SystemEventId
from mirror.wire.errors import LocalProtocolError, RemoteProtocolError
from mirror.wire.events import (
    CollectionCreated,
    CollectionDropped,
    CollectionModified,
    CollectionSettings,
    ScopeCreated,
    ScopeDropped,
    SystemEvent,
    SystemEventContent,
)

_UID_AND_SCOPE = ("manifest_uid", "scope_id")
_IDS = (*_UID_AND_SCOPE, "collection_id")

_FIXED: dict[type[Any], tuple[tuple[struct.Struct, tuple[str, ...]], ...]] = {
    CollectionCreated: ((struct.Struct(">QII"), _IDS), (struct.Struct(">QIII"), (*_IDS, "max_ttl"))),
    CollectionDropped: ((struct.Struct(">QII"), _IDS),),
    ScopeCreated: ((struct.Struct(">QI"), _UID_AND_SCOPE),),
    ScopeDropped: ((struct.Struct(">QI"), _UID_AND_SCOPE),),
}
"""The layout and fields of the value in version 0, and in version 1 if it differs. The event's key is the name."""

_FLATBUFFERS_VERSION = 2
# A FlatBuffers value starts with the offset of its table. The table starts with the (backward) offset of its vtable.
# The vtable has each field's offset in the table, or 0 if the field has its default.

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
_TABLES: dict[type[Any], tuple[tuple[str, _Kind], ...]] = {
    CollectionCreated: _COLLECTION,
    CollectionModified: _COLLECTION,
    CollectionDropped: _DROPPED_COLLECTION,
    ScopeCreated: _SCOPE_TABLE,
    ScopeDropped: _DROPPED_SCOPE,
}

_CONTENTS: dict[int, type[Any]] = {
    SystemEventId.COLLECTION_BEGIN: CollectionCreated,
    SystemEventId.COLLECTION_END: CollectionDropped,
    SystemEventId.SCOPE_CREATE: ScopeCreated,
    SystemEventId.SCOPE_DROP: ScopeDropped,
    SystemEventId.COLLECTION_MODIFY: CollectionModified,
}
_EVENT_IDS = {content: int(event) for event, content in _CONTENTS.items()}


def decode_system_event(event: SystemEvent) -> SystemEventContent:
    """Return the event's content. Raises RemoteProtocolError for an unknown kind or version, or a bad key or value. The
    caller must not skip such an event: it could be a drop, which removes documents.
    """
    kind = _CONTENTS.get(event.event)
    if kind is None or event.version not in ((0, 1, 2) if kind in _FIXED else (2,)):
        raise _error(event, f"no such system event: {event.event} in version {event.version}")
    if event.version == _FLATBUFFERS_VERSION:
        fields = _read_table(event, _TABLES[kind])
        if not fields.pop("ttl_valid", True):
            fields["max_ttl"] = None
    else:
        layout, names = _FIXED[kind][event.version if kind is CollectionCreated else 0]
        if len(event.value) != layout.size:
            raise _error(event, f"a value of {len(event.value)} bytes, not {layout.size} (event {event.event})")
        fields = dict(zip(names, layout.unpack(event.value), strict=True))
        if issubclass(kind, CollectionSettings | ScopeCreated):
            fields["name"] = _name(event, event.key)
    return cast(SystemEventContent, kind(**fields))


def encode_system_event(content: SystemEventContent, *, vbid: int, seqno: int, version: int = 1) -> SystemEvent:
    """Return the event of `content`. If `version` is not 2, a new collection with a max_ttl gets version 1, any other
    content version 0. Raises LocalProtocolError if `content` is a modification and `version` is not 2.
    """
    kind = type(content)
    if version == _FLATBUFFERS_VERSION:
        value = _write_table(content)
    elif kind not in _FIXED:
        raise LocalProtocolError(f"{kind.__name__} exists in version 2 only", op=Opcode.DCP_SYSTEM_EVENT, vbid=vbid)
    else:
        version = int(isinstance(content, CollectionCreated) and content.max_ttl is not None)
        layout, names = _FIXED[kind][version]
        value = layout.pack(*(getattr(content, name) for name in names))
    key = content.name.encode() if isinstance(content, CollectionSettings | ScopeCreated) else b""
    return SystemEvent(vbid, seqno, _EVENT_IDS[kind], version, key, value)


def _error(event: SystemEvent, detail: str) -> RemoteProtocolError:
    return RemoteProtocolError(detail, op=Opcode.DCP_SYSTEM_EVENT, vbid=event.vbid)


def _name(event: SystemEvent, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise _error(event, f"a name that is not UTF-8: {raw!r}") from None


def _read_table(event: SystemEvent, layout: tuple[tuple[str, _Kind], ...]) -> dict[str, Any]:
    """Return the fields of a FlatBuffers table; missing fields have their default."""
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


def _write_table(content: SystemEventContent) -> bytes:
    layout = _TABLES[type(content)]
    fields = {name: getattr(content, name) for name, _ in layout if name != "ttl_valid"}
    if isinstance(content, CollectionSettings):
        fields |= {"ttl_valid": content.max_ttl is not None, "max_ttl": content.max_ttl or 0}
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
