"""Flow control of DCP: the consumer's ledger of received bytes, and the producer's window.

Every counted byte is acknowledged exactly once, even if the consumer drops the message. Sources: kv_engine
docs/dcp/documentation/flow-control.md, commands/buffer-ack.md, commands/prepare.md (MB-46634: a prepare counts two
bytes more than are sent); docs/protocol.md 2.8.
"""

from __future__ import annotations

from mirror.wire.constants import Magic, Opcode
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.frame import Frame

ACK_SHARE = 0.2
"""A consumer acknowledges after this share of the window, as kv_engine's own consumer does."""

_ACK_MAX = 0xFFFF_FFFF

_REQUESTS = frozenset((int(Magic.REQUEST), int(Magic.FLEX_REQUEST)))

_COUNTED: dict[int, int] = {
    int(Opcode.DCP_STREAM_END): 0,
    int(Opcode.DCP_SNAPSHOT_MARKER): 0,
    int(Opcode.DCP_MUTATION): 0,
    int(Opcode.DCP_DELETION): 0,
    int(Opcode.DCP_EXPIRATION): 0,
    int(Opcode.DCP_SET_VBUCKET_STATE): 0,
    int(Opcode.DCP_SYSTEM_EVENT): 0,
    int(Opcode.DCP_PREPARE): 2,
    int(Opcode.DCP_COMMIT): 0,
    int(Opcode.DCP_ABORT): 0,
    int(Opcode.DCP_SEQNO_ADVANCED): 0,
    int(Opcode.DCP_OSO_SNAPSHOT): 0,
    int(Opcode.DCP_CACHE_TRANSFER): 0,
    int(Opcode.DCP_CACHE_TRANSFER_END): 0,
}
"""Opcode of a producer's counted request -> bytes counted beyond those sent. Noops and responses do not count."""


def counted_size(frame: Frame) -> int:
    """Return the bytes of the window that a producer's frame uses; 0 if its opcode does not count."""
    more = _COUNTED.get(frame.opcode)
    if more is None or frame.magic not in _REQUESTS:
        return 0
    return frame.wire_size + more


class FlowControlLedger:
    __slots__ = ("_threshold", "acked_total", "received_total", "unacked", "window_bytes")

    def __init__(self, window_bytes: int, ack_share: float = ACK_SHARE) -> None:
        """`window_bytes` is the DCP_CONTROL setting `connection_buffer_size`; 0: no flow control."""
        assert 0 <= window_bytes <= _ACK_MAX
        assert 0 < ack_share <= 1
        self.window_bytes = window_bytes
        self._threshold = max(1, int(window_bytes * ack_share))
        self.unacked = 0
        self.received_total = 0
        self.acked_total = 0

    def received(self, count: int) -> None:
        assert count >= 0
        self.received_total += count
        self.unacked += count

    def take_ack(self, *, force: bool = False) -> int:
        """Return the count of the BUFFER_ACK that the caller must send; 0: send none. `force` ignores the threshold."""
        if self.window_bytes == 0 or not (force or self.unacked >= self._threshold):
            return 0
        count = min(self.unacked, _ACK_MAX)
        self.unacked -= count
        self.acked_total += count
        return count


class ProducerWindow:
    """Open until it is full, so the last message may exceed it."""

    __slots__ = ("outstanding", "window_bytes")

    def __init__(self, window_bytes: int = 0) -> None:
        assert window_bytes >= 0
        self.window_bytes = window_bytes
        self.outstanding = 0

    @property
    def is_open(self) -> bool:
        return self.window_bytes == 0 or self.outstanding < self.window_bytes

    def sent(self, count: int) -> None:
        assert count >= 0
        self.outstanding += count

    def acked(self, count: int) -> None:
        """Subtract acknowledged bytes. Raises RemoteProtocolError if fewer are outstanding."""
        if count > self.outstanding:
            detail = f"acknowledged {count} bytes, {self.outstanding} are outstanding"
            raise RemoteProtocolError(detail, op=Opcode.DCP_BUFFER_ACK)
        self.outstanding -= count
