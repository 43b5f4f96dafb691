"""One version of one key, as a complete DCP frame.

`frame` has opaque 0 and all parts that a client can negotiate (collection id before the key, true datatype, xattrs,
delete time), and `ItemEncoder` adapts it to a client. No attribute but `next_seqno` changes.
"""

from __future__ import annotations

import struct

from mirror.wire.constants import Magic, Opcode
from mirror.wire.events import SystemEventContent
from mirror.wire.keys import decode_leb128

MUTATION = int(Opcode.DCP_MUTATION)
DELETION = int(Opcode.DCP_DELETION)
EXPIRATION = int(Opcode.DCP_EXPIRATION)
SYSTEM_EVENT = int(Opcode.DCP_SYSTEM_EVENT)
PREPARE = int(Opcode.DCP_PREPARE)
ABORT = int(Opcode.DCP_ABORT)
BETWEEN = frozenset((int(Opcode.DCP_SEQNO_ADVANCED), int(Opcode.DCP_SNAPSHOT_MARKER)))

REQUEST = int(Magic.REQUEST)
NRU = 2
"""Eviction hint in each mutation: kv_engine's default."""

MUTATION_HEAD = struct.Struct(">BBHBBHIIQ QQIIIHB")

_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")

_PREPARE_DELETED = 24 + 29


class Item:
    """`key` is the wire key with its collection id; system events have a key that no document can have."""

    __slots__ = ("frame", "key", "next_seqno", "seqno")

    def __init__(self, seqno: int, key: bytes, frame: bytes) -> None:
        self.seqno = seqno
        self.key = key
        self.frame = frame
        self.next_seqno = 0
        """Seqno of the change that superseded this version; 0: none did; its own `seqno`: it was purged."""

    def __repr__(self) -> str:
        return f"Item({self.seqno}, {self.key!r}, {Opcode(self.kind).name})"

    @property
    def kind(self) -> int:
        return self.frame[1]

    @property
    def datatype(self) -> int:
        return self.frame[5]

    @property
    def cas(self) -> int:
        return int(_U64.unpack_from(self.frame, 16)[0])

    @property
    def rev_seqno(self) -> int:
        return int(_U64.unpack_from(self.frame, 32)[0]) if self.is_document else 0

    @property
    def flags(self) -> int:
        """The flags that the client stored; 0 for a tombstone."""
        return int(_U32.unpack_from(self.frame, 40)[0]) if self.frame[1] in (MUTATION, PREPARE) else 0

    @property
    def expiry(self) -> int:
        """Unix time in seconds at which the document expires, or 0; for a tombstone the time of the deletion."""
        position = {MUTATION: 44, PREPARE: 44, DELETION: 40, EXPIRATION: 40}.get(self.frame[1])
        return 0 if position is None else int(_U32.unpack_from(self.frame, position)[0])

    @property
    def value(self) -> bytes:
        """The value as stored: perhaps compressed, xattrs before the body."""
        extras = self.frame[4]
        return self.frame[24 + extras + int.from_bytes(self.frame[2:4]) :]

    @property
    def deleted(self) -> bool:
        return self.frame[1] in (DELETION, EXPIRATION)

    @property
    def deletes(self) -> bool:
        return self.frame[1] == PREPARE and self.frame[_PREPARE_DELETED] != 0

    @property
    def is_document(self) -> bool:
        return self.frame[1] not in (SYSTEM_EVENT, ABORT)

    @property
    def collection_id(self) -> int:
        """The id of the key's collection. For a system event use `vbucket.system_id`."""
        return self.key[0] if self.key[0] < 0x80 else decode_leb128(self.key)[0]

    @property
    def event(self) -> int:
        return int(_U32.unpack_from(self.frame, 32)[0])


class BetweenItem(Item):
    """A marker or SeqnoAdvanced within a backfill, sent unchanged after all items up to its seqno."""

    __slots__ = ()

    def __init__(self, seqno: int, frame: bytes) -> None:
        super().__init__(seqno, b"", frame)


class EventItem(Item):
    """A system event. `ItemEncoder` makes its FlatBuffers form from `content`."""

    __slots__ = ("content",)

    def __init__(self, seqno: int, key: bytes, frame: bytes, content: SystemEventContent) -> None:
        super().__init__(seqno, key, frame)
        self.content = content


def mutation_frame(
    vbid: int,
    key: bytes,
    seqno: int,
    rev_seqno: int,
    cas: int,
    value: bytes,
    *,
    flags: int = 0,
    expiry: int = 0,
    datatype: int = 0,
) -> bytes:
    """Return the bytes of a DCP mutation. For speed this bypasses `codec_dcp`."""
    length = 31 + len(key) + len(value)
    head = MUTATION_HEAD.pack(
        REQUEST, MUTATION, len(key), 31, datatype, vbid, length, 0, cas, seqno, rev_seqno, flags, expiry, 0, 0, NRU
    )
    return head + key + value
