"""Frames: to bytes and back, and every header that cannot be true."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.wire.constants import HEADER_SIZE, Magic, Opcode, Status
from mirror.wire.errors import LocalProtocolError, RemoteProtocolError
from mirror.wire.frame import (
    HEADER,
    Frame,
    decode,
    encode,
    frame_infos,
    frame_size,
    request,
    response,
    stream_id_framing,
    with_stream_id,
)
from tests.wire.shapes import frames


def header(magic: int = 0x80, key: int = 0, extras: int = 0, body: int = 0, vbucket: int = 3) -> bytes:
    return HEADER.pack(magic, 0x57, key, extras, 0, vbucket, body, 9, 0)


@given(frames, st.binary(max_size=5), st.binary(max_size=5))
def test_a_frame_is_read_as_it_was_written(frame: Frame, before: bytes, after: bytes) -> None:
    data = encode(frame)
    assert len(data) == frame.wire_size == frame_size(data)
    for buf in (before + data + after, bytearray(before + data + after), memoryview(before + data + after)):
        assert decode(buf, len(before)) == (frame, len(before) + len(data))


@given(frames, st.data())
def test_a_truncated_frame_is_an_error_and_its_full_size_is_known(frame: Frame, data: st.DataObject) -> None:
    whole = encode(frame)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    assert frame_size(cut) in ((0,) if len(cut) < HEADER_SIZE else (len(whole),))
    with pytest.raises(RemoteProtocolError, match="truncated"):
        decode(cut)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_frame_or_a_remote_error(data: bytes) -> None:
    try:
        frame, end = decode(data)
    except RemoteProtocolError:
        return
    assert encode(frame) == data[:end]


def test_an_unknown_magic_is_refused_at_its_first_byte() -> None:
    assert frame_size(b"") == 0
    assert frame_size(b"\x80") == 0
    with pytest.raises(RemoteProtocolError, match="magic"):
        frame_size(b"H")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (header(body=2**32 - 1), "above the limit"),
        (header(key=1, body=0), "do not fit"),
        (header(key=5, extras=31, body=35), "do not fit"),
        (header(magic=0x08, key=0x0301, body=3), "do not fit"),
    ],
)
def test_an_impossible_length_is_an_error_before_the_body_arrives(bad: bytes, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words) as caught:
        frame_size(bad)
    assert (caught.value.op, caught.value.vbid) == (Opcode.DCP_MUTATION, 3)


def test_a_response_has_a_status_in_place_of_a_vbucket() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        frame_size(header(magic=0x81, key=1))
    assert caught.value.vbid is None
    assert decode(header(magic=0x81, vbucket=0x23))[0].status == Status.ROLLBACK


def test_the_limit_of_a_frame_is_set_by_the_caller() -> None:
    data = encode(request(Opcode.SET, key=b"k", value=b"x" * 100))
    assert frame_size(data, 0, 101) == len(data)
    with pytest.raises(RemoteProtocolError, match="limit of 100"):
        frame_size(data, 0, 100)


@pytest.mark.parametrize(
    "frame",
    [
        Frame(0x80, 0, framing=b"\x22\0\1"),
        Frame(0x08, 0, framing=b"x" * 256),
        Frame(0x08, 0, key=b"x" * 256),
        Frame(0x42, 0),
        Frame(0x80, 0, key=b"x" * 65_536),
        Frame(0x80, 0, extras=b"x" * 256),
        Frame(0x80, 0, opaque=-1),
        Frame(0x80, 0, vbucket=65_536),
    ],
)
def test_a_frame_that_a_header_cannot_describe_is_a_local_error(frame: Frame) -> None:
    with pytest.raises(LocalProtocolError):
        encode(frame)


@given(st.lists(st.tuples(st.integers(0, 270), st.binary(max_size=270)), max_size=5))
def test_frame_infos_are_read_as_they_were_written(infos: list[tuple[int, bytes]]) -> None:
    """Id and length are four bits each; 15 means that the number goes on in another byte."""
    framing = b""
    for info_id, content in infos:
        numbers = (info_id, len(content))
        head = [min(info_id, 15) << 4 | min(len(content), 15), *(number - 15 for number in numbers if number >= 15)]
        framing += bytes(head) + content
    assert frame_infos(framing) == infos


@given(st.binary(max_size=30))
def test_any_framing_extras_are_frame_infos_or_a_remote_error(framing: bytes) -> None:
    try:
        infos = frame_infos(framing)
    except RemoteProtocolError:
        return
    assert sum(len(content) for _, content in infos) < max(len(framing), 1)


@pytest.mark.parametrize("framing", [b"\x22", b"\x22\0", b"\xf2", b"\x2f", b"\xff\0", b"\x0f\x01"])
def test_framing_extras_that_end_too_early_are_an_error(framing: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        frame_infos(framing)


def test_a_stream_id_takes_three_bytes_of_framing_extras() -> None:
    assert stream_id_framing(5) == bytes.fromhex("220005")
    assert stream_id_framing(None) == b""
    frame = request(Opcode.DCP_CLOSE_STREAM, framing=stream_id_framing(0xFFFF))
    assert frame.magic == Magic.FLEX_REQUEST
    assert frame.stream_id == 0xFFFF
    assert request(Opcode.DCP_CLOSE_STREAM).stream_id is None
    assert request(Opcode.GET, framing=b"\x11x").stream_id is None
    with pytest.raises(LocalProtocolError):
        stream_id_framing(65_536)
    with pytest.raises(RemoteProtocolError, match="stream id of 1 bytes"):
        _ = request(Opcode.DCP_MUTATION, framing=b"\x21\0").stream_id


@given(st.binary(max_size=255), st.binary(max_size=255), st.binary(max_size=300), st.integers(1, 0xFFFF))
def test_a_stream_id_added_later_gives_the_same_bytes_as_one_encoded(
    extras: bytes, key: bytes, value: bytes, stream_id: int
) -> None:
    plain = request(Opcode.DCP_MUTATION, datatype=5, vbucket=3, opaque=9, cas=7, extras=extras, key=key, value=value)
    framed = replace(plain, magic=int(Magic.FLEX_REQUEST), framing=stream_id_framing(stream_id))
    assert with_stream_id(encode(plain), stream_id) == encode(framed)


def test_an_answer_has_the_opcode_and_opaque_of_its_question() -> None:
    sent = request(Opcode.GET, opaque=77, key=b"k")
    assert response(sent, Status.KEY_ENOENT) == Frame(0x81, 0, vbucket=1, opaque=77)
    assert response(sent, framing=b"\x02\0\1").magic == Magic.FLEX_RESPONSE
    assert response(Frame(0x82, 1, opaque=5)).magic == Magic.SERVER_RESPONSE
    assert response(sent).is_response
    with pytest.raises(LocalProtocolError):
        response(response(sent))
