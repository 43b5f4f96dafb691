"""The benchmark of starts measures a real service: every stream is open, on an empty directory and on a full one."""

from __future__ import annotations

from pathlib import Path

import pytest

from mirror.bench.start import starts
from storage.env import directory
from storage.read.view import open_view


@pytest.mark.timeout(300)
def test_a_start_opens_every_stream_and_the_next_one_goes_on_from_there(tmp_path: Path) -> None:
    first, second = starts(16, 2, 2, 1, str(tmp_path))
    assert (first.made, second.made) == (True, False)
    for figures in (first, second):
        assert figures.seconds > 0
        assert len(figures.worker_private_bytes) == 2
        assert min(figures.worker_private_bytes) > 1 << 20
    path = str(tmp_path / "data")
    assert directory.load(path).vbucket_count == 16
    with open_view(path) as view:
        assert all(view.state(vbid).failover_log for vbid in range(16))
