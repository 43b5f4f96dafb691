"""The documented packet examples: what is right in them is read and written to the byte, what is wrong is refused."""

from __future__ import annotations

import pytest

from mirror.wire import codec_dcp, codec_kv
from mirror.wire.errors import RemoteProtocolError
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


def names(goldens: tuple[Golden, ...]) -> list[str]:
    return [golden.name for golden in goldens]


WRONG = tuple(golden for golden in GOLDENS if golden.corrected is not None)


@pytest.mark.parametrize("golden", GOLDENS, ids=names(GOLDENS))
def test_the_example_reads_as_its_field_list_says(golden: Golden) -> None:
    assert understand(golden.right) == [golden.message]


@pytest.mark.parametrize("golden", GOLDENS, ids=names(GOLDENS))
def test_the_field_list_writes_the_example(golden: Golden) -> None:
    frame = golden.message if isinstance(golden.message, Frame) else codec_dcp.to_frame(golden.message)
    assert encode(frame) == golden.right


@pytest.mark.parametrize("golden", WRONG, ids=names(WRONG))
def test_a_wrong_picture_is_refused_or_says_something_else(golden: Golden) -> None:
    assert golden.errata
    data = bytes.fromhex(golden.dump)
    if golden.reads_as == "error":
        with pytest.raises(RemoteProtocolError):
            understand(data)
    else:
        assert understand(data) != [golden.message]


def test_every_decoded_opcode_has_its_example() -> None:
    assert {golden.right[1] for golden in GOLDENS} >= codec_dcp.DECODED
