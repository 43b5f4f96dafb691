"""Every byte that two real servers and their clients said, through everything that reads and writes bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest

from mirror.wire import codec_dcp, codec_kv, xattr
from mirror.wire.constants import Datatype, Opcode, Status
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.events import Deletion, Expiration, Mutation, Response, SystemEvent
from mirror.wire.frame import Frame, decode, encode
from mirror.wire.scan import is_data, normalise, scan
from mirror.wire.system_events import decode_system_event, encode_system_event
from tests.oracle import kv_client
from tests.recordings import Recording
from tests.wire.goldens import is_dcp
from tests.wire.shapes import by_codec, flat, in_order

ROUTE = b"brch"


def frames_of(data: bytes) -> list[Frame]:
    frames, pos = [], 0
    while pos < len(data):
        frame, pos = decode(data, pos)
        frames.append(frame)
    return frames


@pytest.fixture(scope="module")
def sides(recordings: list[Recording]) -> list[tuple[str, bytes, list[Frame]]]:
    """(name and direction, bytes, frames)."""
    found = []
    for recording in recordings:
        for direction in ("c2s", "s2c"):
            data = recording.side(direction)
            found.append((f"{recording.name} {direction}", data, frames_of(data)))
    return found


Sides = list[tuple[str, bytes, list[Frame]]]


def pieces_of(data: bytes, sizes: Iterator[int]) -> Iterator[bytes]:
    pos = 0
    while pos < len(data):
        size = next(sizes)
        yield data[pos : pos + size]
        pos += size


def test_the_recordings_cover_both_servers_and_the_sdk(recordings: list[Recording]) -> None:
    assert {recording.name.split("_")[0] for recording in recordings} == {"605", "72", "sdk"}
    assert len(recordings) >= 100


def test_every_frame_is_written_as_it_was_read(sides: Sides) -> None:
    for name, data, frames in sides:
        assert b"".join(map(encode, frames)) == data, name
        assert sum(frame.wire_size for frame in frames) == len(data), name


def test_every_message_of_dcp_is_written_as_it_was_read(sides: Sides) -> None:
    refused = []
    for name, _, frames in sides:
        for frame in frames:
            if not is_dcp(frame.opcode):
                continue
            try:
                event = codec_dcp.decode(frame)
            except RemoteProtocolError as error:
                refused.append((name, str(error)))
                continue
            assert codec_dcp.encode(event) == encode(frame), name
    too_short = "DCP_STREAM_REQ vb 1: extras of 40 bytes, not 48"
    assert refused == [("605_i2_bad_extras_len c2s", too_short), ("72_i2_bad_extras_len c2s", too_short)]


def test_every_request_of_a_client_has_a_known_shape(sides: Sides) -> None:
    seen = set()
    for _, _, frames in sides:
        for frame in frames:
            if not is_dcp(frame.opcode) and not frame.is_response:
                assert codec_kv.check_request(frame) is frame
                seen.add(Opcode(frame.opcode))
    assert {Opcode.HELLO, Opcode.SASL_AUTH, Opcode.SELECT_BUCKET, Opcode.SUBDOC_MULTI_MUTATION} <= seen


def test_the_scan_agrees_with_the_codec_however_the_bytes_are_cut(sides: Sides) -> None:
    rng = random.Random(11)
    for name, data, frames in sides:
        routes = {frame.opaque: ROUTE for frame in frames if is_data(frame)}
        for size_max in (len(data) + 1, 40, 3000, 100_000):
            if size_max == 40 and len(data) > 100_000:
                continue
            rest, got = b"", []
            for piece in pieces_of(data, iter(partial(rng.randint, 1, size_max), 0)):
                rest += piece
                items, pos = scan(rest, 0, routes)
                rest = rest[pos:]
                got += items
            assert rest == b"", name
            assert in_order(flat(got)) == in_order(by_codec(data, routes)), name


def test_a_normalised_document_is_the_document_without_its_stream_id(sides: Sides) -> None:
    with_id = 0
    for name, _, frames in sides:
        for frame in filter(is_data, frames):
            event = codec_dcp.decode(frame)
            assert isinstance(event, Mutation | Deletion | Expiration)
            stored = codec_dcp.decode(decode(normalise(frame, b"\0"))[0])
            assert isinstance(stored, Mutation | Deletion | Expiration)
            assert (stored.key, stored.value, stored.cas) == (b"\0" + event.key, event.value, event.cas), name
            assert stored.stream_id is None
            with_id += event.stream_id is not None
    assert with_id > 100, "the recordings k18 and k19 have stream ids"


def test_every_system_event_is_read_and_written_in_all_forms(sides: Sides) -> None:
    versions = set()
    for name, _, frames in sides:
        for frame in frames:
            if frame.opcode != Opcode.DCP_SYSTEM_EVENT:
                continue
            event = codec_dcp.decode(frame)
            assert isinstance(event, SystemEvent)
            content = decode_system_event(event)
            versions.add(event.version)
            again = encode_system_event(content, vbid=event.vbid, seqno=event.seqno, version=event.version)
            again = replace(again, opaque=event.opaque, stream_id=event.stream_id)
            assert decode_system_event(again) == content, name
            assert again.key == event.key, name
            if event.version != 2:
                assert again == event, name
    assert versions == {0, 1, 2}


def test_every_uncompressed_xattr_blob_is_read_and_written(sides: Sides) -> None:
    names = set()
    for name, _, frames in sides:
        for frame in filter(is_data, frames):
            if frame.datatype & Datatype.XATTR and not frame.datatype & Datatype.SNAPPY:
                xattrs, body = xattr.split(frame.value, frame.datatype)
                assert xattr.join(xattrs, body) == frame.value, name
                names |= set(xattrs)
    assert {b"_sync", b"meta", b"u1"} <= names


def test_bodies_that_the_sdk_exchanges_are_read_and_written(sides: Sides) -> None:
    answers: dict[tuple[int, bool], int] = {}
    for name, _, frames in sides:
        if not name.startswith("sdk"):
            continue
        for frame in frames:
            check = _BODIES.get((frame.opcode, frame.is_response))
            if check is not None and not (frame.is_response and frame.status not in _FULL):
                check(frame)
                answers[frame.opcode, frame.is_response] = answers.get((frame.opcode, frame.is_response), 0) + 1
    assert set(answers) == set(_BODIES)


_FULL = (Status.SUCCESS, Status.SUBDOC_MULTI_PATH_FAILURE)


def _is(read: bytes, written: bytes) -> None:
    assert written == read


def _looked_up(results: list[kv_client.LookupResult]) -> bytes:
    return b"".join(codec_kv.encode_lookup_head(status, len(value)) + value for status, value in results)


_BODIES: dict[tuple[int, bool], Callable[[Frame], None]] = {
    (Opcode.HELLO, False): lambda f: _is(f.value, codec_kv.encode_features(codec_kv.decode_hello(f)[1])),
    (Opcode.HELLO, True): lambda f: _is(f.value, codec_kv.encode_features(codec_kv.decode_features(f.value))),
    (Opcode.SET, False): lambda f: _is(f.extras, kv_client.encode_store(codec_kv.decode_store(f.extras))),
    (Opcode.SET, True): lambda f: _is(
        f.extras, codec_kv.encode_mutation_token(*kv_client.decode_mutation_token(f.extras))
    ),
    (Opcode.GET_META, True): lambda f: _is(f.extras, codec_kv.encode_meta(kv_client.decode_meta(f.extras))),
    (Opcode.GET_COLLECTION_ID, True): lambda f: _is(
        f.extras, codec_kv.encode_collection_id(*kv_client.decode_collection_id(f.extras))
    ),
    (Opcode.SUBDOC_MULTI_LOOKUP, False): lambda f: _is(
        f.value, kv_client.encode_lookup_specs(codec_kv.decode_lookup_specs(f.value))
    ),
    (Opcode.SUBDOC_MULTI_LOOKUP, True): lambda f: _is(f.value, _looked_up(kv_client.decode_lookup_results(f.value))),
    (Opcode.GET_ERROR_MAP, False): lambda f: _is(
        f.value, kv_client.get_error_map(codec_kv.decode_error_map_request(f)).value
    ),
}


def test_error_contexts_of_real_servers_are_read(sides: Sides) -> None:
    contexts = set()
    for _, _, frames in sides:
        for frame in frames:
            if frame.is_response and frame.status != Status.SUCCESS and frame.datatype & Datatype.JSON:
                response = codec_dcp.decode(frame) if is_dcp(frame.opcode) else kv_client.response(frame)
                assert isinstance(response, Response)
                contexts.add(kv_client.error_context(response.value, response.datatype))
    assert "" not in contexts
    assert any("Unknown scope or collection" in context for context in contexts)
