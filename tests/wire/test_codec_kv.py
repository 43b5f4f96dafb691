"""Key-value messages: bodies there and back, shapes that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.wire import codec_kv as kv
from mirror.wire.constants import Feature, Magic, Opcode, Status
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.frame import Frame, request
from tests.oracle import kv_client
from tests.wire.shapes import blobs, u8, u16, u32, u64

i64 = st.integers(-(2**63), 2**63 - 1)

lookup_specs = st.lists(st.builds(kv.LookupSpec, u8, blobs, u8), min_size=1, max_size=16)
documents = st.lists(st.builds(kv.ScanItem, blobs, blobs, u32, u32, u64, u64, u8), max_size=4)
only_keys = st.lists(st.builds(kv.ScanItem, blobs), max_size=4)
observed = st.builds(kv.ObservedSeqno, u16, u64, u64, u64) | st.builds(kv.ObservedSeqno, u16, u64, u64, u64, u64, u64)

Pair = tuple[str, Callable[[Any], bytes], Callable[[bytes], Any], st.SearchStrategy[Any]]
READ: list[Pair] = [
    ("features", kv.encode_features, kv.decode_features, st.lists(u16, max_size=9).map(tuple)),
    ("store", kv_client.encode_store, kv.decode_store, st.builds(kv.Store, u32, u32)),
    ("observed", kv.encode_observe_seqno, kv.decode_observe_seqno, observed),
    ("lookup specs", kv_client.encode_lookup_specs, kv.decode_lookup_specs, lookup_specs),
    (
        "scan limits",
        kv_client.encode_scan_continue,
        kv.decode_scan_continue,
        st.builds(kv.ScanLimits, st.binary(min_size=16, max_size=16), u32, u32),
    ),
]
"""Bodies that the program reads."""
SENT: list[Pair] = [
    ("meta", kv.encode_meta, kv_client.decode_meta, st.builds(kv.Meta, st.booleans(), u32, u32, u64, st.none() | u8)),
    ("documents", kv.encode_scan_items, lambda body: kv_client.decode_scan_items(body, keys_only=False), documents),
    ("keys", kv.encode_scan_items, lambda body: kv_client.decode_scan_items(body, keys_only=True), only_keys),
    ("token", lambda pair: kv.encode_mutation_token(*pair), kv_client.decode_mutation_token, st.tuples(u64, u64)),
]
"""Bodies that its clients alone read."""


def _names(pairs: list[Pair]) -> list[str]:
    return [pair[0] for pair in pairs]


@pytest.mark.parametrize("pair", READ + SENT, ids=_names(READ + SENT))
@given(st.data())
def test_a_body_is_read_as_it_was_written(pair: tuple[Any, ...], data: st.DataObject) -> None:
    _, write, read, values = pair
    value = data.draw(values)
    assert read(write(value)) == value


@pytest.mark.parametrize("pair", READ, ids=_names(READ))
@given(st.binary(max_size=60))
def test_any_bytes_are_a_body_or_a_remote_error(pair: tuple[Any, ...], body: bytes) -> None:
    name, write, read, _ = pair
    try:
        value = read(body)
    except RemoteProtocolError:
        return
    if name in ("observed", "scan limits"):  # which leave some numbers out
        assert read(write(value)) == value
    elif body:
        assert write(value) == body


@pytest.mark.parametrize("pair", READ, ids=_names(READ))
@given(st.data())
def test_a_body_cut_short_is_a_shorter_body_or_a_remote_error(pair: tuple[Any, ...], data: st.DataObject) -> None:
    name, write, read, values = pair
    value = data.draw(values)
    body = write(value)
    shortest = 1 if name == "expiry" else 0  # no extras at all mean an expiry of 0
    if len(body) <= shortest:
        return
    try:
        found = read(body[: data.draw(st.integers(shortest, len(body) - 1))])
    except RemoteProtocolError:
        return
    assert found != value


def test_requests_of_a_session_are_read_as_they_were_written() -> None:
    sent = kv_client.hello(b"agent", (Feature.XATTR, Feature.COLLECTIONS), opaque=1)
    assert kv.decode_hello(sent) == (b"agent", (6, 0x12))
    for make in (kv_client.sasl_auth, kv_client.sasl_step):
        assert kv.decode_sasl(make(b"PLAIN", b"\0a\0b")) == (b"PLAIN", b"\0a\0b")
    assert kv.decode_error_map_request(kv_client.get_error_map(2)) == 2
    assert kv.decode_cluster_config_request(kv.get_cluster_config()) is None
    assert kv.decode_cluster_config_request(kv.get_cluster_config((-1, 7))) == (-1, 7)
    assert kv.decode_observe_seqno_request(kv.observe_seqno(3, 2**60)) == 2**60


@given(i64, i64, blobs, blobs, u32)
def test_a_pushed_cluster_map_is_read_as_it_was_written(
    epoch: int, revision: int, bucket: bytes, config: bytes, opaque: int
) -> None:
    frame = kv.clustermap_notification(epoch, revision, bucket, config, opaque=opaque)
    assert kv_client.decode_clustermap_notification(frame) == (epoch, revision, bucket, config)


@pytest.mark.parametrize(
    ("frame", "status"),
    [
        (request(0xEE), Status.UNKNOWN_COMMAND),
        (request(Opcode.DCP_OPEN, extras=bytes(8), key=b"n"), Status.UNKNOWN_COMMAND),
        (Frame(Magic.SERVER_REQUEST, 9), Status.UNKNOWN_COMMAND),
        (request(Opcode.GET), Status.EINVAL),
        (request(Opcode.GET, extras=b"x", key=b"k"), Status.EINVAL),
        (request(Opcode.GET, key=b"k", value=b"v"), Status.EINVAL),
        (request(Opcode.SET, extras=bytes(4), key=b"k"), Status.EINVAL),
        (request(Opcode.NOOP, key=b"k"), Status.EINVAL),
        (request(Opcode.GET_ERROR_MAP), Status.EINVAL),
    ],
)
def test_malformed_requests_are_refused_with_a_status(frame: Frame, status: Status) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        kv.check_request(frame)
    assert (caught.value.op, caught.value.status) == (frame.opcode, status)


def test_too_many_paths_are_refused_with_the_status_of_a_real_server() -> None:
    for read, body in (
        (kv.decode_lookup_specs, kv_client.encode_lookup_specs([kv.LookupSpec(0xC5, b"p")] * 17)),
        (kv.decode_lookup_specs, b""),
    ):
        with pytest.raises(RemoteProtocolError) as caught:
            read(body)
        assert caught.value.status == Status.SUBDOC_INVALID_COMBO


def test_a_request_with_one_path_is_taken_apart() -> None:
    def sent(extras: str, value: bytes = b"pathrest") -> Frame:
        return request(Opcode.SUBDOC_DICT_UPSERT, extras=bytes.fromhex(extras), key=b"k", value=value)

    assert kv.decode_subdoc(sent("000405")) == (b"path", b"rest", 5, None, 0)
    assert kv.decode_subdoc(sent("00040509")) == (b"path", b"rest", 5, None, 9)
    assert kv.decode_subdoc(sent("0004050000000a")) == (b"path", b"rest", 5, 10, 0)
    assert kv.decode_subdoc(sent("0004050000000a09")) == (b"path", b"rest", 5, 10, 9)
    for bad in (sent("0009000000"), sent("000900"), sent("00")):
        with pytest.raises(RemoteProtocolError):
            kv.decode_subdoc(bad)


def test_items_of_a_range_scan_are_encoded_as_documented() -> None:
    """range_scans/range_scan_continue.md: lengths are LEB128; 25 bytes of metadata before a document."""
    assert kv.encode_scan_items([kv.ScanItem(b"key0"), kv.ScanItem(b"k" * 128)])[:7].hex() == "046b6579308001"
    item = kv.ScanItem(b"key0", b"value0", flags=1, expiry=2, seqno=3, cas=4, datatype=5)
    body = kv.encode_scan_items([item])
    assert body[:25].hex() == "00000001000000020000000000000003000000000000000405"
    assert body[25:] == b"\x04key0\x06value0"


def test_a_server_duration_is_read_as_written_within_five_percent() -> None:
    """Two bytes for any time: the larger, the coarser (BinaryProtocol.md)."""
    for duration_us in (0, 1, 50, 1_000, 1_000_000, 100_000_000):
        decoded = kv_client.server_duration_us(kv.encode_server_duration(duration_us))
        assert decoded is not None
        assert abs(decoded - duration_us) <= max(2, duration_us * 0.05)
    assert kv_client.server_duration_us(b"") is None
    assert kv.encode_server_duration(-5) == kv.encode_server_duration(0)
    assert kv.encode_server_duration(1e12)[1:] == b"\xff\xff"
