"""The hot loop against the frame-by-frame codec, under every way to cut and to break bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.wire import codec_dcp
from mirror.wire import events as ev
from mirror.wire.constants import BODY_LENGTH_MAX, HEADER_SIZE, Opcode
from mirror.wire.errors import LocalProtocolError, RemoteProtocolError
from mirror.wire.frame import HEADER, Frame, decode, encode, request
from mirror.wire.keys import key_problem
from mirror.wire.scan import Row, Run, is_data, normalise, row_of, scan
from tests.wire import shapes
from tests.wire.shapes import by_codec, flat

MAX = BODY_LENGTH_MAX
PREFIXES = {1: b"pre1", 2: b"pre2"}
opaques = st.sampled_from((1, 2, 3))
vbids = st.sampled_from((5, 6))
documents = st.one_of(
    st.builds(ev.Mutation, vbids, shapes.keys, shapes.u64, shapes.u64, shapes.u64, value=shapes.blobs, opaque=opaques),
    st.builds(ev.Deletion, vbids, shapes.keys, shapes.u64, shapes.u64, shapes.u64, opaque=opaques),
    st.builds(ev.Expiration, vbids, shapes.keys, shapes.u64, shapes.u64, shapes.u64, opaque=opaques),
)
messages = st.lists(documents | documents | shapes.requests | shapes.plain_responses, max_size=12)


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        (b"\0" + b"k" * 250, None),
        (b"\x80\x01" + b"k" * 249, None),
        (b"\xff\xff\xff\xff\x0f" + b"k" * 250, None),
        (b"\0" + b"k" * 251, "has 251 bytes; 250 is the most"),
        (b"\x80\x01" + b"k" * 251, "has 251 bytes"),
        (b"\0" + b"k" * 600, "has 600 bytes"),
        (b"\xff\xff\xff\xff\xff\0k", "does not end within 5 bytes"),
        (b"\x80", "does not end"),
    ],
)
def test_a_key_that_cannot_be_stored_is_not_part_of_a_run(key: bytes, problem: str | None) -> None:
    """A key of 600 bytes once reached the store, and stopped the vbuckets of the whole group."""
    good = ev.Mutation(5, b"\0k", 1, 1, 1, opaque=1)
    data = codec_dcp.encode(good) + codec_dcp.encode(ev.Mutation(5, key, 2, 1, 1, opaque=1)) + codec_dcp.encode(good)
    items, _ = scan(data, 0, PREFIXES, MAX)
    found = key_problem(key)
    if problem is None:
        assert found is None
        assert len(flat(items)) == 3
        return
    assert found is not None
    assert problem in found
    run, frame, after = items
    assert isinstance(run, Run)
    assert isinstance(after, Run)
    assert isinstance(frame, Frame)
    assert frame.key == key


def test_a_key_without_collection_id_may_have_250_bytes() -> None:
    assert key_problem(b"\xff" * 250, prefixed=False) is None
    assert key_problem(b"k" * 251, prefixed=False) is not None


@given(messages, st.lists(st.integers(1, 80), max_size=40))
def test_the_result_does_not_depend_on_how_the_bytes_are_cut(said: list[ev.Event], sizes: list[int]) -> None:
    data = b"".join(map(codec_dcp.encode, said))
    got: list[object] = []
    rest, start = b"", 0
    for size in [*sizes, len(data)]:
        rest += data[start : start + size]
        start += size
        items, pos = scan(rest, 0, PREFIXES, MAX)
        got += flat(items)
        rest = rest[pos:]
    assert rest == b""
    assert shapes.in_order(got) == shapes.in_order(by_codec(data, PREFIXES))


@given(messages, st.data())
def test_corrupted_bytes_are_a_remote_error_at_most(said: list[ev.Event], data: st.DataObject) -> None:
    whole = bytearray(b"".join(map(codec_dcp.encode, said)))
    if not whole:
        return
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        items, pos = scan(bytes(whole), 0, PREFIXES, MAX)
    except RemoteProtocolError:
        return
    assert 0 <= pos <= len(whole)
    assert shapes.in_order(flat(items)) == shapes.in_order(by_codec(bytes(whole[:pos]), PREFIXES))


@given(st.binary(max_size=120), st.integers(0, 20))
def test_any_bytes_are_consumed_kept_or_refused(data: bytes, pos: int) -> None:
    pos = min(pos, len(data))
    try:
        items, end = scan(data, pos, PREFIXES, 60)
    except RemoteProtocolError:
        return
    assert pos <= end <= len(data)
    assert len(data) - end < 24 + 61
    size = sum(item.wire_size if isinstance(item, Frame) else item.byte_count for item in items)
    assert size == end - pos


def document(seqno: int, opaque: int = 1, vbid: int = 5, **more: object) -> bytes:
    return codec_dcp.encode(ev.Mutation(vbid, b"\0key", seqno, 1, 2, value=b"value", opaque=opaque, **more))  # type: ignore[arg-type]


MARKER = codec_dcp.encode(ev.SnapshotMarker(5, 1, 9, 1, opaque=1))


def runs(data: bytes) -> list[tuple[int, int, int, int] | int]:
    items, pos = scan(data, 0, PREFIXES, MAX)
    assert pos == len(data)
    return [
        item.opcode
        if isinstance(item, Frame)
        else (item.opaque, item.vbid, int.from_bytes(item.rows[0][0][4:]), int.from_bytes(item.rows[-1][0][4:]))
        for item in items
    ]


def test_the_rows_of_each_stream_are_gathered_over_the_whole_buffer() -> None:
    data = document(1) + document(6, 2) + document(2) + document(7, 2) + document(3)
    assert runs(data) == [(1, 5, 1, 3), (2, 5, 6, 7)]
    items, _ = scan(data, 0, PREFIXES, MAX)
    assert [item.byte_count for item in items if isinstance(item, Run)] == [3 * len(document(1)), 2 * len(document(1))]


def test_a_message_of_a_stream_ends_only_the_run_of_that_stream() -> None:
    data = document(1) + document(7, 2) + MARKER + document(2) + document(8, 2) + document(3, vbid=6) + document(4)
    assert runs(data) == [
        (1, 5, 1, 1),
        (2, 5, 7, 8),
        Opcode.DCP_SNAPSHOT_MARKER,
        (1, 5, 2, 2),
        (1, 6, 3, 3),
        (1, 5, 4, 4),
    ]


def test_an_answer_ends_all_runs() -> None:
    """The answer describes the moment at which the source sent it, so later messages must not overtake it."""
    answer = encode(Frame(0x81, Opcode.GET_ALL_VB_SEQNOS, opaque=77))
    data = document(1) + document(7, 2) + answer + document(2) + document(8, 2)
    assert runs(data) == [(1, 5, 1, 1), (2, 5, 7, 7), Opcode.GET_ALL_VB_SEQNOS, (1, 5, 2, 2), (2, 5, 8, 8)]


def test_a_row_is_its_prefix_its_seqno_and_the_whole_message() -> None:
    data = document(258)
    items, _ = scan(data, 0, PREFIXES, MAX)
    assert isinstance(items[0], Run)
    assert items[0].rows == [(b"pre1" + (258).to_bytes(8), data)]
    assert items[0].byte_count == len(data)


def test_a_message_without_a_route_arrives_as_a_frame() -> None:
    assert runs(document(1, 9) + document(2, stream_id=4) + document(3)) == [0x57, 0x57, (1, 5, 3, 3)]


def test_messages_at_the_very_end_of_a_buffer_are_found() -> None:
    noop = codec_dcp.encode(ev.DcpNoop(opaque=3))
    end = codec_dcp.encode(ev.StreamEnd(5, 0, opaque=1))
    assert runs(document(1) + noop + noop + end) == [(1, 5, 1, 1), 0x5C, 0x5C, 0x55]


def bad_header(opcode: int = 0x57, key: int = 1, extras: int = 31, body: int = 32, magic: int = 0x80) -> bytes:
    return HEADER.pack(magic, opcode, key, extras, 0, 5, body, 1, 0)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (bad_header(extras=30), "extras of 30 bytes, not 31"),
        (bad_header(0x58, extras=20), "not 18 or 21"),
        (bad_header(0x59, extras=18), "not 20"),
        (bad_header(key=0), "no key"),
        (bad_header(key=2), "do not fit in a body of 32"),
        (bad_header(body=MAX + 1), "above the limit"),
        (bad_header(body=0, key=0, extras=0), "extras of 0 bytes"),
        (bad_header(magic=0x08, key=0x0300, body=40), "no key"),
        (bad_header(magic=0x08, key=0x0301, extras=18, body=40), "not 31"),
        (bad_header(magic=0x7F), "magic"),
    ],
)
@pytest.mark.parametrize("before", [b"", document(1), MARKER])
@pytest.mark.parametrize("after", [b"", bytes(100)])
def test_an_impossible_header_is_an_error_as_soon_as_it_arrives(
    header: bytes, words: str, before: bytes, after: bytes
) -> None:
    with pytest.raises(RemoteProtocolError, match=words) as caught:
        scan(before + header + after, 0, PREFIXES, MAX)
    if words != "magic":
        assert (caught.value.op, caught.value.vbid) == (header[1], 5)


def test_a_plausible_header_waits_for_its_body() -> None:
    data = document(1) + document(2)
    cut = len(document(1)) + HEADER_SIZE
    items, pos = scan(data[:cut], 0, PREFIXES, MAX)
    assert (len(items), pos) == (1, len(document(1)))


def test_a_message_above_the_limit_is_refused_whole_or_in_part() -> None:
    data = document(1)
    body = len(data) - HEADER_SIZE
    assert scan(data, 0, PREFIXES, body)[1] == len(data)
    for length in (HEADER_SIZE, HEADER_SIZE + 8, len(data)):
        with pytest.raises(RemoteProtocolError, match="above the limit"):
            scan(data[:length], 0, PREFIXES, body - 1)


@given(shapes.data_events, st.sampled_from((b"", b"\0")))
def test_a_normalised_message_has_a_collection_id(
    event: ev.Mutation | ev.Deletion | ev.Expiration, prefix: bytes
) -> None:
    frame = codec_dcp.to_frame(event)
    stored, end = decode(normalise(frame, prefix))
    assert end == frame.wire_size - len(frame.framing) + len(prefix)
    assert (stored.magic, stored.framing, stored.key) == (0x80, b"", prefix + frame.key)
    row: Row = row_of(frame, b"abcd", prefix)
    assert row == (b"abcd" + event.seqno.to_bytes(8), encode(stored))
    if not (event.stream_id is not None or prefix):
        assert encode(stored) == encode(frame)


def test_only_documents_are_normalised() -> None:
    assert not is_data(Frame(0x81, Opcode.DCP_MUTATION))
    for frame in (decode(MARKER)[0], Frame(0x81, Opcode.DCP_MUTATION)):
        with pytest.raises(LocalProtocolError):
            normalise(frame)
    with pytest.raises(RemoteProtocolError):
        normalise(request(Opcode.DCP_MUTATION, extras=bytes(30), key=b"k"))
