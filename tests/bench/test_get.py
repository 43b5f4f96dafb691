"""The bench of reads, and its limit, find what they look for."""

from __future__ import annotations

from pathlib import Path

from mirror.bench import get, limits, stores
from storage.admin.check import check
from storage.read.view import open_view


def test_reads_find_every_sampled_key(tmp_path: Path) -> None:
    path = str(tmp_path / "m")
    stores.store_rows(path, stores.own_keys(4, 500), snapshot_rows=50)
    assert check(path).problems == []
    sample = stores.sample_keys(200, 500)
    assert limits.get_limit(path, sample, 4).documents == 200
    assert get.get_view(path, sample).documents == get.get_many_view(path, sample, 30).documents == 200
    with open_view(path) as view:
        assert len(view.get_many(sample)) == len(set(sample))
