"""JSON bodies against a user's schema: what fits, what does not, what is no JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from mirror.errors import ConfigError
from mirror.typed import bodies as bodies_module
from mirror.typed import values
from mirror.typed.bodies import Bodies, DocumentDoesNotFit, Mode, Parsed, Reading
from mirror.typed.ddl import fields_of


def parsed(schema: Any, bodies: Sequence[bytes], datatypes: bytes = b"", mode: Mode = "failfast") -> Parsed:
    keys = pa.array([b"key-%d" % number for number in range(len(bodies))])
    return Bodies(schema, Reading(mode=mode)).columns(pa.array(bodies), datatypes or b"\1" * len(bodies), keys)


def columns(schema: Any, *bodies: bytes, permissive: bool = False) -> list[Any]:
    return [
        each.to_pylist() for each in parsed(schema, bodies, mode="permissive" if permissive else "failfast").columns
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


def test_absent_fields_and_empty_bodies_are_null_and_line_breaks_are_allowed() -> None:
    schema = pa.schema([("a", pa.int64())])
    bodies = (b'{"b":1}', b' \n{"a":\n2}', b"", b'{"a":3}', b'{"a":null}')
    assert columns(schema, *bodies) == [[None, 2, None, 3, None]]


def test_a_body_that_is_not_an_object_does_not_fit() -> None:
    schema = pa.schema([("a", pa.int64()), ("_corrupt_record", pa.string())])
    bodies = (b'{"a":1}', b"[1]", b"12", b"\xff\x00", b'{"a":3}')
    found = parsed(schema, bodies, b"\1\1\1\0\0", "permissive")
    assert found.columns[0].to_pylist() == [1, None, None, None, None]
    assert found.columns[1].to_pylist() == [None, "[1]", "12", "\ufffd\0", '{"a":3}']
    assert list(found.misfits) == [1, 2, 3, 4]
    with pytest.raises(DocumentDoesNotFit, match="'key-1' does not fit the schema: the body is not a JSON object"):
        parsed(schema, bodies)


def test_the_record_of_a_misfit_is_kept_whole_and_its_other_fields_are_read() -> None:
    schema = pa.schema([("_corrupt_record", pa.string()), ("a", pa.int64()), ("b", pa.string())])
    bodies = (b'{"a":1,"b":"x"}', b'{"a":"?","b":"y"}', b'{"a":', b'{"b":"z"}')
    found = parsed(schema, bodies, mode="permissive")
    assert [each.to_pylist() for each in found.columns] == [
        [None, '{"a":"?","b":"y"}', '{"a":', None],
        [1, None, None, None],
        ["x", "y", None, "z"],
    ]
    assert parsed(schema, bodies, mode="dropmalformed").misfits.keys() == {1, 2}
    with pytest.raises(ConfigError, match="column _corrupt_record holds the text of a document"):
        Bodies(pa.schema([("_corrupt_record", pa.int64())]))


def test_one_misfit_among_many_costs_a_few_parses_not_one_for_each_document(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"arrow": 0, "one by one": 0}
    parse, object_of = bodies_module._ArrowReader.parse, values.object_of

    def counted(self: Any, objects: Any) -> Any:
        calls["arrow"] += 1
        return parse(self, objects)

    def counted_one(body: bytes) -> Any:
        calls["one by one"] += 1
        return object_of(body)

    monkeypatch.setattr(bodies_module._ArrowReader, "parse", counted)
    monkeypatch.setattr(bodies_module, "object_of", counted_one)
    bodies = [b'{"a":%d}' % number for number in range(4096)]
    bodies[1234] = b'{"a":"?"}'
    found = parsed(pa.schema([("a", pa.int64())]), bodies, mode="permissive")
    assert found.columns[0].to_pylist() == [None if number == 1234 else number for number in range(4096)]
    assert calls == {"arrow": 2 * 8 + 1, "one by one": 16}


def test_columns_of_maps_mix_with_columns_that_arrow_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = pa.schema(
        [("m", pa.map_(pa.string(), pa.int64())), ("a", pa.int64()), ("n", pa.map_(pa.string(), pa.string()))]
    )
    bodies = [b'{"a":%d,"m":{"x":%d},"n":{"y":%d}}' % (number, number, number) for number in range(100)]
    bodies[3], bodies[70] = b'{"a":3,"m":{"x":"?"}}', b'{"a":"?","n":{}}'
    found = parsed(schema, bodies, mode="permissive")
    assert list(found.misfits) == [3, 70]
    for column, expected in zip(found.columns, ([("x", 5)], 5, [("y", "5")]), strict=True):
        assert column[5].as_py() == expected
    assert [column[3].as_py() for column in found.columns] == [None, 3, None]
    assert [column[70].as_py() for column in found.columns] == [None, None, []]
    whole: list[int] = []
    parse = bodies_module._ArrowReader.parse

    def counted(reader: Any, objects: Any) -> Any:
        whole.append(len(objects))
        return parse(reader, objects)

    monkeypatch.setattr(bodies_module._ArrowReader, "parse", counted)
    parsed(schema, bodies[10:60])
    assert whole == [50]


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


def test_whitespace_around_a_body_is_ignored() -> None:
    schema = pa.schema([("a", pa.int64())])
    assert columns(schema, b'{"a":1}\r\n', b'\t{"a":2} ', b'{"a":3}', b" ") == [[1, 2, 3, None]]


@pytest.mark.parametrize("kind", [pa.binary(), pa.time32("s"), pa.map_(pa.int64(), pa.int64())])
def test_types_that_json_lacks_are_refused_beforehand(kind: Any) -> None:
    with pytest.raises(ConfigError, match="column a: "):
        Bodies(pa.schema([("a", kind)]))


@pytest.mark.parametrize(("begin", "end"), [(b"[", b"]"), (b'{"a":', b"}")])
@pytest.mark.parametrize("kind", ["int", "string", "map<string,int>", "struct<a:int>"])
def test_a_document_of_any_depth_is_read_or_reported_as_a_misfit(kind: str, begin: bytes, end: bytes) -> None:
    for depth in (50, 400, 500, 800, 5_000):
        deep = begin * depth + b"1" + end * depth
        bodies = (b'{"v":' + deep + b"}", b'{"w":1,"x":' + deep + b"}", b'{"w":2}')
        found = parsed(fields_of(f"v {kind}, w int"), bodies, mode="permissive")
        assert found.columns[1].to_pylist() == [None, 1, 2], depth
        if kind == "string" and depth <= 800:
            assert found.columns[0][0].as_py() == deep.decode()
            assert not found.misfits
        elif not kind.startswith("map"):
            assert found.misfits.keys() == {0}


def test_invalid_utf_8_becomes_replacement_characters() -> None:
    bodies = (b'{"a":"\xff"}', b'{"a":"x\xed\xa0\x80"}')
    assert columns(pa.schema([("a", pa.string())]), *bodies) == [["\ufffd", "x\ufffd\ufffd\ufffd"]]


@pytest.mark.parametrize("others", [(), ("x" * 300,), ("ß", "x" * 300), ("Total_",)])
def test_a_field_fills_its_column_in_every_spelling(others: tuple[str, ...]) -> None:
    """Among many or long names, one that JSON may escape hid the spellings of all."""
    schema = pa.schema([(name, pa.struct([("Id", pa.int64())])) for name in ("Total", *others)])
    spellings = (b"Total", b"total", b"TOTAL", b"\\u0054otal", b"t\\u004ftal")
    bodies = [b'{"%b":{"%b":%d}}' % (spellings[at % 5], b"iD" if at % 3 else b"Id", at) for at in range(60)]
    bodies[7] = b'{"Total":{"Id":1},"total":{}}'
    found = parsed(schema, bodies, mode="permissive")
    assert found.columns[0].to_pylist() == [None if at == 7 else {"Id": at} for at in range(60)]
    assert found.misfits == {7: "Total: the document has both Total and total"}


def test_decimals_are_not_left_to_arrow() -> None:
    """12345678901234567890123456789012345678 was 99881319256748086134.00, and 1e-999999999 ended the process."""
    for kind in (pa.decimal128(38, 18), pa.list_(pa.decimal128(38, 18)), pa.struct([("a", pa.decimal128(38, 18))])):
        assert Bodies(pa.schema([("a", kind)]))._arrow is None
    found = parsed(pa.schema([("a", pa.decimal128(38, 18))]), [b'{"a":%d.5}' % (10**19)] * 20)
    assert found.columns[0].to_pylist() == [Decimal(10**19) + Decimal("0.5")] * 20
