"""Faults, settings and counters of streams, for tests and the control socket."""

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
    frames: int = 0
    bytes: int = 0
    stream_requests: list[AcceptedStream] = field(default_factory=list)
    snapshot_ends: set[int] = field(default_factory=set)
    """Last seqnos of the announced snapshots: a client may publish only these."""


@dataclass(slots=True)
class StreamTuning:
    antilag_items: int = 0
    """Consecutive omitted items after which a backfill sends SeqnoAdvanced (docs/protocol.md 2.7); 0: only at its end.
    """
    live_snapshot_items: int = 5
    """Limit of changes in a snapshot from memory, except in a stream's first and if the stream is far behind."""
    purge_seqno_reported: bool = True
    """False for a server that accepts V2.2 markers, but sends none (docs/protocol.md 2.6)."""
    in_turn: bool = True
    """True if the streams of a connection send one message each in turn, as in kv_engine; else a larger piece each."""


@dataclass(slots=True)
class RefusalFault:
    """Stream requests to refuse. `vbids` None: all vbuckets; `times` None: no limit."""

    status: Status
    vbids: frozenset[int] | None
    times: int | None
    value: bytes | None
    """Body of the answer; None: the usual body."""


@dataclass(slots=True)
class StreamFaults:
    noops_withheld: bool = False
    on_change: list[Callable[[], None]] = field(default_factory=list)
    """Called when muted streams may continue."""
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
        """Refuse stream requests for these vbuckets (None: all). If several faults fit a request, the newest counts."""
        self._refused.insert(0, RefusalFault(status, None if vbids is None else frozenset(vbids), times, value))

    def refusal(self, vbid: int) -> RefusalFault | None:
        """Return the fault for a stream request of this vbucket, if any, and count it as used."""
        for fault in self._refused:
            if fault.vbids is None or vbid in fault.vbids:
                if fault.times is not None:
                    fault.times -= 1
                    if not fault.times:
                        self._refused.remove(fault)
                return fault
        return None

    def mute(self, vbids: Iterable[int] | None = None, *, node: int | None = None) -> None:
        """Send no messages of these vbuckets (None: all) from this node (None: all), but accept their streams."""
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
