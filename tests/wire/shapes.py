"""Strategies of hypothesis for what is said on the wire."""

from __future__ import annotations

from hypothesis import strategies as st

from mirror.wire import events as ev
from mirror.wire.constants import MarkerVersion, Opcode
from mirror.wire.frame import Frame, decode, frame_size
from mirror.wire.keys import KEY_BYTES_MAX, key_problem
from mirror.wire.scan import Run, is_data

u8 = st.integers(0, 2**8 - 1)
u16 = st.integers(0, 2**16 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
blobs = st.binary(max_size=60)
keys = st.binary(min_size=1, max_size=40)
names = st.text(max_size=20)

stream = {"opaque": u32, "stream_id": st.none() | u16}

frames = st.builds(
    Frame, st.sampled_from((0x80, 0x81, 0x82, 0x83)), u8, u8, u16, u32, u64, st.just(b""), blobs, blobs, blobs
) | st.builds(Frame, st.sampled_from((0x08, 0x18)), u8, u8, u16, u32, u64, blobs, blobs, blobs, blobs)

mutations = st.builds(
    ev.Mutation, u16, keys, u64, u64, u64, u32, u32, u32, u8, blobs, u8, st.sampled_from((b"", b"meta")), **stream
)
deletions = st.builds(
    ev.Deletion, u16, keys, u64, u64, u64, u8, blobs, st.none(), st.sampled_from((b"", b"meta")), **stream
) | st.builds(ev.Deletion, u16, keys, u64, u64, u64, u8, blobs, u32, **stream)
expirations = st.builds(ev.Expiration, u16, keys, u64, u64, u64, u8, blobs, u32, **stream)
data_events = mutations | deletions | expirations

_marker = (u16, u64, u64, u32)


def _versioned(
    version: MarkerVersion, *more: st.SearchStrategy[int], **named: st.SearchStrategy[int]
) -> st.SearchStrategy[ev.SnapshotMarker]:
    return st.builds(ev.SnapshotMarker, *_marker, u64, u64, *more, version=st.just(int(version)), **named, **stream)


markers = st.one_of(
    st.builds(ev.SnapshotMarker, *_marker, **stream),
    _versioned(MarkerVersion.V2_0),
    _versioned(MarkerVersion.V2_1, timestamp=u64),
    _versioned(MarkerVersion.V2_2, u64, u64),
    _versioned(MarkerVersion.V2_2_SHORT, u64),
)

other_events = st.one_of(
    markers,
    st.builds(ev.Prepare, u16, keys, u64, u64, u64, u32, u32, u32, u8, blobs, u8, u8, u8, **stream),
    st.builds(ev.Commit, u16, keys, u64, u64, **stream),
    st.builds(ev.Abort, u16, keys, u64, u64, **stream),
    st.builds(ev.SystemEvent, u16, u64, u32, u8, blobs, blobs, **stream),
    st.builds(ev.SeqnoAdvanced, u16, u64, **stream),
    st.builds(ev.OsoSnapshot, u16, u32, **stream),
    st.builds(ev.StreamEnd, u16, u32, **stream),
    st.builds(ev.DcpOpen, keys, u32, blobs, opaque=u32),
    st.builds(ev.DcpControl, keys, keys, opaque=u32),
    st.builds(ev.StreamRequest, u16, u32, u64, u64, u64, u64, u64, blobs, **stream),
    st.builds(ev.CloseStream, u16, **stream),
    st.builds(ev.GetFailoverLog, u16, opaque=u32),
    st.builds(ev.BufferAck, u32, u16, opaque=u32),
    st.builds(ev.DcpNoop, opaque=u32),
)

requests = data_events | other_events

plain_responses = st.builds(
    ev.Response,
    st.sampled_from((int(Opcode.DCP_OPEN), int(Opcode.DCP_CONTROL), int(Opcode.DCP_NOOP))),
    u16,
    blobs,
    blobs,
    blobs,
    u8,
    u64,
    opaque=u32,
)


def in_order(found: list[object]) -> list[tuple[object, dict[int, list[object]]]]:
    """The parts whose order counts: the messages of each opaque, and those before and after each answer."""
    parts: list[tuple[object, dict[int, list[object]]]] = [(None, {})]
    for each in found:
        opaque = each.opaque if isinstance(each, Frame) else each[0]  # type: ignore[index]
        if isinstance(each, Frame) and each.magic not in (0x80, 0x08):
            parts.append((each, {}))
        else:
            parts[-1][1].setdefault(opaque, []).append(each)
    return parts


def flat(items: list[Run | Frame]) -> list[object]:
    out: list[object] = []
    for item in items:
        if isinstance(item, Frame):
            out.append(item)
        else:
            assert item.rows
            assert item.byte_count == sum(len(value) for _, value in item.rows)
            out += [(item.opaque, item.vbid, row) for row in item.rows]
    return out


def by_codec(data: bytes, routes: dict[int, bytes]) -> list[object]:
    """The expected result of scan, made by the frame codec."""
    out: list[object] = []
    pos = 0
    while (size := frame_size(data, pos)) and pos + size <= len(data):
        frame, end = decode(data, pos)
        storable = len(frame.key) <= KEY_BYTES_MAX + 1 and key_problem(frame.key) is None
        if is_data(frame) and storable and not frame.framing and frame.opaque in routes and frame.magic == 0x80:
            out.append((frame.opaque, frame.vbucket, (routes[frame.opaque] + frame.extras[:8], data[pos:end])))
        else:
            out.append(frame)
        pos = end
    return out
