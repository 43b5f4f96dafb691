"""The histogram of request times: bounds belong to the class below them, and a turn counts all its requests."""

from __future__ import annotations

from mirror.serve.latency import BOUNDS_S, Latencies


def test_requests_are_counted_by_the_time_that_they_took() -> None:
    latencies = Latencies()
    latencies.observe(0.00005)
    latencies.observe(0.001, 3)
    latencies.observe(0.0011)
    latencies.observe(60.0)
    figures = latencies.figures()
    counts = dict(zip([*figures["bounds_s"], "longer"], figures["counts"], strict=True))
    assert {bound: count for bound, count in counts.items() if count} == {
        0.0001: 1, 0.001: 3, 0.0025: 1, "longer": 1,
    }  # fmt: skip
    assert figures["sum_s"] == 60.00415
    assert list(BOUNDS_S) == sorted(BOUNDS_S)
