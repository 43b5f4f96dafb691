"""Rows, system events and snapshots of vbucket 0, for tests of what reads them."""

from __future__ import annotations

from storage.format import records
from storage.model import Collection, Manifest, ManifestUid, Seqno
from storage.write.writer import GroupWriter
from tests.storage.frames import encode_deletion
from tests.storage.model import keys_of, span

A, B, C, D = keys_of(0, 4)
ID = "00000000000000ff"


def put(
    writer: GroupWriter,
    key: bytes,
    seqno: int,
    value: bytes | None = b"v",
    cid: int = 0,
    expiry: int = 0,
    publish: bool = False,
) -> None:
    """Stage a mutation, or a deletion (value None)."""
    frame = encode_deletion(key, seqno, collection_id=cid)
    if value is not None:
        frame = records.encode_mutation(key, value, seqno, collection_id=cid, expiry=expiry)
    writer.vbuckets[0].stage([(writer.vbuckets[0].prefix + seqno.to_bytes(8, "big"), frame)], 0, span(seqno, seqno))
    if publish:
        commit(writer, seqno)


def system_event(
    writer: GroupWriter, seqno: int, *collections: Collection, scopes: dict[int, str], publish: bool = False
) -> None:
    manifest = Manifest(ManifestUid(seqno), scopes, {c.collection_id: c for c in collections})
    extras = seqno.to_bytes(8, "big") + b"\0\0\0\0\0"
    frame = records.HEADER.pack(0x80, 0x5F, 0, 13, 0, 0, 13, 0, 0) + extras
    writer.vbuckets[0].system_event(seqno, frame, manifest, span(seqno, seqno))
    if publish:
        commit(writer, seqno)


def commit(writer: GroupWriter, seqno: int) -> None:
    writer.vbuckets[0].publish(seqno, seqno)
    writer.commit()


DEFAULT = Collection(0, 0, "_default", Seqno(0))
SCOPES = {0: "_default", 8: "shop"}
