"""The tables of `sync` as other programs read them: after a rollback too, each finds the same documents."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import polars
import pyarrow.compute as pc
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from tests.spark.events import History, event
from tests.spark.tables.test_documents import lake_in, typed
from tests.spark.tables.test_lake import apply


def test_each_program_finds_the_current_documents(spark: SparkSession, tmp_path: Path) -> None:
    history = History()
    for number in range(40):
        history.write(f"k{number % 15}", json.dumps({"total": number / 4, "note": "é" * number}).encode())
    published = len(history.log)
    history.roll_back(22)
    history.delete("k3")
    history.write("k16", b'{"total":"x"}')
    with lake_in(tmp_path, typed("total double, note string")) as lake:
        apply(lake, [history.log[:published]])
        apply(lake, [history.log[published:]])
        other = event("mutation", "other", (1, 1), vbid=900, value=b'{"total": 1}')
        apply(lake, [[other]])
    bodies = {key: (each["seqno"], json.loads(each["value"])) for (_, key), each in history.state.items()}
    expected = {(k, seqno, None if k == "k16" else b["total"], b.get("note"), 0) for k, (seqno, b) in bodies.items()}
    expected.add(("other", 1, 1.0, None, 56))
    table = DeltaTable(str(tmp_path / "documents"))
    files, names = table.file_uris(), "_key, _seqno, total, note, _part"
    dataset = table.to_pyarrow_dataset()
    frame = spark.read.option("basePath", str(tmp_path / "documents")).parquet(*files)
    found = {
        "deltalake": [tuple(row.values()) for row in table.to_pyarrow_table(columns=names.split(", ")).to_pylist()],
        "polars": polars.scan_delta(str(tmp_path / "documents")).select(names.split(", ")).collect().rows(),
        "duckdb over Arrow": duckdb.execute(f"select {names} from dataset").fetchall(),
        "duckdb over files": duckdb.execute(f"select {names} from read_parquet({files})").fetchall(),
        "spark": [tuple(row) for row in frame.selectExpr(*names.split(", ")).collect()],
    }
    assert dataset.count_rows() == len(expected) == 16
    for program, rows in found.items():
        assert len(rows) == len(expected), program
        assert set(rows) == expected, program
    for column, value in (("_vbid", 900), ("_part", 56)):
        one = polars.scan_delta(str(tmp_path / "documents")).filter(polars.col(column) == value).select("_key", "_part")
        assert one.collect().rows() == [("other", 56)]
        (plan,) = duckdb.execute(f"explain analyze select _key from read_parquet({files}) where _part = 56").fetchall()
        assert "Scanning Files: 1/2" in plan[1]
    assert "PartitionFilters: [isnotnull(_part" in frame.where("_part = 56")._jdf.queryExecution().toString()
    assert dataset.filter(pc.field("_part") == 56).to_table(["_key", "_part"]).to_pylist() == [
        {"_key": "other", "_part": 56}
    ]
    assert len(list(dataset.get_fragments(pc.field("_part") == 56))) == 1
    skipped = dataset.get_fragments(pc.field("_vbid") == 900)
    assert len(list(skipped)) == 1, "statistics let readers skip files"
    events = DeltaTable(str(tmp_path / "changes")).file_uris()
    kinds = duckdb.execute(f"select distinct kind from read_parquet({events})")
    assert {kind for (kind,) in kinds.fetchall()} == {"mutation", "deletion", "retraction", "restoration"}
