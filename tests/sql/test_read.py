"""Arrow batches at one boundary of each vbucket: what is read, what is held, and how a read ends."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pyarrow as pa
import pytest

import mirror as api
from mirror import View, lease
from mirror.errors import ConfigError, MirrorError, QueryCancelled, QueryFailed
from mirror.sql import Session, arrow, to_pandas
from mirror.typed import rows as typed_rows
from mirror.typed.rows import DOCUMENTS, Documents
from storage.errors import UnknownCollection, ViewInvalidated
from storage.read import bulk
from tests.spark.mirrors import SmallMirror, orders
from tests.sql.rig import collections, put, rows


class Held:
    """Leases that a service would grant."""

    def __init__(self) -> None:
        self.now: list[dict[int, tuple[int, int]]] = []
        self.count = 0

    def __call__(self, _: object, positions: dict[int, tuple[int, int]], *, name: str, **_options: Any) -> Held:
        self.now.append(positions)
        self.count += 1
        return self

    def release(self) -> None:
        self.now.pop()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    found = Held()
    monkeypatch.setattr(lease, "Lease", found)
    return found


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typed_rows, "BATCH_ROWS", 5)
    monkeypatch.setattr(bulk, "GET_ROWS", 4)


def after_first_chunk(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Call `action` once, when the first vbucket has given its first rows."""
    documents = bulk.documents
    left = [action]

    def with_action(*given: Any, **options: Any) -> Iterator[Any]:
        for chunk in documents(*given, **{**options, "rows_max": 3}):
            yield chunk
            if left:
                left.pop()()

    monkeypatch.setattr(bulk, "documents", with_action)


def test_columns_equal_those_of_the_spark_source(mirror: SmallMirror, view: View) -> None:
    mirror.put(orders(0, 50))
    found = arrow(view).read_all()
    assert found.schema == DOCUMENTS
    scanned = {each.key: each for each in view.scan()}
    assert len(scanned) == 50
    for row in found.to_pylist():
        document = scanned.pop(row["key"].encode())
        assert (row["vbid"], row["seqno"], row["cas"]) == (document.vbid, document.seqno, document.cas)
        assert (row["collection"], row["value"]) == ("_default._default", document.value)


def test_a_schema_types_documents_as_spark_does(mirror: SmallMirror, view: View) -> None:
    mirror.put(orders(0, 3))
    reader = view.arrow(prefix="order::000001", schema="_key string, total double, paid boolean, _value string")
    (row,) = reader.read_all().to_pylist()
    assert (row["_key"], row["total"], row["paid"]) == ("order::000001", 0.37, False)
    assert row["_value"].startswith('{"id": 1')
    with pytest.raises(ConfigError, match="_seqno has type int64, not string"):
        view.arrow(schema="_seqno string")
    with pytest.raises(ConfigError, match="no column 'nothing'"):
        view.arrow(columns=("nothing",))


def test_integers_stay_exact_in_pandas(mirror: SmallMirror, view: View) -> None:
    """pandas makes a column with a null a float: 9007199254740993 became ...992."""
    number = 2**53 + 1
    put(mirror, {"a": {"n": number, "s": {"n": number}, "l": [number, None], "b": True}, "b": {"s": {}}})
    schema = "_key string, n long, s struct<n: long>, l array<long>, b boolean"
    by_sql = to_pandas(view.sql("SELECT _key, n, s, l, b FROM documents ORDER BY _key"))
    for frame in (view.to_pandas(schema=schema).sort_values("_key"), by_sql):
        assert [str(frame[name].dtype) for name in ("n", "b")] == ["Int64", "boolean"]
        assert [frame.n.iloc[0], frame.s.iloc[0]["n"], *frame.l.iloc[0]] == [number, number, number, None]
        assert frame.n.sum() == number
    sums = to_pandas(view.sql("SELECT sum(n) AS total, [{'n': n}, NULL] AS l FROM documents GROUP BY n ORDER BY n"))
    assert (int(sums.total[0]), sums.l[0][0]) == (number, {"n": number})


def test_a_read_of_a_collection_has_no_other_documents(mirror: SmallMirror, view: View) -> None:
    ids = collections(mirror, "orders")
    put(mirror, {"a": 1})
    put(mirror, {"a": 2, "b": 3}, collection_id=ids["orders"])
    reader = arrow(view, "inventory.orders", columns=("collection", "value"))
    assert sorted(reader.read_all().column("value").to_pylist()) == [b"2", b"3"]
    with pytest.raises(UnknownCollection, match=r"known here: _default\._default, inventory\.orders"):
        arrow(view, "inventory.none")


def test_columns_that_the_query_does_not_name_are_not_read(
    mirror: SmallMirror, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror.put(orders(0, 20))
    with Session(view) as session:
        session.tables()
        made: list[str] = []
        column = Documents.column

        def noted(self: Documents, name: str) -> Any:
            made.append(name)
            return column(self, name)

        monkeypatch.setattr(Documents, "column", noted)
        monkeypatch.setattr(Documents, "values", property(lambda _: pytest.fail("a value was read")))
        assert arrow(view, columns=("key", "seqno")).read_all().num_rows == 20
        assert set(made) == {"key", "seqno"}
        for query, columns in (
            ("SELECT count(*) FROM documents", {"vbid"}),
            ("SELECT max(_seqno) FROM documents WHERE _key > 'order::000003'", {"key", "seqno"}),
        ):
            made.clear()
            session.run(query).reader.read_all()
            assert set(made) == columns
        with pytest.raises(pytest.fail.Exception):
            session.run("SELECT sum(total) FROM documents").reader.read_all()


def test_a_query_reads_only_the_collections_keys_and_seqnos_it_names(
    mirror: SmallMirror, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    collections(mirror, "orders", "others")
    mirror.put(orders(0, 30))
    requested: list[tuple[Any, ...]] = []
    documents = bulk.documents
    with Session(view) as session:
        session.columns("_default._default")

        def noted(reader: Any, pin: Any, ids: Any, key_range: Any, **options: Any) -> Any:
            requested.append((int(pin.vbid), ids, key_range, options))
            return documents(reader, pin, ids, key_range, **options)

        monkeypatch.setattr(bulk, "documents", noted)

        def reads(query: str) -> list[tuple[Any, ...]]:
            requested.clear()
            session.run(query).reader.read_all()
            return requested

        ((vbid, ids, key_range, _),) = reads("SELECT * FROM documents WHERE _key = 'order::000007' AND total > 0")
        assert (vbid, ids) == (view.vbid_of(b"order::000007"), [0])
        assert key_range == (b"order::000007", b"", b"order::000007\0")
        for odd in ('a"b', "a\\b", "a'b", "(_seqno > 5)"):
            ((*_, key_range, _),) = reads("SELECT _key FROM documents WHERE _key = '{}'".format(odd.replace("'", "''")))
            assert key_range == (odd.encode(), b"", odd.encode() + b"\0")
        between = "d._key >= 'order::00' AND d._key < 'order::01'"
        ranges = {each[2] for each in reads(f"SELECT 1 FROM documents d WHERE 'ü' <> 'a' AND {between}")}
        assert ranges == {(b"order::00", b"", b"order::01")}
        for test, vbids in (
            ("_vbid = 1", {1}),
            ("_vbid < 2 AND _seqno > 0", {0, 1}),
            ("_vbid % 50 = 1", {*view.vbids}),
        ):
            assert {each[0] for each in reads(f"SELECT 1 FROM documents WHERE {test}")} == vbids
        for test, after in (
            ("_seqno >= 3 AND _vbid > 0", 2),
            ("_seqno > 3 OR _vbid > 0", 0),
            ("NOT _seqno > 3", 0),
            ("_seqno > 3 AND customer IN ('a', 'b', 'c') AND (id < 9 OR total > 7)", 3),
            ("customer = '(_seqno > 5)' AND note <> ') and (_seqno > 5) and ('", 0),
            ("customer = '\" and (_seqno > 5) and \"' AND id > 3", 0),
            ("customer IN ('x\") and (_seqno > 5) and (\"', 'y', 'z') AND id > 3", 0),
            ("customer IN ('x\"', 'y', 'z\"\n') AND _seqno > 3", 0),
        ):
            assert {each[3]["after_seqno"] for each in reads(f"SELECT 1 FROM documents WHERE {test}")} == {after}
        assert reads("SELECT 1") == []


WAYS: dict[str, Callable[[Session], object]] = {
    "read to its end": lambda session: session.run("SELECT * FROM documents").reader.read_all(),
    "closed early": lambda session: session.run("SELECT * FROM documents").close(),
    "replaced": lambda session: (session.run("SELECT * FROM documents"), session.run("SELECT 1")),
    "failed": lambda session: session.run("SELECT CAST(note AS INTEGER) FROM documents").reader.read_all(),
    "does not bind": lambda session: session.run("SELECT nothing FROM documents"),
    "a batch": lambda session: next(session.run("SELECT * FROM documents").reader),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_lease_of_a_query_ends_however_the_query_ends(
    mirror: SmallMirror, view: View, held: Held, few_rows: None, way: str
) -> None:
    mirror.put(orders(0, 50))
    with Session(view, threads=1) as session:
        session.tables()
        try:
            WAYS[way](session)
        except QueryFailed:
            assert way in ("failed", "does not bind")
        else:
            assert held.count
        assert way == "a batch" or held.now == []
    assert held.now == []


def test_the_lease_of_a_reader_ends_with_it(mirror: SmallMirror, view: View, held: Held, few_rows: None) -> None:
    mirror.put(orders(0, 50))
    reader = arrow(view)
    assert held.now == []
    next(reader)
    assert held.now == [{pin.vbid: (pin.branch, pin.seqno) for pin in map(view.pin, view.vbids)}]
    del reader
    gc.collect()
    assert held.now == []


def test_a_query_by_key_needs_no_lease(mirror: SmallMirror, view: View, held: Held) -> None:
    put(mirror, {"a": {"n": 1}})
    assert rows(view, "SELECT n FROM documents WHERE _key = 'a'") == [(1,)]
    assert held.count == 0


TWICE = "SELECT (SELECT count(*) FROM documents), (SELECT count(n) FROM documents), (SELECT sum(n) FROM documents)"


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("event", ["write", "rollback", "drop", "purge"])
def test_one_query_sees_one_boundary_or_is_refused(
    mirror: SmallMirror, view: View, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    put(mirror, {f"k{at}": {"n": at} for at in range(60)})
    put(mirror, {f"k{at}": {"n": at + 1} for at in range(60)})
    before = rows(view, TWICE)
    assert before == [(60, 60, 1830)]

    def happen() -> None:
        if event == "rollback":
            for vbid, seqno in list(mirror.seqnos.items()):
                mirror.roll_back(vbid, seqno - 1)
        elif event == "drop":
            collections(mirror)
        put(mirror, {f"k{at}": {"n": 9} for at in range(30)})
        if event == "purge":
            mirror.put({f"k{at}": None for at in range(60)})
            mirror.purge(boundaries=1, time_ms=0)

    with Session(view, threads=1) as session:
        session.tables()
        after_first_chunk(monkeypatch, happen)
        if event == "purge":
            with pytest.raises(ViewInvalidated, match="start the read again"):
                session.run(TWICE).reader.read_all()
        else:
            (row,) = session.run(TWICE).reader.read_all().to_pylist()
            assert [tuple(row.values())] == before


@pytest.mark.usefixtures("few_rows")
def test_a_reader_whose_history_is_gone_is_refused(mirror: SmallMirror, view: View) -> None:
    mirror.put(orders(0, 60))
    reader = arrow(view)
    next(reader)
    mirror.put(dict.fromkeys(orders(0, 60)))
    mirror.purge(boundaries=1, time_ms=0)
    with pytest.raises(ViewInvalidated, match="start the read again"):
        reader.read_all()


def test_a_query_can_be_ended_by_another_thread(
    mirror: SmallMirror, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror.put(orders(0, 60))
    with Session(view, threads=1) as session:
        session.tables()
        after_first_chunk(monkeypatch, session.interrupt)
        with pytest.raises(QueryCancelled):
            session.run("SELECT sum(total) FROM documents").reader.read_all()
        assert session.run("SELECT 1 AS one").reader.read_all().to_pylist() == [{"one": 1}]


def test_an_error_for_missing_packages_says_how_to_install_them(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for missing in ("duckdb", "mirror.sql"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, missing, None)
            if missing == "mirror.sql":
                patch.delattr(api, "sql", raising=False)
            with pytest.raises(MirrorError, match=r"pip install 'dcp-mirror\[sql\]'"):
                view.sql("SELECT 1")


def test_an_answer_has_the_types_of_its_query(view: View) -> None:
    with Session(view) as session:
        found = session.run("SELECT 1::BIGINT AS a, 'x' AS b").reader.schema
    assert found == pa.schema({"a": pa.int64(), "b": pa.string()})


def test_a_reader_holds_at_most_four_batches(mirror: SmallMirror, view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror.put({f"k{at}": b"x" * 1000 for at in range(200)})
    monkeypatch.setattr(typed_rows, "BATCH_BYTES", 10_000)
    monkeypatch.setattr(bulk, "GET_ROWS", 4)
    taken = 0
    documents = bulk.documents

    def noted(*given: Any, **options: Any) -> Iterator[Any]:
        nonlocal taken
        for chunk in documents(*given, **{**options, "rows_max": 4}):
            taken += len(chunk.stored)
            yield chunk

    monkeypatch.setattr(bulk, "documents", noted)
    given = 0
    for batch in arrow(view):
        given += batch.num_rows
        assert batch.nbytes < 25_000
        assert taken - given < 50
    assert given == 200


@pytest.mark.parametrize("columns", [("value",), ("key", "seqno"), ("n",)])
def test_threads_make_batches_of_bodies_and_end_with_their_read(
    mirror: SmallMirror, view: View, monkeypatch: pytest.MonkeyPatch, columns: tuple[str, ...]
) -> None:
    """One core read rows and parsed bodies, while another was idle."""
    mirror.put({f"k{at}": b'{"n":%d}' % at for at in range(50)})
    monkeypatch.setattr(typed_rows, "BATCH_ROWS", 5)
    makers = set()
    close = Documents.close

    def noted(documents: Documents) -> None:
        makers.add(threading.current_thread())
        close(documents)

    monkeypatch.setattr(Documents, "close", noted)
    schema = "n long" if columns == ("n",) else None
    before = threading.active_count()
    for batch_count in (None, 3):
        makers.clear()
        reader = arrow(view, columns=columns, schema=schema)
        found = [*islice(reader, batch_count)]
        del reader
        gc.collect()
        assert len(found) == batch_count or len(found) > 5
        assert makers - {threading.current_thread()}
        assert threading.active_count() == before
