"""Reading: collections by name, drops and flushes, expiry, ranges, time travel, tokens."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import GeneratorType
from typing import Any

import pytest

from storage import index, keys, records
from storage.environment import Environment
from storage.errors import AnswerTooLarge, NoSuchBoundary, StorageError, UnknownCollection, ViewInvalidated
from storage.model import Branch, Collection, Manifest, ManifestUid, Seqno, Vbid
from storage.purge import Window
from storage.view import CHUNK_BYTES, Pieces, Pin, Time, Token, View
from storage.writer import GroupWriter
from tests.storage.model import keys_of, span
from tests.storage.test_writer import Clock, publish

A, B, C, D = keys_of(0, 4)
ID = "00000000000000ff"


def put(writer: GroupWriter, key: bytes, seqno: int, value: bytes = b"v", cid: int = 0, expiry: int = 0) -> None:
    frame = records.encode_mutation(key, value, seqno, collection_id=cid, expiry=expiry)
    writer.stage(0, [(writer.row_prefix(0) + seqno.to_bytes(8, "big"), frame)], 0, span(seqno, seqno))


def system_event(writer: GroupWriter, seqno: int, *collections: Collection, scopes: dict[int, str]) -> None:
    manifest = Manifest(ManifestUid(seqno), scopes, {c.collection_id: c for c in collections})
    extras = seqno.to_bytes(8, "big") + b"\0\0\0\0\0"
    frame = records.HEADER.pack(0x80, 0x5F, 0, 13, 0, 0, 13, 0, 0) + extras
    writer.system_event(0, seqno, frame, manifest, span(seqno, seqno))


def commit(writer: GroupWriter, seqno: int) -> None:
    writer.publish(0, seqno, seqno)
    writer.commit()


DEFAULT = Collection(0, 0, "_default", Seqno(0))
SCOPES = {0: "_default", 8: "shop"}


def test_collections_are_read_by_name_and_a_flush_or_drop_hides_what_is_older(writer: GroupWriter, view: View) -> None:
    put(writer, A, 1, b"default")
    system_event(writer, 2, DEFAULT, Collection(9, 8, "orders", Seqno(2)), scopes=SCOPES)
    put(writer, A, 3, b"order a", cid=9)
    put(writer, B, 4, b"order b", cid=9)
    commit(writer, 4)

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
    put(writer, B, 6, b"new b", cid=9)
    commit(writer, 6)
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
    assert 9 not in view.manifest_of(view.pin(0)).collections
    assert view.manifest_of(view.pin(0, 4)).collections[9].name == "orders"
    writer.rollback(0, 6)
    assert read(B, "shop.orders") == b"new b"


def test_documents_beyond_their_expiry_are_absent_at_the_time_that_counts(
    writer: GroupWriter, view: View, clock: Clock
) -> None:
    clock.now = 50_000
    put(writer, A, 1, expiry=60)
    put(writer, B, 2)
    commit(writer, 2)  # published at 50 s
    clock.now = 90_000
    put(writer, C, 3)
    commit(writer, 3)
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


def test_as_of_takes_the_newest_boundary_not_after_a_seqno_or_a_time(
    writer: GroupWriter, view: View, clock: Clock
) -> None:
    for seqno, now in ((10, 1_000_000), (20, 2_000_000), (30, 3_000_000)):
        clock.now = now
        put(writer, A, seqno, b"%d" % seqno)
        commit(writer, seqno)

    def read(as_of: int | Time) -> bytes:
        document = view.get(A, as_of=as_of)
        assert document is not None
        return document.value

    assert [read(seqno) for seqno in (10, 19, 20, 29, 30, 99)] == [b"10", b"10", b"20", b"20", b"30", b"30"]
    assert [read(Time(ms)) for ms in (1_500_000, 2_500_000, 9_000_000)] == [b"10", b"20", b"30"]
    for too_early in (9, 0, Time(999_999)):
        with pytest.raises(NoSuchBoundary, match="history begins at seqno 10"):
            view.get(A, as_of=too_early)
    assert [b.seqno for b in view.boundaries(0)] == [30, 20, 10]


def test_ranges_limits_and_vbuckets(path: str, writer: GroupWriter, view: View) -> None:
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
    assert [d.seqno for d in view.scan_seqno(0, after_seqno=1, to_seqno=3)] == [2, 3]
    with pytest.raises(StorageError, match="no vbucket 9; this bucket has 4"):
        list(view.scan(9))
    assert view.vbid_of(A) == 0


def test_a_rollback_comes_first_then_what_it_retracted_and_restored(writer: GroupWriter, view: View) -> None:
    publish(writer, 0, [(A, b"a1", 1), (B, b"b1", 2)])
    publish(writer, 0, [(A, b"a2", 3), (B, None, 4), (C, b"c1", 5), (A, b"a3", 6)])
    token = view.token(0, 1, 6)
    writer.rollback(0, 4)
    publish(writer, 0, [(D, b"d1", 9)])
    events = list(view.changes(0, since=token))
    assert events[0].kind == "rollback"
    assert events[0].rollback is not None
    assert (events[0].rollback.from_seqno, events[0].rollback.to_seqno) == (6, 2)
    told = [(e.kind, e.document.key, e.document.value, e.document.seqno) for e in events[1:] if e.document]
    assert told == [
        ("retraction", B, b"", 4),
        ("restoration", B, b"b1", 2),
        ("retraction", C, b"c1", 5),
        ("retraction", A, b"a3", 6),
        ("restoration", A, b"a1", 1),
        ("mutation", D, b"d1", 9),
    ]
    # A reader that stops before the last of them starts over; after it, it is on the new history.
    assert {str(e.token) for e in events[:5]} == {str(token)}
    assert [e.token for e in events[5:]] == [view.token(0, 2, 2), view.token(0, 2, 9)]
    assert [e.kind for e in view.changes(0, since=events[5].token)] == ["mutation"]


def test_two_rollbacks_in_a_row_are_told_as_one_way_back(writer: GroupWriter, view: View) -> None:
    publish(writer, 0, [(A, b"1", 1)])
    publish(writer, 0, [(A, b"2", 2)])
    publish(writer, 0, [(A, b"3", 3)])
    token = view.token(0, 1, 3)
    writer.rollback(0, 2)
    publish(writer, 0, [(B, b"x", 7)])
    writer.rollback(0, 1)
    events = list(view.changes(0, since=token))
    assert [e.kind for e in events] == ["rollback", "retraction", "restoration"]
    assert events[-1].token == view.token(0, 3, 1)
    assert list(view.changes(0, since=events[-1].token)) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1:2",
        "1:2:3:4",
        "1:2:3:000000000000000G",
        "1:2:3:000000000000000a:1",
        f"a:b:c:{ID}",
        f"1:2:-3:{ID}",
        f"70000:1:1:{ID}",
        f"1:4294967296:1:{ID}",
        f"1:1:1.5:{ID}",
        f"1:1:{'9' * 5000}:{ID}",
    ],
)
def test_a_token_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a token"):
        Token.parse(text)


def test_a_token_is_its_three_numbers_and_its_history() -> None:
    assert str(Token.parse(f"7:2:55:{ID}")) == f"7:2:55:{ID}"
    assert Token.parse(f"7:2:55:{ID}") == Token(Vbid(7), Branch(2), Seqno(55), 255)


def test_a_token_of_an_earlier_version_is_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"of an earlier version.*begin again"):
        Token.parse("7:2:55")


def test_a_token_ahead_of_what_is_published_is_refused(writer: GroupWriter, view: View) -> None:
    publish(writer, 0, [(A, b"1", 1)])
    with pytest.raises(ViewInvalidated, match="ahead of what is published"):
        list(view.changes(0, since=view.token(0, 1, 5)))


def test_a_token_of_an_unknown_branch_is_refused(writer: GroupWriter, view: View) -> None:
    publish(writer, 0, [(A, b"1", 1)])
    with pytest.raises(ViewInvalidated, match="no branch 9"):
        list(view.changes(0, since=Token(Vbid(0), Branch(9), Seqno(1), 5)))


def test_states_speak_of_all_vbuckets(path: str, writer: GroupWriter, view: View) -> None:
    publish(writer, 2, [(keys_of(2, 1)[0], b"x", 5)])
    assert [(s.vbid, s.published_seqno) for s in view.states()] == [(0, 0), (1, 0), (2, 5), (3, 0)]


def test_pages_of_a_pinned_vbucket_stay_as_they_were_until_a_rollback_passes_them(
    writer: GroupWriter, view: View, clock: Clock
) -> None:
    clock.now = 10_000
    put(writer, A, 1, b"one")
    put(writer, B, 2, b"one", expiry=12)
    commit(writer, 2)
    put(writer, C, 3, b"one")
    commit(writer, 3)
    pin = view.pin(0, now=11)
    assert (pin.branch, pin.seqno, pin.now_ms) == (view.published()[0].branch, 3, 11_000)
    put(writer, A, 4, b"two")
    put(writer, D, 5, b"two")
    commit(writer, 5)
    found: list[bytes] = []
    start = b""
    while True:
        page, start = view.scan_page(pin, start=start, limit=1)
        assert len(page) <= 1
        found += [document.key + document.value for document in page]
        if not start:
            break
    assert found == sorted(key + b"one" for key in (A, B, C))
    assert [document.key for document in view.scan_page(pin, prefix=B)[0]] == [B]
    assert view.scan_page(view.pin(0, now=11), start=A, end=B)[0] == list(view.scan(0, start=A, end=B, now=11))
    assert view.scan_page(pin, start=B, end=B) == view.scan_page(pin, start=B, end=A) == ([], b"")
    assert B not in [document.key for document in view.scan_page(view.pin(0, now=13))[0]]
    assert view.pin(0, 4).seqno == 3
    pages: list[bytes] = []
    start = b""
    while not pages or start:
        page, start = view.scan_page(pin, start=start, bytes_max=4)
        pages.append(b"".join(each.value for each in page))
    assert pages == [b"one"] * len(found)
    writer.rollback(0, 3)
    assert len(view.scan_page(pin)[0]) == 3, "a rollback to the pin itself takes nothing from it"
    late = view.pin(0)
    put(writer, D, 4, b"three")
    commit(writer, 4)
    writer.rollback(0, 2)
    for lost in (pin, late):
        with pytest.raises(ViewInvalidated):
            view.scan_page(lost)
    with pytest.raises(ViewInvalidated, match="no branch"):
        view.scan_page(Pin(Vbid(0), Branch(99), Seqno(3), 5, 0))


def test_large_documents_make_small_pages(writer: GroupWriter, view: View) -> None:
    for seqno, key in enumerate((A, B, C), 1):
        put(writer, key, seqno, b"x" * (CHUNK_BYTES // 2 + 1))
    commit(writer, 3)
    page, start = view.scan_page(view.pin(0))
    assert [document.key for document in page] == sorted([A, B, C])[:1]
    assert start == sorted([A, B, C])[1]
    assert [document.key for document in view.scan(0)] == sorted([A, B, C])
    assert [document.key for document in view.scan_seqno(0)] == [A, B, C]
    with pytest.raises(AnswerTooLarge, match="ask for fewer"):
        view.get_many([A, B, C], bytes_max=CHUNK_BYTES)
    assert len(view.get_many([A, B], bytes_max=2 * CHUNK_BYTES)) == 2


def test_many_documents_are_those_that_get_returns_one_by_one_read_in_one_transaction(
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
    known = Environment.read

    def counted(environment: Environment) -> Any:
        nonlocal reads
        reads += 1
        return known(environment)

    monkeypatch.setattr(Environment, "read", counted)
    assert view.get_many(names, now=60) == one_by_one
    assert reads == 1


def test_what_is_published_and_how_far_back_it_goes(writer: GroupWriter, view: View, clock: Clock) -> None:
    assert view.past(0).floor is None
    clock.now = 5_000
    put(writer, A, 1)
    commit(writer, 1)
    first = view.published()
    assert [each.seqno for each in first] == [1, 0, 0, 0]
    past = view.past(0)
    assert (past.floor, past.refills_ms) == (view.boundaries(0)[-1], ())
    writer.begin_refill(0)
    writer.commit()
    assert [each.stale for each in view.published()] == [True, False, False, False]
    clock.now = 6_000
    put(writer, A, 7)
    commit(writer, 7)
    assert view.published()[0].seqno == 7
    assert view.published()[0].branch > first[0].branch
    assert len(view.past(0).refills_ms) == 1
    assert view.past(0).refills_ms[0] >= 6_000


def test_find_gives_the_document_and_what_an_answer_needs_beside_it(writer: GroupWriter, view: View) -> None:
    found = view.find(b"\0" + A)
    assert (found.document, found.collection_exists, found.published_seqno, found.stale) == (None, True, 0, False)
    put(writer, A, 1, b"old")
    system_event(writer, 2, DEFAULT, Collection(300, 8, "orders", Seqno(2)), scopes=SCOPES)
    put(writer, A, 3, b"order", cid=300)
    put(writer, B, 4, b"gone", expiry=50)
    commit(writer, 4)
    found = view.find(b"\0" + A)
    assert found.document is not None
    assert (found.document.value, found.published_seqno, found.manifest.uid) == (b"old", 4, 2)
    order = view.find(b"\xac\x02" + A).document
    assert order is not None
    assert (order.value, order.collection_id) == (b"order", 300)
    assert view.find(b"\0" + B, now=49).document is not None
    assert view.find(b"\0" + B, now=50).document is None
    assert view.find(b"\0" + B).document is None
    unknown = view.find(b"\x09" + A)
    assert (unknown.document, unknown.collection_exists) == (None, False)
    frame = records.encode_deletion(A, 5)
    writer.stage(0, [(writer.row_prefix(0) + (5).to_bytes(8, "big"), frame)], 0, span(5, 5))
    commit(writer, 5)
    assert view.find(b"\0" + A).document is None
    tombstone = view.find(b"\0" + A, deletions=True).document
    assert tombstone is not None
    assert tombstone.deleted
    writer.rollback(0, 4)
    again = view.find(b"\0" + A).document
    assert again is not None
    assert again.value == b"old"
    system_event(writer, 6, DEFAULT, scopes={0: "_default"})
    commit(writer, 6)
    assert not view.find(b"\xac\x02" + A).collection_exists
    writer.begin_refill(0)
    assert view.find(b"\0" + A).stale


def test_documents_of_a_collection_that_only_lost_history_dropped_are_restored(writer: GroupWriter, view: View) -> None:
    """Found by the simulation: a drop has no events of documents, so its undoing told nobody that they were back."""
    orders = Collection(9, 8, "orders", Seqno(1))
    system_event(writer, 1, DEFAULT, orders, scopes=SCOPES)
    for seqno, key in enumerate((A, B, A + A), start=2):
        put(writer, key, seqno, b"order", cid=9)
    commit(writer, 4)
    system_event(writer, 5, DEFAULT, scopes=SCOPES)
    commit(writer, 5)
    token = view.token(0, 1, 5)
    writer.rollback(0, 4)
    told = [(change.kind, change.document and change.document.key) for change in view.changes(0, since=token)]
    assert told == [("rollback", None), *(("restoration", key) for key in sorted((A, B, A + A)))]


def test_what_lost_history_overwrote_and_then_flushed_is_restored_once(writer: GroupWriter, view: View) -> None:
    orders = Collection(9, 8, "orders", Seqno(1))
    system_event(writer, 1, DEFAULT, orders, scopes=SCOPES)
    put(writer, A, 2, b"old", cid=9)
    put(writer, B, 3, b"untouched", cid=9)
    commit(writer, 3)
    put(writer, A, 4, b"lost", cid=9)
    system_event(writer, 5, DEFAULT, Collection(9, 8, "orders", Seqno(5)), scopes=SCOPES)
    put(writer, A, 6, b"after the flush", cid=9)
    commit(writer, 6)
    token = view.token(0, 1, 6)
    writer.rollback(0, 3)
    told = [(each.kind, each.document and each.document.value) for each in view.changes(0, since=token)]
    assert told == [
        ("rollback", None),
        ("retraction", b"after the flush"),
        ("restoration", b"old"),
        ("restoration", b"untouched"),
    ]


def test_what_a_flush_had_hidden_before_the_rollback_is_not_restored(writer: GroupWriter, view: View) -> None:
    """Found by the simulation: the version below a flush came back as if the flush had been undone, too."""
    system_event(writer, 1, DEFAULT, Collection(9, 8, "orders", Seqno(1)), scopes=SCOPES)
    put(writer, A, 2, b"before", cid=9)
    system_event(writer, 3, DEFAULT, Collection(9, 8, "orders", Seqno(3)), scopes=SCOPES)
    commit(writer, 3)
    put(writer, A, 4, b"lost", cid=9)
    commit(writer, 4)
    token = view.token(0, 1, 4)
    writer.rollback(0, 3)
    told = [(change.kind, change.document and change.document.value) for change in view.changes(0, since=token)]
    assert told == [("rollback", None), ("retraction", b"lost")]


def test_the_rollback_that_is_told_is_the_one_that_took_place(writer: GroupWriter, view: View) -> None:
    """Found by the simulation: after an abandoned snapshot at the same seqno another branch was named."""
    put(writer, A, 1)
    commit(writer, 1)
    put(writer, A, 2)
    writer.commit(flush_open=True)
    writer.abandon(0)
    put(writer, A, 3)
    commit(writer, 3)
    token = view.token(0, writer.state(0).branch, 3)
    writer.rollback(0, 2)
    assert next(view.changes(0, since=token)).rollback == view.rollbacks(0)[0]


def test_two_positions_have_the_same_between_them_also_after_a_rollback_left_the_later_one(
    writer: GroupWriter, view: View
) -> None:
    publish(writer, 0, [(A, b"a1", 1), (B, b"b1", 2)])
    publish(writer, 0, [(A, b"a2", 3), (B, None, 4)])
    publish(writer, 0, [(C, b"c1", 5)])
    start, end = (view.token(0, 1, seqno) for seqno in (2, 4))
    before = list(view.changes_between(start, end))
    assert [(each.kind, each.document and each.document.seqno) for each in before] == [("mutation", 3), ("deletion", 4)]
    writer.rollback(0, 2)
    publish(writer, 0, [(D, b"d1", 3)])
    assert list(view.changes_between(start, end)) == before
    assert list(view.changes_between(None, start)) == list(view.changes_between(None, end))[:2]
    told = [each.kind for each in view.changes_between(end, view.token(0, 2, 3))]
    assert told == ["rollback", "retraction", "restoration", "retraction", "restoration", "mutation"]
    again = list(view.changes_between(end, view.token(0, 2, 3)))
    writer.rollback(0, 2)
    assert list(view.changes_between(end, view.token(0, 2, 3))) == again


def test_what_lies_between_two_positions_is_refused_once_it_is_not_kept(
    writer: GroupWriter, view: View, clock: Clock
) -> None:
    for seqno in range(1, 5):
        publish(writer, 0, [(A, b"%d" % seqno, seqno)])
    end = view.token(0, 1, 4)
    writer.rollback(0, 2)
    publish(writer, 0, [(B, b"b", 3)])
    assert [each.token.seqno for each in view.changes_between(None, end)] == [1, 2, 3, 4]
    writer._purger.window = Window(boundaries=1)
    while (vbid := writer._purger.plan(clock.now)) is not None:
        writer._purge(vbid, clock.now)
    with pytest.raises(ViewInvalidated, match="gone"):
        list(view.changes_between(None, end))
    with pytest.raises(ViewInvalidated, match="no branch 9"):
        list(view.changes_between(None, Token(Vbid(0), Branch(9), Seqno(4), 5)))


def test_changes_in_pieces_keep_nothing_that_was_returned_and_are_returned_again(
    writer: GroupWriter, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seqno, key in enumerate((A, B, C, D), 1):
        put(writer, key, seqno, b"x" * 1000)
    commit(writer, 4)
    read_count = 0
    known = view._frame

    def counted(*found: Any) -> bytes:
        nonlocal read_count
        read_count += 1
        return known(*found)

    monkeypatch.setattr(view, "_frame", counted)
    pieces = Pieces(2500)
    changes = view.changes(0, pieces=pieces)
    first = next(changes)
    assert first.token.seqno == 1
    assert not any(isinstance(holder, GeneratorType) for holder in gc.get_referrers(first, first.document))
    seqnos = []
    for change in changes:
        seqnos.append(change.token.seqno)
        pieces.again = len(seqnos) in (2, 3, 5)
    assert seqnos == [2, 3, 3, 3, 4, 4]
    assert read_count == 7
    assert [change.token.seqno for change in view.changes(0, pieces=Pieces(1))] == [1, 2, 3, 4]


def test_a_token_is_checked_as_at_the_beginning_of_its_changes(writer: GroupWriter, view: View) -> None:
    put(writer, A, 1)
    commit(writer, 1)
    token = view.token(0, 1, 1)
    view.check_since(token)
    with pytest.raises(ViewInvalidated, match="ahead of what is published"):
        view.check_since(replace(token, seqno=Seqno(7)))


def test_a_rollback_is_read_document_by_document_and_its_events_are_returned_again(
    writer: GroupWriter, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2,000 events once all documents were held, each of 20 MiB perhaps."""
    names = keys_of(0, 200)
    publish(writer, 0, [(key, b"old", seqno) for seqno, key in enumerate(names, 1)])
    publish(writer, 0, [(key, b"new", seqno) for seqno, key in enumerate(names, 201)])
    token = view.token(0, 1, 400)
    writer.rollback(0, 200)
    writer.commit()
    read_count, row_counts = 0, []
    row, rows_between = view._row, index.key_rows_between

    def counted(*found: Any, **options: Any) -> Any:
        nonlocal read_count
        read_count += 1
        return row(*found, **options)

    def bounded(*found: Any) -> Any:
        answer = rows_between(*found)
        row_counts.append(len(answer[0]))
        return answer

    monkeypatch.setattr(view, "_row", counted)
    monkeypatch.setattr(index, "key_rows_between", bounded)
    pieces = Pieces(64 * 1024)
    changes = view.changes(0, since=token, pieces=pieces)
    assert next(changes).kind == "rollback"
    assert read_count == 0
    change = next(changes)
    assert not any(isinstance(holder, GeneratorType) for holder in gc.get_referrers(change, change.document))
    seen = [change]
    for change in changes:
        seen.append(change)
        assert read_count == len(seen), "nothing is read ahead"
        pieces.again = len(seen) in (2, 3, 402)
    assert [each.kind for each in seen[:5]] == ["retraction", "restoration", "restoration", "restoration", "retraction"]
    assert len(seen) == 403
    assert seen[401] == seen[402], "the last one, too"
    assert len({each.token for each in seen[:401]}) == 1
    assert seen[402].token == view.token(0, 2, 200)
    assert max(row_counts) == 64
    assert [change.kind for change in view.changes(0, since=token)].count("restoration") == 200


def test_what_is_purged_while_a_rollback_is_returned_is_gone_from_history(
    writer: GroupWriter, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between finding a row and reading it; a row that is missing where it is still named is damage."""
    publish(writer, 0, [(A, b"old", 1)])
    publish(writer, 0, [(A, b"new", 2)])
    token = view.token(0, 1, 2)
    writer.rollback(0, 1)
    writer.commit()
    found = list(view._undone(*undone_arguments(view, token)))
    assert [each.kind for each in found] == ["retraction", "restoration"]
    opened = view._open(0)
    gone = found[0]._replace(dup=keys.DUP.pack(1, 7, 0x57))
    with pytest.raises(ViewInvalidated, match="gone from history"):
        view._undone_document(opened, 0, gone, False)


def undone_arguments(view: View, token: Token) -> tuple[Any, ...]:
    opened = view._open(0)
    served, lost, after = view._way(opened, 0, token, None)
    return opened, 0, served, lost, after
