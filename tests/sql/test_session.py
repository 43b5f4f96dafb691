"""SQL over a view: tables, columns, what reaches the store, and every way in which a query ends."""

from __future__ import annotations

import pytest

from mirror import View
from mirror.errors import QueryFailed
from mirror.sql import Session
from tests.spark.mirrors import SmallMirror
from tests.sql.rig import collections, put, rows


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
    ],
)
def test_a_query_that_cannot_be_answered_says_why(mirror: SmallMirror, view: View, query: str, what: str) -> None:
    collections(mirror, "orders")
    with Session(view) as session:
        with pytest.raises(QueryFailed, match=what):
            session.run(query)
        assert session.run("SELECT 1").reader.read_all().to_pylist() == [{"1": 1}]


def test_other_collections_than_the_allowed_ones_do_not_exist(mirror: SmallMirror, view: View) -> None:
    collections(mirror, "orders", "secrets")
    with Session(view, collections_allowed=frozenset({"inventory.orders"})) as session:
        assert list(session.tables()) == ["inventory.orders"]
        for name in ("inventory.secrets", "secrets", "documents"):
            with pytest.raises(QueryFailed, match=r"does not exist \(tables: inventory.orders\)"):
                session.run(f"SELECT * FROM {name}")
