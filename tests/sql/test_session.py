"""SQL over a view: tables, columns, what reaches the store, and every way in which a query ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mirror import View
from mirror.errors import QueryFailed
from mirror.serve.http.problems import DETAIL_LENGTH_MAX, Problem
from mirror.sql import Session
from storage.format import records
from storage.model import Collection, Manifest, ManifestUid, Seqno, SnapshotRange
from tests.spark.mirrors import GROUPS, VBUCKETS, SmallMirror
from tests.sql.rig import SCOPES, collections, put, rows


def test_each_collection_is_a_table_and_the_default_one_is_documents(mirror: SmallMirror, view: View) -> None:
    ids = collections(mirror, "orders", "customers")
    put(mirror, {"a": {"n": 1}, "b": {"n": 2}})
    put(mirror, {"o1": {"total": 5, "who": "a"}, "o2": {"total": 7, "who": "a"}}, collection_id=ids["orders"])
    assert rows(view, "SELECT count(*), sum(n) FROM documents") == [(2, 3)]
    assert rows(view, "SELECT sum(total) FROM inventory.orders") == [(12,)]
    assert rows(view, "SELECT sum(total) FROM orders") == [(12,)]
    assert rows(view, "SELECT sum(total) FROM INVENTORY.Orders WHERE who = 'a'") == [(12,)]
    assert rows(view, "SELECT count(*) FROM inventory.customers") == [(0,)]
    joined = "SELECT d._key, sum(o.total) FROM documents d JOIN inventory.orders o ON o.who = d._key GROUP BY 1"
    assert rows(view, joined) == [("a", 12)]


@pytest.mark.parametrize(
    ("query", "what"),
    [
        ("SELECT * FROM nothing", r"table nothing does not exist \(tables: documents, inventory.orders\)"),
        ("SELECT nothing FROM documents", "column"),
        ("SELECT ' FROM documents", "unterminated"),
        ("COPY documents TO 'x'", "only SELECT"),
        ("SELECT 1; SELECT 2", "one statement"),
        ("SELECT * FROM read_csv('/etc/passwd')", "read_csv is not available"),
        ("FROM '/etc/passwd'", "does not exist"),
        ("WITH x AS (INSERT INTO documents VALUES (1) RETURNING *) SELECT * FROM x", "only SELECT"),
        ("WITH x AS (COPY (SELECT 1) TO '/tmp/x.csv') SELECT 1", "only SELECT"),
        ("SELECT (WITH x AS (DELETE FROM documents RETURNING 1) SELECT count(*) FROM x)", "only SELECT"),
        ("SELECT 1 UNION ALL (WITH x AS (UPDATE documents SET n = 1 RETURNING 1) SELECT * FROM x)", "only SELECT"),
    ],
)
def test_a_query_that_cannot_be_answered_is_an_error_with_the_reason(
    mirror: SmallMirror, view: View, query: str, what: str
) -> None:
    collections(mirror, "orders")
    with Session(view) as session:
        with pytest.raises(QueryFailed, match=what):
            session.run(query)
        assert session.run("SELECT 1").reader.read_all().to_pylist() == [{"1": 1}]


def test_a_query_with_2500_conditions_is_answered_and_5000_levels_are_refused(mirror: SmallMirror, view: View) -> None:
    """2,500 conditions once ended in a RecursionError, 5,000 levels kept the parser busy for minutes."""
    put(mirror, {"a": {"n": 1}})
    with Session(view) as session:
        others = " AND ".join(f"_key <> 'k{number}'" for number in range(2_500))
        assert session.run(f"SELECT n FROM documents WHERE {others}").reader.read_all().to_pylist() == [{"n": 1}]
        with pytest.raises(QueryFailed, match="nested too deep"):
            session.run("WITH a AS (" * 5_000 + "SELECT 1" + ")" * 5_000)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("SELECT count(*) FROM (WITH documents AS (SELECT 1) SELECT * FROM documents), documents", 2),
        ("WITH orders AS (SELECT n FROM documents) SELECT sum(n) FROM orders", 3),
        ("WITH orders AS (SELECT total AS n FROM inventory.orders) SELECT sum(n) FROM orders", 5),
        ("SELECT sum(total) FROM orders WHERE total > (WITH orders AS (SELECT 1 AS a) SELECT a FROM orders)", 5),
        ("WITH a AS (SELECT 7 AS n), b AS (SELECT * FROM a) SELECT n FROM b", 7),
        ("WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < 5) SELECT sum(n) FROM r", 15),
        ("SELECT sum(n) FROM (SELECT n FROM documents UNION ALL VALUES (10))", 13),
    ],
)
def test_a_table_of_the_query_hides_a_collection_only_in_its_scope(
    mirror: SmallMirror, view: View, query: str, found: int
) -> None:
    ids = collections(mirror, "orders")
    put(mirror, {"a": {"n": 1}, "b": {"n": 2}})
    put(mirror, {"o": {"total": 5}}, collection_id=ids["orders"])
    assert rows(view, query) == [(found,)]


def test_a_long_list_of_names_is_cut(mirror: SmallMirror, view: View) -> None:
    """A hint of 80 KiB ended in an internal error."""
    for vbid in range(VBUCKETS):
        writer = mirror.writers[vbid % GROUPS]
        seqno = mirror.seqnos[vbid] + 1
        scopes = {number: f"{number:03}" + "s" * 240 for number in range(8, 308)}
        entries = {number: Collection(number, number, "x", Seqno(seqno)) for number in scopes}
        frame = records.HEADER.pack(0x80, 0x5F, 0, 13, 0, 0, 13, 0, 0) + seqno.to_bytes(8, "big") + bytes(5)
        snapshot = SnapshotRange(Seqno(seqno), Seqno(seqno))
        writer.vbuckets[vbid].system_event(seqno, frame, Manifest(ManifestUid(1), scopes, entries), snapshot)
        writer.vbuckets[vbid].publish(seqno, seqno)
        writer.commit()
    with Session(view) as session, pytest.raises(QueryFailed, match="table x is ambiguous") as caught:
        session.run("SELECT * FROM x")
    assert len(Problem("bad-request", caught.value.what, hint=caught.value.hint).hint) <= DETAIL_LENGTH_MAX


def test_a_collection_that_is_not_allowed_does_not_exist_for_the_session(mirror: SmallMirror, view: View) -> None:
    collections(mirror, "orders", "secrets")
    with Session(view, collections_allowed=frozenset({"inventory.orders"})) as session:
        assert list(session.tables()) == ["inventory.orders"]
        for name in ("inventory.secrets", "secrets", "documents"):
            with pytest.raises(QueryFailed, match=r"does not exist \(tables: inventory.orders\)"):
                session.run(f"SELECT * FROM {name}")


def test_names_that_differ_in_case_are_different_tables(mirror: SmallMirror, view: View) -> None:
    ids = collections(mirror, "orders", "Orders", "Documents")
    put(mirror, {"a": {"n": 1, "x": 1}, "b": {"x": "mixed"}}, collection_id=ids["orders"])
    put(mirror, {"a": {"n": 10}}, collection_id=ids["Orders"])
    put(mirror, {"a": {"n": 100}}, collection_id=ids["Documents"])
    put(mirror, {"a": {"n": 1000}})
    with Session(view) as session:

        def total(table: str) -> int:
            return int(session.run(f"SELECT sum(n) AS total FROM {table}").reader.read_all().to_pylist()[0]["total"])

        for table, expected in (
            ("inventory.orders", 1),
            ("inventory.Orders", 10),
            ('"inventory.orders"', 1),
            ("inventory.Orders", 10),
            ("Documents", 1000),
            ("documents", 1000),
            ("inventory.documents", 100),
        ):
            assert total(table) == expected
        with pytest.raises(QueryFailed, match="have one name in SQL"):
            session.run("SELECT * FROM inventory.orders JOIN inventory.Orders USING (_key)")
    query = 'SELECT a.n, b.n, a.x FROM "inventory.orders" a JOIN inventory.Orders b USING (_key)'
    assert rows(view, query) == [(1, 10, "1")]


@pytest.mark.parametrize(
    "shape", ["{}", "[{}]", "array_value({})", "{{'a': {}}}", "map {{'a': {}}}", "union_value(a := {})"]
)
def test_a_number_that_arrow_cannot_hold_is_an_error(view: View, shape: str) -> None:
    with Session(view) as session:
        with pytest.raises(QueryFailed, match=r"UHUGEINT.*VARCHAR"):
            session.run("SELECT " + shape.format("md5_number('b')"))
        found = session.run("SELECT md5_number('b')::VARCHAR AS n, array_value(1, 2), 1.5, 'a'::ENUM('a')")
        assert found.reader.read_all().column("n").to_pylist() == ["190532336368564675417118094528692087698"]


def test_a_scope_named_like_a_schema_of_duckdb_is_queried(
    mirror: SmallMirror, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCOPES, 8, "main")
    ids = collections(mirror, "documents", "orders")
    put(mirror, {"a": {"n": 1}})
    put(mirror, {"a": {"n": 2}}, collection_id=ids["documents"])
    put(mirror, {"a": {"n": 3}}, collection_id=ids["orders"])
    with Session(view) as session:
        for table, n in (("documents", 1), ("main.documents", 2), ("documents", 1), ("main.orders", 3), ("orders", 3)):
            assert session.run(f"SELECT n FROM {table}").reader.read_all().to_pylist() == [{"n": n}]
        with pytest.raises(QueryFailed, match=r'have one name in SQL \(name one of them "'):
            session.run("SELECT * FROM documents JOIN main.documents USING (_key)")
    query = 'SELECT a.n, b.n FROM documents a JOIN "main.documents" b USING (_key)'
    assert rows(view, query) == [(1, 2)]


def test_duckdb_prints_no_progress_bar(mirror: SmallMirror) -> None:
    """DuckDB took `python -c`, a shell and a notebook for a terminal, and wrote to stdout after two seconds."""
    program = (
        "import mirror, sys\n"
        "with mirror.open_view(sys.argv[1]) as view:\n"
        "    print(view.sql(\"SELECT current_setting('enable_progress_bar') AS a\").to_pylist())"
    )
    command = [sys.executable, "-P", "-c", program, str(mirror.path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[{'a': False}]\n"
