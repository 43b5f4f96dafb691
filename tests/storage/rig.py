"""A writer of a group, the snapshots that it publishes, and the purge of what became old."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from storage.env import directory
from storage.env.environment import SHARED
from storage.format import keys, records
from storage.history.purge import Purger, Window
from storage.model import Collection, Document, Manifest, ManifestUid
from storage.read.scan import KeySelection
from storage.read.view import Pin, View
from storage.write.writer import GroupWriter, WriterOptions
from tests.storage.frames import encode_deletion
from tests.storage.model import IDENTITY, keys_of, row, span

HOUR_MS = 3_600_000


class Clock:
    """Milliseconds that rise by one at every look."""

    now = 1_000_000

    def __call__(self) -> int:
        self.now += 1
        return self.now


def open_writer(
    path: str, group: int = 0, clock: Callable[[], int] | None = None, map_size: int = 1 << 30, **options: Any
) -> GroupWriter:
    return GroupWriter(
        directory.group_path(path, group),
        WriterOptions(group=group, identity=IDENTITY, clock_ms=clock or Clock(), map_size=map_size, **options),
    )


def crash(writer: GroupWriter) -> None:
    """Leave what SIGKILL leaves: the environment as of the last commit, and a free lock."""
    for vbucket in writer.background.jobs:
        assert vbucket.job is not None
        vbucket.job.close()
    SHARED.release(writer.environment)
    writer.owner.unlock()
    writer.owner.closed = True


def stage(
    writer: GroupWriter, end: int, *items: tuple[bytes, bytes | None, int], vbid: int = 0, flush: bool = False
) -> None:
    """Stage rows of the open snapshot that ends at `end`, and write them with `flush`."""
    prefix = writer.vbuckets[vbid].prefix
    writer.vbuckets[vbid].stage([row(prefix, *item) for item in items], 0, span(items[0][2], end))
    if flush:
        writer.commit(flush_open=True)


def publish(
    writer: GroupWriter, vbid: int, items: list[tuple[bytes, bytes | None, int]], end: int | None = None
) -> None:
    stage(writer, items[-1][2], *items, vbid=vbid)
    writer.vbuckets[vbid].publish(end or items[-1][2], items[0][2])
    writer.commit()


def snapshots(writer: GroupWriter, *published: list[tuple[bytes, bytes | None, int]]) -> None:
    """Publish snapshots of vbucket 0."""
    for items in published:
        publish(writer, 0, items)


def staged(writer: GroupWriter, vbid: int, first: int, last: int, end: int) -> None:
    """Rows first..last of the snapshot that ends at `end`, a key each."""
    names = keys_of(vbid, 40)
    prefix = writer.vbuckets[vbid].prefix
    rows = [row(prefix, names[seqno], b"%d" % seqno, seqno) for seqno in range(first, last + 1)]
    writer.vbuckets[vbid].stage(rows, 100, span(0, end))


def settle(writer: GroupWriter) -> None:
    """Commit, and take steps until nothing waits."""
    writer.commit()
    while writer.step() or writer.has_pending:
        writer.commit()


def put(
    writer: GroupWriter,
    key: bytes,
    seqno: int,
    value: bytes | None = b"v",
    cid: int = 0,
    expiry: int = 0,
    publish: bool = False,
    datatype: int = 0,
) -> None:
    """Stage a mutation, or a deletion (value None)."""
    frame = encode_deletion(key, seqno, collection_id=cid)
    if value is not None:
        frame = records.encode_mutation(key, value, seqno, collection_id=cid, expiry=expiry, datatype=datatype)
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


def purge_steps(writer: GroupWriter, window: Window) -> Iterator[int]:
    """Purge to the end, and return the number of each step behind it."""
    purger = writer.background.purger = Purger(writer.environment, writer.vbids, window, writer.background.leases)
    for number in range(1, 10_000):
        if (step := purger.plan(writer.options.clock_ms())) is None:
            return
        writer.background.purge(step, writer.options.clock_ms())
        yield number
    raise AssertionError("no end")


def purge(writer: GroupWriter, window: Window) -> int:
    """To the end; how many steps it took."""
    return max(purge_steps(writer, window), default=0)


def flip(writer: GroupWriter, seqno: int, at: int, bit: int = 0) -> None:
    """Flip a bit of a stored row; a negative `at` counts from the end."""
    key = keys.ROW.pack(1, seqno)
    with writer.environment.begin(write=True) as txn:
        tree = writer.environment.db(keys.rows_db(0))
        stored = bytearray(txn.get(key, db=tree))
        stored[at] ^= 1 << bit
        txn.put(key, bytes(stored), db=tree)


def scan_page(
    view: View,
    pin: Pin,
    collection_id: int = 0,
    *,
    start: bytes = b"",
    prefix: bytes = b"",
    end: bytes | None = None,
    raw: bool = False,
    **limits: int,
) -> tuple[list[Document], bytes]:
    """A page of a read whose boundary is `pin`."""
    selection = KeySelection(prefix, start, end, raw=raw)
    return view.reading(pins=[pin]).page(pin.vbid, collection_id, selection, **limits)


def manifest_of(view: View, pin: Pin) -> Manifest:
    return view.reading(pins=[pin]).manifest(pin.vbid)
