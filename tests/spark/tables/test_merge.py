"""The merge of events into a part, against a model: the order of events decides, however batches cut it."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mirror.spark.source.columns import CHANGES
from mirror.spark.tables.merge import DocumentColumns, Merged, MergeTask, merge_part
from mirror.spark.tables.parts import PartWriter, run_name
from tests.spark.events import Event, History, act, table_of


class PartOfTable:
    """A part of two vbuckets, with events of a third in the same files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[tuple[str, int]] = []
        for name in ("changes", "documents"):
            (folder / name).mkdir()

    def write(self, events: list[Event], group_rows: int) -> list[str]:
        with PartWriter(str(self.folder / "changes"), f"part-{run_name()}-b0", CHANGES, group_rows=group_rows) as parts:
            for row in table_of(events).to_batches(max_chunksize=1):
                parts.write(row)
        return [part.name for part in parts.finished]

    def merge(self, names: list[str]) -> Merged:
        changes, documents = (str(self.folder / name) for name in ("changes", "documents"))
        task = MergeTask(DocumentColumns(), 0, (0, 1), changes, names, documents, self.files, f"part-{run_name()}-b0")
        done = merge_part(task)
        self.files = [each for each in self.files if each[0] not in done.removed]
        self.files += [(part.name, part.size) for part in done.added]
        return done

    def rows(self) -> list[tuple[object, ...]]:
        names = ["collection", "key", "seqno", "value"]
        tables = [
            pq.read_table(self.folder / "documents" / name, columns=names, partitioning=None) for name, _ in self.files
        ]
        return [tuple(row.values()) for table in tables for row in table.to_pylist()]


def follow(folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    histories = [History(vbid) for vbid in range(3)]
    for history in histories:
        for _ in range(chance.randrange(1, 25)):
            act(history, chance)
    logs = [list(history.log) for history in histories]
    order = [vbid for vbid, log in enumerate(logs) for _ in log]
    chance.shuffle(order)
    events = [logs[vbid].pop(0) for vbid in order]
    cuts = sorted(chance.choices(range(len(events) + 1), k=chance.randrange(6)))
    part, waiting, count = PartOfTable(folder), [], 0
    for first, last in zip([0, *cuts], [*cuts, len(events)], strict=True):
        waiting += part.write(events[first:last], chance.randrange(1, 5))
        if last == len(events) or chance.random() < 0.6:
            done = part.merge(waiting)
            waiting = []
            count += done.inserted - done.deleted
    expected = {
        (*name, each["seqno"], each["value"]) for history in histories[:2] for name, each in history.state.items()
    }
    found = part.rows()
    assert len(found) == len(set(found)) == count
    assert set(found) == expected


def test_of_several_ends_of_a_collection_in_one_merge_the_last_counts(tmp_path: Path) -> None:
    part, history = PartOfTable(tmp_path), History()
    history.write("before", b"0", "shop.stage")
    part.merge(part.write(history.log, 1))
    old = len(history.log)
    history.drop("shop.stage", "collection_flushed")
    history.write("first", b"1", "shop.stage")
    history.write("other", b"1", "shop.other")
    history.drop("shop.stage", "collection_flushed")
    history.write("final", b"2", "shop.stage")
    part.merge(part.write(history.log[old:], 10))
    assert sorted(row[:2] for row in part.rows()) == [("shop.other", "other"), ("shop.stage", "final")]


@pytest.mark.parametrize("examples", [100, pytest.param(5_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_any_cut_of_events_into_batches_and_merges_gives_the_documents_of_the_source(
    tmp_path_factory: pytest.TempPathFactory, examples: int
) -> None:
    """Mutations, deletions, drops, flushes, rollbacks and resyncs of several collections and vbuckets."""

    @given(st.integers(0, 2**32))
    @settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=examples)
    def check(seed: int) -> None:
        follow(tmp_path_factory.mktemp("part"), seed)

    check()
