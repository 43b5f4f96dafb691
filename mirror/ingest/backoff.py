"""How long to wait before the next try: a schedule per reason, as a pure function of the attempt.

Knows reasons and seconds; must never know a clock or a source of chance: the caller brings the jitter.

Invariants: a delay never exceeds its schedule's cap, never falls with the attempt (at equal jitter), and is at least
half of the full delay, so that a thousand vbuckets refused at once do not come back at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from mirror.ingest.instructions import RetryReason


@dataclass(frozen=True, slots=True)
class Schedule:
    """The full delay doubles from `first_s` to `cap_s`."""

    first_s: float
    cap_s: float

    def full_delay_s(self, attempt: int) -> float:
        doublings = min(max(attempt, 0), 32)  # 2**32 times any first delay is beyond every cap; bounds the power
        return min(self.first_s * 2.0**doublings, self.cap_s)


SCHEDULES: dict[RetryReason, Schedule] = {
    RetryReason.STREAM_ENDED: Schedule(0.05, 10.0),  # a failover is over within a second; lag counts
    RetryReason.SOURCE_BUSY: Schedule(0.2, 10.0),  # warmup and memory pressure last seconds to minutes
    RetryReason.NOT_MY_VBUCKET: Schedule(0.05, 5.0),  # the map is fetched again meanwhile
    RetryReason.COLLECTION_UNKNOWN: Schedule(1.0, 60.0),  # manifests spread in seconds, or the collection is gone
    RetryReason.VIOLATION: Schedule(1.0, 300.0),  # a source that breaks the protocol will do so again
    RetryReason.REFUSED_FOR_NOW: Schedule(1.0, 60.0),
}


def delay_s(reason: RetryReason, attempt: int, jitter: float) -> float:
    """Return the delay before try number `attempt` (0 is the first); `jitter` is any number, of which 0 to 1 counts."""
    full_s = SCHEDULES[reason].full_delay_s(attempt)
    return full_s * (0.5 + 0.5 * min(max(jitter, 0.0), 1.0))
