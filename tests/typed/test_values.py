"""Values of documents as the data source reads them and as Spark's from_json reads the same text."""

from __future__ import annotations

import json
import re
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.functions import col, from_json
from pyspark.sql.pandas.types import from_arrow_schema

from mirror.errors import ConfigError
from mirror.typed.bodies import Bodies, Reading
from mirror.typed.ddl import fields_of
from mirror.typed.values import Misfit, Problems, is_variant, object_of, struct_reader, text_of

ZONE = "Europe/Berlin"
VALUES: dict[str, list[str]] = {
    "tinyint": ["200", "1", "-128", "1.0", "true", '"1"', "300"],
    "int": ["1", "-2147483648", "2147483648", "1.5", "1e2", '"7"', '""', "null", "[]", "{}"],
    "bigint": ["9223372036854775807", "9223372036854775808", "false"],
    "float": ["1", "0.1", "1e39", '"NaN"', '"x"', "true"],
    "double": ["1", "1.25e-3", "1e999", '"INF"', '"Inf"', '"nan"', '"-INF"', '"+Infinity"', '"infinity"', "+INF",
               "INF", "-INF", "-0", "-0.0", "+NaN", "NaN", "-Infinity", '"Infinity"', '"+INF"', '"1.5"', '""', "[1]"],
    "boolean": ["true", "false", "0", '"true"'],
    "string": ['"x"', '""', "5", "true", "[1, 2]", '{"b": {"c": [null, "\\u00e9"]}, "a": 1}', '"\\u00e9 \\n"',
               "null", "1e3", "1.10", "1E-7", "12345678.5", "0.1234567890123456789", "-0.0", "-0",
               "123456789012345678901234567890", '{"a":1,"a":2}', "[1e3]", '"\\ud800"', "[" * 600 + "]" * 600],
    "decimal(6,2)": ["1", "1.005", "1.015", "-1.005", "9999.994", "9999.995", "12345", "1e3", "1.5E-1", '"1.25"',
                     '"1,234.5"', '"x"', '""', "true", "12345678901234567890123456789012345678901234"],
    "decimal(38,18)": ["12345678901234567890.1234567890123456789", "1e60", "123456789012345678901", "1e-999999999",
                       '"1\\u0065-400"', "1e20000", '"1e20000"', "9" * 20 + "." + "9" * 18],
    "date": ['"2026-01-31"', '"2026-1-5"', '"2026-01-31T23:30:00Z"', '"2026-02-30"', '"31.1.2026"', "20000", '""',
             '"0000-01-01"', '"20260701"', '"202607"', '"2026070"', '"+2026-07-01"', '"-0001-07-01"',
             '"12026-07-01"', '"226-07-01"', '"2026-07-01x"', '"2026-07-01 x"', '"5881580-07-11"', '"5881580-07-12"',
             '"-5877641-06-23"', '" 2026-07-01 "', '"2026-7"', '"2026-07-"'],
    "timestamp": ['"2026-01-31"', '"2026-07-01 12:00"', '"2026-07-01T12:00:00.1234567"', '"2026-07-01T12:00:00Z"',
                  '"2026-07-01T12:00:00+05:30"', '"2026-03-29 02:30:00"', '"2026-10-25 02:30:00"', '"2026"',
                  "1700000000", "-1", "1.5", '"noon"', '""', "true", '"2026-07-01 12:00:00 America/New_York"',
                  '"2026-01-31T"', '"2026-07-01T12"', '"2026-07-01T12Z"', '"2026-07-01T1:2:3"', '"2026-07-01T12:"',
                  '"2026-07-01T12:00."', '"2024-01-02T03:04Z"', '"20260701"', '"202607"', '"12026-07-01 01:02:03"',
                  '"-0044-03-15T12:00:00"', '"0000-01-01"', '"+2026-01-01"', '"294247-01-10T04:00:54.775807Z"',
                  '"294248-01-01"', '"12:30"', '"T12:30:00"', '"2026-07-01T12:00:00 UTC"',
                  '"2026-07-01T12:00:00 +01:00"', '"2026-07-01T24:00:00"', '"2026-07-01T12:60:00"',
                  '"2026-07-01T12:00:00+18:00"', '"2026-07-01T12:00:00+18:01"', '"2026-07-01T12:00:00+1"',
                  '"2026-07-01T12:00:00.Z"', '"2026-07-01T12:00:00,5"', '"9999-12-31T23:59:59-18:00"',
                  "9223372036854", "9223372036855", "1e3", '"1700000000"', '"2026-07-01T12:00:00 CET"',
                  '"2026-07-01T12:00:00EST"'],
    "timestamp_ntz": ['"2026-01-31"', '"2026-07-01 12:00:00.5"', '"2026-07-01T12:00:00Z"', "1700000000", '"x"'],
    "array<int>": ["[1,null,2]", '[1,"x"]', "5", '{"a":1}', "[]"],
    "array<struct<a:int,b:string>>": ['[{"a":1},{"a":"x","b":"y"},null]', "[5]", "{}"],
    "struct<a:int,b:struct<c:double>>": ['{"a":"x","b":{"c":2}}', '{"a":1,"b":{"c":"x"}}', '{"b":5}', "[]", '"x"'],
    "map<string,int>": ['{"a":1,"b":null}', "{}", '{"a":"x","b":1}', "5", "[]"],
    "map<string,string>": ['{"a":"x","a":1}', '{"a":{"b":1,"b":2}}', '{"a":1e3}'],
    "map<string,struct<a:int>>": ['{"x":{"a":1},"y":{"a":"?"}}'],
}  # fmt: skip
BODIES = (
    "", " ", "[]", "5", "x", '{"a":', '{"a":1,}', "{'a':1}", "null", '{"a":01}', '{"a":1 "b":2}', '"{}"', '{"A":1}',
    '{"a":1} x', '{"a":1}{"a":2}', '{"a":1,"a":2}', '{"a":1,"a":"x"}', '{"a":"x","a":1}', '{"a":1}\0',
    '{"a":1,"b":' + "[" * 600 + "]" * 600 + "}", '{"a":1,"b":' + "[" * 1100 + "]" * 1100 + "}",
    '{"a":1,"b":' + "9" * 1100 + "}", '{"a":1,"b":"\\q"}', '{"a":1,"b":"\x01"}', "{a:1}", '{"a":1,"b":+1}',
    '{"a":1,"b":.5}', '{"a":1,"b":5.}', '/* c */{"a":1}', '\ufeff{"a":1}',
)  # fmt: skip
DIFFERENCE = re.compile(r"^\| `([^`]+)` \| `(\{[^`]+)` \| (.+) \| (.+) \|$", re.M)
"""A line of the table in differences.md: type, document, what is read here and by from_json."""
OTHERS = ('"a":1,"b":' + "[" * 1100, '"a":1,"b":' + "9" * 1100, '"a":1}\0')
"""The same, where the page has words: documents that from_json refuses for what is beside the column, or takes."""


def read(kind: str, bodies: list[str], reading: Reading) -> list[dict[str, Any]]:
    """The data source's rows, each document read alone."""
    schema = pa.schema([*fields_of(f"a {kind}"), pa.field("_corrupt_record", pa.string())])
    parser = Bodies(schema, reading)
    found = []
    for body in bodies:
        columns = parser.columns(pa.array([body.encode()]), b"\1", pa.array([b"key"])).columns
        found += comparable(pa.StructArray.from_arrays(columns, fields=list(schema)))
    return found


def test_values_are_those_of_from_json(spark: SparkSession) -> None:
    """Uses one job for all values: a column for each type, a row for each value."""
    spark.conf.set("spark.sql.session.timeZone", ZONE)
    try:
        cases = [(kind, f'{{"a":{value}}}') for kind, values in VALUES.items() for value in values]
        cases += [("int", body) for body in BODIES]
        frame = spark.createDataFrame(list(enumerate(body for _, body in cases)), "n int, body string")
        kinds = sorted(VALUES)
        schemas = [from_arrow_schema(fields_of(f"a {kind}, _corrupt_record string")) for kind in kinds]
        options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": "_corrupt_record"}
        parsed = [from_json(col("body"), each, options).alias(f"t{at}") for at, each in enumerate(schemas)]
        table = frame.select("n", *parsed).toArrow().sort_by("n")
    finally:
        spark.conf.unset("spark.sql.session.timeZone")
    reading = Reading(mode="permissive", time_zone=ZONE)
    page = Path(__file__).with_name("differences.md")
    said = {(kind, body): (here, there) for kind, body, here, there in DIFFERENCE.findall(page.read_text())}
    different = {}
    for at, kind in enumerate(kinds):
        rows = [(number, body) for number, (of, body) in enumerate(cases) if of == kind]
        expected = comparable(table.column(f"t{at}")[number] for number, _ in rows)
        found = read(kind, [body for _, body in rows], reading)
        for (_, body), ours, theirs in zip(rows, found, expected, strict=True):
            if repr(ours) != repr(theirs) and not body.startswith(tuple("{" + each for each in OTHERS)):
                different[kind, body] = (is_misfit(ours), is_misfit(theirs))
    assert different == {case: tuple(each.startswith("misfit") for each in words) for case, words in said.items()}


def is_misfit(row: dict[str, Any]) -> bool:
    return row["a"] is None and row["_corrupt_record"] is not None


def comparable(rows: Any) -> list[dict[str, Any]]:
    """Times as numbers, since Python cannot hold every time; a row of nulls as none."""
    found = []
    for row in rows:
        at = row["a"]
        if row.is_valid and (pa.types.is_timestamp(at.type) or pa.types.is_date(at.type)):
            at = at.cast(pa.int64() if pa.types.is_timestamp(at.type) else pa.int32())
        found.append({"a": at.as_py(), "_corrupt_record": row["_corrupt_record"].as_py()})
    return found


def test_variants_equal_those_of_spark(spark: SparkSession) -> None:
    values = ['{"b":[1,-300,null,true],"a":"\\u00e9"}', "1.25", "1e40", '"x"', "12345678901234567890", "[]"]
    schema = pa.schema([pa.field("a", variant())])
    bodies = pa.array([f'{{"a":{value}}}'.encode() for value in values])
    columns, misfits = Bodies(schema).columns(bodies, b"\1" * len(values), pa.array([b"k"] * len(values)))
    assert misfits == {}
    frame = spark.createDataFrame([(value,) for value in values], "text string")
    expected = [row.v for row in frame.selectExpr("parse_json(text) as v").collect()]
    assert [(each["value"], each["metadata"]) for each in columns[0].to_pylist()] == [
        (each.value, each.metadata) for each in expected
    ]


def variant() -> pa.DataType:
    metadata = pa.field("metadata", pa.binary(), nullable=False, metadata={b"variant": b"true"})
    return pa.struct([pa.field("value", pa.binary(), nullable=False), metadata])


def test_a_misfit_is_reported_with_its_path_and_the_rest_is_kept() -> None:
    schema = fields_of("n int, who struct<name:string, ages:array<int>>, items array<struct<count:int>>")
    text = '{"n":"' + "x" * 100 + '","who":{"name":"Ada","ages":[1,"2"]},"items":[{"count":1},{"count":1.5}]}'
    problems = Problems()
    found = struct_reader(schema, "UTC", None)(object_of(text.encode()), problems)
    assert found == {"n": None, "who": {"name": "Ada", "ages": None}, "items": [{"count": 1}, {"count": None}]}
    assert problems == [
        'n: "' + "x" * 36 + "... is not an integer of 32 bits",
        'who.ages: "2" is not an integer of 32 bits',
        "items[].count: 1.5 is not an integer of 32 bits",
    ]


def test_a_body_that_is_not_an_object_is_refused_with_the_reason() -> None:
    for body, words in (
        (b"[1]", "not a JSON object"),
        (b"{", "malformed JSON"),
        (b"[" * 100_000, "too deep"),
        (b"9" * 10_000, "not a JSON object, but 999"),
    ):
        with pytest.raises(Misfit, match=words):
            object_of(body)


def test_any_value_can_be_a_string_that_keeps_the_spelling_of_numbers() -> None:
    text = '{"b": [1.10, 1e3, -0, "\\u00e9\\"", NaN], "a": {"x": null, "y": true}}'
    assert text_of(object_of(text.encode())) == '{"b":[1.10,1e3,0,"é\\"",NaN],"a":{"x":null,"y":true}}'


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("a int not null", r"column a: NOT NULL cannot be promised.*leave NOT NULL out"),
        ("a struct<b:int, c:string not null>", r"column a\.c: NOT NULL"),
        ("a map<int,int>", "column a: the names in a JSON object are text, not int32"),
    ],
)
def test_schemas_that_documents_cannot_satisfy_are_refused(schema: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        struct_reader(fields_of(schema), "UTC", None)


def test_options_set_the_epoch_and_the_zone() -> None:
    schema = pa.schema([("a", pa.timestamp("us", "UTC"))])
    body = pa.array([b'{"a":1700000000123}', b'{"a":"2026-01-31"}'])
    columns, _ = Bodies(schema, Reading(epoch="millis", time_zone="+01:00")).columns(
        body, b"\1\1", pa.array([b"k"] * 2)
    )
    assert columns[0].to_pylist() == [
        datetime(2023, 11, 14, 22, 13, 20, 123000, UTC),
        datetime(2026, 1, 30, 23, tzinfo=UTC),
    ]
    assert is_variant(variant())
    assert not is_variant(pa.struct([("value", pa.binary()), ("metadata", pa.binary())]))
    assert json.loads(text_of({"day": str(date(2026, 1, 1))})) == {"day": "2026-01-01"}
