"""Chunks of rows against `scan`, which is the plain way to the same documents."""

from __future__ import annotations

from random import Random

import pytest

from storage import bulk, records
from storage.bulk import EVERY_KEY, KeyRange
from storage.errors import ViewInvalidated
from storage.model import Branch, Collection, Document, Seqno, Vbid
from storage.purge import Window
from storage.view import Pin, View
from storage.writer import GroupWriter
from tests.storage.model import keys_of
from tests.storage.test_view import commit, put, system_event
from tests.storage.test_writer import Clock, publish

NAMES = keys_of(0, 40)


def documents(view: View, pin: Pin, wanted: KeyRange = EVERY_KEY, rows_max: int = 7) -> list[Document]:
    found = []
    for chunk in bulk.documents(view, pin, None, wanted, rows_max=rows_max):
        rows = [records.decode_row(Vbid(0), Branch(0), frame) for frame in chunk.frames]
        assert [records.keys.encode_collection_id(chunk.collection_id) + row.key for row in rows] == chunk.keys
        found += rows
    return sorted(found, key=lambda row: (row.collection_id, row.key))


def scanned(view: View, **options: object) -> list[Document]:
    return [each._replace(branch=Branch(0)) for each in view.scan(0, now=0, **options)]  # type: ignore[arg-type]


def fill(writer: GroupWriter, seed: int, first_seqno: int, count: int) -> int:
    """Random sets and deletes of few keys, so that keys have many versions."""
    rng = Random(seed)
    for seqno in range(first_seqno, first_seqno + count):
        publish(writer, 0, [(rng.choice(NAMES), None if rng.random() < 0.2 else b"%d" % seqno, seqno)])
    return first_seqno + count


@pytest.fixture(params=["rows", "keys", "too many"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to read a vbucket, and the change from one to the other."""
    monkeypatch.setattr(bulk, "ROWS_PER_DOCUMENT", 0 if request.param == "keys" else 1000)
    monkeypatch.setattr(bulk, "REMEMBERED_MAX", 5 if request.param == "too many" else 10_000)
    monkeypatch.setattr(bulk, "GET_ROWS", 3)


@pytest.mark.parametrize("rows_max", [1, 7, 1000])
def test_the_same_documents_as_a_scan_also_across_rollbacks(
    writer: GroupWriter, view: View, rows_max: int, way: None
) -> None:
    following = fill(writer, 1, 1, 60)
    assert documents(view, view.pin(0), rows_max=rows_max) == scanned(view)
    writer.rollback(0, 35)
    fill(writer, 2, 36, 30)
    writer.rollback(0, 50)
    fill(writer, 3, following, 20)
    assert documents(view, view.pin(0), rows_max=rows_max) == scanned(view)
    for wanted in (KeyRange(NAMES[5]), KeyRange(prefix=NAMES[7]), KeyRange(NAMES[3], b"", NAMES[9]), KeyRange(end=b"")):
        options = {"start": wanted.start, "prefix": wanted.prefix, "end": wanted.end}
        assert documents(view, view.pin(0), wanted, rows_max) == scanned(view, **options)


def test_a_pinned_boundary_is_read_to_its_end_whatever_happens_to_the_history_that_is_served(
    writer: GroupWriter, view: View, clock: Clock, way: None
) -> None:
    fill(writer, 1, 1, 100)
    pin, before = view.pin(0), scanned(view)
    chunks = bulk.documents(view, pin, rows_max=5)
    seen = list(next(chunks).keys)
    writer.rollback(0, 40)
    fill(writer, 2, 41, 80)
    for chunk in chunks:
        seen += chunk.keys
    assert sorted(key[1:] for key in seen) == [each.key for each in before]
    assert documents(view, pin) == before
    chunks = bulk.documents(view, pin, rows_max=5)
    next(chunks)
    writer._purger.window = Window(boundaries=1)
    while (vbid := writer._purger.plan(clock.now)) is not None:
        writer._purge(vbid, clock.now)
    with pytest.raises(ViewInvalidated, match="gone"):
        list(chunks)


def test_collections_are_told_apart_by_id_and_by_name_and_a_drop_hides_them(
    writer: GroupWriter, view: View, way: None
) -> None:
    default = Collection(0, 0, "_default", Seqno(0))
    orders, users = Collection(8, 8, "orders", Seqno(1)), Collection(0x90, 8, "users", Seqno(2))
    scopes = {0: "_default", 8: "shop"}
    system_event(writer, 1, default, orders, scopes=scopes)
    system_event(writer, 2, default, orders, users, scopes=scopes)
    put(writer, b"o", 3, cid=8)
    put(writer, b"u", 4, cid=0x90)
    put(writer, b"d", 5)
    commit(writer, 5)
    assert bulk.collection_names(view, view.pin(0)) == {
        0: "_default._default",
        8: "shop.orders",
        0x90: "shop.users",
    }
    assert [(each.collection_id, each.keys) for each in bulk.documents(view, view.pin(0))] == [
        (0, [b"\0d"]),
        (8, [b"\x08o"]),
        (0x90, [b"\x90\x01u"]),
    ]
    assert [each.collection_id for each in bulk.documents(view, view.pin(0), [8, 77])] == [8]
    system_event(writer, 6, default, users, scopes=scopes)
    commit(writer, 6)
    assert [each.collection_id for each in bulk.documents(view, view.pin(0))] == [0, 0x90]


def test_large_documents_come_in_smaller_chunks(
    writer: GroupWriter, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "CHUNK_BYTES", 5000)
    monkeypatch.setattr(bulk, "GET_ROWS", 2)
    publish(writer, 0, [(name, b"x" * 1000, seqno) for seqno, name in enumerate(NAMES, 1)])
    for wanted in (EVERY_KEY, KeyRange(prefix=NAMES[0][:1])):
        chunks = list(bulk.documents(view, view.pin(0), None, wanted))
        names = [key[1:] for chunk in chunks for key in chunk.keys]
        assert sorted(names) == sorted(name for name in NAMES if name.startswith(wanted.prefix))
        assert max(len(chunk.frames) for chunk in chunks) == 6
