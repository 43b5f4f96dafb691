"""Tables of current documents: columns out of the body, columns that come later, and what does not fit."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from mirror.errors import ConfigError
from mirror.spark.places import folder_at
from mirror.spark.tables import documents
from mirror.spark.tables.documents import BATCH_MARK, Applied, Layout
from mirror.spark.tables.lake import Lake
from mirror.typed.bodies import DocumentDoesNotFit, Reading, TooManyMisfits
from mirror.typed.ddl import fields_of
from tests.spark.events import Event, event
from tests.spark.tables.test_lake import apply

Row = dict[str, Any]


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def put(key: str, at: int, collection: str = "_default._default", /, **fields: Any) -> Event:
    return event("mutation", key, (1, at), value=body(**fields), collection=collection)


def typed(schema: str, misfits_max: float = 1, overwrite_schema: bool = False, **reading: Any) -> Layout:
    return Layout(fields_of(schema), Reading(**{"mode": "permissive"} | reading), misfits_max, overwrite_schema)


def lake_in(folder: Path, layout: Layout) -> Lake:
    return Lake(folder_at(folder), layout)


def rows(lake: Lake, *columns: str) -> dict[str, tuple[Any, ...]]:
    found = lake.documents.table.to_pyarrow_table(columns=["_key", *columns]).to_pylist()
    return {row["_key"]: tuple(row[name] for name in columns) for row in found}


def test_fields_of_the_body_are_columns_next_to_the_metadata(tmp_path: Path) -> None:
    with lake_in(tmp_path, typed("total double, City string, `weiter-name` int, live boolean")) as lake:
        first = [put("a", 1, total=1.5, City="Bonn", key="x"), put("b", 2, total=2), put("c", 3, live=True)]
        assert apply(lake, [first]) == Applied(inserted=3)
        assert rows(lake, "total", "City", "live") == {
            "a": (1.5, "Bonn", None),
            "b": (2.0, None, None),
            "c": (None, None, True),
        }
        second = [put("a", 4, total=7, **{"weiter-name": 3}), event("deletion", "b", (1, 5)), put("d", 6, City="Ulm")]
        assert apply(lake, [second]) == Applied(inserted=1, updated=1, deleted=1)
        assert rows(lake, "total", "City", "weiter-name", "_seqno") == {
            "a": (7.0, None, 3, 4),
            "c": (None, None, None, 3),
            "d": (None, "Ulm", None, 6),
        }
        assert rows(lake, "_value")["d"] == (body(City="Ulm"),)
        names = [field.name for field in lake.documents.table.schema().fields]
        assert names[:2] == ["_key", "_collection"]
        assert names[-6:] == ["_at_seqno", "total", "City", "weiter-name", "live", "_part"]
        lake.tidy()
        assert rows(lake, "total") == {"a": (7.0,), "c": (None,), "d": (None,)}


def test_columns_of_any_type_are_merged(tmp_path: Path) -> None:
    schema = "at timestamp, local timestamp_ntz, day date, price decimal(10,2)"
    schema += ", items array<struct<sku: string>>, m map<string, int>"
    order = {"at": "2026-01-31T12:00:00Z", "local": "2026-01-31T12:00:00", "day": "2026-01-31", "price": 1.005}
    with lake_in(tmp_path, typed(schema)) as lake:
        apply(lake, [[put("a", 1), put("b", 2)]])
        more = [put("a", 3, **order, items=[{"sku": "x"}], m={"n": 1}), put("c", 4, **order)]
        assert apply(lake, [more]) == Applied(inserted=1, updated=1)
        found = rows(lake, "price", "items", "m", "day", "local")
        assert found["a"][:3] == (Decimal("1.01"), [{"sku": "x"}], [("n", 1)])
        assert found["b"] == (None,) * 5
        assert found["c"][0] == Decimal("1.01")
        assert found["a"][3].isoformat() == "2026-01-31"
        assert found["a"][4].isoformat() == "2026-01-31T12:00:00"


def test_a_column_that_is_added_later_has_its_value_in_every_row(tmp_path: Path) -> None:
    """Delta alone would leave it null in the rows that are there: 'no city' would look like 'not read yet'."""
    orders = [put(f"k{number}", number + 1, total=number, city=f"c{number}") for number in range(100)]
    with lake_in(tmp_path, typed("total double")) as lake:
        apply(lake, [orders])
        version = lake.documents.table.version()
    wider = typed("city string, total double, at timestamp_ntz")
    with lake_in(tmp_path, wider) as lake:
        assert lake.documents.table.version() <= version + 2, "the columns, and their values with them, are one commit"
        assert rows(lake, "city", "total") == {f"k{number}": (f"c{number}", float(number)) for number in range(100)}
        assert lake.documents.table.transaction_version(BATCH_MARK) == 0
        assert apply(lake, [[put("k0", 101, city="new")]]) == Applied(updated=1)
        assert rows(lake, "city", "total")["k0"] == ("new", None)
        version = lake.documents.table.version()
    with lake_in(tmp_path, wider) as lake:
        assert lake.documents.table.version() == version


def test_a_field_that_is_added_within_a_struct_has_its_value_in_every_row(tmp_path: Path) -> None:
    """It was once refused as a removed field and another type of the column."""
    items = [{"sku": "x", "count": 2}]
    before, after = (
        "customer struct<name: string>, items array<struct<sku: string>>",
        ("customer struct<city: string, name: string>, items array<struct<sku: string, count: int>>"),
    )
    with lake_in(tmp_path, typed(before)) as lake:
        apply(lake, [[put("a", 1, customer={"name": "Ada", "city": "Bonn"}, items=items), put("b", 2)]])
    with lake_in(tmp_path, typed(after)) as lake:
        ada = {"city": "Bonn", "name": "Ada"}
        assert rows(lake, "customer", "items") == {"a": (ada, items), "b": (None, None)}
        apply(lake, [[put("b", 3, customer={"city": "Ulm"}, items=items)]])
        assert rows(lake, "customer", "items")["b"] == ({"city": "Ulm", "name": None}, items)
    said = r"column customer is struct<city: string, name: string> in the table and would be struct<name: string>"
    with pytest.raises(ConfigError, match=f"{said}.*--overwrite-schema"):
        lake_in(tmp_path, typed(before))


def test_a_crash_before_the_commit_of_new_columns_leaves_the_table_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lake_in(tmp_path, typed("total double")) as lake:
        apply(lake, [[put("a", 1, total=1, city="Bonn")]])

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(documents, "commit", dies)
        with pytest.raises(KeyboardInterrupt):
            lake_in(tmp_path, typed("total double, city string"))
    with lake_in(tmp_path, typed("total double")) as lake:
        assert rows(lake, "total") == {"a": (1.0,)}
    with lake_in(tmp_path, typed("total double, city string")) as lake:
        assert rows(lake, "total", "city") == {"a": (1.0, "Bonn")}


@pytest.mark.parametrize(
    ("schema", "reading", "said"),
    [
        ("total string, n int", {}, "column total is double in the table and would be string"),
        ("n int", {}, "column total is double in the table and would be gone"),
        ("total double, n int", {"epoch": "millis"}, "read with another --time-zone, --epoch"),
        ("total double, n int", {"time_zone": "Asia/Tokyo"}, "read with another --time-zone"),
    ],
)
def test_other_changes_of_columns_need_overwrite_schema(tmp_path: Path, schema: str, reading: Row, said: str) -> None:
    with lake_in(tmp_path, typed("total double, n int")) as lake:
        apply(lake, [[put("a", 1, total=1.5, n=3)]])
    with pytest.raises(ConfigError, match=f"{said}.*--overwrite-schema"):
        lake_in(tmp_path, typed(schema, **reading))
    with lake_in(tmp_path, typed(schema, overwrite_schema=True, **reading)) as lake:
        expected = {"total string, n int": ("1.5", 3), "n int": (3,)}.get(schema, (1.5, 3))
        assert rows(lake, *fields_of(schema).names) == {"a": expected}
        apply(lake, [[put("a", 2, total=2.5, n=3)]])
    with lake_in(tmp_path, typed(schema, **reading)):
        pass


def test_a_table_with_a_schema_is_not_opened_without_one(tmp_path: Path) -> None:
    for made, opened in ((Layout(), typed("n int")), (typed("n int"), Layout())):
        folder = tmp_path / str(made.mark == "")
        with lake_in(folder, made):
            pass
        with pytest.raises(ConfigError, match="a table with other columns"):
            lake_in(folder, opened)


def test_misfits_are_counted_and_shown(tmp_path: Path) -> None:
    with lake_in(tmp_path, typed("n int, _corrupt_record string")) as lake:
        first = [put("a", 1, n="many"), put("b", 2, n=2), event("mutation", "c", (1, 3), value=b"no JSON")]
        assert apply(lake, [first]) == Applied(inserted=3, misfits=2)
        found = rows(lake, "n", "_corrupt_record")
        assert found == {"a": (None, '{"n": "many"}'), "b": (2, None), "c": (None, "no JSON")}
        second = [put("a", 4, n=1), event("deletion", "c", (1, 5)), put("b", 6, n=[])]
        assert apply(lake, [second]) == Applied(updated=2, deleted=1, misfits=1)


def test_a_failfast_merge_ends_at_a_misfit_and_a_permissive_one_goes_on(tmp_path: Path) -> None:
    with lake_in(tmp_path, typed("n int", mode="failfast")) as lake:
        apply(lake, [[put("a", 1, n=1)]])
        with pytest.raises(DocumentDoesNotFit, match="'b' does not fit"):
            apply(lake, [[put("b", 2, n="two")]])
    with lake_in(tmp_path, typed("n int")) as lake:
        assert lake.merge() == Applied(inserted=1, misfits=1)
        assert rows(lake, "n") == {"a": (1,), "b": (None,)}


def test_a_schema_of_other_documents_is_not_loaded_and_may_be_corrected(tmp_path: Path) -> None:
    orders = [put(f"k{number}", number + 1, total=f"{number} EUR") for number in range(200)]
    with lake_in(tmp_path, typed("total double", misfits_max=0.01)) as lake:
        with pytest.raises(TooManyMisfits, match=r"200 of 200 documents do not fit.*nothing was written"):
            apply(lake, [orders])
        assert lake.documents.table.count() == 0
    with lake_in(tmp_path, typed("total string", misfits_max=0.01)) as lake:
        assert lake.merge() == Applied(inserted=200)
        assert rows(lake, "total")["k7"] == ("7 EUR",)
    with pytest.raises(TooManyMisfits):
        lake_in(tmp_path, typed("total double", misfits_max=0.01, overwrite_schema=True))
    with lake_in(tmp_path, typed("total string")) as lake:
        assert rows(lake, "total")["k7"] == ("7 EUR",)


def test_a_misfit_after_the_first_merge_does_not_stop_the_stream(tmp_path: Path) -> None:
    """It was once 1 of 1 documents of a vbucket without rows, at every restart."""
    with lake_in(tmp_path, typed("n int", misfits_max=0.01)) as lake:
        apply(lake, [[put(f"k{number}", number + 1, n=number) for number in range(100)]])
        misfit = event("mutation", "a", (1, 1), value=body(n="many"), vbid=700)
        assert apply(lake, [[misfit]]) == Applied(inserted=1, misfits=1)
        assert rows(lake, "_vbid", "n", "_part")["a"] == (700, None, 43)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("_key string", "names '_key'"),
        ("_Part int", "names '_Part'"),
        ("total int, TOTAL int", "names ignore case"),
        ("`a b` int", "a Delta table cannot have this column name"),
        ("`a.b` int", "a Delta table cannot have this column name"),
        ("a array<struct<`b c`:int>>", "'b c': a Delta table cannot have this column name"),
        ("a int not null", "NOT NULL cannot be promised"),
    ],
)
def test_an_impossible_schema_is_refused_before_a_table_is_made(schema: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        typed(schema)


def test_documents_that_do_not_fit_are_not_dropped() -> None:
    with pytest.raises(ConfigError, match="--mode dropmalformed"):
        typed("n int", mode="dropmalformed")


def test_a_rollback_restores_the_columns_too(tmp_path: Path) -> None:
    with lake_in(tmp_path, typed("n int")) as lake:
        apply(lake, [[put("a", 1, n=1), put("a", 2, n=2), put("b", 3, n=3)]])
        back = event("restoration", "a", (2, 1), seqno=1, value=body(n=1))
        apply(lake, [[event("retraction", "a", (2, 1), seqno=2), back, event("retraction", "b", (2, 1), seqno=3)]])
        assert rows(lake, "n", "_seqno") == {"a": (1, 1)}
