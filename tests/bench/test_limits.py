"""The benchmarks do what they say: the limit and the store end with the same trees."""

from __future__ import annotations

from pathlib import Path

import lmdb
import pytest

from mirror.bench import limits, stores
from storage.format import keys


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
    rows = {vbid: stores.document_rows(vbid, 2, 700, 60) for vbid in range(2)}
    limit = limits.write_limit(str(tmp_path / "limit"), rows, deferred=deferred, batch_rows=100)
    store = stores.store_rows(str(tmp_path / "store"), rows, snapshot_rows=snapshot_rows, run_rows=40)
    assert limit.documents == store.documents == 1400
    assert trees(str(tmp_path / "limit"), 2) == trees(str(tmp_path / "store" / "group-0000"), 2)
    assert limit.per_second > 0
