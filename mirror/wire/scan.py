"""The hot loop: turns a buffer of received bytes into rows for the store. A `Run` has rows of one stream.

The sink checks the order of seqnos. A source sends one message of each stream in turn (docs/protocol.md 2.8), so the
rows of a run come from the whole buffer:
- Frames with the same opaque keep their order; frames of different streams may change places. But an answer is returned
  after all messages that came before it, and before all that came after it.
- The same bytes, cut into other buffers, give the same result, except that a run ends at the end of a buffer.
- A run holds only storable keys (`keys.key_problem`). A data message with another key is returned as a Frame.

For speed the loop has one `unpack` per frame, local names only, and no object per row except its tuple. Sources:
docs/protocol.md 2.1 and 2.11; kv_engine docs/dcp/documentation/commands/{mutation,deletion,expiration}.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from operator import itemgetter

from mirror.wire.constants import BODY_LENGTH_MAX, HEADER_SIZE, Magic, Opcode
from mirror.wire.errors import LocalProtocolError, RemoteProtocolError
from mirror.wire.frame import Frame, decode, encode, frame_size
from mirror.wire.keys import COLLECTION_ID_BYTES_MAX

Row = tuple[bytes, bytes]
"""(prefix from `routes` followed by the seqno, whole frame)."""

_PEEK = struct.Struct(">HHBxHII8x8s")
"""magic and opcode, key length, extras length, vbucket, body length, opaque, seqno (the extras' first eight bytes)."""
assert _PEEK.size == HEADER_SIZE + 8

_EXTRAS: dict[int, tuple[int, ...]] = {
    int(Opcode.DCP_MUTATION): (31,),
    int(Opcode.DCP_DELETION): (18, 21),
    int(Opcode.DCP_EXPIRATION): (20,),
}
"""Opcode of a data message -> the lengths its extras can have."""

_PLAIN_EXTRAS = {int(Magic.REQUEST) << 8 | opcode: lengths for opcode, lengths in _EXTRAS.items()}
_MUTATION = int(Magic.REQUEST) << 8 | int(Opcode.DCP_MUTATION)
_frame_of = itemgetter(1)
_REQUESTS = frozenset((int(Magic.REQUEST), int(Magic.FLEX_REQUEST)))


class Run:
    """Consecutive data messages of one stream. `byte_count` is their size for flow control."""

    __slots__ = ("byte_count", "opaque", "rows", "vbid")

    def __init__(self, opaque: int, vbid: int, rows: list[Row], byte_count: int) -> None:
        self.opaque = opaque
        self.vbid = vbid
        self.rows = rows
        self.byte_count = byte_count


def scan(
    data: bytes, pos: int, routes: Mapping[int, bytes], body_length_max: int = BODY_LENGTH_MAX
) -> tuple[list[Run | Frame], int]:
    """Return the whole messages in `data[pos:]`, and the position after them. `routes` maps the opaque of a stream to
    the prefix of its rows. A data message of such a stream becomes a row of a Run; any other message becomes a Frame.
    If this raises, the messages of the call are lost: the caller must not acknowledge them, and closes the connection.
    """
    unpack = _PEEK.unpack_from
    extras_of = _PLAIN_EXTRAS.get
    items: list[Run | Frame] = []
    runs: list[Run] = []
    open_runs: dict[int, tuple[int, bytes, Callable[[Row], None]]] = {}  # by opaque: vbid, prefix, run.rows.append
    find_run = open_runs.get
    no_rows: list[Row] = []
    none_open = (-1, b"", no_rows.append)
    no_extras: tuple[int, ...] = ()
    end = len(data)
    last = end - HEADER_SIZE - 8
    while pos <= last:
        kind, key_length, extras_length, vbid, body_length, opaque, seqno = unpack(data, pos)
        after = pos + 24 + body_length
        if (
            after <= end
            and (extras_length == 31 if kind == _MUTATION else extras_length in extras_of(kind, no_extras))
            and 0 < key_length <= 251
            and key_length <= body_length - extras_length
            and body_length <= body_length_max
            and (data[pos + 24 + extras_length] < 0x80 or _prefix_ends(data, pos + 24 + extras_length, key_length))
        ):
            run_vbid, prefix, add_row = find_run(opaque, none_open)
            if run_vbid == vbid:
                add_row((prefix + seqno, data[pos:after]))
                pos = after
                continue
            if opaque in routes:
                prefix = routes[opaque]
                run = Run(opaque, vbid, [(prefix + seqno, data[pos:after])], 0)
                open_runs[opaque] = vbid, prefix, run.rows.append
                runs.append(run)
                items.append(run)
                pos = after
                continue
        frame = _other(data, pos, body_length_max)
        if frame is None:
            break
        if frame.magic in _REQUESTS:
            open_runs.pop(opaque, None)
        else:
            open_runs.clear()
        items.append(frame)
        pos = after
    for run in runs:
        run.byte_count = sum(map(len, map(_frame_of, run.rows)))
    while pos < end and (frame := _other(data, pos, body_length_max)) is not None:
        items.append(frame)
        pos += frame.wire_size
    return items, pos


def _prefix_ends(data: bytes, start: int, key_length: int) -> bool:
    """True if a collection id of several bytes ends within the key."""
    return min(data[start : start + min(key_length, COLLECTION_ID_BYTES_MAX)]) < 0x80


def _other(data: bytes, pos: int, body_length_max: int) -> Frame | None:
    """Return the frame at `pos`, or None if it is incomplete. The header is checked even then."""
    size = frame_size(data, pos, body_length_max)
    if size == 0:
        return None
    opcode = data[pos + 1]
    if opcode in _EXTRAS and data[pos] in _REQUESTS:
        flexible = data[pos] == Magic.FLEX_REQUEST
        key_length = data[pos + 3] if flexible else data[pos + 2] << 8 | data[pos + 3]
        _check_data(opcode, data[pos + 4], key_length, size - HEADER_SIZE, data[pos + 6] << 8 | data[pos + 7])
    if size > len(data) - pos:
        return None
    return decode(data, pos, body_length_max)[0]


def _check_data(opcode: int, extras_length: int, key_length: int, body_length: int, vbid: int) -> None:
    legal = _EXTRAS[opcode]
    if extras_length not in legal:
        expected = " or ".join(map(str, legal))
        detail = f"extras of {extras_length} bytes, not {expected} (key {key_length}, body {body_length})"
        raise RemoteProtocolError(detail, op=opcode, vbid=vbid)
    if key_length == 0:
        raise RemoteProtocolError(f"no key (extras {extras_length}, body {body_length})", op=opcode, vbid=vbid)


def is_data(frame: Frame) -> bool:
    return frame.opcode in _EXTRAS and frame.magic in _REQUESTS


def normalise(frame: Frame, prefix: bytes = b"") -> bytes:
    """Return the stored form of a data message: plain magic, no framing extras, a key with a collection id. If the
    connection has no collections, `prefix` is the id of the default collection, `b"\\0"`.
    """
    if not is_data(frame):
        raise LocalProtocolError("only mutations, deletions and expirations are stored as rows", op=frame.opcode)
    body_length = frame.wire_size - HEADER_SIZE
    _check_data(frame.opcode, len(frame.extras), len(frame.key), body_length, frame.vbucket)
    return encode(
        Frame(
            int(Magic.REQUEST),
            frame.opcode,
            frame.datatype,
            frame.vbucket,
            frame.opaque,
            frame.cas,
            b"",
            frame.extras,
            prefix + frame.key,
            frame.value,
        )
    )


def row_of(frame: Frame, row_prefix: bytes, key_prefix: bytes = b"") -> Row:
    value = normalise(frame, key_prefix)
    return row_prefix + frame.extras[:8], value
