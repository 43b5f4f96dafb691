"""Encodes and decodes one frame of the memcached binary protocol: a 24-byte header, plain or flexible framing.

Sources: kv_engine docs/BinaryProtocol.md (packet structure, flexible framing extras),
include/memcached/dcp_stream_id.h; docs/protocol.md 2.1.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from mirror.wire.constants import BODY_LENGTH_MAX, HEADER_SIZE, FrameInfoId, Magic, Status, opcode_name
from mirror.wire.errors import LocalProtocolError, RemoteProtocolError

Buffer = bytes | bytearray | memoryview
NONE, MAY, MUST = "no", "perhaps a", "a"
Shape = tuple[tuple[int, ...], str, str]
"""Possible lengths of a message's extras, then NONE, MAY or MUST for its key and for its value."""

HEADER = struct.Struct(">BBHBBHIIQ")
"""magic, opcode, key length (flexible: framing length and key length, a byte each), extras length, datatype,
vbucket or status, body length, opaque, cas."""
assert HEADER.size == HEADER_SIZE

_LENGTHS = struct.Struct(">BBHBxxxI")
"""The first 12 bytes of the header, with all lengths."""

_PLAIN = 0
_FLEX = 1
_KIND = {
    int(Magic.REQUEST): _PLAIN,
    int(Magic.RESPONSE): _PLAIN,
    int(Magic.SERVER_REQUEST): _PLAIN,
    int(Magic.SERVER_RESPONSE): _PLAIN,
    int(Magic.FLEX_REQUEST): _FLEX,
    int(Magic.FLEX_RESPONSE): _FLEX,
}
_RESPONSES = frozenset((int(Magic.RESPONSE), int(Magic.FLEX_RESPONSE), int(Magic.SERVER_RESPONSE)))
_FLEX_REQUEST = int(Magic.FLEX_REQUEST)
_FLEX_OF = {int(Magic.REQUEST): _FLEX_REQUEST, int(Magic.RESPONSE): int(Magic.FLEX_RESPONSE)}

_ESCAPE = 15
"""A nibble of a frame info with this value stands for 15 plus the next byte."""


@dataclass(frozen=True, slots=True)
class Frame:
    """`vbucket` holds the status if the frame is a response."""

    magic: int
    opcode: int
    datatype: int = 0
    vbucket: int = 0
    opaque: int = 0
    cas: int = 0
    framing: bytes = b""
    extras: bytes = b""
    key: bytes = b""
    value: bytes = b""

    @property
    def status(self) -> int:
        return self.vbucket

    @property
    def is_response(self) -> bool:
        return self.magic in _RESPONSES

    @property
    def wire_size(self) -> int:
        return HEADER_SIZE + len(self.framing) + len(self.extras) + len(self.key) + len(self.value)

    @property
    def stream_id(self) -> int | None:
        if not self.framing:
            return None
        for info_id, content in frame_infos(self.framing):
            if info_id == FrameInfoId.DCP_STREAM_ID:
                if len(content) != 2:
                    raise RemoteProtocolError(f"a stream id of {len(content)} bytes", op=self.opcode, vbid=self.vbucket)
                return int.from_bytes(content)
        return None


def frame_size(buf: Buffer, pos: int = 0, body_length_max: int = BODY_LENGTH_MAX) -> int:
    """Return the size in bytes of the frame at `pos`, or 0 if its header is incomplete. Raises RemoteProtocolError for
    a wrong magic (one byte is enough) or impossible lengths.
    """
    available = len(buf) - pos
    if available <= 0:
        return 0
    kind = _KIND.get(buf[pos])
    if kind is None:
        raise RemoteProtocolError(f"no such magic: 0x{buf[pos]:02x}")
    if available < HEADER_SIZE:
        return 0
    body_length: int
    _, opcode, key_length, extras_length, body_length = _LENGTHS.unpack_from(buf, pos)
    if body_length > body_length_max:
        raise _bad_length(buf, pos, opcode, f"body length {body_length} is above the limit of {body_length_max}")
    framing_length = 0
    if kind == _FLEX:
        framing_length, key_length = key_length >> 8, key_length & 0xFF
    if framing_length + extras_length + key_length > body_length:
        lengths = f"framing {framing_length}, extras {extras_length} and key {key_length}"
        raise _bad_length(buf, pos, opcode, f"{lengths} do not fit in a body of {body_length} bytes")
    return HEADER_SIZE + body_length


def _bad_length(buf: Buffer, pos: int, opcode: int, detail: str) -> RemoteProtocolError:
    vbid = None if buf[pos] in _RESPONSES else int.from_bytes(buf[pos + 6 : pos + 8])
    return RemoteProtocolError(detail, op=opcode, vbid=vbid, status=Status.EINVAL)


def decode(buf: Buffer, pos: int = 0, body_length_max: int = BODY_LENGTH_MAX) -> tuple[Frame, int]:
    """Return the frame at `pos` and the position after it. Raises RemoteProtocolError, also for an incomplete frame."""
    size = frame_size(buf, pos, body_length_max)
    available = len(buf) - pos
    if size == 0 or size > available:
        needed = size or HEADER_SIZE
        raise RemoteProtocolError(f"truncated frame: {max(available, 0)} of {needed} bytes")
    magic, opcode, key_length, extras_length, datatype, vbucket, _, opaque, cas = HEADER.unpack_from(buf, pos)
    framing_length = 0
    if _KIND[magic] == _FLEX:
        framing_length, key_length = key_length >> 8, key_length & 0xFF
    extras_pos = pos + HEADER_SIZE + framing_length
    key_pos = extras_pos + extras_length
    value_pos = key_pos + key_length
    end = pos + size
    frame = Frame(
        magic,
        opcode,
        datatype,
        vbucket,
        opaque,
        cas,
        bytes(buf[pos + HEADER_SIZE : extras_pos]),
        bytes(buf[extras_pos:key_pos]),
        bytes(buf[key_pos:value_pos]),
        bytes(buf[value_pos:end]),
    )
    return frame, end


def encode(frame: Frame) -> bytes:
    """Return the bytes of a frame. Raises LocalProtocolError for a field that does not fit."""
    framing_length, extras_length, key_length = len(frame.framing), len(frame.extras), len(frame.key)
    kind = _KIND.get(frame.magic)
    if kind is None:
        raise LocalProtocolError(f"no such magic: 0x{frame.magic:02x}", op=frame.opcode)
    if kind == _FLEX:
        if framing_length > 0xFF or key_length > 0xFF:
            detail = f"framing of {framing_length} and key of {key_length} bytes do not fit in a flexible header"
            raise LocalProtocolError(detail, op=frame.opcode)
        key_field = framing_length << 8 | key_length
    elif framing_length:
        raise LocalProtocolError(f"magic 0x{frame.magic:02x} cannot carry framing extras", op=frame.opcode)
    else:
        key_field = key_length
    body_length = framing_length + extras_length + key_length + len(frame.value)
    try:
        header = HEADER.pack(
            frame.magic,
            frame.opcode,
            key_field,
            extras_length,
            frame.datatype,
            frame.vbucket,
            body_length,
            frame.opaque,
            frame.cas,
        )
    except struct.error as error:
        raise LocalProtocolError(f"does not fit in a header: {error}", op=frame.opcode) from None
    return b"".join((header, frame.framing, frame.extras, frame.key, frame.value))


def refusal(frame: Frame, detail: str, status: int = Status.EINVAL) -> RemoteProtocolError:
    vbid = None if frame.is_response else frame.vbucket
    return RemoteProtocolError(detail, op=frame.opcode, vbid=vbid, status=status)


def fits(part: bytes, presence: str) -> bool:
    return presence == MAY or bool(part) == (presence == MUST)


def check_shape(frame: Frame, shape: Shape) -> None:
    """Raise RemoteProtocolError unless extras, key and value have possible lengths."""
    lengths, key, value = shape
    if len(frame.extras) not in lengths:
        raise refusal(frame, f"extras of {len(frame.extras)} bytes, not {' or '.join(map(str, lengths))}")
    for name, part, presence in (("key", frame.key, key), ("value", frame.value, value)):
        if not fits(part, presence):
            fault = f"unexpected {name} of {len(part)} bytes" if part else f"missing {name}"
            raise refusal(frame, f"{fault}; this message has {presence} {name}")


def frame_infos(framing: bytes) -> list[tuple[int, bytes]]:
    """Return the (id, content) pairs in framing extras. If id and length are escaped, the id's extra byte comes first.
    Raises RemoteProtocolError.
    """
    infos = []
    pos, end = 0, len(framing)
    while pos < end:
        info_id, length = framing[pos] >> 4, framing[pos] & 0x0F
        pos += 1
        if info_id == _ESCAPE and pos < end:
            info_id += framing[pos]
            pos += 1
        elif info_id == _ESCAPE:
            raise RemoteProtocolError("framing extras end inside of a frame info")
        if length == _ESCAPE and pos < end:
            length += framing[pos]
            pos += 1
        elif length == _ESCAPE:
            raise RemoteProtocolError("framing extras end inside of a frame info")
        if length > end - pos:
            raise RemoteProtocolError(f"frame info {info_id} of {length} bytes, {end - pos} are left")
        infos.append((info_id, framing[pos : pos + length]))
        pos += length
    return infos


def stream_id_framing(stream_id: int | None) -> bytes:
    if stream_id is None:
        return b""
    if not 0 <= stream_id <= 0xFFFF:
        raise LocalProtocolError(f"stream id {stream_id} is not 16 bits")
    return b"\x22" + stream_id.to_bytes(2)


def with_stream_id(message: bytes, stream_id: int) -> bytes:
    """Return a plain request in flexible framing, with a stream id. For speed this makes no Frame."""
    key_length = int.from_bytes(message[2:4])
    body_length = int.from_bytes(message[8:12]) + 3
    head = bytes((_FLEX_REQUEST, message[1], 3, key_length)) + message[4:8] + body_length.to_bytes(4) + message[12:24]
    return head + b"\x22" + stream_id.to_bytes(2) + message[24:]


def request(
    opcode: int,
    *,
    datatype: int = 0,
    vbucket: int = 0,
    opaque: int = 0,
    cas: int = 0,
    framing: bytes = b"",
    extras: bytes = b"",
    key: bytes = b"",
    value: bytes = b"",
) -> Frame:
    magic = int(Magic.FLEX_REQUEST if framing else Magic.REQUEST)
    return Frame(magic, int(opcode), int(datatype), vbucket, opaque, cas, framing, extras, key, value)


def response(
    to: Frame,
    status: int = Status.SUCCESS,
    *,
    datatype: int = 0,
    cas: int = 0,
    framing: bytes = b"",
    extras: bytes = b"",
    key: bytes = b"",
    value: bytes = b"",
) -> Frame:
    if to.is_response:
        raise LocalProtocolError(f"{opcode_name(to.opcode)} is itself a response", op=to.opcode)
    magic = int(Magic.SERVER_RESPONSE if to.magic == Magic.SERVER_REQUEST else Magic.RESPONSE)
    magic = _FLEX_OF.get(magic, magic) if framing else magic
    return Frame(magic, to.opcode, int(datatype), int(status), to.opaque, cas, framing, extras, key, value)


class FrameBuffer:
    """A queue that takes received bytes and returns whole frames. The owner calls `next_frame` until it returns None,
    and only then feeds again. A byte is copied a bounded number of times, even if bytes arrive one by one.
    """

    __slots__ = ("_bytes_needed", "_data", "_pieces", "_pos", "_size", "body_length_max")

    def __init__(self, body_length_max: int = BODY_LENGTH_MAX) -> None:
        assert 0 < body_length_max < 1 << 32
        self.body_length_max = body_length_max
        self._data = b""
        self._pos = 0
        self._pieces: list[bytes] = []
        self._size = 0
        self._bytes_needed = 1

    def __len__(self) -> int:
        return self._size

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        if data:
            self._pieces.append(bytes(data))
            self._size += len(data)

    def next_frame(self) -> Frame | None:
        if self._size < self._bytes_needed:
            return None
        if self._pieces:
            self._data = b"".join((self._data[self._pos :], *self._pieces))
            self._pieces.clear()
            self._pos = 0
        size = frame_size(self._data, self._pos, self.body_length_max)
        if size == 0 or size > self._size:
            self._bytes_needed = size or HEADER_SIZE
            return None
        frame, end = decode(self._data, self._pos, self.body_length_max)
        self._size -= size
        self._pos = end
        self._bytes_needed = 1
        if self._size == 0:
            self._data, self._pos = b"", 0
        return frame
