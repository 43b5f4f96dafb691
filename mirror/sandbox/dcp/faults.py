"""Faults of streams on request: which vbuckets' requests are refused, and which streams and noops are kept back.

Knows vbids, numbers of nodes and statuses; must never know connections or data: who answers stream requests and who
sends asks here first. Invariants: without a fault nothing is refused or held; a refusal with `times` is used up by as
many requests; what is held back goes on where it stopped when the fault is cleared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from mirror.wire.constants import Status


@dataclass(slots=True)
class RefusalFault:
    """Stream requests that are refused; None: of all vbuckets, for ever."""

    status: Status
    vbids: frozenset[int] | None
    times: int | None
    value: bytes | None
    """Body of the answer; None: what the server would say."""


@dataclass(slots=True)
class StreamFaults:
    """The faults that are on."""

    noops_withheld: bool = False
    on_change: list[Callable[[], None]] = field(default_factory=list)
    """Called when something that was held back may go on."""
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
        """Answer stream requests with this status; the newest fault that fits counts."""
        self._refused.insert(0, RefusalFault(status, None if vbids is None else frozenset(vbids), times, value))

    def refusal(self, vbid: int) -> RefusalFault | None:
        """What a request for this vbucket is to be answered now; it is thereby used."""
        for fault in self._refused:
            if fault.vbids is None or vbid in fault.vbids:
                if fault.times is not None:
                    fault.times -= 1
                    if not fault.times:
                        self._refused.remove(fault)
                return fault
        return None

    def mute(self, vbids: Iterable[int] | None = None, *, node: int | None = None) -> None:
        """Accept streams of these vbuckets (on this node), and send nothing on them."""
        self._mute.append((None if vbids is None else frozenset(vbids), node))

    def muted(self, vbid: int, node: int) -> bool:
        """Whether a stream must keep silent."""
        return bool(self._mute) and any(
            (vbids is None or vbid in vbids) and number in (None, node) for vbids, number in self._mute
        )

    def clear(self) -> None:
        """All is well again."""
        self.noops_withheld = False
        self._refused.clear()
        self._mute.clear()
        for call in tuple(self.on_change):
            call()
