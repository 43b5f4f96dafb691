"""A model of a source and of what a mirror of it must show: dicts, snapshot by snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from storage.format import keys, records
from storage.model import Collection, Document, FailoverLog, Identity, Manifest, Seqno, SnapshotRange
from storage.read import changes
from storage.read.view import View
from tests.storage.frames import encode_deletion

IDENTITY = Identity("cluster", "bucket", "uuid", 4, 2)

Value = tuple[int, bytes | None]
"""(seqno, value); None: a tombstone."""


def keys_of(vbid: int, count: int, vbuckets: int = IDENTITY.vbucket_count) -> list[bytes]:
    """The first `count` keys `k<n>` that belong to a vbucket."""
    found: list[bytes] = []
    number = 0
    while len(found) < count:
        key = b"k%d" % number
        if keys.vbid_of(key, vbuckets) == vbid:
            found.append(key)
        number += 1
    return found


A, B, C, D = keys_of(0, 4)
ID = "00000000000000ff"
DEFAULT = Collection(0, 0, "_default", Seqno(0))
SCOPES = {0: "_default", 8: "shop"}


def row(prefix: bytes, key: bytes, value: bytes | None, seqno: int) -> tuple[bytes, bytes]:
    """A row as the scanner would make it."""
    frame = encode_deletion(key, seqno) if value is None else records.encode_mutation(key, value, seqno)
    return prefix + seqno.to_bytes(8, "big"), frame


def span(start_seqno: int, end_seqno: int) -> SnapshotRange:
    """The range of an open snapshot."""
    return SnapshotRange(Seqno(start_seqno), Seqno(end_seqno))


def log(vbuuid: int = 77) -> FailoverLog:
    """A failover log of one entry."""
    return FailoverLog.of([(vbuuid, 0)])


def events(view: View, vbid: int = 0, *, raw: bool = False) -> Iterator[Document]:
    """Every published event, in the order of seqnos."""
    for change in view.changes(vbid, raw=raw):
        assert change.document is not None
        yield change.document


def manifest_at(view: View, branch: int, seqno: int) -> Manifest:
    """The collections of vbucket 0 as of a position."""
    reader = view.reader(0)
    return changes.manifest_at(reader, changes.resolve_range(reader, None, None), branch, seqno)


@dataclass
class ModelVbucket:
    """The contents that one vbucket of a mirror must show."""

    vbid: int
    published: int = 0
    contents: dict[bytes, Value] = field(default_factory=dict)
    """key -> newest published version."""
    boundaries: dict[int, dict[bytes, Value]] = field(default_factory=dict)
    """Every kept boundary of the served history and the contents at it."""
    events: list[tuple[int, bytes, bytes | None]] = field(default_factory=list)
    """Published events of the served history: (seqno, key, value)."""

    def live(self) -> dict[bytes, Value]:
        """Documents that a reader must find."""
        return {key: entry for key, entry in self.contents.items() if entry[1] is not None}

    def publish(self, seqno: int, events: list[tuple[int, bytes, bytes | None]]) -> None:
        """A complete snapshot became visible."""
        self.contents = dict(self.contents)
        for at, key, value in events:
            self.contents[key] = (at, value)
        self.events += events
        self.published = seqno
        self.boundaries[seqno] = self.contents

    def purge_below(self, floor: int) -> None:
        """The floor rose to a boundary."""
        assert floor in self.boundaries
        self.boundaries = {at: contents for at, contents in self.boundaries.items() if at >= floor}

    def kept_events(self) -> list[tuple[int, bytes, bytes | None]]:
        """Events that must still be there when everything below the floor was purged."""
        floor = min(self.boundaries, default=0)
        below = {key: (at, key, value) for at, key, value in self.events if at <= floor}
        newest = [event for event in below.values() if event[2] is not None]
        return sorted(newest) + [event for event in self.events if event[0] > floor]

    def roll_back(self, to_seqno: int) -> int:
        """Back to the newest kept boundary at or below; 0 when there is none."""
        below = [seqno for seqno in self.boundaries if seqno <= to_seqno]
        if not below:
            return 0
        seqno = max(below)
        self.boundaries = {at: contents for at, contents in self.boundaries.items() if at <= seqno}
        self.contents = self.boundaries[seqno]
        self.published = seqno
        self.events = [event for event in self.events if event[0] <= seqno]
        return seqno
