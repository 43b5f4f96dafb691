"""Recorded frames as requests with their answers and as streams, and vbuckets filled with what was recorded."""

from __future__ import annotations

from dataclasses import replace

from mirror.sandbox.data.item import Item
from mirror.sandbox.data.sandbox_vbucket import Vbucket, system_key
from mirror.wire import frame as fr
from mirror.wire.constants import Opcode
from mirror.wire.frame import Frame

DATA = (Opcode.DCP_MUTATION, Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION)
STREAM = (*DATA, Opcode.DCP_SNAPSHOT_MARKER, Opcode.DCP_SYSTEM_EVENT, Opcode.DCP_SEQNO_ADVANCED, Opcode.DCP_STREAM_END)


def answers(recording: list[tuple[str, Frame]]) -> list[tuple[Frame, Frame]]:
    """The requests of a client, in order, each with its answer."""
    by_opaque: dict[tuple[int, int], list[Frame]] = {}
    for direction, frame in recording:
        if direction == "s2c" and frame.is_response:
            by_opaque.setdefault((frame.opcode, frame.opaque), []).append(frame)
    found = []
    for direction, frame in recording:
        there = by_opaque.get((frame.opcode, frame.opaque))
        if direction == "c2s" and there and not frame.is_response:
            found.append((frame, there.pop(0)))
    return found


def stream_of(recording: list[tuple[str, Frame]], vbid: int | None = None) -> list[Frame]:
    """Return the server's frames of all streams, without opaques."""
    return [
        replace(frame, opaque=0)
        for direction, frame in recording
        if direction == "s2c" and frame.opcode in STREAM and not frame.is_response and vbid in (None, frame.vbucket)
    ]


def seqno_of(frame: Frame) -> int:
    return int.from_bytes(frame.extras[:8])


def fill(vbucket: Vbucket, by_seqno: dict[int, Frame], high_seqno: int) -> None:
    """Make a vbucket hold exactly what a server held that sent these frames; the gaps are what dedup left out."""
    newest: dict[bytes, Item] = {}
    vbucket.log.clear()
    vbucket.collection_high_seqno.clear()
    for seqno in range(1, high_seqno + 1):
        frame = by_seqno.get(seqno)
        if frame is None:
            gap = fr.request(
                Opcode.DCP_MUTATION, vbucket=vbucket.vbid, extras=seqno.to_bytes(8) + bytes(23), key=b"\0gap"
            )
            item = Item(seqno, b"\0gap", fr.encode(gap))
            item.next_seqno = high_seqno if seqno < high_seqno else 0
            vbucket.log.append(item)
            continue
        key = frame.key
        if frame.opcode == Opcode.DCP_SYSTEM_EVENT:
            event = int.from_bytes(frame.extras[8:12])
            about_scope = event in (3, 4)
            id_ = int.from_bytes(frame.value[8:12] if about_scope else frame.value[12:16])
            key = system_key(about_scope=about_scope, id_=id_)
            if not about_scope:
                for old in list(newest.values()):
                    if old.kind != Opcode.DCP_SYSTEM_EVENT and old.collection_id == id_:
                        newest.pop(old.key).next_seqno = seqno
        item = Item(seqno, key, fr.encode(replace(frame, opaque=0)))
        if key in newest:
            newest[key].next_seqno = seqno
        newest[key] = item
        vbucket.log.append(item)
    vbucket.newest = {0: {}}
    for item in newest.values():
        if item.kind != Opcode.DCP_SYSTEM_EVENT:
            id_ = item.collection_id
            vbucket.newest.setdefault(id_, {})[item.key] = item
            vbucket.collection_high_seqno[id_] = max(vbucket.collection_high_seqno.get(id_, 0), item.seqno)
    vbucket.to_disk()
