"""The tables against a model: whatever breaks off, and however often it is tried again, each event once."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Transaction, write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mirror.errors import ConfigError, MirrorError
from mirror.spark.places import folder_at
from mirror.spark.source.columns import CHANGES
from mirror.spark.tables import lake as lakes
from mirror.spark.tables import parts as parts_module
from mirror.spark.tables.delta import CommitConflict, commit, vacuum
from mirror.spark.tables.documents import BATCH_MARK, Applied, batch_of, prefix
from mirror.spark.tables.lake import Lake
from mirror.spark.tables.parts import PartWriter
from tests.spark.events import Event, History, Name, act, event, table_of

IDENTITY = ("kind", "vbid", "collection", "key", "seqno", "branch", "at_branch", "at_seqno")


class Crash(Exception):
    """The process would be gone here."""


def write_files(lake: Lake, files: list[list[Event]]) -> list[Any]:
    written = []
    for events in files:
        with PartWriter(lake.changes_folder.url, prefix(lake.next_batch), CHANGES, group_rows=4) as parts:
            for rows in table_of(events).to_batches():
                parts.write(rows)
        written += parts.finished
    return written


def apply(
    lake: Lake,
    files: list[list[Event]],
    crash_at: str = "",
    *,
    put_off: bool = False,
    position: dict[str, Any] | None = None,
) -> Applied | None:
    """Apply a batch as `sync` does, and stop where the test says."""
    written = write_files(lake, files)
    if crash_at == "before changes":
        raise Crash
    lake.add_changes(written, position or {})
    if crash_at == "between":
        raise Crash
    if put_off:
        return None
    done = lake.merge()
    if crash_at == "after":
        raise Crash
    return done


def reported(lake: Lake) -> Counter[tuple[Any, ...]]:
    lake.changes.update_incremental()
    rows = lake.changes.to_pyarrow_table(columns=list(IDENTITY)).to_pylist()
    return Counter(tuple(row[name] for name in IDENTITY) for row in rows)


def current(lake: Lake) -> dict[Name, tuple[Any, ...]]:
    lake.documents.table.update_incremental()
    rows = lake.documents.table.to_pyarrow_table().to_pylist()
    found = {(row["collection"], row["key"]): (row["seqno"], row["value"]) for row in rows}
    assert len(found) == len(rows), "a document stands twice"
    assert {row["_part"] for row in rows} <= {row["vbid"] // 2 for row in rows}
    return found


def expected(histories: list[History]) -> dict[Name, tuple[Any, ...]]:
    return {name: (e["seqno"], e["value"]) for h in histories for name, e in h.state.items()}


def identities(events: list[Event]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(each[name] for name in IDENTITY) for each in events)


@pytest.mark.parametrize("examples", [6, pytest.param(300, marks=pytest.mark.long)])
def test_each_event_is_applied_once_after_a_crash_at_any_step(
    tmp_path_factory: pytest.TempPathFactory, examples: int
) -> None:
    """Batches cut anywhere, even within a rollback; every step may be the last before a restart that replays it."""

    @given(st.integers(0, 2**32))
    @settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=examples)
    def check(seed: int) -> None:
        follow(tmp_path_factory.mktemp("lake"), seed)

    check()


def lake_in(folder: Path, **more: Any) -> Lake:
    """The tables in a folder, with parts of two vbuckets."""
    return Lake(folder_at(folder), part_vbuckets=2, **more)


def follow(folder: Path, seed: int) -> None:
    """Tables that follow some history, made of `seed`, to its end. An attempt that was broken off leaves its position
    behind or not; the next one begins there, and ends elsewhere.
    """
    chance = random.Random(seed)
    histories = [History(vbid) for vbid in range(3)]
    lake = lake_in(folder)
    for number in range(8):
        for history in histories:
            for _ in range(chance.randrange(6)):
                act(history, chance)
        crashes = [*chance.sample(["before changes", "between", "after"], chance.randrange(4)), ""]
        for crash_at in crashes:
            sent = (lake.position or {"sent": [0] * 3})["sent"]
            cuts = [chance.randint(start, len(each.log)) for start, each in zip(sent, histories, strict=True)]
            if number == 7 and not crash_at:
                cuts = [len(each.log) for each in histories]
            pieces = [h.log[start:end] for h, start, end in zip(histories, sent, cuts, strict=True)]
            put_off = not crash_at and chance.random() < 0.4
            try:
                apply(lake, [pieces[0] + pieces[1], pieces[2]], crash_at, put_off=put_off, position={"sent": cuts})
            except Crash:
                lake.close()
                lake = lake_in(folder)
                lake.remove_unfinished()
        if not put_off and chance.random() < 0.3:
            lake.tidy()
        assert lake.position == {"sent": cuts}
        assert reported(lake) == identities([e for h, end in zip(histories, cuts, strict=True) for e in h.log[:end]])
    for _ in range(2):
        lake.merge()
        assert current(lake) == expected(histories)
    lake.close()
    assert [path.name for path in (folder / "_positions").iterdir()] == [str(lake._position_file()).rpartition("/")[2]]


def files(lake: Lake) -> set[str]:
    return {uri.rsplit("/", 1)[-1] for uri in lake.documents.table.file_uris()}


def test_a_merge_writes_only_the_parts_that_have_events_and_the_files_that_change(tmp_path: Path) -> None:
    with lake_in(tmp_path) as lake:
        first = [event("mutation", f"{vbid}", (1, 1), vbid=vbid, value=random.randbytes(9_000)) for vbid in range(8)]
        assert apply(lake, [first]) == Applied(inserted=8)
        before = files(lake)
        assert len(before) == 4
        assert apply(lake, [[event("mutation", "4", (1, 2), vbid=4, value=b"")]]) == Applied(updated=1)
        assert len(files(lake) & before) == 3
        before = files(lake)
        assert apply(lake, [[event("mutation", "new", (1, 2), vbid=0, value=b"")]]) == Applied(inserted=1)
        assert files(lake) > before
        version = lake.documents.table.version()
        assert apply(lake, [[event("deletion", "absent", (1, 3))]]) == Applied()
        assert lake.documents.table.version() == version + 1, "the commit has the mark"
        assert lake.merged_batch == 3


def test_small_files_of_a_part_are_joined(tmp_path: Path) -> None:
    with lake_in(tmp_path) as lake:
        for number in range(40):
            apply(lake, [[event("mutation", f"{number}", (1, number + 1), value=b"")]])
        assert len(files(lake)) < 8
        assert len(current(lake)) == 40


def test_the_memory_of_a_merge_does_not_grow_with_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "ROW_GROUP_BYTES", 1 << 20)
    peaks = []
    for size in (10, 40):
        with lake_in(tmp_path / str(size)) as lake:
            for number in range(size):
                rows = [
                    event("mutation", f"{number}-{at}", (1, number * 1_000 + at), value=random.randbytes(4_000))
                    for at in range(250)
                ]
                apply(lake, [rows], put_off=True)
            pool = pa.proxy_memory_pool(pa.system_memory_pool())
            kept = pa.default_memory_pool()
            for number, key in ((size, "0-0"), (size + 1, "1-1")):
                if number > size:
                    pa.set_memory_pool(pool)
                apply(lake, [[event("mutation", key, (1, number * 1_000), value=b"")]])
            pa.set_memory_pool(kept)
            peaks.append(pool.max_memory())
    assert peaks[1] < 1.3 * peaks[0]


def test_the_documents_table_is_not_rebuilt_from_compacted_changes(tmp_path: Path) -> None:
    """A compaction gives the files of `changes` other names, by which no merge finds them."""
    with lake_in(tmp_path) as lake:
        for number in range(3):
            apply(lake, [[event("mutation", f"{number}", (1, number + 1), value=b"1")]])
        lake.tidy()
        apply(lake, [[event("mutation", "3", (1, 4), value=b"1")]])
    shutil.rmtree(tmp_path / "documents")
    with pytest.raises(ConfigError, match=r"does not belong to .*they end at batches -1 and 3"):
        lake_in(tmp_path)


def test_the_documents_table_is_rebuilt_while_changes_has_each_batch(tmp_path: Path) -> None:
    with lake_in(tmp_path) as lake:
        for number in range(3):
            apply(lake, [[event("mutation", f"{number}", (1, number + 1), value=b"1")]])
        found = current(lake)
    shutil.rmtree(tmp_path / "documents")
    with lake_in(tmp_path) as lake:
        assert lake.merge() == Applied(inserted=3)
        assert current(lake) == found


def test_a_documents_table_ahead_of_changes_is_refused(tmp_path: Path) -> None:
    with lake_in(tmp_path) as lake:
        apply(lake, [[event("mutation", "a", (1, 1), value=b"1")]])
        shutil.copytree(tmp_path / "changes", tmp_path / "older")
        apply(lake, [[event("mutation", "a", (1, 2), value=b"1")]])
    shutil.rmtree(tmp_path / "changes")
    (tmp_path / "older").rename(tmp_path / "changes")
    with pytest.raises(ConfigError, match="restore both from one copy"):
        lake_in(tmp_path)


def test_a_stale_process_cannot_commit_a_batch_twice(tmp_path: Path) -> None:
    events = [[event("mutation", "a", (1, 1), value=b"1")]]
    zombie = lake_in(tmp_path)
    written = write_files(zombie, events)
    zombie.close()
    with lake_in(tmp_path) as lake:
        apply(lake, events)
        with pytest.raises(CommitConflict):
            zombie.add_changes(written, {})
        assert reported(lake) == identities(events[0])
        zombie.changes.update_incremental()
        assert zombie.next_batch == 1


def test_a_merge_after_the_merge_of_another_process_changes_nothing(tmp_path: Path) -> None:
    events = [[event("mutation", "a", (1, 1), value=b"1")]]
    zombie = lake_in(tmp_path)
    zombie.add_changes(write_files(zombie, events), {})
    zombie.close()
    with lake_in(tmp_path) as lake:
        lake.merge()
        with pytest.raises(CommitConflict, match="another writer has committed"):
            zombie.merge()
        assert current(lake) == {("_default._default", "a"): (1, b"1")}


def test_a_commit_of_another_program_ends_a_merge_and_its_rows_are_refused(tmp_path: Path) -> None:
    with lake_in(tmp_path) as lake:
        apply(lake, [[event("mutation", "a", (1, 1), value=b"1")]])
        rows = lake.documents.table.to_pyarrow_table()
        lake.add_changes(write_files(lake, [[event("mutation", "a", (1, 2), value=b"2")]]), {})
        write_deltalake(lake.documents.folder.url, rows, mode="append")
        with pytest.raises(CommitConflict, match="another writer has committed"):
            lake.merge()
    with lake_in(tmp_path) as lake:
        with pytest.raises(ConfigError, match=r"a file of another program .*DeltaTable\.restore"):
            lake.merge()
        lake.documents.table.restore(1)
        lake.merge()
        assert current(lake) == {("_default._default", "a"): (2, b"2")}


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"no Parquet")], ids=["gone", "damaged"])
@pytest.mark.parametrize("table", ["changes", "documents"])
def test_a_file_removed_or_damaged_by_another_program_is_named(tmp_path: Path, table: str, damage: Any) -> None:
    with lake_in(tmp_path) as lake:
        apply(lake, [[event("mutation", "a", (1, 1), value=b"1")]])
        apply(lake, [[event("mutation", "a", (1, 2), value=b"2")]], put_off=True)
        version = lake.documents.table.version()
        (path,) = (tmp_path / table).glob("*-b1-*.parquet" if table == "changes" else "**/*.parquet")
        damage(path)
        with pytest.raises(MirrorError, match=f"{path.name}: cannot be read: .*another program") as failed:
            lake.merge()
        assert "\n" not in str(failed.value)
        assert DeltaTable(lake.documents.folder.url).version() == version


def test_a_full_disk_ends_a_merge_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with lake_in(tmp_path) as lake:
        apply(lake, [[event("mutation", "a", (1, 1), value=b"1")]])
        apply(lake, [[event("mutation", "a", (1, 2), value=b"2")]], put_off=True)
        before = sorted((tmp_path / "documents").iterdir())

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(MirrorError, match=r"documents: cannot be written on .*: No space left on device"):
                lake.merge()
        assert sorted((tmp_path / "documents").iterdir()) == before
        lake.merge()
        assert current(lake) == {("_default._default", "a"): (2, b"2")}


def test_an_older_event_changes_nothing_even_without_marks(tmp_path: Path) -> None:
    """The second guard alone: an old batch under a new number."""
    old = [event("mutation", "a", (1, 8), value=b"old"), event("mutation", "b", (1, 9), value=b"old")]
    old.insert(0, event("collection_dropped", None, (1, 7)))
    new = [event("retraction", "a", (2, 5), seqno=8), event("mutation", "a", (2, 6), value=b"new")]
    with lake_in(tmp_path) as lake:
        apply(lake, [old])
        apply(lake, [new])
        assert apply(lake, [old]) == Applied()
        assert current(lake) == {("_default._default", "a"): (6, b"new"), ("_default._default", "b"): (9, b"old")}


def orders_of(numbers: range, seqno: int) -> list[Event]:
    chance = random.Random(seqno)
    keys = (f"order::{number:06d}" for number in numbers)
    return [event("mutation", key, (1, seqno + at), value=chance.randbytes(64)) for at, key in enumerate(keys)]


def test_a_merge_is_due_once_its_oldest_event_has_waited_long_enough(tmp_path: Path) -> None:
    now_s = 0.0
    with lake_in(tmp_path, max_age_s=60, clock=lambda: now_s) as lake:
        for number in range(3):
            apply(lake, [orders_of(range(10), number * 100)], put_off=True)
            now_s += 29
            assert (lake.due_in_s <= 0) == (number == 2)
        assert lake.merge() == Applied(inserted=10)
        assert lake.due_in_s == math.inf


def test_old_versions_of_the_documents_table_are_removed_after_keep_hours(tmp_path: Path) -> None:
    now_s = 0.0

    def there() -> int:
        return len(list((tmp_path / "documents").glob("**/*.parquet")))

    with lake_in(tmp_path, keep_hours=0, clock=lambda: now_s) as lake:
        for number in range(4):
            apply(lake, [orders_of(range(100), 1 + number * 1_000)])
            lake.tidy_documents()
        assert there() == 4
        now_s = lakes.VACUUM_INTERVAL_S
        lake.tidy_documents()
        assert there() == 1
        assert sum(reported(lake).values()) == 400


def make_older(folder: Path, hours: int) -> None:
    """All that the table in a folder has written or removed was so much earlier."""
    for path in folder.glob("**/*.parquet"):
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 3600 * hours))
    for path in (folder / "_delta_log").glob("*.json"):
        actions = [json.loads(line) for line in path.read_text().splitlines()]
        for action in actions:
            if "remove" in action:
                action["remove"]["deletionTimestamp"] -= 3_600_000 * hours
        path.write_text("\n".join(map(json.dumps, actions)))


def test_readers_of_a_kept_version_continue_while_expired_files_are_removed(tmp_path: Path) -> None:
    documents = tmp_path / "documents"
    with lake_in(tmp_path) as lake:
        for number in range(3):
            apply(lake, [orders_of(range(100), 1 + number * 1_000)])
        expired = {path for path in documents.glob("**/*.parquet") if path.name not in files(lake)}
    assert len(expired) == 2
    make_older(documents, 2)
    with lake_in(tmp_path) as lake:
        apply(lake, [orders_of(range(1_000), 3_001)])
        kept = DeltaTable(str(documents))
        reading = kept.to_pyarrow_dataset().to_batches(batch_size=10, batch_readahead=0, fragment_readahead=0)
        keys = next(reading).column("key").to_pylist()
        apply(lake, [orders_of(range(500), 5_001)])
        lake.documents.vacuum(1)
        assert [path for path in expired if path.exists()] == []
        keys += [key for rows in reading for key in rows.column("key").to_pylist()]
        assert len(keys) == len(set(keys)) == 1_000
        assert DeltaTable(str(documents)).count() == 1_000


def test_only_files_of_an_uncommitted_batch_are_removed(tmp_path: Path) -> None:
    events = [[event("mutation", "a", (1, 1), value=b"1")]]
    with Lake(folder_at(tmp_path)) as lake:
        apply(lake, events)
        orphans = [part.name for part in write_files(lake, events)]
        with PartWriter(lake.documents.folder.url, prefix(1), CHANGES) as parts:
            parts.write_table(table_of(events[0]))
        assert lake.remove_unfinished() == [*orphans, parts.finished[0].name]
        assert len(current(lake)) == 1
        assert reported(lake) == identities(events[0])


def test_a_file_of_delta_rs_is_not_taken_for_the_file_of_a_batch(tmp_path: Path) -> None:
    """Such a file of a compacted table was once taken for the unfinished attempt at batch 7051415, and removed."""
    assert batch_of("part-00000-57051415-1179-471f-bb20-cb496dc8c714-c000.zstd.parquet") is None
    assert batch_of("part-00000-57051415-b117-471f-b120-cb496dc8c714-c000.zstd.parquet") is None
    with Lake(folder_at(tmp_path)) as lake:
        for number in range(2):
            apply(lake, [[event("mutation", "a", (1, number + 1), value=b"1")]])
        assert {batch_of(path.name) for path in (tmp_path / "changes").glob("*.parquet")} == {0, 1}
        lake.tidy()
        vacuum(lake.changes_folder, lake.changes, 0)
        (compacted,) = (tmp_path / "changes").glob("*.parquet")
        stranger = tmp_path / "changes" / "part-00000-99999999-1179-471f-bb20-cb496dc8c714-c000.zstd.parquet"
        stranger.touch()
        assert lake.remove_unfinished() == []
        assert compacted.exists()
        assert stranger.exists()


def test_a_table_without_a_position_is_refused(tmp_path: Path) -> None:
    """As one of an older version, whose position was in a checkpoint of Spark."""
    with lake_in(tmp_path) as lake:
        commit(lake.changes_folder, lake.changes, [], CHANGES, marks=[Transaction(BATCH_MARK, 0)])
    with pytest.raises(ConfigError, match=r"older version of this program \(give a new folder"):
        lake_in(tmp_path)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"{")], ids=["gone", "damaged"])
def test_a_position_that_is_gone_or_damaged_is_refused(tmp_path: Path, damage: Any) -> None:
    with lake_in(tmp_path) as lake:
        apply(lake, [[event("mutation", "a", (1, 1), value=b"1")]])
    (path,) = (tmp_path / "_positions").iterdir()
    damage(path)
    with pytest.raises(ConfigError, match=f"{path.name}: cannot be read: .*restore the whole folder") as refused:
        lake_in(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("table", "said"), [("changes", "other columns"), ("documents", "older version of it.*another folder")]
)
def test_a_folder_with_another_table_is_refused(tmp_path: Path, table: str, said: str) -> None:
    write_deltalake(str(tmp_path / table), table_of([]).select(["key"]))
    with pytest.raises(ConfigError, match=said):
        Lake(folder_at(tmp_path))
