"""Schemas as text: the words of Spark, and what is no schema."""

from __future__ import annotations

import pyarrow as pa
import pytest

from mirror.errors import ConfigError
from mirror.typed.ddl import fields_of


def test_a_schema_has_plain_and_nested_columns() -> None:
    text = (
        "id BIGINT, `the name` string,paid boolean, total decimal(12,2), at timestamp, "
        "items array<struct<sku:string, n:int>>, local timestamp_ntz, tags map<string, array<int>>, must int not null"
    )
    assert fields_of(text) == pa.schema(
        [
            ("id", pa.int64()),
            ("the name", pa.string()),
            ("paid", pa.bool_()),
            ("total", pa.decimal128(12, 2)),
            ("at", pa.timestamp("us", "UTC")),
            ("items", pa.list_(pa.struct([("sku", pa.string()), ("n", pa.int32())]))),
            ("local", pa.timestamp("us")),
            ("tags", pa.map_(pa.string(), pa.list_(pa.int32()))),
            pa.field("must", pa.int32(), nullable=False),
        ]
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "expected a name at its end"),
        ("a", "expected a name at its end"),
        ("a int b int", "expected ','"),
        ("a int not b int", "expected NULL"),
        ("a int,", "expected a name at its end"),
        ("a uuid", r"expected a type \(bigint"),
        ("a array<int", "expected '>'"),
        ("a struct<>", "expected a name"),
        ("a int, a string", "there already"),
        ("city int, s struct<City:int,CITY:int>", "there already, and names ignore case at 36, found 'CITY'"),
        ("a decimal(99)", "at most 38 digits"),
        ("a; drop table", "expected a name or a type"),
        ("a " + "array<" * 40 + "int" + ">" * 40, "within one another"),
    ],
)
def test_a_malformed_schema_is_refused_with_the_position(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        fields_of(text)
