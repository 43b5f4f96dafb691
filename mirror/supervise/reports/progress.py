"""Compares reports over time: lag in seconds, rates, and the progress of catching up. Pure.

The caller passes the times; an unknown figure is None, never 0.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from mirror.supervise.status import VbucketRow

TREND_WINDOW_MS = 5_000
"""Rates cover this much time: short enough to follow a change, long enough not to flicker."""
TREND_REPORTS_MAX = 64
"""Most reports kept."""
UNKNOWN_MS = float("-inf")


@dataclass(slots=True)
class _Lag:
    """The seqnos that a vbucket has not published yet, and the time since which they are missing."""

    waits: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=TREND_REPORTS_MAX))
    """(time, high seqno) of each look that saw the source further ahead."""
    contact_ms: float = UNKNOWN_MS
    """The newest time of which the source's seqno was known."""
    in_contact: bool = False

    def look(self, row: VbucketRow, now_ms: int) -> None:
        high, behind = row["source_high_seqno"], row["lag_seqnos"]
        heard_ms = now_ms - (row["silent_ms"] or 0)
        if high is None:
            self.in_contact, self.contact_ms = False, min(self.contact_ms, heard_ms)
            return
        in_time = behind is not None  # else the high seqno is too old to be compared with what is published now
        reached = max(high, row["staged_seqno"] or 0) - behind if behind is not None else row["published_seqno"] or 0
        while self.waits and self.waits[0][1] <= reached:
            self.waits.popleft()
        # After a gap the source may have written the missing seqnos since the last contact.
        since_ms = now_ms if self.in_contact else self.contact_ms
        if self.waits and high < self.waits[-1][1]:  # a failover at the source lost seqnos that were waited for
            since_ms = min(since_ms, self.waits[0][0])
            self.waits.clear()
        if high > reached and (not self.waits or high > self.waits[-1][1]):
            if len(self.waits) == self.waits.maxlen:
                self.waits.pop()  # the lag counts from the oldest entry, so replace the newest
            self.waits.append((since_ms, high))
        self.in_contact = in_time
        self.contact_ms = heard_ms if in_time or high <= reached else min(self.contact_ms, heard_ms)

    def seconds(self, now_ms: int) -> float | None:
        """Return the lag; None if it began before the first contact, or if there was no contact."""
        since_ms = self.waits[0][0] if self.waits else now_ms
        if not self.in_contact:
            since_ms = min(since_ms, self.contact_ms)
        return None if since_ms == UNKNOWN_MS else round((now_ms - since_ms) / 1000, 1)


class Trend:
    def __init__(self) -> None:
        self._reports: deque[tuple[int, dict[int, int], dict[str, int]]] = deque(maxlen=TREND_REPORTS_MAX)
        self._lags: defaultdict[int, _Lag] = defaultdict(_Lag)

    def observe(self, rows: Sequence[VbucketRow], counters: Mapping[str, int], now_ms: int) -> None:
        positions = {row["vbid"]: seqno for row in rows if (seqno := row["published_seqno"]) is not None}
        self._reports.append((now_ms, positions, dict(counters)))
        while len(self._reports) > 2 and now_ms - self._reports[0][0] > TREND_WINDOW_MS:
            self._reports.popleft()
        for row in rows:
            self.observe_lag(row, now_ms)

    def observe_lag(self, row: VbucketRow, now_ms: int) -> None:
        if row["published_seqno"] is not None:
            self._lags[row["vbid"]].look(row, now_ms)

    def fill(self, rows: Sequence[VbucketRow], now_ms: int) -> None:
        """Write rates and the lag in seconds into the rows. Without contact the lag counts from the last contact."""
        for row in rows:
            row["lag_s"] = self._lags[row["vbid"]].seconds(now_ms)
            row["seqnos_per_s"] = self._rate(row["vbid"])

    def _rate(self, vbid: int) -> float | None:
        span_ms, first, last = self._span()
        if not span_ms or vbid not in first or vbid not in last:
            return None
        return round(max(0, last[vbid] - first[vbid]) * 1000 / span_ms, 1)

    def _span(self) -> tuple[int, dict[int, int], dict[int, int]]:
        if len(self._reports) < 2:
            return 0, {}, {}
        (first_ms, first, _), (last_ms, last, _) = self._reports[0], self._reports[-1]
        return last_ms - first_ms, first, last

    def counter_rate(self, name: str) -> float | None:
        """Return the rise of a counter per second. A fall, after a worker was replaced, counts as 0."""
        if len(self._reports) < 2:
            return None
        risen = 0
        reports = list(self._reports)
        for (_, _, before), (_, _, after) in pairwise(reports):
            risen += max(0, after.get(name, 0) - before.get(name, 0))
        span_ms = reports[-1][0] - reports[0][0]
        return round(risen * 1000 / span_ms, 1) if span_ms else None


class CatchUp:
    """The progress of catching up. A vbucket is done once it has published up to its mark.

    The mark is the source's high seqno in the first report with an open stream, or a lower high seqno in a later
    report. A rollback removes the mark until the next report with an open stream. A mark of 0 is reached at once.
    """

    OPEN_STATES = frozenset({"streaming", "backfilling"})

    def __init__(self, vbucket_count: int) -> None:
        self._vbucket_count = vbucket_count
        self._marks: dict[int, int] = {}
        self._rollbacks: dict[int, int | None] = {}
        self._published: dict[int, int] = {}
        self._received: dict[int, int] = {}

    def observe(self, rows: Sequence[VbucketRow]) -> None:
        for row in rows:
            vbid, published, rollback_count = row["vbid"], row["published_seqno"], row["rollback_count"]
            if published is None:
                continue
            if self._rollbacks.get(vbid, rollback_count) != rollback_count:
                self._marks.pop(vbid, None)
            self._rollbacks[vbid] = rollback_count
            if row["state"] not in self.OPEN_STATES or row["source_high_seqno"] is None:
                continue
            mark = self._marks.setdefault(vbid, row["source_high_seqno"])
            if row["source_high_seqno"] < mark:
                self._marks[vbid] = row["source_high_seqno"]
            self._published[vbid] = published
            self._received[vbid] = max(row["staged_seqno"] or 0, published)

    @property
    def vbuckets_done(self) -> int:
        return sum(self._published.get(vbid, 0) >= mark for vbid, mark in self._marks.items())

    @property
    def done(self) -> bool:
        return self.vbuckets_done == self._vbucket_count

    def progress(self) -> dict[str, int]:
        return {
            "vbuckets": self._vbucket_count,
            "vbuckets_done": self.vbuckets_done,
            "seqnos_target": sum(self._marks.values()),
            "seqnos_received": self._sum_of(self._received),
            "seqnos_published": self._sum_of(self._published),
        }

    def _sum_of(self, seqnos: Mapping[int, int]) -> int:
        return sum(min(seqnos.get(vbid, 0), mark) for vbid, mark in self._marks.items())
