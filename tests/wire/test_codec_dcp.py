"""DCP messages: round trips, and every shape that is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.wire import codec_dcp
from mirror.wire import events as ev
from mirror.wire.constants import MarkerVersion, Opcode, Status
from mirror.wire.errors import LocalProtocolError, RemoteProtocolError
from mirror.wire.frame import Frame, decode, encode, request
from tests.wire import shapes
from tests.wire.shapes import plain_responses, requests, u32, u64

LOGS = st.lists(st.tuples(u64, u64), max_size=5)


@given(requests, u32)
def test_a_message_is_read_as_it_was_written(event: ev.Event, opaque: int) -> None:
    data = codec_dcp.encode(event)
    assert codec_dcp.decode(decode(data)[0]) == event
    other = codec_dcp.decode(decode(codec_dcp.encode(event, opaque=opaque))[0])
    assert other.opaque == opaque


@given(plain_responses)
def test_an_answer_is_read_as_it_was_written(answer: ev.Response) -> None:
    assert codec_dcp.decode(decode(codec_dcp.encode(answer))[0]) == answer


@given(LOGS, u64)
def test_failover_logs_and_rollback_seqnos_are_read_as_they_were_written(
    log: list[tuple[int, int]], seqno: int
) -> None:
    body = codec_dcp.encode_failover_log(log)
    assert codec_dcp.decode_failover_log(body) == log
    assert codec_dcp.decode_rollback_seqno(codec_dcp.encode_rollback_seqno(seqno)) == seqno
    for kind, op in ((ev.StreamResponse, Opcode.DCP_STREAM_REQ), (ev.FailoverLogResponse, Opcode.DCP_GET_FAILOVER_LOG)):
        said = kind(op, Status.SUCCESS, failover_log=tuple(log), opaque=4)
        decoded = codec_dcp.decode(codec_dcp.to_frame(said))
        assert isinstance(decoded, kind)
        assert decoded.failover_log == tuple(log)
        assert decoded.value == body
    back = ev.StreamResponse(Opcode.DCP_STREAM_REQ, Status.ROLLBACK, rollback_seqno=seqno)
    decoded = codec_dcp.decode(codec_dcp.to_frame(back))
    assert isinstance(decoded, ev.StreamResponse)
    assert (decoded.rollback_seqno, decoded.failover_log) == (seqno, ())


@given(st.lists(st.tuples(shapes.u16, u64), max_size=5))
def test_seqnos_of_vbuckets_are_read_as_they_were_written(seqnos: list[tuple[int, int]]) -> None:
    assert codec_dcp.decode_all_vb_seqnos(codec_dcp.encode_all_vb_seqnos(seqnos)) == seqnos


@given(shapes.u8, shapes.u8, shapes.blobs, shapes.blobs, shapes.blobs, st.sampled_from((0x80, 0x81, 0x82)))
def test_any_frame_is_a_message_or_a_remote_error(
    opcode: int, datatype: int, extras: bytes, key: bytes, value: bytes, magic: int
) -> None:
    frame = Frame(magic, opcode, datatype, 3, 4, 5, b"", extras, key, value)
    try:
        event = codec_dcp.decode(frame)
    except RemoteProtocolError:
        return
    again = codec_dcp.to_frame(event)
    assert (again.opcode, again.key, again.value) == (opcode, key, value)


@pytest.mark.parametrize(("opcode", "length"), [(o, n) for o in sorted(codec_dcp.DECODED) for n in (2, 19, 49)])
def test_extras_of_an_unknown_length_are_refused(opcode: int, length: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"extras of {length} bytes") as caught:
        codec_dcp.decode(request(opcode, vbucket=9, extras=bytes(length), key=b"k", value=b"v"))
    assert (caught.value.op, caught.value.vbid) == (opcode, 9)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (request(0x57, extras=bytes(31), value=b"v"), "missing key; this message has a key"),
        (
            request(0x62, extras=bytes(16), key=b"k", value=b"v"),
            "unexpected value of 1 bytes; this message has no value",
        ),
        (request(0x55, extras=bytes(4), key=b"k"), "unexpected key of 1 bytes; this message has no key"),
        (request(0x5E, key=b"k"), "missing value"),
        (request(0x57, extras=bytes(28) + b"\0\2\0", key=b"k", value=b"v"), "metadata of 2 bytes in 1"),
        (request(0x58, extras=bytes(16) + b"\0\2", key=b"k", value=b"v"), "metadata of 2 bytes in 1"),
        (request(0x50, extras=bytes(8), key=b"n" * 201), "a name of 201 bytes"),
        (request(0x56, extras=bytes(20), value=b"v"), "V1 marker with a value"),
        (request(0x56, extras=b"\0", value=bytes(44)), "byte 0 and a value of 44"),
        (request(0x56, extras=b"\1", value=bytes(52)), "byte 1 and a value of 52"),
        (request(0x56, extras=b"\2", value=bytes(60)), "byte 2 and a value of 60"),
        (request(0x56, extras=b"\3", value=bytes(52)), "byte 3 and a value of 52"),
        (Frame(0x81, 0x53, value=bytes(17)), "failover log of 17"),
        (Frame(0x81, 0x53, value=bytes(16 * 4097)), "failover log of 65552"),
        (Frame(0x81, 0x53, vbucket=0x23, value=bytes(7)), "rollback seqno of 7"),
        (Frame(0x81, 0x54, value=b"x"), "failover log of 1"),
        (request(0x57, framing=b"\x23\0\0\0", extras=bytes(31), key=b"k"), "stream id of 3"),
    ],
)
def test_a_malformed_message_is_refused(frame: Frame, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        codec_dcp.decode(frame)


@pytest.mark.parametrize("opcode", [0x00, 0x1F, 0x4F, 0x51, 0x5A, 0x5B, 0x61, 0x66, 0x67, 0x68, 0xFF])
def test_an_opcode_that_no_consumer_uses_is_refused(opcode: int) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        codec_dcp.decode(request(opcode))
    assert caught.value.status == Status.UNKNOWN_COMMAND


def test_a_v2_2_marker_is_encoded_as_documented() -> None:
    """Byte 0 version, then start, end, type, max visible, high completed, purge, high prepared."""
    marker = ev.SnapshotMarker(1, 1, 2, 3, 4, 5, 6, 7, MarkerVersion.V2_2, opaque=1)
    body = "02" + "".join(f"{n:016x}" for n in (1, 2)) + "00000003" + "".join(f"{n:016x}" for n in (4, 5, 6, 7))
    assert codec_dcp.encode(marker)[24:].hex() == body
    for version, length in ((MarkerVersion.V2_1, 44), (MarkerVersion.V2_2_SHORT, 44)):
        assert len(codec_dcp.to_frame(ev.SnapshotMarker(1, 1, 2, 3, 4, 5, 6, version=int(version))).value) == length


def test_a_deletion_with_a_delete_time_has_the_longer_extras() -> None:
    plain = ev.Deletion(1, b"k", 2, 3, 4)
    timed = ev.Deletion(1, b"k", 2, 3, 4, delete_time=0)
    assert len(codec_dcp.to_frame(plain).extras) == 18
    assert codec_dcp.to_frame(timed).extras.hex() == "000000000000000200000000000000030000000000"


def test_cas_and_datatype_of_a_message_without_them_are_ignored() -> None:
    frame = Frame(0x80, Opcode.DCP_STREAM_END, 1, 3, 4, 99, b"", bytes(4))
    assert codec_dcp.decode(frame) == ev.StreamEnd(3, 0, opaque=4)


@pytest.mark.parametrize(
    "event",
    [
        ev.SnapshotMarker(1, 2, 3, 4, version=7),
        ev.Deletion(1, b"k", 2, 3, 4, delete_time=5, metadata=b"m"),
        ev.DcpOpen(b"", 1),
        ev.DcpOpen(b"n" * 201, 1),
        ev.Mutation(1, b"", 2, 3, 4),
        ev.Mutation(1, b"k", 2**64, 3, 4),
        ev.DcpControl(b"name", b""),
        ev.StreamEnd(1, -1),
        ev.Event(),
    ],
)
def test_an_event_that_cannot_be_encoded_is_a_local_error(event: ev.Event) -> None:
    with pytest.raises(LocalProtocolError):
        codec_dcp.to_frame(event)


def test_a_key_too_long_for_a_stream_id_is_a_local_error() -> None:
    event = ev.Mutation(1, b"k" * 256, 2, 3, 4, stream_id=1)
    with pytest.raises(LocalProtocolError):
        codec_dcp.encode(event)
    assert encode(codec_dcp.to_frame(ev.Mutation(1, b"k" * 256, 2, 3, 4)))


def test_a_request_for_seqnos_carries_its_state_and_collection() -> None:
    for state, collection, extras in ((None, None, 0), (1, None, 4), (None, 8, 8), (1, 8, 8)):
        body = codec_dcp.encode_all_vb_seqnos_request(state, collection)
        assert len(body) == extras
        frame = request(Opcode.GET_ALL_VB_SEQNOS, extras=body)
        assert codec_dcp.decode_all_vb_seqnos_request(frame) == (state or 0, collection)
    for bad in (b"x", (9).to_bytes(4)):
        with pytest.raises(RemoteProtocolError):
            codec_dcp.decode_all_vb_seqnos_request(request(Opcode.GET_ALL_VB_SEQNOS, extras=bad))
    with pytest.raises(RemoteProtocolError):
        codec_dcp.decode_all_vb_seqnos(bytes(11))
