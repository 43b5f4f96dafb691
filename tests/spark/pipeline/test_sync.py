"""The stream's half of exactly-once, without Spark: what a batch is by its checkpoint, and what does not go together.

The rest is in test_lake.py (the tables, against a model) and test_sync_kill.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mirror.config_reader import load
from mirror.errors import ConfigError, ConnectFailed, MirrorError
from mirror.spark.pipeline import sync as syncs
from mirror.spark.pipeline.progress import MergeFigures
from mirror.spark.pipeline.sync import How, SourceSize, SyncTarget, checkpoint_name, look_at, sync
from mirror.spark.places import Folder, folder_at
from mirror.spark.source.columns import CHANGES
from mirror.spark.tables.lake import Lake
from mirror.spark.tables.parts import PartWriter
from storage.errors import NotAMirror
from tests.spark.events import event, table_of
from tests.spark.mirrors import SmallMirror


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
    events: list[int] = []
    frame = [event("mutation", "a", (1, 1), value=b"1")]
    with Lake(folder_at(tmp_path), "an-id") as lake:
        sink = SyncTarget(lake, place, How(), events.append)
        sink(frame, 0)
        sink(frame, 0)
    assert events == [1]
    assert len(executors) == 1


def test_a_batch_without_events_leaves_no_version(tmp_path: Path, executors: list[str]) -> None:
    place = checkpoint(tmp_path / "_checkpoint", b0="0 to 0", b1="0 to 1")
    with Lake(folder_at(tmp_path), "an-id") as lake:
        sink = SyncTarget(lake, place, How())
        sink([], 0)
        assert (lake.changes.version(), lake.documents.table.version()) == (0, 0)
        sink([event("mutation", "a", (1, 1), value=b"1")], 1)
        assert lake.done_batch == 1


def test_a_waiting_batch_is_merged_when_due_or_when_the_stream_ends(tmp_path: Path, executors: list[str]) -> None:
    place = checkpoint(tmp_path / "_checkpoint", **{f"b{number}": str(number) for number in range(6)})
    now_s = 0.0
    merges: list[MergeFigures] = []
    with Lake(folder_at(tmp_path), "an-id", max_age_s=10, clock=lambda: now_s) as lake:
        sink = SyncTarget(lake, place, How(), on_merge=merges.append)
        for number in range(3):
            sink([event("mutation", "a", (1, number + 1), value=b"")], number)
            sink.catch_up(due_only=True)
        assert merges == []
        now_s = 10.0
        sink.catch_up(due_only=True)
        sink([event("mutation", "b", (1, 4), value=b"")], 3)
        now_s = 20.0
        sink([event("mutation", "a", (1, 5), value=b"")], 4)
        sink([event("deletion", "absent", (1, 6))], 5)
        for _ in range(2):
            sink.catch_up(due_only=False)
    assert [(each.batch, each.inserted, each.updated) for each in merges] == [(2, 1, 0), (4, 1, 1), (5, 0, 0)]
    assert [each.rewritten_bytes > 0 for each in merges] == [True, True, False]


def test_tables_are_compacted_between_batches(tmp_path: Path, executors: list[str]) -> None:
    place = checkpoint(tmp_path / "_checkpoint", **{f"b{number}": str(number) for number in range(4)})
    with Lake(folder_at(tmp_path), "an-id", max_age_s=1e9) as lake:
        sink = SyncTarget(lake, place, How(tidy_batches=2))
        for number in range(4):
            sink([event("mutation", f"k{number}", (1, number + 1), value=b"")], number)
        assert len(lake.changes.file_uris()) == 1
        assert lake.changes.count() == lake.documents.table.count() == 4


@pytest.mark.parametrize(
    ("source", "width"),
    [
        (SourceSize(1024), 16),
        (SourceSize(1024, 0), 256),
        (SourceSize(1024, 1 << 30), 16),
        (SourceSize(1024, 1 << 50), 4),
        (SourceSize(64, 1 << 50), 1),
        (SourceSize(1), 1),
    ],
)
def test_the_number_of_parts_follows_the_size_of_the_source(source: SourceSize, width: int) -> None:
    assert source.part_vbuckets == width


def test_a_checkpoint_is_identified_by_its_metadata_file(tmp_path: Path) -> None:
    assert checkpoint_name(tmp_path / "absent") is None
    assert checkpoint_name(checkpoint(tmp_path / "there")) == "an-id"
    (tmp_path / "there" / "metadata").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read as a checkpoint"):
        checkpoint_name(tmp_path / "there")


def test_a_checkpoint_whose_tables_are_gone_is_refused_at_the_start(tmp_path: Path) -> None:
    place = checkpoint(tmp_path / "_checkpoint", b0="0 to 5")
    (place / "commits").mkdir()
    (place / "commits" / "0").touch()
    with pytest.raises(ConfigError, match="tables that are gone"):
        sync(None, {"path": "x"}, tmp_path)


def test_a_source_is_checked_before_a_table_is_made(tmp_path: Path) -> None:
    settings = load().settings
    with pytest.raises(NotAMirror):
        look_at({"path": str(tmp_path / "absent")}, settings)
    with pytest.raises(ConnectFailed):
        look_at({"connection": "couchbase://demo@127.0.0.1:1/demo"}, settings)
    SmallMirror(tmp_path / "mirror").close()
    assert look_at({"path": str(tmp_path / "mirror"), "vbuckets": "0-3"}, settings) == SourceSize(8, 0)
    with pytest.raises(ConfigError, match="does not hold vbucket 8"):
        look_at({"path": str(tmp_path / "mirror"), "vbuckets": "0-8"}, settings)


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


def test_the_error_of_a_sink_replaces_the_error_of_spark() -> None:
    sink = SyncTarget(None, Path("x"), How())  # type: ignore[arg-type]
    sink.failed = MirrorError("the reason")
    assert syncs._cause(sink, RuntimeError("[STREAM_FAILED] ...")) is sink.failed
    sink.failed = None
    assert "STREAM_FAILED" in str(syncs._cause(sink, RuntimeError("[STREAM_FAILED] ...")))
