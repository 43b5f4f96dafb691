"""`sync` over a small mirror: its batches, merges, figures and position, and sources that it refuses.

The tables against a model are in test_lake.py, kills in test_sync_kill.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from mirror.config_reader import load
from mirror.errors import ConfigError, ConnectFailed
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.thread import SandboxThread
from mirror.spark.pipeline.sync import BatchFigures, How, MergeFigures, SourceSize, Synced, look_at, sync
from mirror.spark.runner import LocalRunner
from storage.errors import NotAMirror
from storage.model import Collection, Seqno
from tests.spark.mirrors import SmallMirror, orders, scanned
from tests.storage.rig import system_event


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallMirror]:
    made = SmallMirror(tmp_path / "data")
    yield made
    made.close()


def synced(small: SmallMirror, how: How | None = None, figures: list[Any] | None = None, **options: str) -> Synced:
    how = how or How(available_now=True)
    on_figures = [].append if figures is None else figures.append
    source = {"path": str(small.path), **options}
    return sync(source, small.path.parent / "lake", LocalRunner(1), how, on_figures=on_figures)


def documents(small: SmallMirror) -> dict[str, tuple[int, bytes]]:
    table = DeltaTable(str(small.path.parent / "lake" / "documents"))
    rows = table.to_pyarrow_table(columns=["key", "seqno", "value"]).to_pylist()
    return {row["key"]: (row["seqno"], row["value"]) for row in rows}


def test_a_run_goes_on_where_the_one_before_ended(small: SmallMirror) -> None:
    small.put(orders(0, 40))
    assert synced(small) == Synced(1, 40, 40, 0, 0)
    assert synced(small) == Synced(0, 0, 0, 0, 0)
    small.put(orders(35, 15))
    assert synced(small) == Synced(1, 15, 10, 5, 0)
    assert documents(small) == scanned(small.path)


def test_batches_are_as_large_as_their_limit_and_wait_for_one_merge(small: SmallMirror) -> None:
    for number in range(0, 60, 10):
        small.put(orders(number, 10))
    figures: list[BatchFigures | MergeFigures] = []
    done = synced(small, How(available_now=True, max_age_s=1e9), figures, maxRowsPerBatch="20")
    *batches, merge = figures
    assert all(isinstance(each, BatchFigures) for each in batches)
    assert [each.batch for each in batches] == list(range(len(batches)))
    assert len(batches) == done.batches > 2
    assert sum(each.events for each in batches if isinstance(each, BatchFigures)) == 60
    lags = [each.lag_seqnos for each in batches if isinstance(each, BatchFigures)]
    assert lags == sorted(lags, reverse=True)
    assert lags[-1] == 0
    assert isinstance(merge, MergeFigures)
    assert (merge.batch, merge.inserted) == (len(batches) - 1, 60)
    assert documents(small) == scanned(small.path)


def test_each_batch_is_merged_if_documents_may_not_be_older(small: SmallMirror) -> None:
    for number in range(0, 60, 10):
        small.put(orders(number, 10))
    figures: list[Any] = []
    synced(small, How(available_now=True, max_age_s=0), figures, maxRowsPerBatch="20")
    kinds = [type(each) for each in figures]
    assert kinds == [BatchFigures, MergeFigures] * (len(kinds) // 2)
    assert documents(small) == scanned(small.path)


def test_tables_are_compacted_between_batches(small: SmallMirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirror.spark.pipeline.sync.TIDY_BATCHES", 1)
    for number in range(0, 60, 10):
        small.put(orders(number, 10))
    done = synced(small, How(available_now=True, max_age_s=1e9), maxRowsPerBatch="20")
    assert len(DeltaTable(str(small.path.parent / "lake" / "changes")).file_uris()) < done.batches
    assert documents(small) == scanned(small.path)


def test_events_of_other_collections_move_the_position(small: SmallMirror) -> None:
    """Otherwise each batch would read them again, and a lease would keep their history."""
    default, empty = Collection(0, 0, "_default", Seqno(0)), Collection(8, 8, "empty", Seqno(1))
    system_event(small.writers[0], 1, default, empty, scopes={0: "_default", 8: "shop"}, publish=True)
    small.seqnos[0] = 1
    small.put(orders(0, 40))
    assert synced(small, collection="shop.empty") == Synced(0, 0, 0, 0, 0)
    changes = DeltaTable(str(small.path.parent / "lake" / "changes"))
    assert changes.version() == 1
    synced(small, collection="shop.empty")
    changes.update_incremental()
    assert changes.version() == 1


def test_another_selection_is_refused_with_a_remedy(small: SmallMirror) -> None:
    """With a wider one the table had 5 of 3,026 documents for ever, and every run said `0 events`."""
    small.put(orders(0, 40))
    synced(small, collection="_default")
    others: list[dict[str, Any]] = [{}, {"collection": "_default,s.b"}]
    for other in others:
        with pytest.raises(ConfigError, match=r"made with collection=_default\._default, not .*sync: a new folder"):
            synced(small, **other)


def test_a_mirror_and_a_cluster_do_not_follow_each_other(small: SmallMirror, monkeypatch: pytest.MonkeyPatch) -> None:
    small.put(orders(0, 40))
    synced(small)
    monkeypatch.setenv("DCP_MIRROR_PASSWORD", "demo")
    with SandboxThread(SandboxCluster(nodes=1, vbuckets=8)) as source:
        of_cluster = {"connection": source.connection_string}
        with pytest.raises(ConfigError, match="made with option path, not connection"):
            sync(of_cluster, small.path.parent / "lake", LocalRunner(1), How(available_now=True))


def test_a_run_ends_after_the_batch_in_which_it_is_stopped(small: SmallMirror) -> None:
    for number in range(0, 60, 10):
        small.put(orders(number, 10))
    stop = threading.Event()

    def on_figures(figures: BatchFigures | MergeFigures) -> None:
        if figures.batch == 1:
            stop.set()

    options = {"path": str(small.path), "maxRowsPerBatch": "20"}
    how = How(trigger_s=0, max_age_s=1e9)
    done = sync(options, small.path.parent / "lake", LocalRunner(1), how, on_figures=on_figures, stop=stop)
    assert done.batches == 2
    assert done.inserted == done.events > 0, "what waited is merged"
    synced(small)
    assert documents(small) == scanned(small.path)


@pytest.mark.parametrize(
    ("size", "width"),
    [
        (SourceSize(1024), 16),
        (SourceSize(1024, 0), 256),
        (SourceSize(1024, 1 << 30), 16),
        (SourceSize(1024, 1 << 50), 4),
        (SourceSize(64, 1 << 50), 1),
        (SourceSize(1), 1),
    ],
)
def test_the_number_of_parts_follows_the_size_of_the_source(size: SourceSize, width: int) -> None:
    assert size.part_vbuckets == width


def test_a_source_is_checked_before_a_table_is_made(tmp_path: Path, small: SmallMirror) -> None:
    settings = load().settings
    with pytest.raises(NotAMirror):
        look_at({"path": str(tmp_path / "absent")}, settings)
    with pytest.raises(ConnectFailed):
        look_at({"connection": "couchbase://demo@127.0.0.1:1/demo"}, settings)
    assert look_at({"path": str(small.path), "vbuckets": "0-3"}, settings) == SourceSize(8, 0)
    with pytest.raises(ConfigError, match="does not hold vbucket 8"):
        look_at({"path": str(small.path), "vbuckets": "0-8"}, settings)
