"""The API of readers: what it has, and when it ends."""

from __future__ import annotations

import multiprocessing

import pytest

from storage.errors import Closed, StorageError
from storage.read.view import View, open_view
from storage.write.writer import GroupWriter
from tests.storage.one_vbucket import A, B, commit, put
from tests.storage.test_writer import open_writer, publish

READS = {
    "boundaries", "changes", "changes_between", "check_since", "check_way", "close", "count", "exists", "find", "get",
    "get_many", "get_or_large", "history", "key_at", "manifest", "manifest_of", "manifest_uids", "pin", "published",
    "retracted_by", "rollbacks", "scan", "scan_page", "stale", "state", "states", "token", "vbid_of", "wait_for",
}  # fmt: skip


def test_a_view_has_the_reads_that_are_documented_and_no_others() -> None:
    assert {name for name in dir(View) if not name.startswith("_")} == READS
    assert all(getattr(View, name).__doc__ for name in READS)


def test_a_view_that_was_closed_says_so(path: str, writer: GroupWriter) -> None:
    put(writer, A, 1)
    commit(writer, 1)
    with open_view(path) as view:
        assert view.exists(A)
        assert view.vbid_of(A) == 0
    with pytest.raises(Closed, match="the view is closed"):
        view.get(A)
    view.close()


def test_a_read_of_a_view_that_was_closed_says_so(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.read.scan.CHUNK_ROWS", 1)
    writer = open_writer(path)
    publish(writer, 0, [(A, b"1", 1), (B, b"1", 2)])
    writer.close()
    view = open_view(path)
    reads = [view.scan(0), view.changes(0)]
    for read in reads:
        next(read)
    view.close()
    for read in reads:
        with pytest.raises(Closed, match="the view is closed"):
            next(read)


def _read_in_child(view: object, results: object) -> None:
    try:
        view.get("anything")  # type: ignore[attr-defined]
        results.put("read")  # type: ignore[attr-defined]
    except StorageError as error:
        results.put(type(error).__name__)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_view_is_not_used_after_fork(path: str) -> None:
    context = multiprocessing.get_context("fork")
    with open_view(path) as view:
        view.get("anything")
        results = context.Queue()
        child = context.Process(target=_read_in_child, args=(view, results))
        child.start()
        assert results.get(timeout=20) == "Closed"
        child.join(20)
