"""The ledger of the window, from both ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.wire import codec_dcp
from mirror.wire import events as ev
from mirror.wire.constants import Opcode
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.flow_control import FlowControlLedger, ProducerWindow, counted_size
from mirror.wire.frame import request

KEYLESS = {  # docs/protocol.md 2.8: header and extras of each message, without key and value
    55: ev.Mutation(1, b"k", 2, 3, 4),
    42: ev.Deletion(1, b"k", 2, 3, 4),
    45: ev.Deletion(1, b"k", 2, 3, 4, delete_time=5),
    44: ev.Expiration(1, b"k", 2, 3, 4),
    40: ev.Commit(1, b"k", 2, 3),
    57: ev.Prepare(1, b"k", 2, 3, 4),
}


@pytest.mark.parametrize(("size", "event"), KEYLESS.items(), ids=lambda x: str(x)[:12])
def test_a_document_counts_as_the_server_counts_it(size: int, event: ev.Event) -> None:
    """A prepare counts two bytes that it does not send (MB-46634)."""
    assert counted_size(codec_dcp.to_frame(event)) == size + 1


@pytest.mark.parametrize(
    ("size", "event"),
    [
        (44, ev.SnapshotMarker(1, 2, 3, 4)),
        (61, ev.SnapshotMarker(1, 2, 3, 4, version=20)),
        (77, ev.SnapshotMarker(1, 2, 3, 4, version=22)),
        (37, ev.SystemEvent(1, 2, 0, 0)),
        (28, ev.StreamEnd(1, 0)),
        (31, ev.StreamEnd(1, 0, stream_id=7)),
        (28, ev.OsoSnapshot(1, 1)),
        (32, ev.SeqnoAdvanced(1, 2)),
        (0, ev.DcpNoop()),
        (0, ev.Response(Opcode.DCP_STREAM_REQ, 0)),
        (0, ev.Response(Opcode.DCP_MUTATION, 0)),
    ],
)
def test_other_messages_count_as_the_server_counts_them(size: int, event: ev.Event) -> None:
    assert counted_size(codec_dcp.to_frame(event)) == size


def test_ordinary_requests_do_not_count() -> None:
    assert counted_size(request(Opcode.NOOP)) == 0


@given(st.lists(st.integers(0, 500), max_size=60), st.integers(1, 2000), st.floats(0.01, 1.0))
def test_a_consumer_that_acks_in_time_keeps_the_window_open(sizes: list[int], window_bytes: int, share: float) -> None:
    ledger, window = FlowControlLedger(window_bytes, share), ProducerWindow(window_bytes)
    for size in sizes:
        assert window.is_open
        window.sent(size)
        ledger.received(size)
        window.acked(ledger.take_ack())
        assert ledger.unacked == window.outstanding < window_bytes
    window.acked(ledger.take_ack(force=True))
    assert window.outstanding == ledger.unacked == 0
    assert ledger.acked_total == ledger.received_total == sum(sizes)


def test_an_ack_waits_for_its_share_of_the_window() -> None:
    ledger = FlowControlLedger(1000, 0.2)
    ledger.received(199)
    assert (ledger.take_ack(), ledger.unacked) == (0, 199)
    ledger.received(1)
    assert (ledger.take_ack(), ledger.unacked) == (200, 0)
    ledger.received(5)
    assert ledger.take_ack(force=True) == 5
    assert ledger.take_ack(force=True) == 0


def test_a_stream_without_flow_control_needs_no_acks() -> None:
    ledger, window = FlowControlLedger(0), ProducerWindow()
    ledger.received(10**9)
    window.sent(10**9)
    assert ledger.take_ack(force=True) == 0
    assert window.is_open


def test_an_ack_is_at_most_a_number_of_32_bits() -> None:
    ledger = FlowControlLedger(2**32 - 1)
    ledger.received(2**33)
    assert ledger.take_ack() == 2**32 - 1
    assert ledger.unacked == 2**33 - 2**32 + 1


def test_a_consumer_that_acknowledges_too_much_is_blamed() -> None:
    window = ProducerWindow(10)
    window.sent(5)
    with pytest.raises(RemoteProtocolError, match="acknowledged 6 bytes, 5"):
        window.acked(6)


def test_a_window_overshoots_by_one_message_and_can_be_resized() -> None:
    window = ProducerWindow(10)
    window.sent(9)
    assert window.is_open
    window.sent(1000)
    assert not window.is_open
    window.window_bytes = 2000
    assert window.is_open
