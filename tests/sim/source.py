"""The source: the sandbox's bucket, vbuckets, connections and producers, without sockets, tasks or time of their own.

What a source may do and the sandbox does not do by itself is added here: two markers with one end (change streams),
advances in the middle of a backfill, refusals, and pieces of any size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from mirror.sandbox.data.bucket import Bucket, User
from mirror.sandbox.data.item import ABORT, PREPARE, SYSTEM_EVENT, Item
from mirror.sandbox.data.manifest import FIRST_ID
from mirror.sandbox.data.profile import DEFAULT_PROFILE, PROFILES
from mirror.sandbox.data.sandbox_vbucket import Vbucket, system_id
from mirror.sandbox.dcp.encoder import ItemEncoder
from mirror.sandbox.dcp.filter import SandboxFilter, content_of
from mirror.sandbox.dcp.producer import SandboxProducer
from mirror.sandbox.dcp.producer_stream import ProducerStream
from mirror.sandbox.node.node import NodeConnection, SandboxNode
from mirror.server.controls import Controls
from mirror.server.errors import Refused
from mirror.server.rollback import StreamHistory
from mirror.wire import codec_dcp
from mirror.wire.constants import DcpOpenFlag, Feature, MarkerVersion, SnapshotFlag, Status, SystemEventId
from mirror.wire.events import SeqnoAdvanced, SnapshotMarker, StreamRequest
from storage.model import FailoverLog
from tests.sandbox.past import reset

ABILITIES = PROFILES[DEFAULT_PROFILE].abilities(keeps_history=False)


SELECTIONS = (
    "collections _default._default",
    "collections _default._default,s1.c0,s1.c1",
    "collections s1.c0,s1.c1",
    "scope _default",
    "scope s1",
    "scope s1",
)

State = dict[bytes, Item]
"""Wire key -> newest version, tombstones included."""

DOUBLE = int(SnapshotFlag.DISK | SnapshotFlag.HISTORY | SnapshotFlag.MAY_DUPLICATE_KEYS)


class Extra(Item):
    """A message between items, sent as its frame is."""


class SimEncoder(ItemEncoder):
    def encode(self, item: Item, *, from_disk: bool, stream_id: int | None = None) -> bytes:
        if isinstance(item, Extra):
            return item.frame
        return super().encode(item, from_disk=from_disk, stream_id=stream_id)


class SimStream(ProducerStream):
    """Backfills in all the shapes that servers give them."""

    counts: Counter[str]
    shapes: tuple[str, ...] = ("plain",)

    def __init__(self, vbucket: Vbucket, *args: Any, **options: Any) -> None:
        super().__init__(vbucket, *args, **options)
        self.log = vbucket.log

    def _begin_disk(self, out: bytearray) -> bool:
        self._shape = self._rng.choice(self.shapes)
        self._purge_seqno = self.vbucket.purge_seqno
        return super()._begin_disk(out)

    def _marker(self, out: bytearray, start: int, end: int, flags: int) -> None:
        request = self._request
        resumed = request.snap_start_seqno < request.start_seqno < end < request.snap_end_seqno
        if resumed and not self._first_marker_sent and not flags & SnapshotFlag.DISK:
            self.counts["ends before that of a resumed snapshot"] += 1
        super()._marker(out, start, end, flags)

    def _on_disk(self, first: int, last: int) -> Iterator[Item]:
        if self._shape == "double" and not self.filter.legacy:
            return self._in_two_parts(first, last)
        items = super()._on_disk(first, last)
        return self._with_advances(items) if self._shape == "advances" else items

    def _with_advances(self, items: Iterator[Item]) -> Iterator[Item]:
        position = 0
        for item in items:
            if position and item.seqno - 1 > position and self._rng.random() < 0.5:
                self.counts["advances inside a backfill"] += 1
                advance = SeqnoAdvanced(self.vbucket.vbid, item.seqno - 1)
                yield Extra(item.seqno - 1, b"", codec_dcp.encode(advance))
            position = item.seqno
            yield item

    def _in_two_parts(self, first: int, last: int) -> Iterator[Item]:
        """Deduplicated up to a seqno, then a marker with the same end and every version (MB-52553's shape)."""
        turn = self._rng.randint(first, last)
        if not self.filter.all and turn == last:
            turn = last - 1  # what ends it may be held back, and is sent after the second marker
        purge_seqno = self._purge_seqno
        yield from self._found_on_disk(self.log[first - 1 : turn], last, purge_seqno, last + 1)  # no further: each once
        self.counts["double markers"] += 1
        marker = SnapshotMarker(self.vbucket.vbid, first, last, DOUBLE)
        yield Extra(max(turn, first - 1), b"", codec_dcp.encode(marker))
        for item in self.log[turn:last]:
            if self._stays(item, last, purge_seqno) and self.filter.passes(item) and self._encoder.shows(item):
                yield item

    def _stays(self, item: Item, last: int, purge_seqno: int) -> bool:
        """History keeps superseded versions; what compaction took away takes its predecessors along."""
        while item.next_seqno and item.next_seqno <= last:
            if item.next_seqno == item.seqno:
                return item.seqno > purge_seqno
            item = self.log[item.next_seqno - 1]
        return True


class SimProducer(SandboxProducer):
    """A producer whose rounds the simulation runs."""

    def __init__(self, source: Source, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.source = source
        self.of_mirror = True

    def start(self, report: Callable[[BaseException], None] | None = None) -> None:
        pass

    def request_stream(self, request: StreamRequest) -> FailoverLog:
        source = self.source
        if source.refuse_next:
            source.counts["refused on purpose"] += 1
            raise Refused(source.refuse_next.pop())
        try:
            return super().request_stream(request)
        except Refused as error:
            source.counts["rollback answers"] += error.status == Status.ROLLBACK
            raise

    def _open_stream(
        self, request: StreamRequest, stream_filter: SandboxFilter, history: StreamHistory
    ) -> ProducerStream:
        source = self.source
        plain = super()._open_stream(request, stream_filter, history)
        options = {"disk_flags": plain._disk_flags, "announced_ends": plain._announced_ends}
        options["ephemeral"] = source.ephemeral
        stream = SimStream(plain.vbucket, request, plain.filter, plain._controls, source.rng, plain._tuning, **options)
        stream._encoder = SimEncoder(self.controls)
        stream.counts, stream.shapes = source.counts, source.shapes
        if not self.of_mirror:
            resumes = request.snap_start_seqno < request.start_seqno < request.snap_end_seqno
            source.counts["mid-snapshot resumes of a reader"] += resumes
            return stream
        source.lines[request.opaque] = plain.vbucket.log
        source.counts["streams accepted"] += 1
        if source.selection:
            source.counts["filtered streams accepted"] += 1
            before = source.filters.get(request.vbid, request.value)
            source.counts["filters that changed"] += before != request.value
            source.filters[request.vbid] = request.value
        if request.snap_start_seqno < request.start_seqno < request.snap_end_seqno:
            source.counts["mid-snapshot resumes"] += 1
            if request.start_seqno < plain.vbucket.purge_seqno:
                source.counts["mid-snapshot resumes below the purge seqno"] += 1
        return stream


class SimNode(SandboxNode):
    """A node that is up without a socket to listen at."""

    @property
    def alive(self) -> bool:
        return True


class SimConnection(NodeConnection):
    """A connection that is a logged-in DCP client's from the start."""

    source: Source

    def open_sim(self, source: Source, *, window_bytes: int, name: str, of_mirror: bool = True) -> None:
        self.source = source
        session = self.session
        session.user = User("demo", "demo")
        session.bucket_selected = True
        features = {int(Feature.XATTR), int(Feature.SNAPPY), int(Feature.JSON)}
        if source.collections:
            features.add(int(Feature.COLLECTIONS))
        session.grant(frozenset(features))
        flags = DcpOpenFlag.PRODUCER | DcpOpenFlag.INCLUDE_XATTRS | DcpOpenFlag.INCLUDE_DELETE_TIMES
        controls = Controls(
            ABILITIES,
            collections=source.collections,
            snappy=True,
            open_flags=int(flags),
            expiry_opcode=True,
            noop_enabled=True,
            marker_version=MarkerVersion.V2_2 if source.marker_v2_2 else MarkerVersion.V1,
        )
        producer = SimProducer(source, self, name, controls, source.rng)
        producer.of_mirror = of_mirror
        producer.controls.buffer_bytes = window_bytes
        producer.window.window_bytes = window_bytes
        session.producer = producer

    def piece_bytes(self, stream: ProducerStream) -> int:
        return self.source.rng.choice((0, 1, 1, 200, 600, 3000, 20000))


class Source:
    """A bucket on two nodes."""

    def __init__(self, rng: Random, clock: Any, counts: Counter[str], *, vbuckets: int) -> None:
        self.rng = rng
        self.counts = counts
        self.collections = rng.random() < 0.85
        self.marker_v2_2 = self.collections and rng.random() < 0.6
        live_snapshot_items = rng.choice((1, 3, 5, 20))
        self.shapes: tuple[str, ...] = ("plain", "plain")
        if self.collections:
            self.shapes = rng.choice((("plain",), ("plain", "advances", "double"), ("advances",), ("double",)))
        self.selection = ""
        """The selection of the mirror's identity; empty: the whole bucket."""
        if self.collections and rng.random() < 0.5:
            self.selection = rng.choice(SELECTIONS)
        self.bucket = Bucket(
            "demo",
            vbuckets=vbuckets,
            clock=clock,
            rng=rng,
            checkpoint_items_max=rng.choice((3, 10, 40, 10_000)),
            checkpoints_kept=rng.choice((1, 2, 4)),
        )
        self.bucket.tuning.live_snapshot_items = live_snapshot_items
        self.bucket.tuning.purge_seqno_reported = rng.random() < 0.85
        self.ephemeral = rng.random() < 0.3
        self.nodes = [SimNode(number, self.bucket) for number in range(2)]
        for vbid in range(vbuckets):
            self.bucket.map.owners[vbid] = vbid % 2
        self.refuse_next: list[Status] = []
        self.filters: dict[int, bytes] = {}
        """By vbucket, the newest requested filter."""
        self.lines: dict[int, list[Item]] = {}
        """By opaque of an accepted stream of the running mirror, the stream's history."""
        self.purged: dict[int, int] = {}
        """By id of a history, its highest purge seqno."""
        self.keeps_persisted = False
        self.persisted = [0] * vbuckets
        """By vbucket, the seqno that every copy has persisted: no failover loses it."""
        self._states: dict[int, tuple[list[Item], list[int], list[State]]] = {}
        self._past: list[list[tuple[list[Item], int, FailoverLog]]] = [[] for _ in range(vbuckets)]

    def vbucket(self, vbid: int) -> Vbucket:
        return self.bucket.vbuckets[vbid]

    def connect(self, node: int) -> SimConnection:
        return SimConnection(self.nodes[node])

    def end_streams(self, vbid: int) -> None:
        for node in self.nodes:
            node.end_streams(vbid)

    # --- what happens to a vbucket

    def purge(self, vbid: int, below_seqno: int | None) -> None:
        vbucket = self.vbucket(vbid)
        vbucket.purge(below_seqno)
        self.purged[id(vbucket.log)] = max(self.purged.get(id(vbucket.log), 0), vbucket.purge_seqno)

    def persisted_of(self, vbid: int, vbuuid: int) -> int | None:
        """Return every copy's answer to OBSERVE_SEQNO; None if they do not know the history."""
        return self._upper(vbid, vbuuid, self.persisted[vbid])

    def _upper(self, vbid: int, vbuuid: int, seqno: int) -> int | None:
        upper = seqno
        for entry in self.vbucket(vbid).failover_log:
            if entry.vbuuid == vbuuid:
                return upper
            upper = min(upper, entry.seqno)
        return None

    def promote(self, vbid: int, begin_seqno: int) -> None:
        """A replica takes over that holds everything, but part of a snapshot: it says that its history begins where
        that snapshot did.
        """
        vbucket = self.vbucket(vbid)
        self.fail_over(vbid, 0)
        newest, *older = vbucket.failover_log
        kept = FailoverLog(older).pruned(begin_seqno)
        vbucket.failover_log = FailoverLog.of([(newest.vbuuid, begin_seqno), *kept])

    def fail_over(self, vbid: int, lose: int) -> int:
        vbucket = self.vbucket(vbid)
        if self.keeps_persisted:
            lose = min(lose, vbucket.high_seqno - self.persisted[vbid])
            if vbucket._group_first.get(vbucket.high_seqno - lose, 1 << 62) <= self.persisted[vbid]:
                lose = 0
        before = vbucket.log
        high = len(before)
        self._past[vbid].append((before, high, vbucket.failover_log))
        base = vbucket.failover(lose)
        if vbucket.log is not before:
            self.purged[id(vbucket.log)] = self.purged.get(id(before), 0)
        self.end_streams(vbid)
        return high - base

    def start_over(self, vbid: int) -> None:
        """Delete and recreate the vbucket."""
        vbucket = self.vbucket(vbid)
        self._past[vbid].append((vbucket.log, vbucket.high_seqno, vbucket.failover_log))
        reset(vbucket)
        self.persisted[vbid] = 0
        self.end_streams(vbid)

    # --- what it was

    def lines_with(self, vbid: int, seqno: int, vbuuid: int, *, after_past: int = 0) -> Iterator[list[Item]]:
        """The histories that have `seqno` under that name, newest first; those that the source forgot the name of too,
        but for the first `after_past` that it lost. Every history has seqno 0.
        """
        vbucket = self.vbucket(vbid)
        past = self._past[vbid][after_past:]
        for line, high, log in [(vbucket.log, vbucket.high_seqno, vbucket.failover_log), *reversed(past)]:
            upper = high
            for entry in log:
                if not seqno or (entry.vbuuid == vbuuid and seqno <= upper):
                    yield line
                    break
                upper = entry.seqno

    def line(self, vbid: int, seqno: int, vbuuid: int) -> list[Item]:
        found = next(self.lines_with(vbid, seqno, vbuuid), None)
        assert found is not None, f"vb {vbid}: the source never had seqno {seqno} under {vbuuid:#x}"
        return found

    def past_count(self, vbid: int) -> int:
        return len(self._past[vbid])

    def state(self, line: list[Item], seqno: int) -> State:
        """The state of a history at a seqno: as `Vbucket.state_at` says, made from the nearest one made before."""
        assert 0 <= seqno <= len(line), (seqno, len(line))
        _, seqnos, states = self._states.setdefault(id(line), (line, [0], [{}]))
        index = bisect_right(seqnos, seqno) - 1
        if seqnos[index] == seqno:
            return states[index]
        state = dict(states[index])
        for item in line[seqnos[index] : seqno]:
            kind = item.kind
            if kind == SYSTEM_EVENT:
                if item.event in (SystemEventId.COLLECTION_BEGIN, SystemEventId.COLLECTION_END):
                    gone = system_id(item)
                    state = {key: old for key, old in state.items() if old.collection_id != gone}
            elif kind not in (PREPARE, ABORT):
                state[item.key] = item
        seqnos.insert(index + 1, seqno)
        states.insert(index + 1, state)
        return state

    def seen(self, state: State, line: list[Item], shown: str | None) -> State:
        """Return the part of a history's state that streams filtered to `shown` show."""
        if not self.collections:
            return {key: item for key, item in state.items() if key[0] == 0}
        if shown is None:
            return state
        ids = self._ids(line, shown) - self.unshown(shown)
        return {key: item for key, item in state.items() if item.collection_id in ids}

    def unshown(self, shown: str | None) -> set[int]:
        """Collections of which a stream so filtered may leave out what is there: a scope's stream shows what is in the
        manifest when it begins, and not what was there before a collection ended that it will not show ending.
        """
        if shown is None or not shown.startswith("scope"):
            return set()
        manifest = self.bucket.manifest
        return set(range(FIRST_ID, manifest._next_collection_id)) - manifest.collections.keys()

    def scope_of(self, vbid: int, collection_id: int) -> int:
        """Return the scope in which a vbucket was sent a collection."""
        for item in reversed(self.vbucket(vbid).log):
            begins = item.kind == SYSTEM_EVENT and item.event == SystemEventId.COLLECTION_BEGIN
            if begins and system_id(item) == collection_id:
                return content_of(item).scope_id
        return 0

    def _ids(self, line: list[Item], shown: str) -> set[int]:
        kind, _, ids = shown.partition(" ")
        if kind == "collections":
            return {int(each, 16) for each in ids.split(",")}
        scope_id = int(ids, 16)
        begun = {
            system_id(item)
            for item in line
            if item.kind == SYSTEM_EVENT
            and item.event == SystemEventId.COLLECTION_BEGIN
            and content_of(item).scope_id == scope_id
        }
        return begun | ({0} if scope_id == 0 else set())
