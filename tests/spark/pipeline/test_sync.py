"""The stream's half of exactly-once, without Spark: what a batch is by its checkpoint, and what does not go together.

The rest is in test_lake.py (the tables, against a model) and test_sync_kill.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mirror.config_reader import load
from mirror.errors import ConfigError, ConnectFailed, MirrorError
from mirror.spark.pipeline import sync as syncs
from mirror.spark.pipeline.progress import MergeFigures
from mirror.spark.pipeline.sync import How, SyncTarget, check_source, checkpoint_name, space_warning, sync
from mirror.spark.places import Folder, folder_at
from mirror.spark.source.columns import CHANGES
from mirror.spark.tables.documents import Applied
from mirror.spark.tables.lake import Costs, Lake
from mirror.spark.tables.parts import PartWriter
from storage.errors import NotAMirror
from tests.spark.events import Event, event, table_of
from tests.spark.mirrors import SmallMirror
from tests.spark.tables.test_lake import orders_of


def checkpoint(folder: Path, name: str = "an-id", **offsets: str) -> Path:
    """As Spark makes it, with the offsets of batches by number."""
    (folder / "offsets").mkdir(parents=True, exist_ok=True)
    (folder / "metadata").write_text(json.dumps({"id": name}))
    for number, text in offsets.items():
        (folder / "offsets" / number.removeprefix("b")).write_text(text)
    return folder


@pytest.fixture
def executors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Parts are written here instead of by Spark; the prefixes that were requested."""
    prefixes: list[str] = []

    def write(frame: Any, folder: Folder, prefix: str) -> Any:
        prefixes.append(prefix)
        with PartWriter(folder.url, prefix, CHANGES) as parts:
            for rows in table_of(frame).to_batches():
                parts.write(rows)
        return parts.finished

    monkeypatch.setattr(syncs, "write_parts", write)
    return prefixes


def test_a_batch_that_is_run_again_after_a_crash_is_not_written_again(tmp_path: Path, executors: list[str]) -> None:
    place = checkpoint(tmp_path / "_checkpoint", b0="0 to 5")
    done: list[tuple[int, Applied]] = []
    frame = [event("mutation", "a", (1, 1), value=b"1")]
    with Lake(folder_at(tmp_path), "an-id") as lake:
        sink = SyncTarget(lake, place, How(), lambda *each: done.append(each))
        sink(frame, 0)
        sink(frame, 0)
    assert done == [(0, Applied(1, 1, 0, 0)), (0, Applied(0, 0, 0, 0))]
    assert len(executors) == 1


def test_a_batch_without_events_leaves_no_version(tmp_path: Path, executors: list[str]) -> None:
    place = checkpoint(tmp_path / "_checkpoint", b0="0 to 0", b1="0 to 1")
    with Lake(folder_at(tmp_path), "an-id") as lake:
        sink = SyncTarget(lake, place, How(), lambda *_: None)
        sink([], 0)
        assert (lake.changes.version(), lake.documents.version()) == (0, 0)
        sink([event("mutation", "a", (1, 1), value=b"1")], 1)
        assert lake.done_batch == 1


def test_a_batch_that_was_put_off_is_merged_when_it_is_due_or_the_stream_ends(
    tmp_path: Path, executors: list[str]
) -> None:
    place = checkpoint(tmp_path / "_checkpoint", **{f"b{number}": str(number) for number in range(5)})
    now_s = 0.0
    done: list[tuple[int, Applied]] = []
    merges: list[MergeFigures] = []
    with Lake(folder_at(tmp_path), "an-id", costs=Costs(rewrite_rate=1), clock=lambda: now_s) as lake:
        sink = SyncTarget(lake, place, How(), lambda *each: done.append(each), merges.append)
        for number in range(3):
            sink([event("mutation", "a", (1, number + 1), value=b"")], number)
        sink.catch_up(due_only=True)
        assert done == [(0, Applied(1, 1, 0, 0)), (1, Applied(1, 0, 1, 0)), (2, Applied(1, 0, 0, 0))]
        now_s = 1e9
        sink.catch_up(due_only=True)
        assert done[3:] == [(2, Applied(0, 0, 1, 0))]
        now_s = 1e9 + 1
        sink([event("mutation", "a", (1, 4), value=b"")], 3)
        sink.catch_up(due_only=False)
        sink.catch_up(due_only=False)
        assert done[4:] == [(3, Applied(1, 0, 0, 0)), (3, Applied(0, 0, 1, 0))]
        sink([event("deletion", "absent", (1, 5))], 4)
        sink.catch_up(due_only=False)
        sink.catch_up(due_only=False)
    assert [(each.batch, each.inserted, each.updated) for each in merges] == [
        (0, 1, 0),
        (1, 0, 1),
        (2, 0, 1),
        (3, 0, 1),
        (4, 0, 0),
    ], "a merge that changes no row is over, too: its events wait no longer"
    assert [each.rewritten_bytes > 0 for each in merges] == [False, True, True, True, False]


def test_tables_are_tidied_between_batches(tmp_path: Path, executors: list[str]) -> None:
    place = checkpoint(tmp_path / "_checkpoint", **{f"b{number}": str(number) for number in range(4)})
    with Lake(folder_at(tmp_path), "an-id") as lake:
        sink = SyncTarget(lake, place, How(tidy_batches=2, keep_hours=0), lambda *_: None)
        for number in range(4):
            sink([event("mutation", f"k{number}", (1, number + 1), value=b"")], number)
        assert len(lake.changes.file_uris()) == 1
        assert lake.changes.count() == lake.documents.count() == 4


def test_space_that_merging_will_need_and_the_disk_does_not_have_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SmallMirror(tmp_path / "data").close()
    said: list[str] = []
    for free_mib in (101, 99):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free_mib << 20: SimpleNamespace(free=free))
        how = How(costs=Costs(rewrite_rate=(50 << 20) // 3600 + 1, keep_documents_hours=2))
        sync(Spark(""), {"path": str(tmp_path / "data")}, tmp_path / "lake", how, on_warning=said.append)
    assert len(said) == 1
    assert "may take 100 MiB, and 99 MiB are free (give a lower --rewrite-rate" in said[0]
    assert space_warning(folder_at("s3://bucket/lake"), 1 << 60) is None


def test_merges_of_each_batch_warn_when_they_write_more_than_the_disk_has(
    tmp_path: Path, executors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At rate 0 nothing is known at the start, and merges write most."""
    SmallMirror(tmp_path / "data").close()
    checkpoint(tmp_path / "lake" / "_checkpoint", **{f"b{number}": str(number) for number in range(9)})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    spark = Feeding(*(orders_of(range(1_000), 1 + number * 1_000) for number in range(9)))
    said: list[tuple[int, str]] = []
    sync(
        spark,
        {"path": str(tmp_path / "data")},
        tmp_path / "lake",
        How(costs=Costs(rewrite_rate=0)),
        on_warning=lambda line: said.append((spark.batch, line)),
    )
    ((batch, line),) = said
    assert batch > 1, "the first load fits, and so do a few versions"
    assert "older versions of documents may take 1 MiB, and 1 MiB are free" in line


def test_a_checkpoints_name(tmp_path: Path) -> None:
    assert checkpoint_name(tmp_path / "absent") is None
    assert checkpoint_name(checkpoint(tmp_path / "there")) == "an-id"
    (tmp_path / "there" / "metadata").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read as a checkpoint"):
        checkpoint_name(tmp_path / "there")


def test_a_checkpoint_whose_tables_are_gone_is_refused_before_anything_runs(tmp_path: Path) -> None:
    place = checkpoint(tmp_path / "_checkpoint", b0="0 to 5")
    (place / "commits").mkdir()
    (place / "commits" / "0").touch()
    with pytest.raises(ConfigError, match="tables that are gone"):
        sync(None, {"path": "x"}, tmp_path)


def test_a_source_is_looked_at_before_anything_is_made(tmp_path: Path) -> None:
    settings = load().settings
    with pytest.raises(NotAMirror):
        check_source({"path": str(tmp_path / "absent")}, settings)
    with pytest.raises(ConnectFailed):
        check_source({"connection": "couchbase://demo@127.0.0.1:1/demo"}, settings)
    SmallMirror(tmp_path / "mirror").close()
    check_source({"path": str(tmp_path / "mirror"), "vbuckets": "0-3"}, settings)
    with pytest.raises(ConfigError, match="does not hold vbucket 8"):
        check_source({"path": str(tmp_path / "mirror"), "vbuckets": "0-8"}, settings)


class Spark:
    """As much of a session as `sync` uses; each query ends as `ends` says: with a text, that of an error, or well."""

    def __init__(self, *ends: str) -> None:
        self.ends = list(ends)

    def __getattr__(self, _: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def awaitTermination(self, _: float) -> bool:
        if text := self.ends.pop(0):
            raise RuntimeError(text)
        return True


class Feeding(Spark):
    """One query, whose batches have these events."""

    def __init__(self, *batches: list[Event]) -> None:
        super().__init__("")
        self.batches = batches
        self.batch = -1

    def foreachBatch(self, sink: SyncTarget) -> Feeding:
        self.sink = sink
        return self

    def awaitTermination(self, timeout_s: float) -> bool:
        for number, events in enumerate(self.batches):
            self.batch = number
            self.sink(events, number)
        return super().awaitTermination(timeout_s)


def test_a_query_whose_processes_were_too_slow_to_connect_is_started_again(tmp_path: Path) -> None:
    """Spark waits ten seconds for a Python process; on a busy machine `sync` ended with that."""
    SmallMirror(tmp_path / "data").close()
    source, slow = {"path": str(tmp_path / "data")}, "[STREAM_FAILED] ...: Python worker failed to connect back. SQLS"
    assert sync(Spark(slow, slow, ""), source, tmp_path / "lake") == syncs.Synced(0, 0, 0, 0, 0)
    for ends in ((slow, slow, slow), ("another error",)):
        spark = Spark(*ends)
        with pytest.raises(MirrorError, match=ends[-1][-10:]):
            sync(spark, source, tmp_path / "lake")
        assert spark.ends == []


def test_what_a_sink_failed_of_is_what_is_raised() -> None:
    sink = SyncTarget(None, Path("x"), How(), lambda *_: None)  # type: ignore[arg-type]
    sink.failed = MirrorError("the reason")
    assert syncs._cause(sink, RuntimeError("[STREAM_FAILED] ...")) is sink.failed
    sink.failed = None
    assert "STREAM_FAILED" in str(syncs._cause(sink, RuntimeError("[STREAM_FAILED] ...")))
