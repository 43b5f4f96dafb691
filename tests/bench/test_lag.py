"""The benchmark of lag measures a real mirror: each write until the first commit that made it visible."""

from __future__ import annotations

from pathlib import Path

import pytest

from mirror.bench.lag import lags, lags_ms, quantile
from storage.admin.check import check
from storage.read.view import open_view


def test_a_write_is_visible_with_the_first_commit_that_covers_it() -> None:
    written = [(1, 1, 10.0), (1, 2, 10.5), (2, 1, 11.0), (1, 3, 12.0)]
    visible = [(1, 2, 11.0), (2, 1, 11.25), (1, 4, 12.5)]
    assert lags_ms(written, visible) == [250.0, 500.0, 500.0, 1000.0]


def test_a_quantile_is_one_of_the_values() -> None:
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 3.0, 4.0, 4.0]


@pytest.mark.timeout(120)
def test_each_rate_is_measured_for_every_write(tmp_path: Path) -> None:
    found = list(lags([100, 400], 0.2, str(tmp_path), "safe"))
    assert [(figures.rate, len(figures.lags_ms), len(figures.limit_ms)) for figures in found] == [
        (100, 20, 20),
        (400, 80, 80),
    ]
    for figures in found:
        assert figures.lags_ms == sorted(figures.lags_ms)
        assert figures.lags_ms[0] > 0
        assert figures.limit_ms[0] > 0
    path = str(tmp_path / "mirror")
    assert check(path).problems == []
    with open_view(path) as view:
        assert sum(state.seqno for state in view.published()) == 100
