"""Documents in the order of keys: ranges, limits, pages of a pin, and pages that are bounded by bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from storage.errors import AnswerTooLarge, StorageError, ViewInvalidated
from storage.history.purge import Window
from storage.model import Branch, Collection, Seqno
from storage.read import scan, states
from storage.read.scan import CHUNK_BYTES
from storage.read.vbucket_reader import VbucketReader
from storage.read.view import Pin, View
from storage.write.writer import GroupWriter
from tests.storage.model import DEFAULT, SCOPES, A, B, C, D, events, keys_of
from tests.storage.rig import Clock, commit, manifest_of, publish, purge, put, scan_page, system_event


def test_a_scan_is_limited_by_range_count_and_vbucket(writer: GroupWriter, view: View) -> None:
    names = sorted([A, B, C, D])
    for seqno, key in enumerate(names, 1):
        put(writer, key, seqno)
    commit(writer, 4)
    other = keys_of(2, 1)[0]
    publish(writer, 2, [(other, b"x", 1)])
    assert [d.key for d in view.scan()] == [*names, other]
    assert [d.key for d in view.scan(limit=3)] == names[:3]
    assert list(view.scan(limit=0)) == []
    assert [d.key for d in view.scan(0, start=names[1], end=names[3])] == names[1:3]
    assert [d.key for d in view.scan(0, prefix=names[2].decode())] == [k for k in names if k.startswith(names[2])]
    with pytest.raises(StorageError, match="no vbucket 9; this bucket has 4"):
        list(view.scan(9))
    assert view.vbid_of(A) == 0


def test_pages_of_a_pin_stay_until_a_rollback_passes_it(writer: GroupWriter, view: View, clock: Clock) -> None:
    clock.now = 10_000
    put(writer, A, 1, b"one")
    put(writer, B, 2, b"one", expiry=12, publish=True)
    put(writer, C, 3, b"one", publish=True)
    pin = view.pin(0, now=11)
    assert (pin.branch, pin.seqno, pin.now_ms) == (view.published()[0].pub.branch, 3, 11_000)
    put(writer, A, 4, b"two")
    put(writer, D, 5, b"two", publish=True)
    found: list[bytes] = []
    start = b""
    while True:
        page, start = scan_page(view, pin, start=start, limit=1)
        assert len(page) <= 1
        found += [document.key + document.value for document in page]
        if not start:
            break
    assert found == sorted(key + b"one" for key in (A, B, C))
    assert [document.key for document in scan_page(view, pin, prefix=B)[0]] == [B]
    assert scan_page(view, view.pin(0, now=11), start=A, end=B)[0] == list(view.scan(0, start=A, end=B, now=11))
    assert scan_page(view, pin, start=B, end=B) == scan_page(view, pin, start=B, end=A) == ([], b"")
    assert B not in [document.key for document in scan_page(view, view.pin(0, now=13))[0]]
    assert view.pin(0, 4).seqno == 3
    pages: list[bytes] = []
    start = b""
    while not pages or start:
        page, start = scan_page(view, pin, start=start, bytes_max=4)
        pages.append(b"".join(each.value for each in page))
    assert pages == [b"one"] * len(found)
    writer.vbuckets[0].rollback(3)
    assert len(scan_page(view, pin)[0]) == 3, "a rollback to the pin itself takes nothing from it"
    late = view.pin(0)
    put(writer, D, 4, b"three", publish=True)
    writer.vbuckets[0].rollback(2)
    for lost in (pin, late):
        with pytest.raises(ViewInvalidated):
            scan_page(view, lost)
    with pytest.raises(ViewInvalidated, match="no branch"):
        scan_page(view, Pin(0, Branch(99), Seqno(3), 5, 0))


@pytest.mark.parametrize("left_by", ["rollback", "window"])
def test_a_page_of_a_purged_moment_is_an_error_not_an_empty_page(writer: GroupWriter, view: View, left_by: str) -> None:
    """Its collection was not found any more in the manifests that are left of that moment."""
    orders = Collection(8, 0, "orders", Seqno(2))
    put(writer, D, 1, publish=True)
    system_event(writer, 2, DEFAULT, orders, scopes=SCOPES)
    for seqno, key in enumerate((A, B, C), 3):
        put(writer, key, seqno, cid=8)
    commit(writer, 5)
    pin = view.pin(0)
    assert manifest_of(view, pin).collections[8] == orders
    found, start = scan_page(view, pin, 8, limit=1)
    assert (len(found), bool(start)) == (1, True)
    seqno = 1
    if left_by == "rollback":
        writer.vbuckets[0].rollback(1)
    else:
        for seqno in range(6, 60):
            system_event(writer, seqno, *([DEFAULT] if seqno % 2 else [DEFAULT, orders]), scopes=SCOPES, publish=True)
    put(writer, D, seqno + 1, publish=True)
    purge(writer, Window(time_ms=0))
    reads: list[Callable[[], Any]] = [
        lambda: scan_page(view, pin, 8, start=start),
        lambda: scan_page(view, pin, 8, start=start, document_bytes_max=99),
        lambda: manifest_of(view, pin),
        lambda: states.newest_of(view.reader(0), pin, 8),
    ]
    for read in reads:
        with pytest.raises(ViewInvalidated):
            read()


def test_large_documents_make_small_pages(writer: GroupWriter, view: View) -> None:
    for seqno, key in enumerate((A, B, C), 1):
        put(writer, key, seqno, b"x" * (CHUNK_BYTES // 2 + 1))
    commit(writer, 3)
    page, start = scan_page(view, view.pin(0))
    assert [document.key for document in page] == sorted([A, B, C])[:1]
    assert start == sorted([A, B, C])[1]
    assert [document.key for document in view.scan(0)] == sorted([A, B, C])
    assert [document.key for document in events(view)] == [A, B, C]
    with pytest.raises(AnswerTooLarge, match="ask for fewer"):
        view.get_many([A, B, C], bytes_max=CHUNK_BYTES)
    assert len(view.get_many([A, B], bytes_max=2 * CHUNK_BYTES)) == 2


def test_keys_are_counted_without_reading_documents(
    writer: GroupWriter, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many versions a key has, it is one step of the count."""
    for seqno in range(1, 301):
        put(writer, A, seqno)
    put(writer, B, 301, expiry=1)
    put(writer, C, 302, publish=True)
    pin = view.pin(0)
    put(writer, D, 303, publish=True)
    monkeypatch.setattr(VbucketReader, "document", None)
    assert view.reading(pins=[pin]).count_keys(0, 0, b"", 4) == (3, b"")
    third = sorted([A, B, C, D])[2]
    before, start = view.reading(pins=[pin]).count_keys(0, 0, b"", 2)
    assert start == third
    assert before + view.reading(pins=[pin]).count_keys(0, 0, third, 2)[0] == 3
    assert view.reading(pins=[pin]).count_keys(0, 9, b"", 10) == (0, b"")
    assert view.reading(pins=[view.pin(0)]).count_keys(0, 0, b"", 4) == (4, b"")


@pytest.mark.parametrize("looks_max", [1, 4, 16, 2_000])
def test_pages_hold_each_document_once_however_many_versions_its_key_has(
    writer: GroupWriter, view: View, monkeypatch: pytest.MonkeyPatch, looks_max: int
) -> None:
    monkeypatch.setattr(scan, "CHUNK_ROWS", looks_max)
    names = keys_of(0, 8)
    for seqno, number in enumerate([0] * 20 + [1, 2] + [3, 4] * 6, 1):
        put(writer, names[number], seqno)
    commit(writer, 34)
    pin = view.pin(0)
    hidden = [names[1], sorted(names)[-1], *names[5:]]  # newer versions of some keys, and keys that `pin` does not see
    for seqno, key in enumerate(hidden * 10, 35):
        put(writer, key, seqno)
    commit(writer, 34 + 10 * len(hidden))
    for limit in range(1, 9):
        found: list[bytes] = []
        start = b""
        while True:
            page, start = scan_page(view, pin, start=start, limit=limit)
            assert len(page) <= limit
            found += [document.key for document in page]
            if not start:
                break
        assert found == sorted(names[:5])
    assert [document.key for document in view.scan(0)] == sorted(names)
    assert view.count(0) == 8
