"""The growth benchmark measures two whole stores: each has every document of every wave."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import lmdb

from mirror.bench.growth import growth, key_of
from storage.admin.check import check
from storage.format import keys
from storage.read.view import open_view


def test_each_size_is_reached_in_waves_and_all_documents_are_there(tmp_path: Path) -> None:
    found = list(growth([300, 600, 2700], 4, 64, 50, str(tmp_path)))
    assert [each.documents for each in found] == [300, 600, 2700]
    for each in found:
        assert each.stored.documents == each.limit.documents == 300, "the last wave"
        assert each.got.documents == each.limit_got.documents == 50
        assert min(each.stored.cpu_us, each.limit.cpu_us, each.got.seconds, each.limit_got.seconds) > 0
    path = str(tmp_path / "mirror")
    assert check(path).problems == []
    with open_view(path) as view:
        assert sum(view.count(vbid) for vbid in range(4)) == 2700
        assert all(view.get(key_of(number)) is not None for number in range(2700))
    with lmdb.open(str(tmp_path / "bare"), max_dbs=16, readonly=True) as env:
        trees = [env.open_db(keys.keys_db(vbid), dupsort=True, dupfixed=True, create=False) for vbid in range(4)]
        with env.begin() as txn:
            assert sum(txn.stat(tree)["entries"] for tree in trees) == 2700


def test_keys_are_different_and_in_random_order() -> None:
    found = [key_of(number) for number in range(10_000)]
    assert len(set(found)) == 10_000
    assert {len(key) for key in found} == {20}
    rising = sum(one < other for one, other in pairwise(found))
    assert 3_000 < rising < 7_000
