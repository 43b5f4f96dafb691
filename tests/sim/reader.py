"""A bounded reader of the same source: real reads, sessions and links, and a copy of what they hand out.

It reads as anyone does who keeps what was handed out and continues there later, also after its process was killed. What
is checked at each snapshot: it follows on what was handed out before, and the copy is then what the source held at its
end, on the history that it names. What a rollback says is checked where the read ends: the copy is given up, and the
next read begins at 0.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

from mirror.clock import Clock
from mirror.config import Settings
from mirror.feed.connection.bootstrap import Access, Handshake
from mirror.feed.connection.connection_string import NodeAddress, parse
from mirror.feed.connection.node_session import NodeSession
from mirror.feed.connection.transport import Link, Opaques
from mirror.feed.read.reading import BoundedRead, ReadVbucket
from mirror.feed.read.snapshot import Position, ReadEnded, Snapshot, SourceRolledBack
from mirror.feed.read.spool import SpoolFile
from mirror.ingest import events as machine_events
from mirror.wire import codec_dcp
from mirror.wire.constants import Feature
from mirror.wire.events import CollectionCreated, CollectionDropped, Deletion, Expiration, Mutation, SystemEvent
from mirror.wire.frame import decode
from mirror.wire.system_events import decode_system_event
from storage.format.records import decode_row
from storage.model import Branch, Document
from tests.manual_clock import ManualClock
from tests.sim.checkers import facts, reported
from tests.sim.loop import drive
from tests.sim.network import Wire
from tests.sim.source import SimProducer, Source
from tests.storage.open_readers import wire_key

NODES = 2


class SimReader:
    """A bounded reader: its connections, its current read, and its copy of each vbucket."""

    def __init__(self, source: Source, rng: Random, clock: ManualClock, counts: Counter[str], *, vbuckets: int) -> None:
        self.source = source
        self.rng = rng
        self.clock: Clock = clock
        self.counts = counts
        self.settings = Settings(connection_buffer_size=rng.choice((600, 5_000, 1 << 20)))
        self.memory_bytes = rng.choice((500, 5_000, 1 << 20))
        self.parallel = rng.choice((1, 2, 8))
        self.copies: list[dict[bytes, Document]] = [{} for _ in range(vbuckets)]
        self.positions = [Position() for _ in range(vbuckets)]
        self.until: dict[int, int] | None = None
        self.past_counts: dict[int, int] = {}
        self.read: BoundedRead | None = None
        self.sessions: list[NodeSession | None] = [None] * NODES
        self.wires: list[Wire | None] = [None] * NODES
        self.acks_held = False
        self.life = 0
        self._opaques = Opaques()

    # --- what the read asks of its maps, connections and queries

    stream_filter: ClassVar[dict[str, Any]] = {}

    def address_of(self, vbid: int) -> int:
        return self.source.bucket.map.owners[vbid]

    def session_at(self, number: int) -> NodeSession | None:
        session = self.sessions[number]
        return session if session is not None and session.ready else None

    def refresh_map(self, config: bytes, vbid: int) -> None:
        pass

    def hold_acks(self) -> None:
        self.counts["acknowledgements held for a reader"] += 1
        self.acks_held = True
        for session in self._ready():
            session.acks_held = True

    def release_acks(self) -> None:
        self.acks_held = False
        for session in self._ready():
            session.release_acks()

    def _ready(self) -> list[NodeSession]:
        return [session for session in self.sessions if session is not None and session.ready]

    # --- what sessions bring (`SessionOwner`)

    def on_closed(self, session: NodeSession, error: Any) -> None:
        for vbucket in self._streamed():
            if vbucket.host.session is session:
                vbucket.host.detach(machine_events.ConnectionLost(error.what))

    def _streamed(self) -> list[ReadVbucket]:
        return [] if self.read is None else list(self.read.active.values())

    # --- the simulation's steps

    def step(self, life: int) -> None:
        """Begin a read, connect, let bytes pass in pieces, take what is complete; now and then something breaks."""
        self.lives(life)
        if self.read is None:
            self.begin(bounded=self.rng.random() < 0.8)
        number = self.rng.randrange(NODES)
        self.connect(number)
        self._follow_map()
        if self.rng.random() < 0.1 and (wire := self.wires[number]) is not None:
            self.counts["connections of a reader cut"] += 1
            wire.cut()
        for _ in range(self.rng.randint(1, 4)):
            self._pass(number, self.rng.choice((24, 60, 300, 600, 2_000, 1 << 20)))
        if self.rng.random() < 0.7:
            self.take()
        if self.until is None and self.rng.random() < 0.05:
            self.end()
        waiting = self.read is not None and self.read.outbox.full
        assert waiting or not self.acks_held, "the source waits, and nothing that is taken lets it go on"

    def finish(self, life: int, vbuckets: int) -> bool:
        """Read everything without faults; return True once it is done."""
        self.lives(life)
        if self.read is None:
            self.begin(bounded=True, vbids=list(range(vbuckets)))
        for number in range(NODES):
            self.connect(number)
            self._follow_map()
            self._pass(number, 1 << 20)
        self.take()
        return self.read is None

    def lives(self, life: int) -> None:
        """Forget memory and connections if the process was killed since; the copies stay."""
        if self.life != life:
            self.life = life
            self.read = None
            for wire in self.wires:
                if wire is not None and wire.open:
                    wire.open = False
                    wire.server.connection_lost(None)
            self.wires, self.sessions = [None] * NODES, [None] * NODES
            self.acks_held = False

    def begin(self, *, bounded: bool, vbids: list[int] | None = None) -> None:
        """Begin a read of some vbuckets after their last positions."""
        everything = range(len(self.positions))
        chosen = vbids or sorted(self.rng.sample(everything, self.rng.randint(1, len(everything))))
        self.until = {vbid: self.source.vbucket(vbid).high_seqno for vbid in chosen} if bounded else None
        self.past_counts = {vbid: self.source.past_count(vbid) for vbid in chosen}
        self.counts["bounded reads begun" if bounded else "endless reads begun"] += 1
        source: Any = SimpleNamespace(clock=self.clock, maps=self, connections=self, stream_filter=self.stream_filter)
        self.read = BoundedRead(
            source,
            SpoolFile(),
            {vbid: self.positions[vbid] for vbid in chosen},
            self.until,
            memory_bytes=self.memory_bytes,
            parallel=self.parallel,
            on_half_empty=self.release_acks,
        )
        self.read.fill_up()

    def end(self) -> None:
        if self.read is not None:
            self.read.end()
            self.read = None
            self.release_acks()

    def connect(self, number: int) -> None:
        session = self.sessions[number]
        if session is not None and session.ready:
            return
        address = NodeAddress("node", 10_000 + number)
        access = Access.of(parse("couchbase://demo@node/demo"), self.settings)
        name = f"reader:{self.life}:{number}"
        session = NodeSession(access, address, self, self.clock, name=name, opaques=self._opaques)
        features = {Feature.COLLECTIONS} if self.source.collections else set()
        session.handshake = Handshake(frozenset(int(feature) for feature in features))
        session.controls["max_marker_version"] = self.source.marker_v2_2
        link = Link(address, self.clock, self._opaques)
        session._link = link
        link.on_batch, link.on_lost = session.on_batch, session.on_lost
        server = self.source.connect(number)
        wire = self.wires[number] = Wire()
        wire.join(link, server)
        server.open_sim(self.source, window_bytes=self.settings.connection_buffer_size, name=name, of_mirror=False)
        session.ready = True
        session.acks_held = self.acks_held
        self.sessions[number] = session

    def _follow_map(self) -> None:
        for vbucket in self._streamed():
            session = self.session_at(self.address_of(vbucket.vbid))
            if vbucket.host.session is not None and vbucket.host.session is not session:
                vbucket.host.detach(machine_events.Stop("moved"))
            if session is not None and vbucket.host.session is None:
                vbucket.host.attach(session)

    def _pass(self, number: int, size: int) -> None:
        wire = self.wires[number]
        if wire is None or not wire.open:
            return
        wire.deliver_up(1 << 20)
        producer = wire.server.session.producer
        if wire.open and isinstance(producer, SimProducer):
            drive(producer._round())
        if wire.open:
            wire.deliver_down(size)

    # --- what is handed out

    def take(self) -> None:
        """Take some complete snapshots, and compare."""
        read = self.read
        for _ in range(self.rng.choice((1, 3, 100))):
            if read is None or not read.outbox._items:
                break
            item = read.outbox.take()
            assert item is not None
            if isinstance(item, Snapshot):
                self._snapshot(item)
                item.close()
            elif isinstance(item, SourceRolledBack):
                position = self.positions[item.vbid]
                assert 0 <= item.seqno < position.seqno, f"vb {item.vbid}: {item} of {position}"
                self.counts["reads that were rolled back"] += 1
                self.copies[item.vbid], self.positions[item.vbid] = {}, Position()
            else:
                self._ended(item)
        if read is not None and read.outbox._finished and not read.outbox._items:
            assert read.outbox._error is None, read.outbox._error
            self.read = None
            self.release_acks()

    def _snapshot(self, snapshot: Snapshot) -> None:
        vbid, copy, before = snapshot.vbid, self.copies[snapshot.vbid], self.positions[snapshot.vbid]
        assert snapshot.start_seqno == before.seqno <= snapshot.end_seqno, f"{snapshot} follows {before}"
        newest = before.seqno
        for frame in snapshot.frames():
            event = codec_dcp.decode(decode(frame)[0])
            assert isinstance(event, (SystemEvent, Mutation, Deletion, Expiration)), event
            assert newest < event.seqno <= snapshot.end_seqno, f"{event} in {snapshot}, after {newest}"
            newest = event.seqno
            if isinstance(event, SystemEvent):
                content = decode_system_event(event)
                if isinstance(content, (CollectionCreated, CollectionDropped)):
                    gone = content.collection_id
                    copy = {key: document for key, document in copy.items() if document.collection_id != gone}
            else:
                document = decode_row(vbid, Branch(0), frame, raw=True)
                copy[wire_key(document)] = document
        self.copies[vbid] = copy
        self.positions[vbid] = snapshot.position
        self._compare(vbid)
        self.counts["snapshots handed out to a reader"] += 1

    def _compare(self, vbid: int) -> None:
        position = self.positions[vbid]
        line = self.source.line(vbid, position.seqno, position.vbuuid) if position.seqno else []
        expected = self.source.seen(self.source.state(line, position.seqno), line, None)
        purged = self.source.purged.get(id(line), 0)
        found = dict(self.copies[vbid])
        for key, item in expected.items():
            document = found.pop(key, None)
            if document is None:
                is_purged = item.deleted and item.seqno <= purged
                assert is_purged, f"vb {vbid} at {position}: {key!r} is missing, {item}"
            else:
                assert reported(document) == facts(item), f"vb {vbid} at {position}: {document}, not {item}"
        assert not found, f"vb {vbid} at {position}: was never there: {found}"

    def _ended(self, ended: ReadEnded) -> None:
        vbid, seqno = ended.vbid, ended.position.seqno
        assert seqno == self.positions[vbid].seqno, f"{ended} after {self.positions[vbid]}"
        self.positions[vbid] = ended.position  # the same seqno may be of a newer history, which has it as well
        self._compare(vbid)
        assert self.until is not None, "an endless read does not end by itself"
        until = max(seqno, self.until[vbid])
        lines = self.source.lines_with(vbid, seqno, ended.position.vbuuid, after_past=self.past_counts[vbid])
        states = (
            [self.source.seen(self.source.state(line, each), line, None) for each in (seqno, until)]
            for line in lines
            if len(line) >= until
        )
        assert any(held == owed for held, owed in states), f"{ended} of {until}: more was to come"
        self.counts["bounded reads of a vbucket"] += 1
