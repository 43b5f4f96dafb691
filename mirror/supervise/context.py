"""What the parts of one service share: the settings in force, the data directory, and what is known of its mirror.

Holds values and the clock, and does nothing. Each value has one writer: `settings` a reload, `identity`, `maps` and
`leases` the setup, `stopping` the supervisor. Invariant: `maps` is known where `identity` is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mirror.clock import Clock
from mirror.config import Settings
from mirror.supervise.leases import LeaseBook
from mirror.supervise.maps import MapBook
from storage.model import Identity


@dataclass(slots=True)
class ServiceContext:
    """The values that the parts of one service share."""

    settings: Settings
    data: Path
    clock: Clock
    identity: Identity | None = None
    """None until the data directory is made."""
    maps: MapBook | None = None
    leases: LeaseBook | None = None
    """None until the service has workers."""
    stopping: bool = False

    def now_ms(self) -> int:
        """Milliseconds of the monotonic clock."""
        return int(self.clock.monotonic() * 1000)

    @property
    def vbucket_count(self) -> int | None:
        """How many vbuckets the mirror has; None while that is not known."""
        return None if self.identity is None else len(self.identity.vbids)
