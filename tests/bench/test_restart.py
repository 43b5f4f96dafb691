"""A service that was killed serves its documents again, and has what the source got meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from mirror.bench.restart import restarts
from storage.admin.check import check
from storage.read.view import open_view


@pytest.mark.ci
@pytest.mark.timeout(180)
def test_each_start_is_measured_to_the_first_read_and_until_it_has_caught_up(tmp_path: Path) -> None:
    found = list(restarts(800, 8, 21, 1, 1, str(tmp_path)))
    assert len(found) == 1
    assert 0 < found[0].first_read_s <= found[0].caught_up_s
    assert found[0].limit_read_s > 0
    assert check(str(tmp_path / "data")).problems == []
    with open_view(str(tmp_path / "data")) as view:
        assert sum(view.count(vbid) for vbid in range(8)) == 800 + 1 + 21
