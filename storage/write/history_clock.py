"""The clock by which history ages: it never goes back, and a wrong wall clock moves it by little.

Knows two clocks that it is given and what the last writer stored; never what is done with the time. While a writer runs
this clock advances with the machine's monotonic clock. For the time between two writers only the wall clock can say how
long it was, and it may be wrong: that counts for `downtime_max_ms` at most. Invariants: `now_ms` never falls, and is
at least what was stored; stepping the wall clock, either way, does not change it while a writer runs.
"""

from __future__ import annotations

from collections.abc import Callable

STEP_MIN_MS = 10_000
"""The wall clock was set when it and the monotonic clock part by this much between two looks: slewing takes hours."""


class HistoryClock:
    """Milliseconds from an arbitrary origin: that of a new mirror is the wall clock of its first writer."""

    def __init__(
        self,
        wall_ms: Callable[[], int],
        monotonic_ms: Callable[[], int],
        *,
        stored_ms: int = 0,
        stored_wall_ms: int = 0,
        downtime_max_ms: int = 0,
    ) -> None:
        """Continue from `stored_ms`, which the last writer stored at wall time `stored_wall_ms` (0: none)."""
        self._wall_ms = wall_ms
        self._monotonic_ms = monotonic_ms
        now_ms, wall_now_ms = monotonic_ms(), wall_ms()
        self._ahead_ms = wall_now_ms - now_ms
        self.step_count = 0
        """Times that the wall clock was set."""
        self.last_step_ms = 0
        """Size of the last step; below 0: it went back."""
        downtime_ms = wall_now_ms - stored_wall_ms
        if not stored_ms:
            self._last_ms = wall_now_ms
        else:
            self._last_ms = stored_ms + min(max(0, downtime_ms), downtime_max_ms)
            if downtime_ms < -STEP_MIN_MS:
                self._note_step(downtime_ms)
        self._seen_ms = now_ms

    def now_ms(self) -> int:
        now_ms = self._monotonic_ms()
        ahead_ms = self._wall_ms() - now_ms
        if abs(ahead_ms - self._ahead_ms) >= STEP_MIN_MS:
            self._note_step(ahead_ms - self._ahead_ms)
            self._ahead_ms = ahead_ms
        self._last_ms += max(0, now_ms - self._seen_ms)  # goes on also where the caller has no clock but the wall's
        self._seen_ms = now_ms
        return self._last_ms

    def _note_step(self, step_ms: int) -> None:
        self.step_count += 1
        self.last_step_ms = step_ms
