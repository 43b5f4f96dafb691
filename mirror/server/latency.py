"""A histogram of the request durations of one listening process. An update takes a microsecond.

The process sends the counts to the supervisor, so one scrape of the metrics has the counts of all processes.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TypedDict

BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds of the histogram's classes; one more class counts longer durations."""


class Figures(TypedDict):
    """A histogram in the shape of cli/JSON.md."""

    bounds_s: list[float]
    counts: list[int]
    """By class; one count more than bounds."""
    sum_s: float


class Latencies:
    __slots__ = ("_counts", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += count
        self._sum_s += seconds * count

    def figures(self) -> Figures:
        return {"bounds_s": list(BOUNDS_S), "counts": list(self._counts), "sum_s": round(self._sum_s, 6)}
