"""Rows as clients get them: what a real server sent to clients with few features, from what one with more got."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cramjam
import pytest

from mirror.serve.dcp.dcp_session import ABILITIES
from mirror.serve.dcp.encoder import RowEncoder
from mirror.serve.dcp.filter import ServedFilter
from mirror.server.controls import Controls
from mirror.wire import codec_dcp, xattr
from mirror.wire import events as ev
from mirror.wire import frame as fr
from mirror.wire.constants import Opcode
from mirror.wire.system_events import decode_system_event, encode_system_event
from storage.model import Collection, Manifest, ManifestUid, Seqno
from tests.recordings import frames

EVERYTHING = Controls(ABILITIES, True, True, 0x125, expiry_opcode=True)
XATTR, SNAPPY, JSON = 4, 2, 1
CARTS = Manifest(ManifestUid(3), {0: "_default", 8: "shop"}, {9: Collection(9, 8, "carts", Seqno(5))})
BLOB = xattr.join({b"_sync": b"1", b"user": b'"u"'})


def encoder(controls: Controls, stream_filter: ServedFilter | None = None, **options: bool) -> RowEncoder:
    return RowEncoder(controls, stream_filter or ServedFilter(), **options)


def sent(row: ev.Event, controls: Controls, **options: Any) -> ev.Event:
    """A client's event for a row."""
    return codec_dcp.decode(fr.decode(encoder(controls, **options).encode(codec_dcp.encode(row)))[0])


def documents(name: str) -> dict[bytes, fr.Frame]:
    """The last frame of each key of a recording."""
    return {
        frame.key: frame
        for direction, frame in frames(name)
        if direction == "s2c" and frame.opcode in (Opcode.DCP_MUTATION, Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION)
    }


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("72_h1_no_features", 0x1),
        ("72_h3_include_xattrs", 0x5),
        ("72_h7_no_value", 0x9),
        ("72_h8_no_value_xattrs", 0xD),
    ],
)
def test_the_fullest_recording_is_encoded_to_the_others(name: str, flags: int) -> None:
    """72_h10 is the recording with xattrs, those of users on deleted documents included."""
    fullest = documents("72_h10_deleted_user_xattrs")
    served = documents(name)
    made = encoder(Controls(ABILITIES, False, False, flags), ServedFilter(collections=frozenset({0}), legacy=True))
    compared = 0
    for key, frame in served.items():
        if key not in fullest:
            continue
        row = replace(fullest[key], key=b"\0" + key)
        got = fr.decode(made.encode(fr.encode(row)))[0]
        if got.extras[:8] != frame.extras[:8]:
            continue  # changed between the recordings
        assert got.key == key
        assert (got.opcode, got.extras, got.datatype, got.cas) == (
            frame.opcode,
            frame.extras,
            frame.datatype,
            frame.cas,
        ), key
        assert got.value == frame.value, key
        compared += 1
    assert compared > 8


def test_a_client_with_every_feature_gets_the_stored_row() -> None:
    made = encoder(EVERYTHING)
    assert made.plain
    assert made.unwanted_datatype == 0
    row = codec_dcp.encode(ev.Mutation(0, b"\0k", 5, 1, 9, datatype=XATTR | JSON, value=BLOB + b"{}"))
    assert made.encode(row) == row


def test_xattrs_and_compression_are_removed_for_clients_without_them() -> None:
    value = bytes(cramjam.snappy.compress_raw(BLOB + b'{"a":1}'))
    row = ev.Mutation(0, b"\0k", 5, 1, 9, flags=3, expiry=4, datatype=XATTR | JSON | SNAPPY, value=value)
    no_snappy = sent(row, Controls(ABILITIES, True, False, 0x5))
    assert no_snappy == replace(row, datatype=XATTR | JSON, value=BLOB + b'{"a":1}')
    neither = sent(row, Controls(ABILITIES, True, True, 0x1))
    assert neither == replace(row, datatype=JSON, value=b'{"a":1}')
    assert encoder(Controls(ABILITIES, True, True, 0x1)).unwanted_datatype == XATTR


def test_values_are_left_out_or_compressed_on_request() -> None:
    row = ev.Mutation(0, b"\0k", 5, 1, 9, datatype=XATTR | JSON, value=BLOB + b'{"a":1}' * 50)
    keys_only = sent(row, Controls(ABILITIES, True, True, 0x9))
    assert keys_only == replace(row, datatype=0, value=b"")
    with_xattrs = sent(row, Controls(ABILITIES, True, True, 0xD))
    assert with_xattrs == replace(row, datatype=XATTR, value=BLOB)
    true_datatype = sent(row, Controls(ABILITIES, True, True, 0x41))
    assert true_datatype == replace(row, value=b"")
    forced = sent(row, Controls(ABILITIES, True, True, 0x5, force_compression=True))
    assert isinstance(forced, ev.Mutation)
    assert forced.datatype == XATTR | JSON | SNAPPY
    assert bytes(cramjam.snappy.decompress_raw(forced.value)) == row.value


def test_tombstones_come_in_the_negotiated_shape() -> None:
    times = Controls(ABILITIES, True, True, 0x25)
    expiries = Controls(ABILITIES, True, True, 0x25, expiry_opcode=True)
    plain = Controls(ABILITIES, True, True, 0x5, expiry_opcode=True)
    old = ev.Deletion(0, b"\0k", 5, 2, 9)
    timed = ev.Deletion(0, b"\0k", 5, 2, 9, delete_time=1700)
    expired = ev.Expiration(0, b"\0k", 5, 2, 9, delete_time=1700)
    assert sent(old, plain) == old
    assert sent(old, times) == replace(old, delete_time=0)
    assert sent(timed, plain) == old
    assert sent(timed, expiries) == timed
    assert sent(expired, plain) == old
    assert sent(expired, times) == timed
    assert sent(expired, expiries) == expired


def test_user_xattrs_stay_on_tombstones_for_clients_that_requested_them() -> None:
    row = ev.Deletion(0, b"\0k", 5, 2, 9, datatype=XATTR, value=BLOB, delete_time=1)
    assert sent(row, Controls(ABILITIES, True, True, 0x125)) == row
    system = sent(row, Controls(ABILITIES, True, True, 0x25))
    assert system == replace(row, value=xattr.join({b"_sync": b"1"}))
    assert sent(row, Controls(ABILITIES, True, True, 0x21)) == replace(row, datatype=0, value=b"")


def test_extended_metadata_of_old_servers_is_removed() -> None:
    row = ev.Mutation(0, b"\0k", 5, 1, 9, value=b"body", metadata=b"meta")
    assert sent(row, Controls(ABILITIES, True, True, 0x9)) == replace(row, value=b"", metadata=b"")
    gone = ev.Deletion(0, b"\0k", 5, 1, 9, metadata=b"meta")
    assert sent(gone, Controls(ABILITIES, True, True, 0x25)) == replace(gone, metadata=b"", delete_time=0)
    lies = bytearray(codec_dcp.encode(row))
    lies[24 + 28 : 24 + 30] = b"\xff\xff"
    with pytest.raises(ValueError, match="metadata of 65535"):
        encoder(Controls(ABILITIES, True, True, 0x9)).encode(bytes(lies))


@pytest.mark.parametrize("stored", [1, 2])
def test_system_events_come_in_the_form_that_the_client_reads(stored: int) -> None:
    content = ev.CollectionCreated(3, 8, 9, "carts", max_ttl=60)
    row = codec_dcp.encode(encode_system_event(content, vbid=0, seqno=5, version=stored))
    for flat, version in ((False, 1), (True, 2)):
        made = encoder(Controls(ABILITIES, True, True, 0x5, flat_events=flat))
        made.manifest = CARTS
        event = codec_dcp.decode(fr.decode(made.encode(row))[0])
        assert isinstance(event, ev.SystemEvent)
        assert (event.version, event.seqno) == (version, 5)
        assert decode_system_event(event) == content


def test_changed_settings_exist_in_one_form_only() -> None:
    content = ev.CollectionModified(3, 8, 9, "carts", max_ttl=60)
    row = codec_dcp.encode(encode_system_event(content, vbid=0, seqno=5, version=2))
    for flat, expected in ((False, b""), (True, row)):
        made = encoder(Controls(ABILITIES, True, True, 0x5, flat_events=flat))
        made.manifest = CARTS
        assert made.encode(row) == expected
