"""The data source in Spark: documents of a live mirror, schemas, filters, and each message that a mistake gets."""

from __future__ import annotations

import json
import pkgutil
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import cramjam
import lmdb
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType, DataType, IntegerType, StringType, StructType

from mirror.spark.source.columns import DOCUMENTS
from mirror.spark.source.data_source import MirrorSource
from mirror.spark.source.failures import MirrorSourceError
from storage.format.records import VALUE_LENGTH_MAX
from tests.spark.mirrors import SmallMirror, orders, scanned

ROOT = Path(__file__).parents[3]


@pytest.fixture
def small(empty: SmallMirror) -> SmallMirror:
    empty.put(orders(0, 100))
    return empty


def read(spark: SparkSession, **options: str) -> DataFrame:
    return spark.read.format("mirror").options(**options).load()


def message_of(action: Callable[[], object]) -> str:
    """The user's view of an error: without traceback and Java stack."""
    with pytest.raises(Exception, match="MirrorSourceError: ") as raised:
        action()
    text = str(raised.value)
    assert "Traceback" not in text
    assert 'File "' not in text
    assert "\tat " not in text
    lines = [line for line in text.splitlines() if "MirrorSourceError: " in line]
    assert len(lines) == 1
    assert text.splitlines().index(lines[0]) <= 1
    return lines[0].partition("MirrorSourceError: ")[2]


def test_documents_have_metadata_columns_or_those_of_a_schema(spark: SparkSession, small: SmallMirror) -> None:
    path = str(small.path)
    frame = read(spark, path=path, partitions="3")
    assert frame.columns == DOCUMENTS.names
    whole = frame.selectExpr("*", "from_json(cast(value as string), 'id long, total double') as body").rdd
    assert whole.getNumPartitions() == 3
    found = whole.collect()
    assert {row.key: (row.seqno, bytes(row.value)) for row in found} == scanned(small.path)
    few = read(spark, path=path, columns="value,key", vbuckets="0-3")
    assert few.columns == ["value", "key"]
    reader = spark.read.format("mirror").schema("id long, _key string, total double, items array<struct<sku:string>>")
    typed = {row._key: row for row in reader.load(path).collect()}
    assert typed["order::000007"].id == 7
    assert typed["order::000007"].total == 2.59
    assert [item.sku for item in typed["order::000007"]["items"]] == ["s7-0", "s7-1", "s7-2"]
    assert {(row.key, row.body.id, row.body.total) for row in found} == {
        (key, row.id, row.total) for key, row in typed.items()
    }


def test_hostile_compressed_values_are_named_and_fail_no_job(spark: SparkSession, small: SmallMirror) -> None:
    """One claims 4 GiB, one inflates beyond 32 MiB: rows show them as stored, a schema treats them as misfits."""
    bomb = bytes(cramjam.snappy.compress_raw(bytes(VALUE_LENGTH_MAX + 1)))
    hostile = {"hostile::claims": b"\xff\xff\xff\xff\x0f", "hostile::inflates": bomb}
    small.put(dict(hostile), datatype=3)
    reader = spark.read.format("mirror").option("mode", "permissive").option("columnNameOfCorruptRecord", "_corrupt")
    schema = "_key string, _value binary, _datatype int, id long, _corrupt string"
    rows = reader.schema(schema).load(str(small.path)).collect()
    assert {row._key: bytes(row._value) for row in rows if row._datatype != 1} == hostile
    assert len(rows) == 102
    assert all((row.id is None) is (row._corrupt is not None) is (row._key in hostile) for row in rows)


def test_a_mistake_is_refused_at_once_and_in_one_line(spark: SparkSession, small: SmallMirror, tmp_path: Path) -> None:
    """When the source is made, when a job is planned, and in a task."""
    path = str(small.path)
    assert "no such directory" in message_of(lambda: read(spark, path=str(tmp_path / "nowhere")))
    required = spark.read.format("mirror").schema("id int not null").load(path)
    assert "column id: NOT NULL cannot be promised" in message_of(required.count)
    unfit = spark.read.format("mirror").schema("id int, customer int").load(path)
    assert "does not fit the schema" in message_of(unfit.collect)


@pytest.mark.parametrize(
    ("schema", "options", "said"),
    [
        (None, {"path": None}, "no options were given"),
        (None, {"collection": "shop.orders"}, "no collection 'shop.orders'"),
        (BinaryType(), {}, "column id: JSON has no binary values"),
        (IntegerType(), {"columns": "key"}, "name the columns in the schema"),
        (IntegerType(), {"table": "changes"}, "columns of its own"),
    ],
)
def test_an_invalid_option_or_schema_is_refused_when_planned(
    schema: DataType | None, options: dict[str, str | None], said: str, small: SmallMirror
) -> None:
    given = {name: text for name, text in ({"path": str(small.path)} | options).items() if text is not None}
    with pytest.raises(MirrorSourceError, match=said):
        planned(given, schema)


def test_a_metadata_column_of_another_type_is_refused(small: SmallMirror) -> None:
    with pytest.raises(MirrorSourceError, match="column _seqno is of type int64, not string"):
        planned({"path": str(small.path)}, StringType(), "_seqno")


def planned(options: dict[str, str], kind: DataType | None, name: str = "id") -> object:
    """Spark's plan, made in its own process: all columns, or those of a user's schema."""
    source = MirrorSource(options)
    reader = source.reader(source.schema() if kind is None else StructType().add(name, kind))
    return reader.partitions()


def test_documents_of_many_types_are_read_in_the_session_time_zone(spark: SparkSession, small: SmallMirror) -> None:
    small.put({f"order::{number:06d}": None for number in range(100)})
    small.put(
        {"fits": b'{"at":"2026-07-01 12:00","tags":{"a":1},"any":[1,{"x":null}]}', "unfit": b'{"at":5.5,"tags":{}}'}
    )
    schema = "_key string, at timestamp, tags map<string,int>, any variant, _corrupt_record string"
    reader = spark.read.format("mirror").schema(schema)
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        frame = reader.option("mode", "permissive").load(str(small.path))
        columns = ("_key", "unix_seconds(at) as at", "tags", "to_json(any) as any", "_corrupt_record as record")
        found = {row._key: row.asDict() for row in frame.selectExpr(*columns).collect()}
    finally:
        spark.conf.unset("spark.sql.session.timeZone")
    noon = datetime(2026, 7, 1, 3, tzinfo=UTC).timestamp()
    assert found["fits"] == {"_key": "fits", "at": noon, "tags": {"a": 1}, "any": '[1,{"x":null}]', "record": None}
    assert found["unfit"] == {"_key": "unfit", "at": None, "tags": {}, "any": None, "record": '{"at":5.5,"tags":{}}'}


def test_a_write_to_a_mirror_is_refused(small: SmallMirror) -> None:
    source = MirrorSource({"path": str(small.path)})
    for refuse in (source.writer, source.streamWriter):
        with pytest.raises(MirrorSourceError, match=r"a mirror cannot be written \(write to the cluster"):
            refuse(source.schema(), False)


def test_an_unknown_format_and_damage_are_named(spark: SparkSession, small: SmallMirror) -> None:
    small.close()
    small.writers = []
    group = small.path / "group-0000"
    with lmdb.open(str(group), map_size=1 << 30, max_dbs=100) as env:
        rows = env.open_db(b"v0")
        with env.begin(write=True, db=rows) as txn:
            cursor = txn.cursor()
            assert cursor.first()
            txn.put(cursor.key(), cursor.value()[:-1])
    frame = read(spark, path=str(small.path))
    damaged = message_of(frame.collect)
    assert "vbucket 0: the row of seqno" in damaged
    assert "its checksum does not match (`dcp-mirror verify --repair` fetches the vbucket again)" in damaged
    identity = json.loads((small.path / "mirror.json").read_text())
    (small.path / "mirror.json").write_text(json.dumps(identity | {"format": 99}))
    assert "format" in message_of(lambda: read(spark, path=str(small.path)))


def test_spark_finds_the_source_by_itself() -> None:
    assert "pyspark_mirror" in {module.name for module in pkgutil.iter_modules()}
    import pyspark_mirror

    assert pyspark_mirror.DefaultSource.name() == "mirror"


def test_a_wheel_holds_the_top_module_and_an_editable_install_is_a_path() -> None:
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert said["py-modules"] == ["pyspark_mirror"]
    assert said["package-dir"] == {"": "."}  # else setuptools makes an import hook, which PySpark cannot look into


def test_a_temporary_view_is_created_in_sql(spark: SparkSession, small: SmallMirror) -> None:
    options = f"OPTIONS (path '{small.path}')"
    spark.sql(f"CREATE TEMPORARY VIEW typed (_key string, id long) USING mirror {options}")
    assert spark.table("typed").where("id < 95").count() == 95
    spark.catalog.dropTempView("typed")
    refused = message_of(partial(spark.sql, f"CREATE TABLE refused USING mirror {options}"))
    assert "CREATE TABLE failed: it names no columns" in refused
    assert "CREATE TEMPORARY VIEW name USING mirror OPTIONS (path '...')" in refused


@pytest.mark.ci
def test_a_table_is_created_and_queried_in_sql(spark: SparkSession, small: SmallMirror) -> None:
    """Spark does not pass options on to queries of a table: a view does. One without columns had nothing else."""
    path = small.path
    options = f"OPTIONS (path '{path}')"
    made = {"typed": "_key string, id long", "whole": "key string, value binary", "events": "kind string, key string"}
    here = f"WITH (path = '{path}')"
    for rest in (f"LOCATION '{path}' COMMENT 'orders'", ""):
        refused = message_of(partial(spark.sql, f"CREATE TABLE refused USING mirror {rest}"))
        assert "CREATE TABLE failed: it names no columns" in refused
    try:
        for name, columns in made.items():
            spark.sql(f"CREATE TABLE {name} ({columns}) USING mirror {options}")
            assert "FROM name WITH (path = '...')" in message_of(spark.table(name).count), name
        joined = f"SELECT id FROM typed {here} JOIN whole {here} ON _key = key"
        assert spark.sql(joined).count() == 100
        spark.sql(f"CREATE VIEW typed_orders AS SELECT * FROM typed {here}")
        small.put(orders(100, 5))
        assert [row.id for row in spark.table("typed_orders").where("_key = 'order::000103'").collect()] == [103]
        changes = f"SELECT kind, key FROM events WITH (path = '{path}', table = 'changes')"
        assert spark.sql(changes).count() == 105
    finally:
        spark.sql("DROP VIEW IF EXISTS typed_orders")
        for name in made:
            spark.sql(f"DROP TABLE IF EXISTS {name}")
    assert (path / "mirror.json").exists()
    several = spark.read.format("mirror")
    assert "several paths were given" in message_of(lambda: several.load([str(path), str(path)]).count())
