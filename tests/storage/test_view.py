"""Reading: collections by name, drops and flushes, expiry, ranges, time travel, tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage import directory, records
from storage.errors import NoSuchBoundary, StorageError, UnknownCollection, ViewInvalidated
from storage.model import Branch, Collection, Manifest, ManifestUid, Seqno, Vbid
from storage.view import Time, Token, View, open_view
from storage.writer import GroupWriter
from tests.storage.model import IDENTITY, keys_of, log, span
from tests.storage.test_writer import Clock, open_writer, publish

A, B, C, D = keys_of(0, 4)


@pytest.fixture
def path(tmp_path: Path) -> str:
    directory.create(str(tmp_path / "mirror"), IDENTITY)
    return str(tmp_path / "mirror")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def writer(path: str, clock: Clock) -> Iterator[GroupWriter]:
    opened = open_writer(path, clock=clock)
    opened.save_failover_log(0, log())
    yield opened
    opened.close()


@pytest.fixture
def view(path: str, writer: GroupWriter) -> Iterator[View]:
    with open_view(path) as opened:
        yield opened


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
    token = Token(Vbid(0), Branch(1), Seqno(6))
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
    assert {str(e.token) for e in events[:5]} == {"0:1:6"}
    assert [str(e.token) for e in events[5:]] == ["0:2:2", "0:2:9"]
    assert [e.kind for e in view.changes(0, since=events[5].token)] == ["mutation"]


def test_two_rollbacks_in_a_row_are_told_as_one_way_back(writer: GroupWriter, view: View) -> None:
    publish(writer, 0, [(A, b"1", 1)])
    publish(writer, 0, [(A, b"2", 2)])
    publish(writer, 0, [(A, b"3", 3)])
    token = Token(Vbid(0), Branch(1), Seqno(3))
    writer.rollback(0, 2)
    publish(writer, 0, [(B, b"x", 7)])
    writer.rollback(0, 1)
    events = list(view.changes(0, since=token))
    assert [e.kind for e in events] == ["rollback", "retraction", "restoration"]
    assert str(events[-1].token) == "0:3:1"
    assert list(view.changes(0, since=events[-1].token)) == []


@pytest.mark.parametrize("text", ["", "1:2", "1:2:3:4", "a:b:c", "1:2:-3", "70000:1:1", "1:4294967296:1", "1:1:1.5"])
def test_a_token_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a token"):
        Token.parse(text)


def test_a_token_is_its_three_numbers() -> None:
    assert str(Token.parse("7:2:55")) == "7:2:55"
    assert Token.parse("7:2:55") == Token(Vbid(7), Branch(2), Seqno(55))


def test_a_token_of_an_unknown_branch_is_refused(writer: GroupWriter, view: View) -> None:
    publish(writer, 0, [(A, b"1", 1)])
    with pytest.raises(ViewInvalidated, match="no branch 9"):
        list(view.changes(0, since=Token(Vbid(0), Branch(9), Seqno(1))))


def test_states_speak_of_all_vbuckets(path: str, writer: GroupWriter, view: View) -> None:
    publish(writer, 2, [(keys_of(2, 1)[0], b"x", 5)])
    assert [(s.vbid, s.published_seqno) for s in view.states()] == [(0, 0), (1, 0), (2, 5), (3, 0)]
