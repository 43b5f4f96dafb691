"""The events of a rollback: each lost key once, with the version that is visible again."""

from __future__ import annotations

import gc
from types import GeneratorType
from typing import Any

import pytest

from storage.errors import ViewInvalidated
from storage.format import keys
from storage.history import chain
from storage.history.purge import Window
from storage.model import Collection, Seqno
from storage.read import changes as events_of
from storage.read import retractions
from storage.read.vbucket_reader import VbucketReader
from storage.read.view import Pieces, View
from storage.write.writer import GroupWriter
from tests.storage.model import DEFAULT, SCOPES, A, B, C, D, keys_of
from tests.storage.rig import HOUR_MS, Clock, commit, publish, purge, put, snapshots, system_event


def test_a_rollback_is_followed_by_its_retractions_and_restorations(writer: GroupWriter, view: View) -> None:
    snapshots(writer, [(A, b"a1", 1), (B, b"b1", 2)], [(A, b"a2", 3), (B, None, 4), (C, b"c1", 5), (A, b"a3", 6)])
    token = view.token(0, 1, 6)
    writer.vbuckets[0].rollback(4)
    publish(writer, 0, [(D, b"d1", 9)])
    events = list(view.changes(0, since=token))
    assert events[0].kind == "rollback"
    assert events[0].rollback is not None
    assert (events[0].rollback.from_seqno, events[0].rollback.to_seqno) == (6, 2)
    reported = [(e.kind, e.document.key, e.document.value, e.document.seqno) for e in events[1:] if e.document]
    assert reported == [
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


def test_two_rollbacks_in_a_row_are_reported_as_one(writer: GroupWriter, view: View) -> None:
    snapshots(writer, [(A, b"1", 1)], [(A, b"2", 2)], [(A, b"3", 3)])
    token = view.token(0, 1, 3)
    writer.vbuckets[0].rollback(2)
    publish(writer, 0, [(B, b"x", 7)])
    writer.vbuckets[0].rollback(1)
    events = list(view.changes(0, since=token))
    assert [e.kind for e in events] == ["rollback", "retraction", "restoration"]
    assert events[-1].token == view.token(0, 3, 1)
    assert list(view.changes(0, since=events[-1].token)) == []


def test_documents_of_a_collection_that_only_lost_history_dropped_are_restored(writer: GroupWriter, view: View) -> None:
    """Found by the simulation: a drop has no events of documents, so its undoing did not report that they were back."""
    orders = Collection(9, 8, "orders", Seqno(1))
    system_event(writer, 1, DEFAULT, orders, scopes=SCOPES)
    for seqno, key in enumerate((A, B, A + A), start=2):
        put(writer, key, seqno, b"order", cid=9)
    commit(writer, 4)
    system_event(writer, 5, DEFAULT, scopes=SCOPES, publish=True)
    token = view.token(0, 1, 5)
    writer.vbuckets[0].rollback(4)
    reported = [(change.kind, change.document and change.document.key) for change in view.changes(0, since=token)]
    assert reported == [("rollback", None), *(("restoration", key) for key in sorted((A, B, A + A)))]


def test_documents_overwritten_and_flushed_in_lost_history_are_restored_once(writer: GroupWriter, view: View) -> None:
    orders = Collection(9, 8, "orders", Seqno(1))
    system_event(writer, 1, DEFAULT, orders, scopes=SCOPES)
    put(writer, A, 2, b"old", cid=9)
    put(writer, B, 3, b"untouched", cid=9, publish=True)
    put(writer, A, 4, b"lost", cid=9)
    system_event(writer, 5, DEFAULT, Collection(9, 8, "orders", Seqno(5)), scopes=SCOPES)
    put(writer, A, 6, b"after the flush", cid=9, publish=True)
    token = view.token(0, 1, 6)
    writer.vbuckets[0].rollback(3)
    reported = [(each.kind, each.document and each.document.value) for each in view.changes(0, since=token)]
    assert reported == [
        ("rollback", None),
        ("retraction", b"after the flush"),
        ("restoration", b"old"),
        ("restoration", b"untouched"),
    ]


def test_documents_flushed_before_the_rollback_are_not_restored(writer: GroupWriter, view: View) -> None:
    """Found by the simulation: the version below a flush came back as if the flush had been undone, too."""
    system_event(writer, 1, DEFAULT, Collection(9, 8, "orders", Seqno(1)), scopes=SCOPES)
    put(writer, A, 2, b"before", cid=9)
    system_event(writer, 3, DEFAULT, Collection(9, 8, "orders", Seqno(3)), scopes=SCOPES, publish=True)
    put(writer, A, 4, b"lost", cid=9, publish=True)
    token = view.token(0, 1, 4)
    writer.vbuckets[0].rollback(3)
    reported = [(change.kind, change.document and change.document.value) for change in view.changes(0, since=token)]
    assert reported == [("rollback", None), ("retraction", b"lost")]


def test_a_rollback_is_read_document_by_document_and_can_be_read_again(
    writer: GroupWriter, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All documents of 2,000 events were held at once, each of up to 20 MiB."""
    names = keys_of(0, 200)
    publish(writer, 0, [(key, b"old", seqno) for seqno, key in enumerate(names, 1)])
    publish(writer, 0, [(key, b"new", seqno) for seqno, key in enumerate(names, 201)])
    token = view.token(0, 1, 400)
    writer.vbuckets[0].rollback(200)
    writer.commit()
    read_count, row_counts = 0, []
    document, piece = VbucketReader.document, chain.piece

    def counted(*found: Any, **options: Any) -> Any:
        nonlocal read_count
        read_count += 1
        return document(*found, **options)

    def bounded(*found: Any) -> Any:
        answer = piece(*found)
        row_counts.append(len(answer.rows))
        return answer

    monkeypatch.setattr(VbucketReader, "document", counted)
    monkeypatch.setattr(chain, "piece", bounded)
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


def test_a_row_purged_while_a_rollback_is_read_is_gone_from_history(writer: GroupWriter, view: View) -> None:
    """Between finding a row and reading it; a row that is missing where it is still named is damage."""
    snapshots(writer, [(A, b"old", 1)], [(A, b"new", 2)])
    token = view.token(0, 1, 2)
    writer.vbuckets[0].rollback(1)
    writer.commit()
    reader = view.reader(0)
    served, lost, _, after, _ = events_of.resolve_range(reader, token, None)
    found = list(retractions.undone(reader, served, lost, after))
    assert [each.kind for each in found] == ["retraction", "restoration"]
    gone = found[0]._replace(reference=keys.DUP.pack(1, 7, 0x57))
    with pytest.raises(ViewInvalidated, match="gone from history"):
        retractions.document_of(reader, gone, False)


def test_a_row_purged_between_two_steps_is_gone_from_history(writer: GroupWriter, view: View, clock: Clock) -> None:
    """The walk found no more lost rows, and ended as if there had been none."""
    names = keys_of(0, 6)
    publish(writer, 0, [(key, b"old", seqno) for seqno, key in enumerate(names, 1)])
    publish(writer, 0, [(key, b"new", seqno) for seqno, key in enumerate(names, 7)])
    token = view.token(0, 1, 12)
    writer.vbuckets[0].rollback(6)
    writer.commit()
    reader = view.reader(0)
    served, lost, _, after, _ = events_of.resolve_range(reader, token, None)
    found = retractions.undone(reader, served, lost, after, bytes_max=2 * retractions.UNDONE_BYTES)
    assert next(found).kind == "retraction"
    clock.now += 2 * HOUR_MS
    assert purge(writer, Window(time_ms=HOUR_MS))
    with pytest.raises(ViewInvalidated, match="gone from history"):
        list(found)
