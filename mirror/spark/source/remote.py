"""Changes of a source over the network, for Spark: executors consume DCP themselves.

A batch of changes ends at the high seqno E that its offset names. Rows above E come with the next batch, so each event
comes once. A snapshot that ends above E has only the newest version of a key. If that version is above E, this batch
has no version of the key, and the next batch brings it. If the source's history changes before the next batch (another
vbuuid), an older version that this batch left out may be valid again. So the next batch then begins where this batch
began (`At.since_seqno`). Some events come twice, which does not affect upserts by (at_branch, at_seqno).

History is lost if the source rolled a delivered version back (without a store, the version that is valid again is
unknown), purged a tombstone before a batch had it, or if a selected collection was dropped and created again (a stream
of the new id does not have the old one's drop). Lost history is an error, or the vbucket is sent again (onLostHistory).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from zlib import crc32

from mirror.errors import SourceTimeout
from mirror.feed.read.reader import Position, Snapshot, SourceReader, SourceRolledBack
from mirror.spark.source.changes import ChangesDriver, ChangesTask, LostHistory, Way, name_of
from mirror.spark.source.columns import change_row, control_row
from mirror.spark.source.offsets import At, Lag, Offset, admit
from mirror.spark.source.options import Options
from mirror.wire.codec_dcp import decode as decode_message
from mirror.wire.events import CollectionCreated, CollectionDropped, SystemEvent
from mirror.wire.frame import decode as decode_frame
from mirror.wire.system_events import decode_system_event
from storage.env.directory import MapRecord
from storage.format.records import decode_row
from storage.model import Branch, FailoverEntry, FailoverLog, Kind

AGAIN = "start the query again"
SUSPECTS = 16
"""Each batch also requests the failover logs of this many vbuckets whose high seqno may be unchanged."""


class SourceConnections:
    """Keeps the process's source reader and its connections between tasks: a Python worker runs many tasks."""

    def __init__(self) -> None:
        self._reader: SourceReader | None = None
        self._key: tuple[Any, ...] = ()

    def reader(self, options: Options, followed: MapRecord | None) -> SourceReader:
        """Return an open reader whose cluster map is not older than the driver's, `followed`."""
        key = (os.getpid(), options.connection, options.collections, options.ca_file)
        if self._reader is not None and self._key == key and not is_behind(self._reader.followed, followed):
            return self._reader
        self.drop()
        self._reader, self._key = connected(options, followed).__enter__(), key
        return self._reader

    def drop(self) -> None:
        """Close the reader: after an error, data of the failed request may still arrive."""
        reader, self._reader = self._reader, None
        if reader is not None and self._key[0] == os.getpid():
            reader.close()


def connected(options: Options, followed: MapRecord | None = None) -> SourceReader:
    assert options.connection is not None
    return SourceReader(options.connection, collections=options.collections, ca=options.ca_file, followed=followed)


def is_behind(known: MapRecord | None, followed: MapRecord | None) -> bool:
    """Return True if a reader's cluster map is older than the driver's."""
    if known is None or followed is None or known.bucket_uuid != followed.bucket_uuid:
        return False
    return known.revision < followed.revision


def filter_sum(reader: SourceReader) -> int:
    """Return a checksum of the selected ids, in whatever order they were named; 0 without a selection."""
    found = [
        f"{kind} {number}"
        for kind, ids in reader.stream_filter.items()
        for number in ([ids] if isinstance(ids, str) else ids)
    ]
    return crc32(",".join(sorted(found)).encode())


KEPT = SourceConnections()


def event_of(frame: bytes) -> SystemEvent:
    event = decode_message(decode_frame(frame)[0])
    assert isinstance(event, SystemEvent), event
    return event


class RemoteChanges(ChangesDriver):
    def __init__(self, options: Options) -> None:
        self._reader = connected(options).__enter__()
        try:
            self._vbids = options.vbids_of(range(self._reader.vbucket_count))
        except BaseException:
            self._reader.close()
            raise
        super().__init__(options, "connection", self._reader.bucket_uuid)
        self._filter_sum = filter_sum(self._reader)
        self._probed: set[tuple[int, int]] = set()
        self._looked = False

    def close(self) -> None:
        self._reader.close()

    def published(self) -> Offset:
        found = {}
        for vbid, seqno in self.seqnos().items():
            if seqno:
                found[vbid] = At(0, seqno, self._reader.failover_log(vbid)[0].vbuuid, filter_sum=self._filter_sum)
        return replace(self.beginning(), at=found, names=self._reader.collection_names())

    def stop_at_published(self) -> None:
        self._target = self.seqnos()

    def seqnos(self) -> dict[int, int]:
        selected = set(self._vbids)
        return {vbid: seqno for vbid, seqno in self._reader.high_seqnos().items() if vbid in selected}

    def latest(self, start: Offset, limited: bool) -> Offset:
        lags: dict[int, Lag] = {}
        again: dict[int, str] = {}
        suspects = self._suspects()
        for vbid, high_seqno in self.seqnos().items():
            at = start.of(vbid)
            seqno = high_seqno if self._target is None else min(high_seqno, self._target.get(vbid, 0))
            if seqno == at.seqno and (vbid not in suspects or not seqno):
                continue
            log = self._reader.failover_log(vbid)
            lost = self._lost(vbid, at, log)
            if lost:
                self._refuse(vbid, lost)
                again[vbid] = lost
            elif seqno <= at.seqno:
                continue
            weight = 1 / self._options.max_rows if limited else 1e-18
            end = At(at.branch, seqno, log[0].vbuuid, filter_sum=self._filter_sum)
            lags[vbid] = Lag(0 if lost else at.seqno, end, bool(lost), weight)
        ends, self._turn = admit(lags, self._turn, lambda *_: None, lambda vbid, _: lags[vbid].published)
        moved = {}
        for vbid, end in ends.items():
            at = start.of(vbid)
            if vbid in again:
                moved[vbid] = end._replace(branch=at.branch + 1, fresh=1)
            else:
                moved[vbid] = end._replace(since_seqno=_begins(at, end.vbuuid))
        names = {**start.names, **self._reader.collection_names()} if moved else start.names
        return replace(start, at={**start.at, **moved}, names=names)

    def _suspects(self) -> set[int]:
        """Return the vbuckets to check for a changed history even if their seqno is unchanged: all in a query's first
        batch, `SUSPECTS` in each later batch.
        """
        if not self._looked:
            self._looked = True
            return set(self._vbids)
        self._vbids = self._vbids[SUSPECTS:] + self._vbids[:SUSPECTS]
        return set(self._vbids[:SUSPECTS])

    def _lost(self, vbid: int, at: At, log: FailoverLog) -> str:
        if not at.seqno:
            return ""
        if at.filter_sum != self._filter_sum:  # the stream of a new id does not have the old one's drop
            return "a selected collection was dropped and created again"
        gone = not_on(at, log)
        if gone:
            return gone
        history = vbid, log[0].vbuuid
        if history not in self._probed:  # later positions are recent, and no tombstone above them is purged yet
            seqno = _begins(at, log[0].vbuuid) or at.seqno  # a read from 0 is never refused
            for item in self._reader.read({vbid: Position(log.vbuuid_at(seqno), seqno)}, {vbid: seqno}):
                if isinstance(item, SourceRolledBack):
                    return f"the source has forgotten deletions since seqno {seqno}"
        self._probed.add(history)
        return ""

    def _way(self, vbid: int, since: At, to: At) -> Way | None:
        log = self._reader.failover_log(vbid)
        gone = not_on(to, log)
        if gone:
            self._refuse(vbid, gone)
            return None
        lost = to.fresh == 0 and self._lost(vbid, since, log)
        if lost:
            self._refuse(vbid, lost)
        seqno = _begins(since, to.vbuuid)
        first = since._replace(seqno=seqno, vbuuid=int(log.vbuuid_at(seqno)))
        return Way(vbid, first, to, bool(lost or to.fresh))

    def _task(self, start: Offset, end: Offset) -> ChangesTask:
        return ChangesTask(names=end.names, known=frozenset(start.names), followed=self._reader.followed)


def _begins(since: At, vbuuid: int) -> int:
    """Return the seqno after which a batch that ends in the history `vbuuid` begins. If the history has changed, the
    batch before began there, too.
    """
    return since.seqno if since.vbuuid == vbuuid else since.since_seqno


def not_on(at: At, log: FailoverLog) -> str:
    """Return why a position is not on the source's history, or an empty text if it is."""
    newer: FailoverEntry | None = None
    for entry in log:
        if entry.vbuuid == at.vbuuid:
            if newer is not None and at.seqno > newer.seqno:
                return (
                    f"the source lost the writes after seqno {newer.seqno}, and those up to {at.seqno} were delivered; "
                    "over a connection the documents concerned are not known"
                )
            return ""
        newer = entry
    return f"the source does not know the history {at.vbuuid:#x} of the position {at.seqno}"


def read_changes(options: Options, work: ChangesTask) -> Iterator[tuple[Any, ...]]:
    reader = KEPT.reader(options, work.followed)
    if any(way.end.filter_sum != filter_sum(reader) for way in work.ways):  # it may have an id that is dropped by now
        KEPT.drop()
        reader = KEPT.reader(options, work.followed)
    ways = {way.vbid: way for way in work.ways}
    positions = {
        vbid: Position() if way.again else Position(way.start.vbuuid, way.start.seqno) for vbid, way in ways.items()
    }
    begun: set[int] = set()
    try:
        for item in reader.read(positions, {vbid: way.end.seqno for vbid, way in ways.items()}):
            way = ways[item.vbid]
            if isinstance(item, SourceRolledBack):
                raise LostHistory(
                    f"vbucket {item.vbid}: the source went back to seqno {item.seqno} while it was read", hint=AGAIN
                )
            if way.again and way.vbid not in begun:
                begun.add(way.vbid)
                yield control_row("resync", way.vbid, "", way.end.branch, 0, way.end.vbuuid, way.end.seqno)
            if isinstance(item, Snapshot):
                yield from _rows(item, way, work)
        _check_ends(reader, ways)
    except BaseException as error:
        try:
            if isinstance(error, SourceTimeout):  # an idle source never reaches an end that it lost
                _check_ends(reader, ways)
        finally:
            KEPT.drop()
        raise


def _check_ends(reader: SourceReader, ways: Mapping[int, Way]) -> None:
    for vbid, way in ways.items():
        gone = not_on(way.end, reader.failover_log(vbid))
        if gone:
            raise LostHistory(f"vbucket {vbid}: {gone}", hint=AGAIN)


def _rows(snapshot: Snapshot, way: Way, work: ChangesTask) -> Iterator[tuple[Any, ...]]:
    vbid, branch, ends = way.vbid, way.end.branch, snapshot.end_seqno
    for frame in snapshot.frames():
        if frame[1] == Kind.SYSTEM_EVENT:
            event = event_of(frame)
            content = decode_system_event(event)
            if event.seqno > way.end.seqno:
                continue
            if isinstance(content, CollectionDropped):
                kind = "collection_dropped"
            elif isinstance(content, CollectionCreated) and (content.flush_uid or content.collection_id in work.known):
                kind = "collection_flushed"
            else:
                continue
            name = name_of(work.names, content.collection_id)
            yield control_row(kind, vbid, name, branch, event.seqno, snapshot.vbuuid, ends)
            continue
        document = decode_row(vbid, Branch(0), frame, lenient=True)
        if document.seqno <= way.end.seqno:
            name = name_of(work.names, document.collection_id)
            at = (branch, int(document.seqno))
            yield change_row(document, name, document.kind.name.lower(), snapshot.vbuuid, ends, at, branch)
