"""Documents of a path without Spark: what is planned, what tasks read, what happens when history goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from mirror.errors import ConfigError
from mirror.sandbox import SandboxCluster, SandboxThread
from mirror.spark.pipeline.export import export
from mirror.spark.runner import LocalRunner
from mirror.spark.source.columns import DOCUMENTS
from mirror.spark.source.local import dealt, plan, read
from mirror.spark.source.options import Options, parse
from mirror.typed.rows import Shape
from storage.errors import NotAMirror, Unavailable, UnknownCollection, ViewInvalidated
from storage.read.view import open_view
from tests.crash.service import Service, until
from tests.spark.mirrors import VBUCKETS, SmallMirror, order, orders

PLAIN = Shape(DOCUMENTS, (False,) * len(DOCUMENTS))


@pytest.fixture
def small(empty: SmallMirror) -> SmallMirror:
    empty.put(orders(0, 100))
    empty.put({"order::000003": None, "order::000004": order(4444)})
    return empty


def options(small: SmallMirror, **more: str) -> Options:
    return parse({"path": str(small.path), "partitions": "3"} | more)


def rows(options: Options, shape: Shape = PLAIN) -> list[dict[str, Any]]:
    job, shares = plan(options)
    return [row for vbids in shares for batch in read(job, vbids, shape) for row in batch.to_pylist()]


def scanned(small: SmallMirror, **how: Any) -> list[dict[str, Any]]:
    with open_view(str(small.path)) as view:
        return [
            {
                "key": each.key.decode(),
                "collection": "_default._default",
                **{name: getattr(each, name) for name in DOCUMENTS.names[2:]},
            }
            for each in view.scan(**how)
        ]


def by_key(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(found, key=lambda row: row["key"])


def test_a_read_returns_every_document_once_as_a_scan_does(small: SmallMirror) -> None:
    assert by_key(rows(options(small))) == by_key(scanned(small))
    only = rows(options(small, vbuckets="1,4-5"))
    assert by_key(only) == by_key([row for vbid in (1, 4, 5) for row in scanned(small, vbid=vbid)])


def test_vbuckets_are_divided_evenly_and_by_group() -> None:
    shares = dealt(range(10), 4, 2)
    assert sorted(vbid for share in shares for vbid in share) == list(range(10))
    assert [len(share) for share in shares] == [2, 3, 2, 3]
    assert all(len({vbid % 2 for vbid in share}) == 1 for share in shares)
    assert dealt([], 4, 2) == [[]]
    assert dealt([5], 4, 2) == [[5]]


def test_a_planned_read_is_not_changed_by_later_writes_and_rollbacks(small: SmallMirror) -> None:
    before = by_key(scanned(small))
    job, shares = plan(options(small))
    small.put(orders(50, 100))
    for vbid in range(VBUCKETS):
        small.roll_back(vbid, 1)
    found = [row for vbids in shares for batch in read(job, vbids, PLAIN) for row in batch.to_pylist()]
    assert by_key(found) == before


def test_purged_history_fails_the_job_with_the_reason(small: SmallMirror) -> None:
    job, shares = plan(options(small))
    small.put(orders(0, 100))
    small.purge(boundaries=1)
    with pytest.raises(ViewInvalidated, match=r"no longer kept.*start the read again"):
        list(read(job, shares[0], PLAIN))


def test_fields_and_metadata_columns_come_in_the_order_of_the_schema(small: SmallMirror) -> None:
    schema = pa.schema([("total", pa.float64()), ("_key", pa.string()), ("paid", pa.bool_()), ("_seqno", pa.int64())])
    shape = Shape(schema, (True, False, True, False))
    found = {row["_key"]: row for row in rows(options(small), shape=shape)}
    assert found["order::000005"]["total"] == 1.85
    assert found["order::000006"]["paid"] is True
    assert {row["_seqno"] for row in found.values()} == {row["seqno"] for row in scanned(small)}


def test_batches_of_small_vbuckets_are_joined(small: SmallMirror) -> None:
    job, shares = plan(options(small, partitions="1"))
    assert [batch.num_rows for batch in read(job, shares[0], PLAIN)] == [99]


def test_a_missing_vbucket_collection_or_mirror_is_named(small: SmallMirror, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not hold vbucket 99 \(it holds 0 to 7\)"):
        plan(options(small, vbuckets="99"))
    with pytest.raises(UnknownCollection, match=r"no collection 'shop.orders'.*_default._default"):
        plan(options(small, collection="shop.orders"))
    with pytest.raises(NotAMirror):
        open_view(str(tmp_path / "nowhere"))


def test_a_read_of_an_empty_mirror_needs_no_lease(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with SandboxThread(SandboxCluster(vbuckets=8)) as source, Service(source.connection_string, data) as service:
        service.start()
        until("the mirror", lambda: (data / "mirror.json").exists())
        with open_view(str(data)) as view:
            until("all of it", lambda: all(view.state(vbid).is_whole for vbid in range(8)))
        assert rows(parse({"path": str(data)})) == []
        done = export(data, tmp_path / "export", LocalRunner(1))
        assert (done.documents, done.vbuckets) == (0, 8)


def test_a_mirror_that_is_filling_is_refused(tmp_path: Path) -> None:
    """An export once left out the documents that had not arrived yet."""
    small = SmallMirror(tmp_path / "data", filled=False)
    small.put(orders(0, 3))
    filled = sorted(vbid for vbid, seqno in small.seqnos.items() if seqno)
    with pytest.raises(Unavailable, match=f"{8 - len(filled)} of 8 vbuckets: not filled yet .wait until"):
        export(small.path, tmp_path / "export", LocalRunner(1))
    assert not (tmp_path / "export").exists()
    assert len(rows(options(small, vbuckets=",".join(map(str, filled))))) == 3
    small.close()
