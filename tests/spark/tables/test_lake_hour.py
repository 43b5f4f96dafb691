"""What `sync` writes and keeps in an hour, on a million orders. The clock is simulated, the bytes are not."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from mirror.spark.pipeline.sync import KEEP_HOURS, TIDY_BATCHES
from mirror.spark.places import folder_at
from mirror.spark.source.columns import CHANGES
from mirror.spark.tables.documents import Layout, Layouts
from mirror.spark.tables.lake import Batch, Costs, Lake
from mirror.spark.tables.parts import PartWriter
from mirror.typed.ddl import fields_of
from tests.spark.mirrors import VBUCKETS, order

ORDERS = 1_000_000
WRITES_PER_S = 100
BATCH_S = 10
CHUNK = 50_000
MIB = 1 << 20


def events(numbers: list[int], first_seqno: int, vbid: int) -> Iterator[pa.RecordBatch]:
    """Mutations of these orders, all in one vbucket: which one does not matter to a table."""
    for start in range(0, len(numbers), CHUNK):
        part = numbers[start : start + CHUNK]
        seqnos = range(first_seqno + start, first_seqno + start + len(part))
        columns = {
            "key": [f"order::{number:08d}" for number in part],
            "value": [order(number + seqno) for number, seqno in zip(part, seqnos, strict=True)],
            "collection": ["_default._default"] * len(part),
            "kind": ["mutation"] * len(part),
        }
        counted = {"seqno": list(seqnos), "at_seqno": list(seqnos), "snapshot_end_seqno": list(seqnos)}
        same = {"vbid": vbid, "rev_seqno": 1, "flags": 0, "expiry": 0, "datatype": 1, "branch": 1, "at_branch": 1}
        clock = random.Random(first_seqno)
        counted["cas"] = [1_700_000_000_000_000_000 + clock.randrange(1 << 40) for _ in part]
        columns |= counted | {name: [value] * len(part) for name, value in (same | {"vbuuid": 77}).items()}
        columns["event_time"] = [None] * len(part)
        yield pa.record_batch([pa.array(columns[field.name], field.type) for field in CHANGES], schema=CHANGES)


def apply(lake: Lake, number: int, files: list[Iterator[pa.RecordBatch]]) -> None:
    batch = Batch(number, "the checkpoint", str(number))
    assert not lake.has_changes(batch)
    parts = []
    for file in files:
        with PartWriter(lake.changes_folder.url, lake.prefix(number), CHANGES) as writer:
            for rows in file:
                writer.write(rows)
        parts += writer.finished
    lake.add_changes(batch, parts)
    tidy = number % TIDY_BATCHES == TIDY_BATCHES - 1
    if tidy or lake.due():
        lake.update_documents(batch)
        if tidy:
            lake.tidy(KEEP_HOURS)


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.parquet"))


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "schema", [None, "id long, customer string, total double, paid boolean"], ids=["plain", "typed"]
)
@pytest.mark.parametrize("rate", [1 << 20, 100 << 10], ids=["1m", "100k"])
def test_an_hour_of_writes_to_a_million_orders(
    tmp_path: Path, rate: int, schema: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(7)
    now_s = 0.0
    layouts = Layouts(others=Layout() if schema is None else Layout(fields_of(schema)))
    with Lake(folder_at(tmp_path), None, costs=Costs(rate), clock=lambda: now_s, layouts=layouts) as lake:
        share = ORDERS // VBUCKETS
        first = [events(list(range(each * share, (each + 1) * share)), 1, each) for each in range(VBUCKETS)]
        apply(lake, 0, first)
        table_bytes, history_bytes = size(tmp_path / "documents"), size(tmp_path / "changes")
        writes = batches = 0
        for number in range(1, 3600 // BATCH_S + 1):
            now_s += BATCH_S
            numbers = [chance.randrange(ORDERS) for _ in range(WRITES_PER_S * BATCH_S)]
            apply(lake, number, [events(numbers, ORDERS + number * 10_000, number % VBUCKETS)])
            writes, batches = writes + len(numbers), batches + 1
        lake.catch_up()
        assert lake.documents.count() == ORDERS
        assert lake.changes.count() == ORDERS + writes
        rewritten = size(tmp_path / "documents") - table_bytes
        current = sum(pa.table(lake.changes.get_add_actions()).column("size_bytes").to_pylist())
        copied = size(tmp_path / "changes") - current
        versions = lake.documents.version()
    with capsys.disabled():
        figures = {
            "rate": rate,
            "schema": schema,
            "table MiB": round(table_bytes / MIB, 1),
            "merges": versions,
            "documents: rewritten and kept MiB": round(rewritten / MIB),
            "documents: bytes for each changed row": round(rewritten / writes),
            "changes: added MiB": round((current - history_bytes) / MIB, 1),
            "changes: bytes for each event": round((current - history_bytes) / writes),
            "changes: replaced by compaction and kept MiB": round(copied / MIB, 1),
        }
        print(json.dumps(figures))  # noqa: T201 - what the test is for
    tidied = batches // TIDY_BATCHES  # what was put off is merged before, whatever the rate
    assert rewritten <= 3600 * rate + (tidied + 2) * table_bytes
    assert copied <= 4 * (current - history_bytes), "a compaction copied what it need not"
