"""The documented packet examples are read and written to the byte."""

from __future__ import annotations

import pytest

from mirror.wire import codec_dcp, codec_kv
from mirror.wire.events import Event
from mirror.wire.frame import Frame, decode, encode
from tests.wire.goldens import GOLDENS, Golden, is_dcp


def understand(data: bytes) -> list[Event | Frame]:
    said: list[Event | Frame] = []
    pos = 0
    while pos < len(data):
        frame, pos = decode(data, pos)
        if is_dcp(frame.opcode):
            said.append(codec_dcp.decode(frame))
        else:
            said.append(frame if frame.is_response else codec_kv.check_request(frame))
    return said


EACH = pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)


@EACH
def test_the_example_decodes_to_its_field_list(golden: Golden) -> None:
    assert understand(golden.data) == [golden.message]


@EACH
def test_the_field_list_encodes_to_the_example(golden: Golden) -> None:
    frame = golden.message if isinstance(golden.message, Frame) else codec_dcp.to_frame(golden.message)
    assert encode(frame) == golden.data


def test_every_decoded_opcode_has_an_example() -> None:
    assert {golden.data[1] for golden in GOLDENS} >= codec_dcp.DECODED
