"""The form of documents for one DCP client: key, value, datatype and tombstones, by its features and flags.

docs/protocol.md 2.2, 2.3 and 2.11, and the recordings 72_h* and 605_h*. Producers send a mutation as it is if `plain`
allows, and compute the differing parts here.
"""

from __future__ import annotations

from mirror.document import values
from mirror.server.controls import Controls
from mirror.wire import leb128
from mirror.wire.constants import Opcode

DELETION = int(Opcode.DCP_DELETION)
EXPIRATION = int(Opcode.DCP_EXPIRATION)

TIME_UNKNOWN = b"\0\0\0\0"
_NO_METADATA = b"\0\0"
_UNUSED = b"\0"


class DocumentShape:
    def __init__(self, controls: Controls) -> None:
        """`controls` must not change any more."""
        self._controls = controls
        self.unwanted_datatype = (0 if controls.xattrs else values.XATTR) | (0 if controls.snappy else values.SNAPPY)
        """Datatype bits that this client must not get."""
        self.plain = controls.collections and not (
            controls.no_value or controls.no_value_with_underlying_datatype or controls.force_compression
        )
        """A mutation without unwanted datatype bits needs no change."""

    def key(self, wire_key: bytes) -> bytes:
        return wire_key if self._controls.collections else wire_key[leb128.decode(wire_key)[1] :]

    def value(self, value: bytes, datatype: int, *, tombstone: bool) -> tuple[bytes, int]:
        """Return value and datatype. Raises ValueError for a value that cannot be taken apart."""
        controls = self._controls
        if controls.no_value_with_underlying_datatype:
            return b"", datatype
        if not controls.xattrs:
            value, datatype = values.without_xattrs(value, datatype)
        elif tombstone and not controls.deleted_user_xattrs:
            value, datatype = _without_user_xattrs(value, datatype)
        if controls.no_value:
            value, datatype = values.without_body(value, datatype)
        if not controls.snappy:
            value, datatype = values.inflate(value, datatype)
        elif controls.force_compression:
            value, datatype = values.deflate(value, datatype)
        return value, datatype

    def tombstone(self, opcode: int, seqnos: bytes, time: bytes) -> tuple[int, bytes]:
        """Return opcode and extras of a deletion or expiration: `seqnos` are its first 16 bytes, `time` 4 bytes."""
        if opcode == EXPIRATION and self._controls.expirations:
            return EXPIRATION, seqnos + time
        return DELETION, seqnos + (time + _UNUSED if self._controls.delete_times else _NO_METADATA)


def _without_user_xattrs(value: bytes, datatype: int) -> tuple[bytes, int]:
    if not datatype & values.XATTR or all(name.startswith(b"_") for name in values.split(value, datatype)[0]):
        return value, datatype
    return values.tombstone_value(value, datatype)
