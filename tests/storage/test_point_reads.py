"""Documents by key: collections by name, drops and flushes, expiry, many at once, by the key on the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from storage.env.environment import Environment
from storage.errors import UnknownCollection
from storage.format import keys, records
from storage.model import Collection, Document, Seqno
from storage.read.point_reads import ReadRun
from storage.read.view import View
from storage.write.writer import GroupWriter
from tests.storage.frames import sealed
from tests.storage.model import DEFAULT, SCOPES, A, B, C, D, keys_of
from tests.storage.rig import Clock, commit, manifest_of, publish, put, system_event


def test_collections_are_read_by_name_and_a_flush_or_drop_hides_older_rows(writer: GroupWriter, view: View) -> None:
    put(writer, A, 1, b"default")
    system_event(writer, 2, DEFAULT, Collection(9, 8, "orders", Seqno(2)), scopes=SCOPES)
    put(writer, A, 3, b"order a", cid=9)
    put(writer, B, 4, b"order b", cid=9, publish=True)

    def read(key: bytes, collection: str | int | None = None) -> bytes | None:
        document = view.get(key, collection)
        return document and document.value

    assert (read(A), read(A, "_default"), read(A, "_default._default"), read(A, 0)) == (b"default",) * 4
    assert (read(A, "shop.orders"), read(A, 9), read(B, "shop.orders"), read(B)) == (
        b"order a",
        b"order a",
        b"order b",
        None,
    )
    assert [d.value for d in view.scan(0)] == [b"default", b"order a", b"order b"]
    assert [d.value for d in view.scan(0, collection="shop.orders", prefix=B)] == [b"order b"]
    with pytest.raises(UnknownCollection, match=r"known here: _default\._default, shop\.orders"):
        view.get(A, "shop.unknown")

    system_event(writer, 5, DEFAULT, Collection(9, 8, "orders", Seqno(5)), scopes=SCOPES)  # flushed
    put(writer, B, 6, b"new b", cid=9, publish=True)
    assert (read(A, 9), read(B, 9), read(A)) == (None, b"new b", b"default")
    assert [d.value for d in view.scan(0)] == [b"default", b"new b"]
    assert view.count(0) == 2
    assert [d.value for d in view.scan(0, as_of=4)] == [b"default", b"order a", b"order b"]

    system_event(writer, 7, DEFAULT, scopes=SCOPES)  # dropped
    commit(writer, 7)
    assert [d.value for d in view.scan(0)] == [b"default"]
    with pytest.raises(UnknownCollection):
        view.get(B, "shop.orders")
    assert view.manifest(0).uid == 7
    old = view.get(A, "shop.orders", as_of=4)
    assert old is not None
    assert old.value == b"order a"
    assert 9 not in manifest_of(view, view.pin(0)).collections
    assert manifest_of(view, view.pin(0, 4)).collections[9].name == "orders"
    writer.vbuckets[0].rollback(6)
    assert read(B, "shop.orders") == b"new b"


def test_expired_documents_are_absent_at_the_time_of_the_read(writer: GroupWriter, view: View, clock: Clock) -> None:
    clock.now = 50_000
    put(writer, A, 1, expiry=60)
    put(writer, B, 2)
    commit(writer, 2)  # published at 50 s
    clock.now = 90_000
    put(writer, C, 3, publish=True)
    assert view.get(A, now=59.9) is not None
    assert view.get(A, now=60) is None
    assert view.get(A) is None
    assert not view.exists(A)
    assert [d.key for d in view.scan(0)] == sorted([B, C])
    assert {d.key for d in view.scan(0, now=10)} == {A, B, C}
    assert {d.key for d in view.scan(0, deletions=True)} == {A, B, C}
    assert {d.key for d in view.scan(0, as_of=2)} == {A, B}  # as of 50 s it had not expired
    assert view.get(A, as_of=2) is not None
    assert set(view.get_many([A, B, C])) == {B, C}
    assert set(view.get_many([A, B, C], as_of=2)) == {A, B}


def test_get_many_equals_single_gets_and_takes_one_transaction(
    writer: GroupWriter, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted, expired, changed by rows that are not published yet, and absent ones among them."""
    for seqno, key in enumerate((A, B, C, D), 1):
        put(writer, key, seqno, b"published", expiry=60 if key == C else 0)
    commit(writer, 4)
    others = keys_of(2, 20)
    publish(writer, 2, [(key, b"x" * number, number) for number, key in enumerate(others[:-1], 1)])
    put(writer, A, 5, b"staged")
    writer.commit(flush_open=True)
    names = [*others, D, C, B, A, B]
    one_by_one = {key: document for key in names if (document := view.get(key, now=60)) is not None}
    assert set(one_by_one) == {A, B, D, *others[:-1]}
    assert one_by_one[A].value == b"published"
    reads = 0
    known = Environment.begin

    def counted(environment: Environment) -> Any:
        nonlocal reads
        reads += 1
        return known(environment)

    monkeypatch.setattr(Environment, "begin", counted)
    assert view.get_many(names, now=60) == one_by_one
    assert reads == 1


def test_find_admits_a_collection_before_it_reads_a_document(writer: GroupWriter, view: View) -> None:
    admitted: list[int] = []

    def find(wire_key: bytes, **options: Any) -> Document | None:
        return view.find(wire_key, admit=lambda manifest: admitted.append(manifest.uid), **options)

    assert find(b"\0" + A) is None
    put(writer, A, 1, b"old")
    system_event(writer, 2, DEFAULT, Collection(300, 8, "orders", Seqno(2)), scopes=SCOPES)
    put(writer, A, 3, b"order", cid=300)
    put(writer, B, 4, b"gone", expiry=50, publish=True)
    found, order = find(b"\0" + A), find(b"\xac\x02" + A)
    assert (found and found.value, order and (order.value, order.collection_id)) == (b"old", (b"order", 300))
    with pytest.raises(UnknownCollection, match="no collection 9"):
        find(b"\x09" + A)
    assert admitted == [0, 2, 2, 2]
    assert view.find(b"\0" + B, now=49) is not None
    assert view.find(b"\0" + B, now=50) is None
    assert view.find(b"\0" + B) is None
    put(writer, A, 5, None, publish=True)
    assert view.find(b"\0" + A) is None
    tombstone = view.find(b"\0" + A, deletions=True)
    assert tombstone is not None
    assert tombstone.deleted
    writer.vbuckets[0].rollback(4)
    again = view.find(b"\0" + A)
    assert again is not None
    assert again.value == b"old"
    system_event(writer, 6, DEFAULT, scopes={0: "_default"}, publish=True)
    with pytest.raises(UnknownCollection):
        view.find(b"\xac\x02" + A)


@pytest.mark.parametrize(
    ("branch", "seqno"),
    [(1, 4), (2, 3), (2, 1)],
    ids=["not published", "of another branch", "of another branch, below"],
)
def test_an_invisible_reference_is_not_followed(writer: GroupWriter, view: View, branch: int, seqno: int) -> None:
    """While key rows are made before a publish, and after a rollback, the newest reference is not the one to read."""
    put(writer, A, 2, b"visible")
    put(writer, B, 3, publish=True)
    wire_key = b"\0" + A
    hidden = [
        (keys.keys_db(0), wire_key, keys.DUP.pack(branch, seqno, records.MUTATION)),
        (keys.rows_db(0), keys.ROW.pack(branch, seqno), sealed(records.encode_mutation(A, b"hidden", seqno))),
    ]
    environment = writer.environment
    with environment.begin(write=True) as txn:
        for tree, key, value in hidden:
            txn.put(key, value, db=environment.db(tree))
    try:
        found: list[Any] = [view.get(A), view.get_many([A])[A], view.find(wire_key)]
        with ReadRun() as run:
            rows = [run.row(view.reader(0), b"\0" + key, 1000) for key in (A, B)]
    finally:
        with environment.begin(write=True) as txn:
            for tree, key, value in hidden:
                txn.delete(key, value, db=environment.db(tree))
    assert [each and each.value for each in found] == [b"visible"] * 3
    assert [row is None for row in rows] == [True, False]


def test_a_row_from_before_a_flush_of_its_collection_is_not_read(writer: GroupWriter, view: View) -> None:
    orders = Collection(9, 8, "orders", Seqno(1))
    system_event(writer, 1, DEFAULT, orders, scopes=SCOPES)
    put(writer, A, 2, cid=9)
    put(writer, B, 3, cid=9)
    system_event(writer, 4, DEFAULT, Collection(9, 8, "orders", Seqno(4)), scopes=SCOPES)
    put(writer, B, 5, cid=9, publish=True)
    with ReadRun() as run:
        rows = [run.row(view.reader(0), b"\x09" + key, 1000) for key in (A, B, C)]
    assert [row is None for row in rows] == [True, False, True]


def test_a_read_waits_while_a_grown_map_is_taken_over(
    writer: GroupWriter, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(writer, A, 1, publish=True)
    assert view.get(A) is not None
    environment = view.reader(0).environment
    begin = Environment.begin
    waited = []

    def begin_after(self: Environment, **options: Any) -> Any:
        waited.append(self.remapping)
        self.remapping = False
        return begin(self, **options)

    monkeypatch.setattr(Environment, "begin", begin_after)
    reads: tuple[Callable[[], object], ...] = (lambda: view.get(A), lambda: view.find(b"\0" + A))
    for read in reads:
        environment.remapping = True
        assert read() is not None
        assert environment.running == []
    assert waited[:1] == [True]
    assert waited.count(True) == 2
