"""The columns of a sample, as Spark, `pyspark_mirror.register` and `sync --schema auto` take them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StringType

import pyspark_mirror
from cli.sync import schema_of
from mirror.errors import ConfigError
from mirror.spark.source.data_source import MirrorSource
from mirror.spark.source.failures import MirrorSourceError
from mirror.typed.ddl import fields_of
from storage.model import Collection, Seqno
from tests.serve.http_site import VBUCKETS, made


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with made(tmp_path_factory.mktemp("infer")) as source:
        for vbid in range(VBUCKETS):
            source.collections(vbid, Collection(9, 8, "orders", Seqno(0)), Collection(10, 8, "empty", Seqno(0)))
        for number in range(40):
            source.put(f"c{number}", b'{"city":"c%d","n":%d,"of":{"a":[1]},"a b":1,"_key":1}' % (number % 3, number))
            source.put(f"o{number}", b'{"total":%d.5,"n":"text"}' % number, collection_id=9)
        source.put("binary", b"\x00", datatype=0)
        yield source.path


def test_inferred_columns_are_those_of_a_sample(spark: SparkSession, path: str) -> None:
    loaded = spark.read.format("mirror").option("inferSchema", True).option("collection", "_default").load(path)
    assert loaded.columns == ["_key", "city", "n", "of", "a b"]
    assert dict(loaded.dtypes)["of"] == "struct<a:array<bigint>>"
    found = {row["city"]: row["n"] for row in loaded.groupBy("city").agg({"n": "sum"}).toDF("city", "n").collect()}
    assert found == {"c0": 273, "c1": 247, "c2": 260, None: None}


def test_a_column_of_two_types_in_two_collections_is_text(path: str) -> None:
    assert MirrorSource({"path": path, "inferSchema": "true"}).schema()["n"].dataType == StringType()


@pytest.mark.parametrize("more", [{"table": "changes"}, {"columns": "key"}, {"inferSchema": "perhaps"}])
def test_an_infer_schema_option_without_documents_is_one_clear_error(more: dict[str, str], path: str) -> None:
    with pytest.raises(MirrorSourceError, match="inferSchema"):
        MirrorSource({"path": path, "inferSchema": "true"} | more)


def test_a_call_registers_a_view_of_each_collection(spark: SparkSession, path: str) -> None:
    names = pyspark_mirror.register(spark, path)
    assert names == ["documents", "shop_empty", "shop_orders"]
    (row,) = spark.sql("SELECT count(*) AS n, sum(total) AS total FROM shop_orders").collect()
    assert (row["n"], row["total"]) == (40, 800.0)
    assert spark.sql("SELECT * FROM shop_empty").columns == ["_key"]
    for name in names:
        spark.catalog.dropTempView(name)


def test_collections_that_only_case_distinguishes_get_no_view(spark: SparkSession, tmp_path: Path) -> None:
    """Spark's temporary views ignore case: the second once replaced the first."""
    with made(tmp_path) as source:
        source.collections(0, Collection(9, 8, "Users", Seqno(0)), Collection(10, 8, "users", Seqno(0)))
        with pytest.raises(ConfigError, match=r"shop\.Users and shop\.users"):
            pyspark_mirror.register(spark, source.path)
    assert not spark.catalog.tableExists("shop_users")


def test_fields_of_any_name_are_columns(spark: SparkSession, tmp_path: Path) -> None:
    """`_class`, which Spring Data writes into each document, had no column; `_corrupt_record` was null."""
    body = b'{"_class":"Order","_ID":"%d","_corrupt_record":"line %d","a.b":%d,"`":1,"Total":1}'
    with made(tmp_path) as source:
        for number in range(4):
            source.put(
                f"k{number}", (body % (number, number, number)).replace(b"Total", b"tOTAL" if number % 2 else b"Total")
            )
        loaded = spark.read.format("mirror").option("inferSchema", True).load(source.path)
        assert set(loaded.columns) == {"_key", "_class", "_ID", "_corrupt_record", "a.b", "`", loaded.columns[-1]}
        (row,) = loaded.selectExpr("sum(total) AS total", "min(_corrupt_record) AS line", "sum(`a.b`) AS ab").collect()
    assert (row["total"], row["line"], row["ab"]) == (4, "line 0", 6)


def test_a_sync_names_the_fields_that_it_leaves_out(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    schema_of("auto", path, ("_default._default",))
    assert capsys.readouterr().err == (
        "warning: --schema auto leaves out 2 fields with a name that the table cannot have (_value has them): "
        "'_key', 'a b'\n"
    )


def test_a_sync_takes_the_schema_of_a_sample(path: str) -> None:
    assert fields_of(schema_of("auto", path, ("_default._default",))).names == ["city", "n", "of"]
    assert fields_of(schema_of("auto", path, None)).names == ["city", "n", "of", "total"]
    assert schema_of("a int", None, None) == "a int"
    with pytest.raises(ConfigError, match="auto"):
        schema_of("auto", None, None)
    with pytest.raises(ConfigError, match="no JSON object"):
        schema_of("auto", path, ("shop.empty",))
