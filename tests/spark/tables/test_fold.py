"""A folded batch has the newest event of each key, and the dropped collections."""

from __future__ import annotations

from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.spark.tables.fold import Voids, fold, fold_files
from tests.spark.events import History, event, table_of


def words(table: pa.Table) -> dict[str, tuple[bool, int]]:
    return {row["key"]: (row["live"], row["seqno"]) for row in table.to_pylist()}


def test_the_last_event_of_a_key_counts() -> None:
    events = [
        event("mutation", "a", (1, 1), value=b"1"),
        event("mutation", "b", (1, 2), value=b"2"),
        event("deletion", "a", (1, 3)),
        event("mutation", "c", (1, 4), value=b"4"),
        event("expiration", "c", (1, 5)),
        event("mutation", "b", (1, 6), value=b"6"),
    ]
    folded, voids = fold(table_of(events))
    assert words(folded) == {"a": (False, 3), "c": (False, 5), "b": (True, 6)}
    assert folded.column("value").to_pylist() == [None, None, b"6"]
    assert not voids.vbuckets
    assert not voids.collections


def test_a_restoration_has_the_last_word_over_its_retraction_though_its_seqno_is_lower() -> None:
    events = [
        event("mutation", "a", (1, 9)),
        event("retraction", "a", (2, 5), seqno=9),
        event("restoration", "a", (2, 5), seqno=3, value=b"old"),
        event("retraction", "gone", (2, 5), seqno=8),
    ]
    folded, _ = fold(table_of(events))
    assert words(folded) == {"a": (True, 3), "gone": (False, 8)}


def test_a_dropped_collection_takes_what_came_before_it_and_leaves_what_comes_after() -> None:
    history = History()
    history.write("early", b"", "s.c")
    history.write("other", b"")
    history.drop("s.c")
    history.write("late", b"", "s.c")
    folded, voids = fold(table_of(history.log))
    assert set(words(folded)) == {"other", "late"}
    assert voids.collections == {(0, "s.c")}


def test_a_resync_takes_the_whole_vbucket_and_no_other() -> None:
    events = [
        event("mutation", "elsewhere", (1, 1), vbid=1),
        event("mutation", "before", (1, 1)),
        event("resync", None, (2, 0), collection=None),
        event("mutation", "after", (2, 1)),
    ]
    folded, voids = fold(table_of(events))
    assert set(words(folded)) == {"elsewhere", "after"}
    assert voids.vbuckets == {0}


def test_keys_that_are_no_text_are_distinguished() -> None:
    strange = [b"\xff\x00", b"\xfe", b"\xff\x00"]
    rows = table_of([event("mutation", "x", (1, number)) for number in (1, 2, 3)])
    column = pa.Array.from_buffers(pa.string(), 3, pa.array(strange, pa.binary()).buffers())
    folded, _ = fold(rows.set_column(0, "key", column))
    assert folded.column("seqno").to_pylist() == [2, 3]


def test_files_that_share_a_vbucket_are_refused_as_their_order_is_not_known() -> None:
    one = table_of([event("mutation", "a", (1, 1))])
    with pytest.raises(AssertionError, match="in one file"):
        list(fold_files([[one], [one]]))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans()), max_size=30), st.data())
def test_a_file_in_pieces_folds_as_in_one_and_a_vbucket_is_in_one_fold(
    rows: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    rows.sort(key=lambda row: row[0])
    events = table_of(
        [
            event("mutation" if put else "deletion", f"{vbid} {key}", (1, at), vbid=vbid)
            for at, (vbid, key, put) in enumerate(rows)
        ]
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=6)))
    pieces = [events.slice(a, b - a) for a, b in pairwise([0, *cuts, len(rows)])]
    whole, _ = fold(events)
    folds = [table for table, _ in fold_files([pieces])]
    assert [row for each in folds for row in each.to_pylist()] == whole.to_pylist()
    vbids = [vbid for each in folds for vbid in set(each.column("vbid").to_pylist())]
    assert len(vbids) == len(set(vbids))


def test_no_more_is_folded_at_once_than_a_piece_and_a_vbucket(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [table_of([event("mutation", "a", (1, at), vbid=at // 3) for at in (two, two + 1)]) for two in (0, 2, 4)]
    folded: list[int] = []

    def counted(events: pa.Table) -> tuple[pa.Table, Voids]:
        folded.append(events.num_rows)
        return fold(events)

    monkeypatch.setattr("mirror.spark.tables.fold.fold", counted)
    list(fold_files([pieces]))
    assert folded == [3, 3]
