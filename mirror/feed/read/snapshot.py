"""The items of a bounded read: whole snapshots, and the end of a vbucket's read.

Knows the rows of a snapshot as a spool of frames in stored form; must never know streams or connections. Invariants: a
snapshot is valid until it is closed, and gives its memory and disk back then, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mirror.feed.read.spool import Spool
from storage.format.records import decode_row
from storage.model import Branch, Document, Manifest

_BRANCH = Branch(0)


@dataclass(frozen=True, slots=True)
class Position:
    """The reader holds everything of a vbucket up to `seqno` of the history `vbuuid`; (0, 0): nothing."""

    vbuuid: int = 0
    seqno: int = 0


@dataclass(slots=True, eq=False)
class Snapshot:
    """A whole snapshot of a vbucket: everything that changed in (start_seqno, end_seqno]. Valid until the next item is
    requested.

    Rows are whole messages in stored form (`storage.format.records` decodes them): mutations, deletions, expirations
    and system events.
    """

    vbid: int
    vbuuid: int
    start_seqno: int
    end_seqno: int
    spool: Spool = field(repr=False)
    manifest: Manifest = field(repr=False)
    """Scopes and collections at its end, as far as the read has seen them made: all, if it began at 0."""
    purge_seqno: int | None = None
    """Tombstones up to here are gone at the source, if it says so (8.0 and newer)."""
    on_close: Callable[[int, int], None] | None = field(default=None, repr=False)
    """Called once, with the bytes of memory and disk that the snapshot held."""
    _closed: bool = field(default=False, repr=False)

    @property
    def position(self) -> Position:
        return Position(self.vbuuid, self.end_seqno)

    @property
    def row_count(self) -> int:
        """The number of rows; 0 in a snapshot that only moves the position."""
        return self._open.frame_count

    @property
    def byte_count(self) -> int:
        return self._open.byte_count

    def frames(self) -> Iterator[bytes]:
        return self._open.frames()

    def documents(self, *, raw: bool = False) -> Iterator[Document]:
        """Yield the decoded rows; `raw` leaves values compressed and with their xattrs.

        Malformed values stay as they are: `storage.format.records.value_problem` gives the reason.
        """
        return (decode_row(self.vbid, _BRANCH, frame, raw=raw, lenient=True) for frame in self.frames())

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            held_bytes = self.spool.memory_bytes, self.spool.disk_bytes
            self.spool.close()
            if self.on_close is not None:
                self.on_close(*held_bytes)

    @property
    def _open(self) -> Spool:
        assert not self._closed, "a snapshot is valid until the next item is requested"
        return self.spool


@dataclass(frozen=True, slots=True)
class SourceRolledBack:
    """The source lost everything above `seqno`; at 0, it no longer knows all changes since the position. This ends the
    vbucket's read.
    """

    vbid: int
    seqno: int


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """The vbucket was read as requested, up to `position`."""

    vbid: int
    position: Position
    text: str = "complete"


Item = Snapshot | SourceRolledBack | ReadEnded
