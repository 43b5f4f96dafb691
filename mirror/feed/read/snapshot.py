"""The snapshots of a read. A vbucket's sink collects each snapshot in a spool, and hands it out when it is complete.

A snapshot is valid until it is closed. Closing releases its memory and disk space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from mirror.feed.host import Staging
from mirror.feed.read.spool import OpenSpools, Spool
from mirror.ingest import instructions as ins
from mirror.ingest.events import Abandoned, Published, StagingRefused
from storage.format.records import decode_row
from storage.model import Branch, Document, FailoverLog, Manifest, Seqno, SourceFacts, VbucketState

BRANCH = Branch(0)
ROW_PREFIX = bytes(4)


@dataclass(frozen=True, slots=True)
class Position:
    """A vbucket was read up to `seqno` of the history `vbuuid`; (0, 0): nothing was read."""

    vbuuid: int = 0
    seqno: int = 0


@dataclass(slots=True, eq=False)
class Snapshot:
    """A whole snapshot of a vbucket: the changes in (start_seqno, end_seqno]. Valid until the next item is requested.

    Rows are whole messages in stored form (`storage.format.records` decodes them): mutations, deletions, expirations
    and system events.
    """

    vbid: int
    vbuuid: int
    start_seqno: int
    end_seqno: int
    spool: Spool = field(repr=False)
    manifest: Manifest = field(repr=False)
    """Scopes and collections at the snapshot's end, without those created before the read's first position."""
    purge_seqno: int | None = None
    """The source's purge seqno; None if the source does not send it (before 8.0)."""
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

    def frames(self) -> Iterator[bytes]:
        return self._open.frames()

    def documents(self, *, raw: bool = False) -> Iterator[Document]:
        """Yield the decoded rows; `raw` leaves values compressed and with their xattrs.

        A malformed value is left as stored: `storage.format.records.value_problem` gives the reason.
        """
        return (decode_row(self.vbid, BRANCH, frame, raw=raw, lenient=True) for frame in self.frames())

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
    """The vbucket's read has ended: the source can continue it only from `seqno` or below (0: from the beginning)."""

    vbid: int
    seqno: int


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """The vbucket was read as requested, up to `position`."""

    vbid: int
    position: Position
    text: str = "complete"


Item = Snapshot | SourceRolledBack | ReadEnded


class SpoolSink:
    def __init__(
        self,
        vbid: int,
        position: Position,
        spools: OpenSpools,
        hand_out: Callable[[Snapshot], None],
        on_lost: Callable[[int], None],
    ) -> None:
        """`on_lost` ends the read; its argument is the seqno of SourceRolledBack."""
        self.vbid = vbid
        self._spool: Spool | None = None
        self._spools = spools
        self._hand_out = hand_out
        self._on_lost = on_lost
        self._boundary = Seqno(position.seqno)
        # A position names one history, so one entry from 0 covers every seqno.
        self._log = FailoverLog.of([(position.vbuuid, 0)] if position.seqno else ())
        self._manifest = Manifest.initial()
        self._manifest_open = self._manifest
        self._purge_seqno = 0

    @property
    def position(self) -> Position:
        return Position(int(self._log.vbuuid_at(self._boundary)), int(self._boundary))

    def state(self) -> VbucketState:
        seqno = self._boundary
        return VbucketState(
            vbid=self.vbid,
            branch=BRANCH,
            published_seqno=seqno,
            history_floor_seqno=seqno,
            staging_branch=BRANCH,
            staged_seqno=seqno,
            staging_published_seqno=seqno,
            open_snapshot=None,
            failover_log=self._log,
            source_purge_seqno=Seqno(self._purge_seqno),
            local_purge_seqno=Seqno(0),
            manifest=self._manifest,
        )

    def row_prefix(self) -> bytes:
        return ROW_PREFIX

    def forget(self) -> None:
        if self._spool is not None:
            self._spools.release(self._spool)
            self._spool.close()
            self._spool = None
        self._manifest_open = self._manifest

    def stage(self, staging: Staging) -> StagingRefused | None:
        match staging:
            case ins.StageRows(rows=rows):
                if any(earlier[0] >= later[0] for earlier, later in pairwise(rows)):
                    self.forget()
                    return StagingRefused(self.state(), "seqnos do not rise inside a run of rows")
                self._spool = self._spools.append(self._spool, [frame for _, frame in rows])
            case ins.StageSystemEvent():
                self._spool = self._spools.append(self._spool, [staging.row_value])
                self._manifest_open = staging.manifest
            case ins.Advance():
                pass  # nothing to keep: no read starts inside a snapshot
        return None

    def publish(self, snapshot: ins.PublishSnapshot) -> Published:
        spool, self._spool = self._spool or self._spools.new(), None
        self._spools.release(spool)
        start_seqno, self._boundary = int(self._boundary), snapshot.seqno
        self._manifest = self._manifest_open
        if snapshot.source_purge_seqno is not None:
            self._purge_seqno = snapshot.source_purge_seqno
        vbuuid, end_seqno = self.position.vbuuid, int(snapshot.seqno)
        self._hand_out(
            Snapshot(self.vbid, vbuuid, start_seqno, end_seqno, spool, self._manifest, snapshot.source_purge_seqno)
        )
        return Published(snapshot.seqno)

    def save(self, facts: SourceFacts) -> None:
        """Keep only the failover log. The filter need not be kept, because a read never changes it."""
        self._log = facts.get("failover_log", self._log)

    def roll_back(self, target: ins.RollbackTo) -> None:
        self._on_lost(int(target.seqno))

    def abandon(self, staged: ins.AbandonStaged) -> Abandoned:
        self.forget()
        return Abandoned(self.state())

    def begin_resync(self, cause: str) -> None:
        """End the vbucket's read, because the source cannot continue it. The caller may read from 0."""
        self._on_lost(0)
