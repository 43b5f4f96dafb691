"""A small mirror with several collections, and what SQL and plain Python find in it."""

from __future__ import annotations

import json
from typing import Any

from mirror import View
from mirror.sql import Session
from storage.format import records
from storage.model import Collection, Manifest, ManifestUid, Seqno, SnapshotRange
from tests.spark.mirrors import GROUPS, VBUCKETS, SmallMirror

SCOPES = {0: "_default", 8: "inventory"}
DEFAULT = Collection(0, 0, "_default", Seqno(0))


def collections(mirror: SmallMirror, *names: str, scope_id: int = 8) -> dict[str, int]:
    """Let every vbucket know the default collection and these alone; return the ids of these."""
    ids = {name: 9 + at for at, name in enumerate(names)}
    for vbid in range(VBUCKETS):
        writer = mirror.writers[vbid % GROUPS]
        seqno = mirror.seqnos[vbid] + 1
        entries = {each: Collection(each, scope_id, name, Seqno(seqno)) for name, each in ids.items()}
        manifest = Manifest(ManifestUid(seqno), SCOPES, {0: DEFAULT, **entries})
        frame = records.HEADER.pack(0x80, 0x5F, 0, 13, 0, 0, 13, 0, 0) + seqno.to_bytes(8, "big") + b"\0\0\0\0\0"
        snapshot = SnapshotRange(Seqno(seqno), Seqno(seqno))
        writer.vbuckets[vbid].system_event(seqno, frame, manifest, snapshot)
        writer.vbuckets[vbid].publish(seqno, seqno)
        writer.commit()
        mirror.seqnos[vbid] = seqno
    return ids


def put(mirror: SmallMirror, documents: dict[str, Any], **fields: int) -> None:
    mirror.put({key: json.dumps(each).encode() for key, each in documents.items()}, **fields)


def rows(view: View, query: str, **options: Any) -> list[tuple[Any, ...]]:
    """The rows of an answer, in an order of their own."""
    with Session(view, threads=1, **options) as session:
        found = session.run(query).reader.read_all()
    return sorted(zip(*(column.to_pylist() for column in found.columns), strict=True), key=repr)
