"""When a child last proved that it is alive, and when its silence is too long.

Knows moments in milliseconds as its owner gives them; never a clock, never a process. A beat comes from the child's
own event loop, so a child that is stopped, or stuck in a loop, is silent. Starting is given more time than running,
since opening stores and importing are not beats. Invariant: the deadline only moves forward.
"""

from __future__ import annotations

from dataclasses import dataclass

INTERVAL_MS = 500
"""How often a child beats."""

DEADLINE_MS = 15_000
"""How long it may be silent: thirty beats, so that one slow disk sync is not taken for death."""

START_DEADLINE_MS = 60_000
"""How long until the first beat: a cold disk and a large store are no reason to kill."""


@dataclass(slots=True)
class Heartbeat:
    """The pulse of one child."""

    started_ms: int
    deadline_ms: int = DEADLINE_MS
    start_deadline_ms: int = START_DEADLINE_MS
    last_beat_ms: int | None = None

    def beat(self, now_ms: int) -> None:
        """The child was heard."""
        assert now_ms >= (self.last_beat_ms or self.started_ms), "a clock that goes back is no clock"
        self.last_beat_ms = now_ms

    def age_ms(self, now_ms: int) -> int:
        """How long it has been silent."""
        return now_ms - (self.started_ms if self.last_beat_ms is None else self.last_beat_ms)

    def overdue(self, now_ms: int) -> bool:
        """Whether its silence is too long."""
        limit = self.start_deadline_ms if self.last_beat_ms is None else self.deadline_ms
        return self.age_ms(now_ms) > limit
