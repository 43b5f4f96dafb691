"""The stores that benches fill are sound, and have the documents that were named."""

from __future__ import annotations

from pathlib import Path

from mirror.bench import stores
from storage.admin.check import check
from storage.read.view import open_view


def test_rows_can_be_stored_in_several_groups(tmp_path: Path) -> None:
    path, rows = str(tmp_path / "m"), stores.own_keys(5, 300)
    assert stores.store_rows(path, rows, snapshot_rows=50, groups=3).documents == 300
    assert check(path).problems == []
    with open_view(path) as view:
        assert view.identity.group_count == 3
        assert len(view.get_many([b"document::%010d" % number for number in range(300)])) == 300
