"""A vbucket whose source fails over, purges, and drops collections, its mirror, and clients of the mirror's streams.

The source's whole history is kept here in plain lists, so what a client must hold at the end of a snapshot is known
without asking the store. Clients do what DCP asks of them and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from mirror.ingest import collections as manifests
from mirror.serve.dcp.dcp_session import ABILITIES
from mirror.serve.dcp.dcp_stream import DcpStream
from mirror.serve.dcp.filter import ServedFilter
from mirror.serve.dcp.producer import published_history, rollback_seqno
from mirror.server.controls import Controls
from mirror.server.errors import Refused
from mirror.server.rollback import judge
from mirror.wire import codec_dcp
from mirror.wire.constants import DcpOpenFlag, MarkerVersion, StreamEndReason
from mirror.wire.events import (
    CollectionCreated,
    CollectionDropped,
    Deletion,
    Mutation,
    SeqnoAdvanced,
    SnapshotMarker,
    StreamEnd,
    StreamRequest,
    SystemEvent,
)
from mirror.wire.frame import FrameBuffer
from mirror.wire.system_events import decode_system_event, encode_system_event
from storage.env import directory
from storage.format import keys, records
from storage.history.purge import Window
from storage.model import SEQNO_MAX, FailoverLog, Identity, Manifest, Seqno, SnapshotRange
from storage.read import stream_reads as stream
from storage.read.view import open_view
from storage.write.writer import GroupWriter, WriterOptions
from tests.storage.frames import encode_deletion

WINDOW_MS = 1000
State = dict[bytes, int]
"""Wire key -> seqno of the live version: two states with the same seqnos of one history are the same."""


@dataclass(frozen=True)
class Change:
    seqno: int
    key: bytes
    alive: bool = True
    content: CollectionCreated | CollectionDropped | None = None

    @property
    def dedup_key(self) -> bytes:
        """System events replace nothing."""
        return self.key if self.content is None else b"event %d" % self.seqno


def fold(changes: list[Change], up_to: int) -> State:
    """The live documents at a seqno."""
    state: State = {}
    for change in changes:
        if change.seqno > up_to:
            break
        apply(state, change)
    return state


def apply(state: State, change: Change) -> None:
    if change.content is not None:
        prefix = keys.encode_collection_id(change.content.collection_id)
        for key in [key for key in state if key.startswith(prefix)]:
            del state[key]
    elif change.alive:
        state[change.key] = change.seqno
    else:
        state.pop(change.key, None)


class World:
    """The source and its mirror."""

    def __init__(self, path: Path, rng: Random) -> None:
        self.rng = rng
        self.now_ms = 1_000_000
        self.path = str(path / "data")
        identity = Identity("cluster", "orders", "b1", 1, 1)
        directory.create(self.path, identity)
        self.writer = GroupWriter(
            directory.group_path(self.path, 0),
            WriterOptions(
                group=0,
                identity=identity,
                sync="unsafe",
                clock_ms=lambda: self.now_ms,
                window=Window(time_ms=WINDOW_MS),
            ),
        )
        self.view = open_view(self.path)
        self.changes: list[Change] = []
        self.log = FailoverLog.of([(rng.getrandbits(48), 0)])
        self.high_seqno = 0
        self.source_purge_seqno = 0
        self.manifest = Manifest.initial()
        self.expected: dict[tuple[int, int], State] = {}
        """(branch, seqno) of everything that the mirror served -> what was alive there."""
        self.resyncing = False
        self.kept_rows = 0
        self.writer.vbuckets[0].save(failover_log=self.log)
        self.writer.commit()
        self._served()

    def close(self) -> None:
        self.view.close()
        self.writer.close()

    @property
    def held_seqno(self) -> int:
        """Up to here the mirror has everything, published or not."""
        return int(self.writer.vbuckets[0].state.staged_seqno)

    def _served(self) -> None:
        state = self.writer.vbuckets[0].state
        branch, seqno = int(state.branch), int(state.published_seqno)
        self.expected.setdefault((branch, seqno), fold(self.changes, seqno))

    # -- the source

    def write(self, count: int) -> None:
        """So many changes at the source."""
        for _ in range(count):
            self.high_seqno += 1
            self.changes.append(self._change(self.high_seqno))

    def _change(self, seqno: int) -> Change:
        rng = self.rng
        roll = rng.random()
        manifest = self.manifest
        others = [cid for cid in manifest.collections if cid]
        if roll < 0.02 and len(others) < 3:
            cid = 8 + len([each for each in self.changes if each.content is not None])
            return self._event(seqno, CollectionCreated(seqno, 0, cid, f"c{cid}"))
        if roll < 0.03 and others:
            return self._event(seqno, CollectionDropped(seqno, 0, rng.choice(others)))
        if roll < 0.04 and others:
            cid = rng.choice(others)
            return self._event(seqno, CollectionCreated(seqno, 0, cid, f"c{cid}"))
        cid = rng.choice([0, 0, 0, *others])
        return Change(seqno, keys.encode_collection_id(cid) + b"k%d" % rng.randrange(30), rng.random() < 0.75)

    def _event(self, seqno: int, content: CollectionCreated | CollectionDropped) -> Change:
        self.manifest = manifests.apply(self.manifest, content, Seqno(seqno))
        return Change(seqno, b"", content=content)

    def fail_over(self, *, keep_seqno: int) -> None:
        """The source goes on from `keep_seqno` under a new name; the mirror follows as a consumer does."""
        self.changes = [each for each in self.changes if each.seqno <= keep_seqno]
        self.high_seqno = keep_seqno
        self.manifest = Manifest.initial()
        for change in self.changes:
            if change.content is not None:
                self.manifest = manifests.apply(self.manifest, change.content, Seqno(change.seqno))
        kept = [entry for entry in self.log if entry.seqno <= keep_seqno]
        self.log = FailoverLog.of([(self.rng.getrandbits(48), keep_seqno), *kept])

    def purge_source(self) -> None:
        """The source forgets its tombstones."""
        self.source_purge_seqno = self.high_seqno

    # -- the mirror

    def receive(self, end_seqno: int, *, publish: bool = True) -> None:
        """A snapshot up to `end_seqno`, deduplicated as a source does."""
        start = self.held_seqno
        if start > end_seqno or self.writer.vbuckets[0].state.open_snapshot is not None:
            return
        newest = {each.dedup_key: each for each in self.changes if start < each.seqno <= end_seqno}
        rows = sorted(newest.values(), key=lambda each: each.seqno)
        if start == 0:  # a backfill from nothing: what the source has purged does not come
            rows = [each for each in rows if each.alive or each.content or each.seqno > self.source_purge_seqno]
            missing = self.rng.choice([self.source_purge_seqno, SEQNO_MAX])
            self.writer.vbuckets[0].save(failover_log=self.log, missing_seqno=missing)
        within = SnapshotRange(Seqno(start), Seqno(end_seqno))
        manifest = Manifest.initial()
        for each in self.changes:
            if each.seqno > start:
                break
            if each.content is not None:
                manifest = manifests.apply(manifest, each.content, Seqno(each.seqno))
        for each in rows:
            if each.content is not None:
                manifest = manifests.apply(manifest, each.content, Seqno(each.seqno))
                frame = codec_dcp.encode(encode_system_event(each.content, vbid=0, seqno=each.seqno))
                self.writer.vbuckets[0].system_event(each.seqno, frame, manifest, within)
            else:
                self.writer.vbuckets[0].stage([self._row(each)], 10, within)
            self.kept_rows += 1
        if publish:
            self.publish(end_seqno)
        else:
            vbucket = self.writer.vbuckets[0]
            vbucket.advance(vbucket.staged_seqno, within)
            self.writer.commit(flush_open=True)

    def _row(self, change: Change) -> tuple[bytes, bytes]:
        cid, key = keys.split_key(change.key)
        if change.alive:
            frame = records.encode_mutation(key, b"v%d" % change.seqno, change.seqno, collection_id=cid)
        else:
            frame = encode_deletion(key, change.seqno, collection_id=cid)
        return self.writer.vbuckets[0].prefix + change.seqno.to_bytes(8), frame

    def publish(self, end_seqno: int) -> None:
        self.writer.vbuckets[0].publish(end_seqno, 0)
        self.writer.commit()
        self.resyncing = False
        self._served()

    def follow_failover(self) -> None:
        """Do as the mirror's consumer after a failover of the source."""
        state = self.writer.vbuckets[0].state
        common = self.log[0].seqno
        if state.staging_branch != state.branch:  # the resync that was under way may hold what is lost
            if self.held_seqno > common:
                self.resync()
        elif state.staged_seqno > state.published_seqno:
            self.writer.vbuckets[0].abandon()
        if self.writer.vbuckets[0].state.staging_branch == self.writer.vbuckets[0].state.branch:
            published = int(self.writer.vbuckets[0].state.published_seqno)
            if published > common and not self.writer.vbuckets[0].rollback(common).boundary_seqno:
                self.resync()
        self.writer.vbuckets[0].save(failover_log=self.log)
        self.writer.commit()
        self._served()

    def resync(self) -> None:
        """Everything from 0, next to the old copy."""
        self.writer.vbuckets[0].begin_resync()
        self.writer.vbuckets[0].save(failover_log=self.log)
        self.writer.commit()
        self.resyncing = True

    def go_back(self) -> None:
        """An operator's rollback: the source knows nothing of it, and its log stays what it was."""
        published = int(self.writer.vbuckets[0].state.published_seqno)
        if published and self.writer.vbuckets[0].rollback(self.rng.randint(published // 2, published)).boundary_seqno:
            self.writer.vbuckets[0].save(failover_log=self.log)
            self.writer.commit()
            self._served()

    def purge(self) -> None:
        """Time passes, and the mirror's history goes."""
        self.now_ms += self.rng.choice([0, WINDOW_MS // 3, 2 * WINDOW_MS])
        for _ in range(200):
            if not self.writer.step():
                break


class WatchedStream(DcpStream):
    """Remembers what was served at the end of each of its snapshots."""

    world: World
    expected_at: dict[int, State]

    def _open(self, out: bytearray, now: stream.ServedState) -> None:
        at = [(link.branch, now.pub.seqno) for link in now.links if link.base_seqno <= now.pub.seqno]
        self.expected_at[now.pub.seqno] = next(self.world.expected[each] for each in at if each in self.world.expected)
        super()._open(out, now)


@dataclass
class Boundary:
    seqno: int
    state: State
    log: FailoverLog


@dataclass
class Client:
    """Follows the mirror by the rules, keeps every boundary, and is compared at each snapshot's end."""

    world: World
    controls: Controls
    seen: dict[str, int] = field(default_factory=dict)
    boundaries: list[Boundary] = field(default_factory=list)
    log: FailoverLog = field(default_factory=FailoverLog)
    stream: WatchedStream | None = None
    state: State = field(default_factory=dict)
    position: int = 0
    marker: SnapshotMarker | None = None
    collections: frozenset[int] | None = None
    keys: set[bytes] = field(default_factory=set)
    """Of the snapshot that this stream is in the middle of."""

    def _count(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1

    @property
    def boundary(self) -> Boundary:
        return self.boundaries[-1] if self.boundaries else Boundary(0, {}, FailoverLog())

    def connect(self) -> None:
        """Ask for a stream until one is accepted; a vbucket that is being filled has none."""
        world = self.world
        for _ in range(20):
            served = stream.served_state(world.view.reader(0))
            if not served.whole:
                self._count("not whole")
                self.stream = None
                return
            marker = self.marker
            middle = marker is not None and self.position > self.boundary.seqno and world.rng.random() < 0.7
            if middle:
                assert marker is not None
                start, snap_start, snap_end = self.position, self.boundary.seqno, marker.end_seqno
            else:
                self._forget_part()
                start = snap_start = snap_end = self.boundary.seqno
            purge_seqno = marker.purge_seqno if marker is not None and middle and marker.purge_seqno else None
            request = StreamRequest(0, 0, start, SEQNO_MAX, self.log.vbuuid_at(start), snap_start, snap_end, opaque=7)
            stream_filter = ServedFilter(collections=self.collections, purge_seqno=purge_seqno)
            history = published_history(served)
            back_to_seqno = judge(request, history, stream_filter.purge_seqno)
            if back_to_seqno is None:
                self._count("middle" if middle else "accepted")
                self.log = served.failover_log
                controls = replace(self.controls)
                self.stream = WatchedStream(request, served, stream_filter, controls, lambda: world.view)
                self.stream.world, self.stream.expected_at = world, {}
                return
            try:
                seqno = rollback_seqno(world.view, request, history, back_to_seqno)
            except Refused:  # it holds what is not published yet
                self._count("waits")
                self.stream = None
                return
            self._count("rolled back" if seqno else "begins again")
            assert seqno in (0, *(each.seqno for each in self.boundaries)), "inside of a snapshot that was sent"
            while self.boundaries and self.boundaries[-1].seqno > seqno:
                self.boundaries.pop()
            self.log = self.log.pruned(self.boundary.seqno)
            self._forget_part()
        raise AssertionError("twenty answers, and none accepts")

    def _forget_part(self) -> None:
        self.state, self.position, self.marker = dict(self.boundary.state), self.boundary.seqno, None

    def hang_up(self) -> None:
        """The connection is lost, perhaps in the middle of a snapshot."""
        self.stream = None
        if self.marker is not None and self.position <= self.boundary.seqno:
            self.marker = None

    def read(self, bytes_max: int) -> bool:
        """Take a piece of the stream. Return False if the stream waits for the mirror, or there is none. A piece may be
        empty: the time of a turn is over on a busy machine.
        """
        stream = self.stream
        if stream is None:
            return False
        data = stream.take(bytes_max)
        buffer = FrameBuffer()
        buffer.feed(data)
        while (frame := buffer.next_frame()) is not None:
            self._apply(codec_dcp.decode(frame))
        assert not self.stream or not self.stream.ended
        return not stream.waiting

    def _apply(self, event: object) -> None:
        if isinstance(event, SnapshotMarker):
            assert self.marker is None or (self.marker.end_seqno <= event.end_seqno), "an end never falls"
            assert event.end_seqno > self.boundary.seqno
            self.marker = event
            self.keys.clear()
            return
        if isinstance(event, StreamEnd):
            self._count(StreamEndReason(event.reason).name)
            self.hang_up()
            return
        assert self.marker is not None, event
        assert isinstance(event, (Mutation, Deletion, SystemEvent, SeqnoAdvanced)), event
        assert self.position < event.seqno <= self.marker.end_seqno
        self.position = event.seqno
        if isinstance(event, SystemEvent):
            content = decode_system_event(event)
            assert isinstance(content, (CollectionCreated, CollectionDropped))
            event_key = b"event of %d" % content.collection_id
            assert event_key not in self.keys, "an event of a collection comes once in a snapshot"
            self.keys.add(event_key)
            apply(self.state, Change(event.seqno, b"", content=content))
        elif isinstance(event, (Mutation, Deletion)):
            assert event.key not in self.keys, "a key comes once in a snapshot"
            self.keys.add(event.key)
            apply(self.state, Change(event.seqno, event.key, isinstance(event, Mutation)))
        if event.seqno == self.marker.end_seqno:
            self._complete(event.seqno)

    def _complete(self, seqno: int) -> None:
        self._count("complete")
        assert self.stream is not None
        expected = self.stream.expected_at[seqno]
        if self.collections is not None:
            prefixes = tuple(keys.encode_collection_id(cid) for cid in self.collections)
            expected = {key: at for key, at in expected.items() if key.startswith(prefixes)}
        assert self.state == expected, (seqno, self.seen)
        self.boundaries.append(Boundary(seqno, dict(self.state), self.log))
        self.marker = None


def client_of(world: World, rng: Random) -> Client:
    """A client that holds a random part of the history."""
    flags = int(DcpOpenFlag.PRODUCER | DcpOpenFlag.INCLUDE_XATTRS)
    version = rng.choice([MarkerVersion.V1, MarkerVersion.V2_2])
    controls = Controls(ABILITIES, True, True, flags, marker_version=version)
    return Client(world, controls, collections=rng.choice([None, None, frozenset({0})]))
