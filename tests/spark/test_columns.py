from __future__ import annotations

from mirror.spark.source.columns import CHANGES, DOCUMENTS, TABLES


def test_changes_begin_with_the_columns_of_documents() -> None:
    assert list(CHANGES)[: len(DOCUMENTS)] == list(DOCUMENTS)


def test_columns_of_older_tables_of_changes_stay_where_they_are() -> None:
    """Tables on disk begin with them; new ones come behind (lake.py)."""
    assert CHANGES.names.index("at_seqno") == 15
    assert CHANGES.names[16:] == ["event_time"]


def test_names_are_unique_and_the_tables_are_the_two_that_the_option_takes() -> None:
    assert len(set(CHANGES.names)) == len(CHANGES)
    assert list(TABLES) == ["documents", "changes"]
