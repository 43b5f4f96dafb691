"""The two tables against a model: whatever breaks off, and however often it is tried again, each event once."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mirror.errors import ConfigError
from mirror.spark.places import folder_at
from mirror.spark.source.columns import CHANGES
from mirror.spark.tables import lake as lakes
from mirror.spark.tables.delta import CommitConflict
from mirror.spark.tables.documents import BATCH_MARK, Applied, DocumentsTable, Layouts, batch_of
from mirror.spark.tables.lake import Batch, Costs, Lake, collection_of, folder_name
from mirror.spark.tables.parts import PartWriter
from tests.spark.events import Event, History, Name, event, table_of

IDENTITY = ("kind", "vbid", "collection", "key", "seqno", "branch", "at_branch", "at_seqno")


class Crash(Exception):
    """The process would be gone here."""


def write_files(lake: Lake, batch: Batch, files: list[list[Event]]) -> list[Any]:
    written = []
    for events in files:
        with PartWriter(lake.changes_folder.url, lake.prefix(batch.number), CHANGES) as parts:
            for rows in table_of(events).to_batches():
                parts.write(rows)
        written += parts.finished
    return written


def apply(
    lake: Lake, batch: Batch, files: list[list[Event]], crash_at: str = "", *, put_off: bool = False
) -> Applied | None:
    """Apply a batch as the stream does, and stop where the test says."""
    if not lake.has_changes(batch):
        written = write_files(lake, batch, files)
        if crash_at == "before changes":
            raise Crash
        lake.add_changes(batch, written)
    if crash_at == "between":
        raise Crash
    if put_off:
        return None
    done = lake.update_documents(batch)
    if crash_at == "after":
        raise Crash
    return done


def batch(number: int, offsets: str = "") -> Batch:
    return Batch(number, "the checkpoint", offsets or f"up to {number}")


def reported(lake: Lake) -> Counter[tuple[Any, ...]]:
    lake.changes.update_incremental()
    rows = lake.changes.to_pyarrow_table(columns=list(IDENTITY)).to_pylist()
    return Counter(tuple(row[name] for name in IDENTITY) for row in rows)


def current(lake: Lake) -> dict[Name, tuple[Any, ...]]:
    rows = []
    for collection, table in lake._tables.items():
        table.refresh()
        mine = table.table.to_pyarrow_table().to_pylist()
        assert collection is None or {row["collection"] for row in mine} <= {collection}
        rows += mine
    found = {(row["collection"], row["key"]): (row["seqno"], row["value"]) for row in rows}
    assert len(found) == len(rows), "a document stands twice"
    return found


def expected(histories: list[History]) -> dict[Name, tuple[Any, ...]]:
    return {name: (e["seqno"], e["value"]) for h in histories for name, e in h.state.items()}


def identities(events: list[Event]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(each[name] for name in IDENTITY) for each in events)


def act(history: History, chance: random.Random) -> None:
    """Something happens at the source. Keys are the vbucket's own, as a key lies in one."""
    key = f"v{history.vbid}-{chance.randrange(6)}"
    collection = chance.choice(["_default._default", "s.it's"])
    choice = chance.random()
    if choice < 0.55:
        history.write(key, chance.randbytes(3), collection)
    elif choice < 0.75:
        history.delete(key, collection, chance.choice(["deletion", "expiration"]))
    elif choice < 0.8:
        history.drop("s.it's", chance.choice(["collection_dropped", "collection_flushed"]))
    elif choice < 0.95:
        history.roll_back(chance.choice(sorted(history.states)))
    else:
        history.resync()


@pytest.mark.parametrize("examples", [6, pytest.param(300, marks=pytest.mark.long)])
def test_whatever_breaks_off_each_event_is_reported_once_and_the_documents_are_the_sources(
    tmp_path_factory: pytest.TempPathFactory, examples: int
) -> None:
    """Batches cut anywhere, even within a rollback; every step may be the last before a restart that replays it."""

    @given(st.integers(0, 2**32), st.booleans())
    @settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=examples)
    def check(seed: int, per_collection: bool) -> None:
        follow(tmp_path_factory.mktemp("lake"), seed, per_collection)

    check()


def follow(folder: Path, seed: int, per_collection: bool) -> None:
    """Tables that follow some history, made of `seed`, to its end."""
    chance = random.Random(seed)
    histories = [History(vbid) for vbid in range(3)]
    sent = [0] * 3
    layouts = Layouts(per_collection)
    lake = Lake(folder_at(folder), None, layouts=layouts)
    for number in range(8):
        for history in histories:
            for _ in range(chance.randrange(6)):
                act(history, chance)
        cuts = [chance.randint(sent[each.vbid], len(each.log)) for each in histories]
        if number == 7:
            cuts = [len(each.log) for each in histories]
        pieces = [history.log[sent[each] : cuts[each]] for each, history in enumerate(histories)]
        files = [pieces[0] + pieces[1], pieces[2]]
        sent = cuts
        for crash_at in chance.sample(["before changes", "between", "after"], chance.randrange(4)):
            try:
                apply(lake, batch(number), files, crash_at)
            except Crash:
                lake.close()
                name = "the checkpoint" if lake.done_batch is not None else None
                lake = Lake(folder_at(folder), name, layouts=layouts)
                lake.remove_unfinished()
        put_off = chance.random() < 0.4
        apply(lake, batch(number), files, put_off=put_off)
        if not put_off and chance.random() < 0.3:
            lake.tidy(0)
        assert reported(lake) == identities([e for each, h in enumerate(histories) for e in h.log[: sent[each]]])
    lake.catch_up()
    assert current(lake) == expected(histories)
    lake.catch_up()
    assert current(lake) == expected(histories)
    lake.close()


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    merge = DocumentsTable._merge

    def counted(table: DocumentsTable, number: int, *rest: Any, **more: Any) -> Any:
        found.append(number)
        return merge(table, number, *rest, **more)

    monkeypatch.setattr(DocumentsTable, "_merge", counted)
    return found


def test_a_first_load_is_written_and_not_merged(tmp_path: Path, merges: list[int]) -> None:
    """A merge holds all rows of its batch, and nothing is there that they could meet."""
    with Lake(folder_at(tmp_path), None) as lake:
        deleted = [[event("mutation", "x", (1, 1), value=b"0"), event("deletion", "x", (1, 2))]]
        first = [[event("mutation", "a", (1, 3), value=b"1"), event("mutation", "a", (1, 4), value=b"2")]]
        first += [[event("mutation", "b", (1, 1), vbid=1, value=b"3")]]
        apply(lake, batch(0), deleted, put_off=True)
        apply(lake, batch(1), first, put_off=True)
        apply(lake, batch(2), [[event("deletion", "b", (1, 2), vbid=1)]], put_off=True)
        assert lake.catch_up() == Applied(0, 2, 0, 1)
        assert merges == [2]
        assert {key: value for (_, key), (_, value) in current(lake).items()} == {"a": b"2"}
        assert lake.documents.transaction_version(BATCH_MARK) == 2


def test_each_batch_of_a_first_load_is_written_and_not_merged(tmp_path: Path, merges: list[int]) -> None:
    """Of vbuckets that the table has nothing of: also where it was opened again between them."""
    for number in range(3):
        with Lake(folder_at(tmp_path), "the checkpoint" if number else None) as lake:
            files = [[event("mutation", f"{number} {vbid}", (1, 1), vbid=4 * number + vbid)] for vbid in range(2)]
            assert apply(lake, batch(2 * number), files[:1]) == Applied(1, 1, 0, 0)
            assert apply(lake, batch(2 * number + 1), files[1:]) == Applied(1, 1, 0, 0)
    assert merges == []
    with Lake(folder_at(tmp_path), "the checkpoint") as lake:
        assert apply(lake, batch(6), [[event("mutation", "1 1", (1, 2), vbid=5, value=b"new")]]) == Applied(1, 0, 1, 0)
        assert merges == [6]


def test_a_batch_that_was_put_together_with_others_is_not_half_folded_again(tmp_path: Path) -> None:
    """A document came and went in two batches that were folded at once, so `documents` had no mark of them. Then only
    the second one's file was compacted, and after a restart the document was back.
    """
    large = random.Random(1).randbytes(100_000)
    with Lake(folder_at(tmp_path), None) as lake:
        files = [[event("mutation", "a", (1, 1), value=b"1")], [event("deletion", "x", (1, 1), vbid=1)]]
        apply(lake, batch(0), files)
        apply(lake, batch(1), [[event("mutation", "b", (1, 2), value=large)]], put_off=True)
        apply(lake, batch(2), [[event("deletion", "b", (1, 3))]], put_off=True)
        lake.catch_up()
        lake.tidy(0)
        assert {batch_of(path.name) for path in (tmp_path / "changes").glob("*.parquet")} == {None, 1}
    with Lake(folder_at(tmp_path), "the checkpoint") as lake:
        lake.catch_up()
        assert current(lake) == {("_default._default", "a"): (1, b"1")}


def test_a_process_that_was_thought_dead_cannot_commit_what_another_did(tmp_path: Path) -> None:
    events = [[event("mutation", "a", (1, 1), value=b"1")]]
    zombie = Lake(folder_at(tmp_path), None)
    assert not zombie.has_changes(batch(0))
    written = write_files(zombie, batch(0), events)
    zombie.close()
    with Lake(folder_at(tmp_path), None) as lake:
        apply(lake, batch(0), events)
        with pytest.raises(CommitConflict):
            zombie.add_changes(batch(0), written)
        assert reported(lake) == identities(events[0])
        assert zombie.has_changes(batch(0))
        assert zombie.update_documents(batch(0)) == Applied(0, 0, 0, 0)


def test_a_merge_that_was_overtaken_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [[event("mutation", "a", (1, 1), value=b"1")]]
    zombie = Lake(folder_at(tmp_path), None)
    zombie.has_changes(batch(0))
    zombie.add_changes(batch(0), write_files(zombie, batch(0), events))
    zombie.close()
    with Lake(folder_at(tmp_path), "the checkpoint") as lake:
        monkeypatch.setattr(
            zombie, "_files_of", lambda *which: lake.update_documents(batch(0)) and lake._files_of(*which)
        )
        with pytest.raises(CommitConflict):
            zombie.update_documents(batch(0))
        assert current(lake) == {("_default._default", "a"): (1, b"1")}


def test_an_event_that_stands_earlier_changes_nothing_even_without_marks(tmp_path: Path) -> None:
    """The second guard alone: an old batch under a new number."""
    old = [event("mutation", "a", (1, 8), value=b"old"), event("mutation", "b", (1, 9), value=b"old")]
    new = [event("retraction", "a", (2, 5), seqno=8), event("mutation", "a", (2, 6), value=b"new")]
    with Lake(folder_at(tmp_path), None) as lake:
        apply(lake, batch(0), [old])
        apply(lake, batch(1), [new])
        done = apply(lake, batch(2), [old])
        assert done is not None
        assert (done.inserted, done.updated, done.deleted) == (0, 0, 0)
        assert current(lake) == {("_default._default", "a"): (6, b"new"), ("_default._default", "b"): (9, b"old")}


def test_a_batch_that_changes_no_document_is_no_obstacle(tmp_path: Path) -> None:
    """delta-rs makes no version for such a merge, so it leaves no mark; found by tidying right after one."""
    with Lake(folder_at(tmp_path), None) as lake:
        apply(lake, batch(0), [[event("mutation", "a", (1, 1), value=b"1")]])
        version = lake.documents.version()
        deletion = [event("mutation", "b", (1, 2), value=b"2"), event("deletion", "b", (1, 3))]
        for _ in range(2):
            apply(lake, batch(1), [deletion])
            assert lake.documents.version() == version
        lake.tidy(0)
        apply(lake, batch(1), [deletion])
        apply(lake, batch(2), [[event("mutation", "a", (1, 4), value=b"4")]])
        assert current(lake) == {("_default._default", "a"): (4, b"4")}
        assert sum(reported(lake).values()) == 4


def written(lake: Lake) -> int:
    """Bytes that `documents` has ever written, its present version among them; nothing is removed here."""
    return sum(path.stat().st_size for path in Path(lake.documents_folder.url).glob("*.parquet"))


def orders_of(numbers: range, seqno: int) -> list[Event]:
    chance = random.Random(seqno)
    keys = (f"order::{number:06d}" for number in numbers)
    return [event("mutation", key, (1, seqno + at), value=chance.randbytes(64)) for at, key in enumerate(keys)]


def test_small_batches_rewrite_documents_at_the_rate_that_is_set_and_not_once_each(tmp_path: Path) -> None:
    """200,000 documents and 30 small batches took 19 MB to 566 MB."""
    now_s = [0.0]
    size = 0
    for name, rate in (("always", 0), ("bounded", 10_000)):
        lake = Lake(folder_at(tmp_path / name), None, costs=Costs(rewrite_rate=rate), clock=lambda: now_s[0])
        with lake:
            apply(lake, batch(0), [orders_of(range(3_000), 1)])
            size = lake.documents_bytes()
            assert lake.due(), "a merge that only inserts rewrites nothing"
            for number in range(1, 13):
                now_s[0] += 10
                events = orders_of(range(number, 3_000, 300), number * 100_000)
                apply(lake, batch(number), [events], put_off=not lake.due())
            lake.catch_up()
            assert lake.documents.count() == 3_000
            rewritten = written(lake) - size
            if rate:
                assert rewritten <= 120 * rate + 2 * size
                assert rewritten < 12 * size / 1.5
            else:
                assert rewritten > 11 * size
            newest = lake.documents.to_pyarrow_table(columns=["key", "seqno"]).to_pylist()
            assert max(row["seqno"] for row in newest) == 1_200_009


def test_what_was_put_off_is_merged_before_it_is_too_much_for_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lakes, "WAITING_BYTES_MAX", 10_000)
    with Lake(folder_at(tmp_path), None, costs=Costs(rewrite_rate=1), clock=lambda: 0.0) as lake:
        apply(lake, batch(0), [orders_of(range(100), 1)])
        apply(lake, batch(1), [orders_of(range(100), 1_000)])
        assert not lake.due()
        apply(lake, batch(2), [orders_of(range(100), 2_000)], put_off=True)
        assert lake.due()


def test_old_versions_of_documents_are_removed_by_a_rule_of_their_own(tmp_path: Path) -> None:
    now_s = 0.0
    with Lake(folder_at(tmp_path), None, costs=Costs(0, keep_documents_hours=0), clock=lambda: now_s) as lake:
        for number in range(4):
            apply(lake, batch(number), [orders_of(range(100), 1 + number * 1_000)])
            lake.tidy_documents()
        assert written(lake) > 2 * lake.documents_bytes()
        now_s = lakes.VACUUM_INTERVAL_S
        lake.tidy_documents()
        assert written(lake) == lake.documents_bytes()
        assert sum(reported(lake).values()) == 400


def make_older(folder: Path, hours: int) -> None:
    """All that the table in a folder has written or removed was so much earlier."""
    for path in folder.glob("*.parquet"):
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 3600 * hours))
    for path in (folder / "_delta_log").glob("*.json"):
        actions = [json.loads(line) for line in path.read_text().splitlines()]
        for action in actions:
            if "remove" in action:
                action["remove"]["deletionTimestamp"] -= 3_600_000 * hours
        path.write_text("\n".join(map(json.dumps, actions)))


def test_readers_of_a_kept_version_read_on_while_expired_files_are_removed(tmp_path: Path) -> None:
    now_s = 0.0
    costs = Costs(0, keep_documents_hours=1)
    documents = tmp_path / "documents"
    with Lake(folder_at(tmp_path), None, costs=costs) as lake:
        for number in range(3):
            apply(lake, batch(number), [orders_of(range(100), 1 + number * 1_000)])
    make_older(documents, 2)
    expired = set(documents.glob("*.parquet"))
    with Lake(folder_at(tmp_path), "the checkpoint", costs=costs, clock=lambda: now_s) as lake:
        for number in (3, 4):  # a file more each, with new keys alone
            apply(lake, batch(number), [orders_of(range(number * 100, number * 100 + 100), 1 + number * 1_000)])
        kept = DeltaTable(str(documents))
        expired -= {Path(unquote(urlsplit(uri).path)) for uri in kept.file_uris()}
        assert len(kept.file_uris()) == 3
        assert len(expired) == 2
        reading = kept.to_pyarrow_dataset().to_batches(batch_size=10, batch_readahead=0, fragment_readahead=0)
        keys = next(reading).column("key").to_pylist()
        apply(lake, batch(5), [orders_of(range(500), 5_001)])
        now_s = lakes.VACUUM_INTERVAL_S
        lake.tidy_documents()
        assert [path for path in expired if path.exists()] == []
        keys += [key for rows in reading for key in rows.column("key").to_pylist()]
        assert len(keys) == len(set(keys)) == 300
        assert DeltaTable(str(documents)).count() == lake.documents.count() == 500


def test_files_of_a_batch_that_was_not_committed_are_removed_and_no_others(tmp_path: Path) -> None:
    events = [[event("mutation", "a", (1, 1), value=b"1")]]
    with Lake(folder_at(tmp_path), None) as lake:
        apply(lake, batch(0), events)
        orphans = [part.name for part in write_files(lake, batch(1), events)]
        assert lake.remove_unfinished() == orphans
        assert reported(lake) == identities(events[0])


def test_names_of_delta_rs_are_no_batch_s_whatever_their_digits(tmp_path: Path) -> None:
    """Such a file of a compacted table was once taken for the unfinished attempt at batch 7051415, and removed."""
    assert batch_of("part-00000-57051415-1179-471f-bb20-cb496dc8c714-c000.zstd.parquet") is None
    assert batch_of("part-00000-57051415-b117-471f-b120-cb496dc8c714-c000.zstd.parquet") is None
    with Lake(folder_at(tmp_path), None) as lake:
        for number in range(2):
            apply(lake, batch(number), [[event("mutation", "a", (1, number + 1), value=b"1")]])
        assert {batch_of(path.name) for path in (tmp_path / "changes").glob("*.parquet")} == {0, 1}
        lake.tidy(0)
        (compacted,) = (tmp_path / "changes").glob("*.parquet")
        stranger = tmp_path / "changes" / "part-00000-99999999-1179-471f-bb20-cb496dc8c714-c000.zstd.parquet"
        stranger.touch()
        assert lake.remove_unfinished() == []
        assert compacted.exists()
        assert stranger.exists()


def test_another_checkpoint_is_refused(tmp_path: Path) -> None:
    with Lake(folder_at(tmp_path), None) as lake:
        apply(lake, batch(0), [[event("mutation", "a", (1, 1), value=b"1")]])
    with pytest.raises(ConfigError, match="another checkpoint"):
        Lake(folder_at(tmp_path), "a new one")
    with pytest.raises(ConfigError, match="another checkpoint"):
        Lake(folder_at(tmp_path), None)
    with Lake(folder_at(tmp_path), "the checkpoint"):
        pass


def test_a_checkpoint_that_was_set_back_is_refused(tmp_path: Path) -> None:
    with Lake(folder_at(tmp_path), None) as lake:
        for number in range(2):
            apply(lake, batch(number), [[event("mutation", "a", (1, number + 1), value=b"1")]])
        with pytest.raises(ConfigError, match="an older copy"):
            lake.has_changes(batch(0))
        with pytest.raises(ConfigError, match="an older copy"):
            lake.has_changes(batch(1, "other offsets"))


def test_another_selection_is_refused_with_what_works(tmp_path: Path) -> None:
    """With a wider one the table had 5 of 3,026 documents for ever, and every run said `0 events`."""
    with Lake(folder_at(tmp_path), None, "collection=s.a"):
        pass
    for other in ("", "collection=s.a,s.b"):
        with pytest.raises(ConfigError, match=r"made with collection=s\.a, not .*a new checkpoint and a new target"):
            Lake(folder_at(tmp_path), None, other)
    with Lake(folder_at(tmp_path), None, "collection=s.a"):
        pass


def test_a_folder_with_another_table_is_refused(tmp_path: Path) -> None:
    from deltalake import write_deltalake

    write_deltalake(str(tmp_path / "changes"), table_of([]).select(["key"]))
    with pytest.raises(ConfigError, match="other columns"):
        Lake(folder_at(tmp_path), None)


def test_each_collection_has_a_table_once_it_has_documents(tmp_path: Path) -> None:
    layouts = Layouts(per_collection=True)
    with Lake(folder_at(tmp_path), None, layouts=layouts) as lake:
        first = [event("mutation", "a", (1, 1), value=b"1"), event("deletion", "x", (1, 2), collection="s.gone")]
        assert apply(lake, batch(0), [first]) == Applied(2, 1, 0, 0)
        assert [path.name for path in (tmp_path / "collections").iterdir()] == ["_default._default"]
        more = [event("mutation", "b", (1, 3), value=b"2", collection="s.c%"), event("deletion", "a", (1, 4))]
        assert apply(lake, batch(1), [more]) == Applied(2, 1, 0, 1)
        assert lake.documents_of("s.c%").count() == 1
        assert lake.documents_of("_default._default").count() == 0
        drop = [event("collection_dropped", None, (1, 5), collection="s.c%")]
        assert apply(lake, batch(2), [drop]) == Applied(1, 0, 0, 1)
        apply(lake, batch(3), [[event("mutation", "c", (1, 6), value=b"3")]])
        resync = [event("resync", None, (2, 0), collection=""), event("mutation", "d", (2, 1), collection="s.c%")]
        assert apply(lake, batch(4), [resync]) == Applied(2, 1, 0, 1)
        assert current(lake) == {("s.c%", "d"): (1, None)}
    with pytest.raises(ConfigError, match=r"made with a table for each collection.*run with --table-per-collection"):
        Lake(folder_at(tmp_path), "the checkpoint")
    with Lake(folder_at(tmp_path), "the checkpoint", layouts=layouts) as lake:
        assert lake.catch_up() == Applied(0, 0, 0, 0)
        assert current(lake) == {("s.c%", "d"): (1, None)}


def test_a_lake_with_one_table_stays_one(tmp_path: Path) -> None:
    with Lake(folder_at(tmp_path), None):
        pass
    with pytest.raises(ConfigError, match=r"made with one table of documents.*run without --table-per-collection"):
        Lake(folder_at(tmp_path), None, layouts=Layouts(per_collection=True))


@pytest.mark.parametrize("name", ["shop.orders", "_default._default", "a-b.c%41", "?.0x9"])
def test_a_collections_folder_has_a_name_that_urls_can_have(name: str) -> None:
    assert collection_of(folder_name(name)) == name
    assert not set(folder_name(name)) & set("%?#/~ ")
