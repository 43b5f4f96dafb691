"""Chunks of rows against `scan`, which is the plain way to the same documents."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from storage.errors import CorruptedError, ViewInvalidated
from storage.format import keys, records
from storage.history.purge import Window
from storage.model import Branch, Collection, Document, Manifest, ManifestUid, Seqno
from storage.read import bulk
from storage.read.bulk import EVERY_KEY, KeyRange
from storage.read.view import Pin, View
from storage.write.writer import GroupWriter
from tests.storage.model import keys_of, log, span
from tests.storage.rig import commit, publish, purge, put, system_event

NAMES = keys_of(0, 40)


def documents(
    view: View, pin: Pin, key_range: KeyRange = EVERY_KEY, rows_max: int = 7, after_seqno: int = 0
) -> list[Document]:
    found = []
    for chunk in bulk.documents(
        view.reader(pin.vbid), pin, None, key_range, rows_max=rows_max, after_seqno=after_seqno
    ):
        rows = [records.decode_row(0, Branch(0), frame) for frame in chunk.frames]
        assert {row.collection_id for row in rows} == {chunk.collection_id}
        found += rows
    return sorted(found, key=lambda row: (row.collection_id, row.key))


def keys_in(chunk: bulk.Chunk) -> list[bytes]:
    return [records.decode_row(0, Branch(0), frame).key for frame in chunk.frames]


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
def test_bulk_reads_equal_scans_across_rollbacks(writer: GroupWriter, view: View, rows_max: int, way: None) -> None:
    following = fill(writer, 1, 1, 60)
    assert documents(view, view.pin(0), rows_max=rows_max) == scanned(view)
    writer.vbuckets[0].rollback(35)
    fill(writer, 2, 36, 30)
    writer.vbuckets[0].rollback(50)
    fill(writer, 3, following, 20)
    assert documents(view, view.pin(0), rows_max=rows_max) == scanned(view)
    for after in range(following + 21):
        newer = [each for each in documents(view, view.pin(0), after_seqno=after) if each.seqno > after]
        assert newer == [each for each in scanned(view) if each.seqno > after]
    for key_range in (
        KeyRange(NAMES[5]),
        KeyRange(prefix=NAMES[7]),
        KeyRange(NAMES[3], b"", NAMES[9]),
        KeyRange(end=b""),
    ):
        options = {"start": key_range.start, "prefix": key_range.prefix, "end": key_range.end}
        assert documents(view, view.pin(0), key_range, rows_max) == scanned(view, **options)


def test_a_pinned_boundary_is_read_to_its_end_through_rollbacks_and_resyncs(
    writer: GroupWriter, view: View, way: None
) -> None:
    fill(writer, 1, 1, 100)
    pin, before = view.pin(0), scanned(view)
    chunks = bulk.documents(view.reader(pin.vbid), pin, rows_max=5)
    seen = keys_in(next(chunks))
    writer.vbuckets[0].rollback(40)
    fill(writer, 2, 41, 80)
    for chunk in chunks:
        seen += keys_in(chunk)
    assert sorted(seen) == [each.key for each in before]
    assert documents(view, pin) == before
    chunks = bulk.documents(view.reader(pin.vbid), pin, rows_max=5)
    next(chunks)
    purge(writer, Window(boundaries=1))
    with pytest.raises(ViewInvalidated, match="gone"):
        list(chunks)


@pytest.mark.parametrize("rolled_back_to", [None, 60])
def test_partly_purged_history_is_refused_after_a_resync_too(
    writer: GroupWriter, view: View, way: None, rolled_back_to: int | None
) -> None:
    """The floor of then is forgotten, and what the purger left behind stays for a while."""
    fill(writer, 1, 1, 100)
    pins = [view.pin(0, as_of) for as_of in (50, 60, 80, 100)]
    before = [scanned(view, as_of=pin.seqno) for pin in pins]
    if rolled_back_to is not None:
        writer.vbuckets[0].rollback(rolled_back_to)
        fill(writer, 2, rolled_back_to + 1, 40)
    chunks = [bulk.documents(view.reader(pin.vbid), pin, rows_max=5) for pin in pins]
    seen = [keys_in(next(each)) for each in chunks]

    purge(writer, Window(boundaries=41, time_ms=10**9))  # from 60 on
    writer.vbuckets[0].begin_resync()
    writer.vbuckets[0].save(failover_log=log(88))
    fill(writer, 3, 1, 1)
    with pytest.raises(ViewInvalidated, match="history at seqno 50 is gone"):
        list(chunks[0])
    with pytest.raises(ViewInvalidated, match="gone"):
        view.reading(pins=[pins[0]]).manifest(0).names()
    for pin, contents, met, rest in list(zip(pins, before, seen, chunks, strict=True))[1:]:
        assert documents(view, pin) == contents
        for chunk in rest:
            met += keys_in(chunk)
        assert sorted(met) == [row.key for row in contents]


def test_history_left_before_a_resync_is_refused_once_purged(writer: GroupWriter, view: View, way: None) -> None:
    fill(writer, 1, 1, 100)
    pin = view.pin(0)
    writer.vbuckets[0].rollback(60)
    fill(writer, 2, 61, 40)
    purge(writer, Window(boundaries=31, time_ms=10**9))  # from 70 on
    writer.vbuckets[0].begin_resync()
    writer.vbuckets[0].save(failover_log=log(88))
    fill(writer, 3, 1, 1)
    with pytest.raises(ViewInvalidated, match="history at seqno 60 is gone"):
        bulk.documents(view.reader(pin.vbid), pin)


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize(
    "damage",
    [
        lambda frame: b"",
        lambda frame: frame[:10],
        lambda frame: frame[:40],
        lambda frame: frame[:55],
        lambda frame: bytes(len(frame)),
        lambda frame: frame[:1] + b"\x42" + frame[2:],
        lambda frame: frame[:1] + b"\x58" + frame[2:],
        lambda frame: frame[:1] + b"\x5f" + frame[2:],
    ],
)
def test_a_damaged_row_is_an_error_not_a_row_of_another_collection(
    writer: GroupWriter, view: View, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes], single: bool
) -> None:
    if single:  # only mutations are met together
        monkeypatch.setattr(bulk, "GET_ROWS", 1)
    publish(writer, 0, [(name, b"value", seqno) for seqno, name in enumerate(NAMES, 1)])
    rows = view.reader(0).rows
    row_key = keys.ROW.pack(writer.vbuckets[0].state.branch, 20)
    with writer.environment.env.begin(write=True) as txn:
        whole = txn.get(row_key, db=rows)
        assert whole is not None
        txn.put(row_key, damage(whole), db=rows)
    for read in (scanned, lambda view: documents(view, view.pin(0))):
        with pytest.raises(CorruptedError):
            read(view)
    with writer.environment.env.begin(write=True) as txn:
        txn.put(row_key, whole, db=rows)


@pytest.mark.parametrize("get_rows", [1, 3, 128])
def test_bulk_reads_pass_over_deletions_and_rows_of_other_collections(
    writer: GroupWriter, view: View, way: None, monkeypatch: pytest.MonkeyPatch, get_rows: int
) -> None:
    monkeypatch.setattr(bulk, "GET_ROWS", get_rows)
    default, gone = Collection(0, 0, "_default", Seqno(0)), Collection(9, 0, "gone", Seqno(1))
    kept, flushed = Collection(8, 0, "kept", Seqno(1)), Collection(0x90, 0, "flushed", Seqno(1))
    last = Collection(0x91, 0, "last", Seqno(1))
    system_event(writer, 1, default, gone, kept, flushed, last, scopes={0: "_default"})
    rng = Random(5)
    for seqno in range(2, 80):
        key, cid = rng.choice(NAMES[:12]), rng.choice([0, 8, 9, 0x90, 0x91])
        put(writer, key, seqno, None if rng.random() < 0.3 else b"%d" % seqno, cid)
    flushed = Collection(0x90, 0, "flushed", Seqno(80))
    system_event(writer, 80, default, kept, flushed, last, scopes={0: "_default"})
    put(writer, NAMES[0], 81, b"after the flush", 0x90, publish=True)
    assert {row.collection_id for row in scanned(view)} == {0, 8, 0x90, 0x91}
    for rows_max in (7, 1000):
        assert documents(view, view.pin(0), rows_max=rows_max) == scanned(view)
        for each in (default, kept, flushed, last):
            (chunk, *more) = bulk.documents(view.reader(0), view.pin(0), [each.collection_id], rows_max=1000)
            assert not more
            assert sorted(keys_in(chunk)) == [row.key for row in scanned(view, collection=f"_default.{each.name}")]
        chunks = bulk.documents(view.reader(0), view.pin(0), [8, 9, 77], rows_max=rows_max)
        assert {chunk.collection_id for chunk in chunks} == {8}, "dropped ones and unknown ones have none"


def test_the_name_in_a_system_event_is_not_a_key(writer: GroupWriter, view: View, way: None) -> None:
    """The name has no collection id in front: read as a key, `abc` would be the document `bc` of collection 0x61."""
    scopes = {0: "_default"}
    orders, more = Collection(0x61, 0, "orders", Seqno(1)), Collection(0x62, 0, "abc", Seqno(3))
    system_event(writer, 1, orders, scopes=scopes)
    put(writer, b"bc", 2, cid=0x61)
    frame = records.HEADER.pack(0x80, 0x5F, 3, 13, 0, 0, 16, 0, 0) + (3).to_bytes(8, "big") + bytes(5) + b"abc"
    manifest = Manifest(ManifestUid(3), scopes, {0x61: orders, 0x62: more})
    writer.vbuckets[0].system_event(3, frame, manifest, span(3, 3))
    commit(writer, 3)
    assert [row.key for row in documents(view, view.pin(0))] == [b"bc"]


@pytest.mark.parametrize("first_seqno", [2**63 - 30, 2**63 + 0x57 * 2**48 - 30, 2**63 + 2**56 - 30, 2**64 - 130])
@pytest.mark.parametrize("get_rows", [1, 3, 128])
def test_a_boundary_is_not_taken_for_a_row_at_any_seqno(
    writer: GroupWriter, view: View, monkeypatch: pytest.MonkeyPatch, first_seqno: int, get_rows: int
) -> None:
    """From 2^63 to 2^63 + 2^56 a boundary begins with the byte 80, as a row does: sound data was called damaged."""
    monkeypatch.setattr(bulk, "GET_ROWS", get_rows)
    monkeypatch.setattr(bulk, "ROWS_PER_DOCUMENT", 1000)
    publish(writer, 0, [(NAMES[0], b"first", 1)])
    fill(writer, 1, first_seqno, 60)
    for rows_max in (7, 1000):
        assert documents(view, view.pin(0), rows_max=rows_max) == scanned(view)


def test_large_documents_come_in_small_chunks(writer: GroupWriter, view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "CHUNK_BYTES", 5000)
    monkeypatch.setattr(bulk, "GET_ROWS", 2)
    publish(writer, 0, [(name, b"x" * 1000, seqno) for seqno, name in enumerate(NAMES, 1)])
    for key_range in (EVERY_KEY, KeyRange(prefix=NAMES[0][:1])):
        chunks = list(bulk.documents(view.reader(0), view.pin(0), None, key_range))
        names = [key for chunk in chunks for key in keys_in(chunk)]
        assert sorted(names) == sorted(name for name in NAMES if name.startswith(key_range.prefix))
        assert max(len(chunk.frames) for chunk in chunks) == 6
