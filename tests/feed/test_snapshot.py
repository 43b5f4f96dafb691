"""A snapshot of a read: its rows, decoded or as they are, until it is closed."""

from __future__ import annotations

import pytest

from mirror.feed.read.snapshot import Position, Snapshot
from mirror.feed.read.spool import Spool, SpoolFile
from storage.format.records import encode_mutation
from storage.model import Manifest


def test_a_snapshot_is_valid_until_it_is_closed() -> None:
    spool = Spool(SpoolFile())
    frame = encode_mutation(b"k", b"v", 7, collection_id=8)
    spool.append([frame])
    closed: list[tuple[int, int]] = []
    snapshot = Snapshot(3, 99, 5, 7, spool, Manifest.initial(), on_close=lambda *held: closed.append(held))
    assert (snapshot.position, snapshot.row_count, snapshot.byte_count) == (Position(99, 7), 1, len(frame))
    (document,) = snapshot.documents()
    assert (document.vbid, document.collection_id, document.key, document.value, document.seqno) == (
        3,
        8,
        b"k",
        b"v",
        7,
    )
    snapshot.close()
    snapshot.close()
    assert closed == [(len(frame), 0)]
    with pytest.raises(AssertionError, match="valid until"):
        next(snapshot.frames())
