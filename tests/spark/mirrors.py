"""Small mirrors for tests, written without a service, and what is in them as plain values."""

from __future__ import annotations

import json
from pathlib import Path

from storage.env import directory
from storage.format import keys, records
from storage.history.purge import Window
from storage.model import FailoverLog, Identity, Seqno, SnapshotRange
from storage.read.view import open_view
from storage.write.writer import GroupWriter, WriterOptions
from tests.storage.frames import encode_deletion

VBUCKETS, GROUPS = 8, 2
IDENTITY = Identity("cluster", "orders", "bucket-uuid", VBUCKETS, GROUPS)


class SmallMirror:
    def __init__(self, path: Path, *, filled: bool = True) -> None:
        """`filled`: a vbucket without documents is complete; otherwise it is in its first fill."""
        self.path = path
        self.filled = filled
        self.now_ms = 1_700_000_000_000
        directory.create(str(path), IDENTITY)
        self.seqnos: dict[int, int] = {}
        self.open()

    def open(self) -> None:
        """Take the groups; also after another directory was put in the place of this one."""
        self.writers = [
            GroupWriter(
                directory.group_path(str(self.path), group),
                WriterOptions(group=group, identity=IDENTITY, clock_ms=lambda: self.now_ms, map_size=1 << 30),
            )
            for group in range(GROUPS)
        ]
        for vbid in range(VBUCKETS):
            writer = self.writers[vbid % GROUPS]
            self.seqnos[vbid] = int(writer.vbuckets[vbid].state.published_seqno)
            writer.vbuckets[vbid].save(failover_log=FailoverLog.of([(77, 0)]))
            if self.filled and not self.seqnos[vbid]:
                writer.vbuckets[vbid].publish(0, 0)
            writer.commit()

    def put(self, documents: dict[str, bytes | None], **fields: int) -> None:
        """Publish the documents, a snapshot for each of their vbuckets; None deletes."""
        by_vbid: dict[int, list[tuple[bytes, bytes | None]]] = {}
        for name, value in documents.items():
            key = name.encode()
            by_vbid.setdefault(keys.vbid_of(key, VBUCKETS), []).append((key, value))
        for vbid, items in by_vbid.items():
            writer = self.writers[vbid % GROUPS]
            first = self.seqnos[vbid] + 1
            rows = []
            for seqno, (key, value) in enumerate(items, first):
                frame = (
                    encode_deletion(key, seqno)
                    if value is None
                    else records.encode_mutation(key, value, seqno, **{"datatype": 1, **fields})
                )
                rows.append((writer.vbuckets[vbid].prefix + seqno.to_bytes(8, "big"), frame))
            self.seqnos[vbid] = end = first + len(items) - 1
            writer.vbuckets[vbid].stage(rows, 0, SnapshotRange(Seqno(first), Seqno(end)))
            writer.vbuckets[vbid].publish(end, first)
            writer.commit()
            while writer.step() or (writer.vbuckets[vbid].complete_seqno is not None):
                writer.commit()

    def roll_back(self, vbid: int, to_seqno: int) -> None:
        self.writers[vbid % GROUPS].vbuckets[vbid].rollback(to_seqno)
        self.seqnos[vbid] = to_seqno

    def purge(self, **window: int) -> None:
        for writer in self.writers:
            writer.background.purger.window = Window(**window)
            while (vbid := writer.background.purger.plan(self.now_ms)) is not None:
                writer.background.purge(vbid, self.now_ms)

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


def order(number: int, length: int = 40) -> bytes:
    """A document that is no padding: figures, words, a list."""
    return json.dumps(
        {
            "id": number,
            "customer": f"c{number * 7919 % 1000}",
            "total": number * 37 % 10_000 / 100,
            "paid": number % 3 == 0,
            "items": [{"sku": f"s{number % 97}-{each}", "count": each + 1} for each in range(number % 4)],
            "note": f"{number * 2654435761 % 2**32:08x}" * (length // 8),
        }
    ).encode()


def orders(first: int, count: int) -> dict[str, bytes | None]:
    return {f"order::{number:06d}": order(number) for number in range(first, first + count)}


def scanned(path: Path) -> dict[str, tuple[int, bytes]]:
    with open_view(str(path)) as view:
        return {each.key.decode(): (each.seqno, each.value) for each in view.scan()}
