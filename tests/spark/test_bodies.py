"""JSON bodies against a user's schema: what fits, what does not, what is no JSON."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from mirror.errors import ConfigError
from mirror.spark.bodies import Bodies, DocumentDoesNotFit


def columns(schema: Any, *bodies: bytes, datatypes: bytes | None = None, permissive: bool = False) -> list[Any]:
    keys = pa.array([b"key-%d" % number for number in range(len(bodies))])
    datatypes = b"\1" * len(bodies) if datatypes is None else datatypes
    return [
        each.to_pylist() for each in Bodies(schema, permissive=permissive).columns(pa.array(bodies), datatypes, keys)
    ]


def test_types_are_those_of_the_schema() -> None:
    schema = pa.schema(
        [
            ("int", pa.int32()),
            ("float", pa.float64()),
            ("flag", pa.bool_()),
            ("at", pa.timestamp("us", "UTC")),
            ("day", pa.date32()),
            ("price", pa.decimal128(10, 2)),
            ("who", pa.struct([("name", pa.string()), ("since", pa.timestamp("us", "UTC"))])),
            ("items", pa.list_(pa.field("element", pa.struct([("count", pa.int64())])))),
        ]
    )
    body = (
        b'{"int":1,"float":2,"flag":true,"at":"2026-01-31T12:00:00Z","day":"2026-01-31","price":"1.25","more":{"x":[]},'
        b'"who":{"name":"Ada","since":"2026-01-31T12:00:00+01:00"},"items":[{"count":5},{"count":6,"sku":"a"}]}'
    )
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert columns(schema, body) == [
        [1],
        [2.0],
        [True],
        [noon],
        [date(2026, 1, 31)],
        [Decimal("1.25")],
        [{"name": "Ada", "since": noon.replace(hour=11)}],
        [[{"count": 5}, {"count": 6}]],
    ]


def test_fields_may_be_absent_bodies_may_be_no_objects_and_lines_may_break() -> None:
    schema = pa.schema([("a", pa.int64())])
    bodies = (b'{"b":1}', b' \n{"a":\n2}', b"[1]", b"12", b"\xff\x00", b"", b'{"a":3}', b'{"a":null}')
    assert columns(schema, *bodies, datatypes=b"\1\1\1\1\0\1\0\1") == [[None, 2, None, None, None, None, None, None]]


@pytest.mark.parametrize(
    "body", [b'{"a":"x"}', b'{"a":1.5}', b'{"a":9223372036854775808}', b'{"a":1}{"a":2}', b'{"a":1', b'{"a":{}}']
)
def test_a_document_that_does_not_fit_is_named_or_has_nulls(body: bytes) -> None:
    schema = pa.schema([("a", pa.int64())])
    with pytest.raises(DocumentDoesNotFit, match=r"document 'key-1' does not fit the schema.*mode=permissive"):
        columns(schema, b'{"a":1}', body, b'{"a":3}')
    assert columns(schema, b'{"a":1}', body, b'{"a":3}', permissive=True) == [[1, None, 3]]


@pytest.mark.parametrize(
    "damaged",
    [
        (b'{"a":1,"c":', b'{"x":5}}'),
        (b'{"a":1,"c":"', b'{"}'),
        (b'{"a":1,"c":"}', b'{"}'),
        (b'{"a":1,"c":{"x":2}', b'{"x":5}}'),
        (b'{"a":1}\0', b'{"a":1}\0}'),
    ],
)
def test_damaged_bodies_that_make_one_object_together_do_not_shift_the_others(damaged: tuple[bytes, bytes]) -> None:
    """Two that are one, and one that is two: as many values as documents."""
    schema = pa.schema([("a", pa.int64())])
    bodies = (*damaged, b'{"a":3}', b'{"a":4}{"a":5}')
    with pytest.raises(DocumentDoesNotFit, match="document 'key-0' does not fit"):
        columns(schema, *bodies)
    assert columns(schema, *bodies, permissive=True) == [[None, None, 3, None]]


def test_blanks_around_a_body_are_part_of_no_value() -> None:
    schema = pa.schema([("a", pa.int64())])
    assert columns(schema, b'{"a":1}\r\n', b'\t{"a":2} ', b'{"a":3}', b" ") == [[1, 2, 3, None]]


@pytest.mark.parametrize("kind", [pa.binary(), pa.map_(pa.string(), pa.int64())])
def test_types_that_json_does_not_have_are_refused_beforehand(kind: Any) -> None:
    with pytest.raises(ConfigError, match="column a: JSON"):
        Bodies(pa.schema([("a", kind)]))
