"""Frames for one client; the recorded shapes of all feature sets are compared in test_dcp_requests."""

from __future__ import annotations

import pytest

from mirror.sandbox.data import item as it
from mirror.sandbox.data.item import EventItem, Item
from mirror.sandbox.data.profile import DEFAULT_PROFILE, PROFILES
from mirror.sandbox.dcp.encoder import ItemEncoder
from mirror.server.controls import Controls
from mirror.wire import codec_dcp
from mirror.wire import events as ev
from mirror.wire import frame as fr
from mirror.wire.system_events import encode_system_event

ABILITIES = PROFILES[DEFAULT_PROFILE].abilities(keeps_history=False)


def decoded(frame: bytes) -> object:
    return codec_dcp.decode(fr.decode(frame)[0])


def mutation(value: bytes = b"{}", datatype: int = 1) -> Item:
    return Item(5, b"\x08k", it.mutation_frame(3, b"\x08k", 5, 1, 9, value, datatype=datatype))


def test_a_frame_that_needs_no_change_is_sent_as_the_same_bytes() -> None:
    encoder = ItemEncoder(Controls(ABILITIES, collections=True))
    item = mutation()
    assert encoder.encode(item, from_disk=True) is item.frame


@pytest.mark.parametrize(
    ("flags", "expiry_opcode", "from_disk", "expected"),
    [
        (0x01, False, True, ev.Deletion(3, b"\x08k", 5, 1, 9, 0, b"", None)),
        (0x01, True, True, ev.Deletion(3, b"\x08k", 5, 1, 9, 0, b"", None)),
        (0x21, False, True, ev.Deletion(3, b"\x08k", 5, 1, 9, 0, b"", 77)),
        (0x21, False, False, ev.Deletion(3, b"\x08k", 5, 1, 9, 0, b"", 0)),
        (0x21, True, True, ev.Expiration(3, b"\x08k", 5, 1, 9, 0, b"", 77)),
    ],
)
def test_an_expiration_has_its_own_opcode_only_with_delete_times(
    flags: int, expiry_opcode: bool, from_disk: bool, expected: object
) -> None:
    item = Item(5, b"\x08k", codec_dcp.encode(ev.Expiration(3, b"\x08k", 5, 1, 9, delete_time=77)))
    features = Controls(ABILITIES, collections=True, open_flags=flags, expiry_opcode=expiry_opcode)
    assert decoded(ItemEncoder(features).encode(item, from_disk=from_disk)) == expected


def test_system_events_are_encoded_in_the_requested_shape_and_with_a_stream_id() -> None:
    content = ev.ScopeCreated(1, 8, "s")
    plain = encode_system_event(content, vbid=3, seqno=5)
    frame = codec_dcp.encode(plain)
    item = EventItem(5, b"x", frame, content)
    assert ItemEncoder(Controls(ABILITIES, collections=True)).encode(item, from_disk=True) == frame
    flat = decoded(ItemEncoder(Controls(ABILITIES, collections=True, flat_events=True)).encode(item, from_disk=True))
    assert flat == encode_system_event(content, vbid=3, seqno=5, version=2)
    with_id = fr.decode(fr.with_stream_id(frame, 300))[0]
    assert (with_id.stream_id, with_id.key, with_id.value) == (300, b"s", plain.value)
