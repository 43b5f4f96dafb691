"""Documents that no table expects: each gives a defined value or a clear error, never a wrong sum."""

from __future__ import annotations

from typing import Any

import pytest

from mirror import View
from mirror.errors import QueryFailed
from mirror.sql import Session
from mirror.typed.bodies import DocumentDoesNotFit
from mirror.typed.values import object_of
from storage.errors import Unavailable
from storage.format import keys
from tests.spark.mirrors import VBUCKETS, SmallMirror
from tests.sql.rig import put, rows

JSON, TEXT = 1, 0


def test_a_document_that_is_not_an_object_has_null_columns_and_a_value(mirror: SmallMirror, view: View) -> None:
    put(mirror, {"object": {"n": 1}, "list": [1, 2], "text": "so", "number": 7})
    mirror.put({"plain": b'say "x"', "binary": b"\xff\x00", "looks": b'{"n":5}', "empty": b""}, datatype=TEXT)
    assert rows(view, "SELECT _key, n, value::VARCHAR FROM documents") == [
        ("binary", None, '"\\ufffd\\u0000"'),
        ("empty", None, None),
        ("list", None, "[1, 2]"),
        ("looks", None, '"{\\"n\\":5}"'),
        ("number", None, "7"),
        ("object", 1, '{"n": 1}'),
        ("plain", None, '"say \\"x\\""'),
        ("text", None, '"so"'),
    ]
    assert rows(view, "SELECT _key, value->>'$.n' FROM documents WHERE value->>'$.n' IS NOT NULL") == [("object", "1")]
    assert rows(view, "SELECT count(*), sum(n) FROM documents") == [(8, 1)]


def test_malformed_json_is_null_in_a_column_and_an_error_if_extracted(mirror: SmallMirror, view: View) -> None:
    put(mirror, {"good": {"n": 1}})
    mirror.put({"bad": b'{"n":', "latin": b'{"t":"\xe9"}'}, datatype=JSON)
    assert rows(view, "SELECT sum(n), count(*) FROM documents") == [(1, 3)]
    with pytest.raises(QueryFailed, match=r"Malformed JSON.*json_valid"):
        rows(view, "SELECT value->>'$.n' FROM documents")
    assert rows(view, "SELECT _key FROM documents WHERE NOT json_valid(value)") == [("bad",)]
    assert rows(view, "SELECT t, value->>'$.t' FROM documents WHERE _key = 'latin'") == [("\ufffd", "\ufffd")]


def test_a_number_that_its_column_cannot_hold_ends_the_query(
    mirror: SmallMirror, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(mirror, {"a": {"n": 1, "in": {"m": [1]}}})
    with Session(view) as session:
        session.tables()
        for key, body, column in (("b", {"n": 1.5}, "n"), ("c", {"n": 2**63}, "n"), ("d", {"in": {"m": [0.5]}}, "in")):
            put(mirror, {key: body})
            with pytest.raises(
                DocumentDoesNotFit, match=f"document '{key}' does not fit the schema: {column}.*value->>"
            ):
                session.run(f'SELECT sum(len(("{column}")::VARCHAR)) FROM documents').reader.read_all()
            mirror.put({key: None})
        put(mirror, {"e": {"n": "1", "in": 5}})
        assert session.run('SELECT sum(n), count("in") FROM documents').reader.read_all().to_pylist() == [
            {"sum(n)": 1, 'count("in")': 1}
        ]


@pytest.mark.parametrize("other", [{"a": 1}, "text", [1], True, 2**63, 10**400])
def test_a_field_of_several_types_is_json(mirror: SmallMirror, view: View, other: Any) -> None:
    put(mirror, {"a": {"x": 1}, "b": {"x": other}, "c": {"x": None}, "d": {}})
    put(mirror, {"quoted": {"x": 1, "a\"/~'b": 1}, "quoted2": {"a\"/~'b": "t"}})
    with Session(view) as session:
        (column,) = (each for each in session.columns("_default._default") if each.name == "x")
        assert column.mixed
        assert column.ddl == "x string"
        found = session.run("SELECT _key, x::VARCHAR AS x FROM documents WHERE x IS NOT NULL").reader.read_all()
        texts = {row["_key"]: row["x"] for row in found.to_pylist()}
        assert texts.keys() == {"a", "b", "quoted"}
        assert texts["a"] == "1"
        if not isinstance(other, int) or other < 10**300:
            assert object_of(b'{"x":' + texts["b"].encode() + b"}") == {"x": other}
    assert rows(view, 'SELECT _key, "a""/~\'b"::VARCHAR FROM documents WHERE _key >= \'q\'') == [
        ("quoted", "1"),
        ("quoted2", '"t"'),
    ]


def test_a_key_that_is_not_utf_8_is_null(mirror: SmallMirror, view: View) -> None:
    put(mirror, {"a": {"n": 1}})
    key = b"\xff\xfe"
    vbid = keys.vbid_of(key, VBUCKETS)
    store_key(mirror, key, vbid)
    assert rows(view, "SELECT _key, n FROM documents") == [("a", 1), (None, 1)]
    assert rows(view, "SELECT count(*), count(_key), sum(n) FROM documents") == [(2, 1, 2)]
    assert view.arrow(columns=("key",)).read_all().column("key").null_count == 1


def store_key(mirror: SmallMirror, key: bytes, vbid: int) -> None:
    class Name(str):
        def encode(self, *_: str) -> bytes:
            return key

    mirror.put({Name("x"): b'{"n":1}'})


def test_a_field_in_two_spellings_or_named_like_metadata_gets_no_column(mirror: SmallMirror, view: View) -> None:
    put(mirror, {"a": {"City": "x", "city": "y", "value": 1, "_key": 2, "": 3, "s": {"A": 1, "a": 2}, "order": 5}})
    with Session(view) as session:
        names = [each.name for each in session.columns("_default._default")]
        with pytest.raises(QueryFailed, match=r"\(a field without a column is value->>"):
            session.run("SELECT city FROM documents")
    assert names[:3] == ["_key", "s", "order"]
    assert names[-1] == "value"
    assert rows(view, "SELECT value->>'$.City', value->>'$.city', _key, s, \"order\" FROM documents") == [
        ("x", "y", "a", '{"A":1,"a":2}', 5)
    ]


@pytest.mark.parametrize("where", ["sampled", "outside the sample"])
def test_a_sum_includes_the_values_of_every_spelling_of_its_field(mirror: SmallMirror, view: View, where: str) -> None:
    """A writer spelled a field differently in the past. `sum` once had the values of one spelling."""
    old = {f"old{at}": {"AMOUNT": 1, "of": [{"Sku": "a"}]} for at in range(50)}
    new = {f"new{at}": {"amount": 2, "of": [{"sku": "b"}]} for at in range(50)}
    put(mirror, old | new if where == "sampled" else new)
    with Session(view, threads=1) as session:
        session.tables()
        put(mirror, old)
        query = "SELECT sum(Amount) AS total, count(of[1].sku) AS skus FROM documents"
        assert session.run(query).reader.read_all().to_pylist() == [{"total": 150, "skus": 100}]
        put(mirror, {"both": {"Amount": 1, "amount": 1}})
        with pytest.raises(DocumentDoesNotFit, match=r"document 'both' .*: the document has both Amount and amount"):
            session.run(query).reader.read_all()
        put(mirror, {"both": {"of": [{"sku": "a", "SKU": "b"}]}})
        assert session.run(query).reader.read_all().to_pylist() == [{"total": 150, "skus": 100}]


def test_a_field_may_have_any_name(mirror: SmallMirror, view: View) -> None:
    """Spark writes a column `_corrupt_record` into its JSON: it was null here, and a number in it ended SELECT *."""
    put(mirror, {f"k{at}": {"_corrupt_record": f"line {at}", "_class": "Order"} for at in range(2)})
    assert rows(view, "SELECT _corrupt_record, _class FROM documents") == [("line 0", "Order"), ("line 1", "Order")]
    put(mirror, {f"k{at}": {"_corrupt_record": {"line": at}} for at in range(2)})
    assert rows(view, "SELECT _corrupt_record.line FROM documents") == [(0,), (1,)]


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "INF", "7", "abc"])
def test_a_text_does_not_count_as_a_number(mirror: SmallMirror, view: View, text: str) -> None:
    """The sum of a column with the text "NaN" outside the sample was NaN."""
    put(mirror, {"a": {"n": 1.5, "in": {"n": 1.5}}})
    with Session(view) as session:
        session.tables()
        put(mirror, {"b": {"n": text, "in": {"n": text}}})
        found = session.run('SELECT sum(n), count(n), sum("in".n) FROM documents').reader.read_all().to_pylist()
    assert list(found[0].values()) == [1.5, 1, 1.5]


@pytest.mark.parametrize("number", ["1e400", "-1e400", "9" * 400, "9" * 5_000])
def test_a_number_too_large_for_a_double_ends_the_query(mirror: SmallMirror, view: View, number: str) -> None:
    put(mirror, {"a": {"n": 1.5}})
    with Session(view) as session:
        session.tables()
        mirror.put({"b": b'{"n":%b}' % number.encode()})
        with pytest.raises(DocumentDoesNotFit, match=r"document 'b'.*not a number of 64 bits"):
            session.run("SELECT sum(n) FROM documents").reader.read_all()


def test_a_lone_surrogate_does_not_end_the_query(mirror: SmallMirror, view: View) -> None:
    """DuckDB refuses a text cut in an emoji, which JSON.stringify writes: no column of several types could be read."""
    mirror.put(
        {"a": b'{"x":1}', "b": b'{"x":"text"}', "c": b'{"note":"cut \\ud83d"}', "d": b'{"x":"\\ude00\\ud83d\\ude00"}'}
    )
    mirror.put({"e": b'{"note":"no escape: \\\\ud83d, an emoji: \\ud83d\\ude00"}'})
    found = rows(view, "SELECT _key, x::VARCHAR, note, value->>'$.note' FROM documents")
    assert found == [
        ("a", "1", None, None),
        ("b", '"text"', None, None),
        ("c", None, "cut ?", "cut ?"),
        ("d", '"?\U0001f600"', None, None),
        ("e", None, "no escape: \\ud83d, an emoji: \U0001f600", "no escape: \\ud83d, an emoji: \U0001f600"),
    ]


def test_a_column_of_several_types_is_read_from_any_document(mirror: SmallMirror, view: View) -> None:
    """An array's element 0 was shown as the field "0", and a malformed document ended the query."""
    put(mirror, {"array": [10, 20], "one": {"0": 1, "*": [1]}, "two": {"0": "t", "*": "t"}})
    mirror.put({"bad": b'{"0":', "inf": b'{"0":1e400}'})
    assert rows(view, 'SELECT _key, "0"::VARCHAR, "*"::VARCHAR FROM documents WHERE "0" IS NOT NULL') == [
        ("inf", "1e400", None),
        ("one", "1", "[1]"),
        ("two", '"t"', '"t"'),
    ]
    assert rows(view, """SELECT _key FROM documents WHERE "0" = '1' OR "0" IN ('"t"', '2')""") == [("one",), ("two",)]


def test_a_document_of_5_mb_is_queried(mirror: SmallMirror, view: View) -> None:
    put(mirror, {"large": {"text": "x" * 5_000_000, "n": 3}, "small": {"n": 4}})
    assert rows(view, "SELECT sum(n), max(length(text)), max(length(value::VARCHAR)) FROM documents") == [
        (7, 5_000_000, 5_000_020)
    ]


def test_documents_of_60_levels_and_of_3000_fields_are_queried(mirror: SmallMirror, view: View) -> None:
    deep: Any = 1
    for _ in range(60):
        deep = {"d": deep}
    put(mirror, {"deep": {"x": deep, "n": 1}, "wide": {"by_id": {str(at): at for at in range(3000)}, "n": 2}})
    put(mirror, {"also": {"by_id": {}, "x": 1}, "wider": {**{f"f{at}": 1 for at in range(3000)}, "n": 4}})
    assert rows(view, "SELECT sum(n) FROM documents") == [(7,)]
    assert rows(view, "SELECT by_id->>'$.17' FROM documents WHERE _key = 'wide'") == [("17",)]


def test_a_mirror_that_is_filling_is_unavailable(tmp_path: Any) -> None:
    from mirror import open_view

    mirror = SmallMirror(tmp_path / "mirror", filled=False)
    put(mirror, {"a": {"n": 1}})
    with open_view(mirror.path) as view:
        for query in ("SELECT count(*) FROM documents", "SELECT n FROM documents"):
            with pytest.raises(Unavailable, match="not filled yet"):
                rows(view, query)
        with pytest.raises(Unavailable, match="not filled yet"):
            view.arrow().read_all()
    mirror.close()


def test_a_field_name_that_looks_like_a_filter_does_not_filter(mirror: SmallMirror, view: View) -> None:
    name, inner = "(q) and (_seqno > 5) and (b)", "(_seqno > 5)"
    put(mirror, {"a": {name: 1, "s": {inner: 1}}, "b": {name: 2, "s": {inner: 2}}})
    assert rows(view, f'SELECT _key FROM documents WHERE "{name}" = 1 AND "{name}" < 7') == [("a",)]
    assert rows(view, f'SELECT _key FROM documents WHERE s."{inner}" = 1 AND s."{inner}" < 7') == [("a",)]


def test_a_condition_reads_only_its_columns(mirror: SmallMirror, view: View) -> None:
    """A column `id` was read for a condition on `order_id`: a number that it cannot hold ended the query."""
    put(mirror, {"a": {"order_id": "id", "id": 1, "s": {"n": 1}}})
    with Session(view) as session:
        session.tables()
        put(mirror, {"b": {"id": 1.5, "order_id": "b"}})
        for condition in ("order_id = 'id'", "order_id >= 'id' AND _seqno > 0", "s.n = 1"):
            found = session.run(f"SELECT _key FROM documents WHERE {condition}").reader.read_all()
            assert found.column("_key").to_pylist() == ["a"], condition
        with pytest.raises(DocumentDoesNotFit):
            session.run("SELECT _key FROM documents WHERE id = 1").reader.read_all()
