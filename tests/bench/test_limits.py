"""The benchmarks do what they say: the limit and the store end with the same trees."""

from __future__ import annotations

from pathlib import Path

import lmdb
import pytest

from mirror.bench import limits
from storage import keys
from storage.check import check
from storage.view import open_view


def trees(path: str, vbuckets: int) -> list[list[tuple[bytes, bytes]]]:
    env = lmdb.open(path, max_dbs=64, readonly=True, map_size=64 << 30)
    found = []
    for vbid in range(vbuckets):
        rows, keys_ = env.open_db(keys.rows_db(vbid)), env.open_db(keys.keys_db(vbid), dupsort=True, dupfixed=True)
        with env.begin() as txn:
            found.append([(k, v) for k, v in txn.cursor(rows) if len(k) == keys.ROW_KEY_SIZE])
            found.append(list(txn.cursor(keys_)))
    env.close()
    return found


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("snapshot_rows", [3, 10**9])
def test_limit_and_store_write_the_same_rows(tmp_path: Path, deferred: bool, snapshot_rows: int) -> None:
    rows = {vbid: limits.document_rows(vbid, 2, 700, 60) for vbid in range(2)}
    limit = limits.write_limit(str(tmp_path / "limit"), rows, deferred=deferred, batch_rows=100)
    store = limits.store_rows(str(tmp_path / "store"), rows, snapshot_rows=snapshot_rows, run_rows=40)
    assert limit.documents == store.documents == 1400
    assert trees(str(tmp_path / "limit"), 2) == trees(str(tmp_path / "store" / "group-0000"), 2)
    assert limit.per_second > 0


def test_rows_can_be_stored_in_several_groups(tmp_path: Path) -> None:
    path, rows = str(tmp_path / "m"), limits.own_keys(5, 300)
    assert limits.store_rows(path, rows, snapshot_rows=50, groups=3).documents == 300
    assert check(path).problems == []
    with open_view(path) as view:
        assert view.identity.group_count == 3
        assert len(view.get_many([b"document::%010d" % number for number in range(300)])) == 300


def test_reads_find_every_sampled_key(tmp_path: Path) -> None:
    path = str(tmp_path / "m")
    limits.store_rows(path, limits.own_keys(4, 500), snapshot_rows=50)
    assert check(path).problems == []
    sample = limits.sample_keys(200, 500)
    assert limits.get_limit(path, sample, 4).documents == 200
    assert limits.get_view(path, sample).documents == 200
    with open_view(path) as view:
        assert len(view.get_many(sample)) == len(set(sample))


def test_a_rollback_is_measured_to_its_last_row(tmp_path: Path) -> None:
    path = str(tmp_path / "m")
    figures = limits.rollback_round(path, 3_000, value_bytes=64)
    assert figures.retracted_rows == 3_000
    assert figures.steps > 1
    assert min(figures.removed_rows_per_s, figures.removed_rows_per_s_alone, figures.step_ms_max) > 0
    assert check(path).problems == []
    with open_view(path) as view:
        assert (view.state(0).branch, view.state(0).published_seqno, view.count(0)) == (2, 1_500, 1_500)
        assert len(list(view.scan_seqno(0))) == 1_500
        assert view.state(1).published_seqno > 0
