"""Frames for one client; the recorded shapes of all feature sets are compared in test_dcp_requests."""

from __future__ import annotations

import pytest

from mirror.sandbox.data.item import Item
from mirror.sandbox.data.profile import DEFAULT_PROFILE, PROFILES
from mirror.sandbox.dcp.encoder import ItemEncoder
from mirror.server.controls import Controls
from mirror.wire import codec_dcp
from mirror.wire import events as ev
from mirror.wire import frame as fr

ABILITIES = PROFILES[DEFAULT_PROFILE].abilities(keeps_history=False)


def decoded(frame: bytes) -> object:
    return codec_dcp.decode(fr.decode(frame)[0])


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
