"""Faults, settings and counters of streams, for tests and the control socket.

Invariants: without a fault no stream is refused or held; a refusal with `times` is used up by as many requests; a muted
stream goes on where it stopped when the fault is cleared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from mirror.wire.constants import Status


@dataclass(frozen=True, slots=True)
class AcceptedStream:
    start_seqno: int
    snap_start_seqno: int
    snap_end_seqno: int
    vbuuid: int
    connection: str


@dataclass(slots=True)
class Sent:
    """Counters of a vbucket over all connections."""

    frames: int = 0
    bytes: int = 0
    stream_requests: list[AcceptedStream] = field(default_factory=list)
    refused_requests: int = 0
    snapshot_ends: set[int] = field(default_factory=set)
    """Ends of announced snapshots: a client may publish at no other seqno."""


@dataclass(slots=True)
class StreamTuning:
    antilag_items: int = 0
    """A filtered backfill sends its seqno after so many omitted items (docs/protocol.md 2.7); 0: only at its end."""
    live_snapshot_items: int = 5
    """Most changes in a live snapshot. The average is about half, as recorded under load."""
    in_turn: bool = True
    """True if the streams of a connection take turns of a message, as in kv_engine; else each sends a piece at once."""


@dataclass(slots=True)
class RefusalFault:
    """Stream requests to refuse. None stands for all vbuckets, or for ever."""

    status: Status
    vbids: frozenset[int] | None
    times: int | None
    value: bytes | None
    """Body of the answer; None: the server's own."""


@dataclass(slots=True)
class StreamFaults:
    noops_withheld: bool = False
    on_change: list[Callable[[], None]] = field(default_factory=list)
    """Called when a stream that was held back may go on."""
    _refused: list[RefusalFault] = field(default_factory=list)
    _mute: list[tuple[frozenset[int] | None, int | None]] = field(default_factory=list)

    def refuse(
        self,
        status: Status,
        vbids: Iterable[int] | None = None,
        *,
        times: int | None = None,
        value: bytes | None = None,
    ) -> None:
        """Answer stream requests, of these vbuckets or of all, with a status. The newest fault that fits counts."""
        self._refused.insert(0, RefusalFault(status, None if vbids is None else frozenset(vbids), times, value))

    def refusal(self, vbid: int) -> RefusalFault | None:
        """Return the fault for a stream request of this vbucket, and count it as used."""
        for fault in self._refused:
            if fault.vbids is None or vbid in fault.vbids:
                if fault.times is not None:
                    fault.times -= 1
                    if not fault.times:
                        self._refused.remove(fault)
                return fault
        return None

    def mute(self, vbids: Iterable[int] | None = None, *, node: int | None = None) -> None:
        """Accept streams of these vbuckets (on this node), but send no message on them."""
        self._mute.append((None if vbids is None else frozenset(vbids), node))

    def muted(self, vbid: int, node: int) -> bool:
        return bool(self._mute) and any(
            (vbids is None or vbid in vbids) and number in (None, node) for vbids, number in self._mute
        )

    def clear(self) -> None:
        self.noops_withheld = False
        self._refused.clear()
        self._mute.clear()
        for call in tuple(self.on_change):
            call()
