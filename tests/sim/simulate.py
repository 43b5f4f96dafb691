"""A world from one seed: a source, a network and a mirror, and random events, step by step.

Each world draws its own settings and its own mixture of events, so that rare things are frequent somewhere. A failure
carries the seed of its world; the same seed gives the same steps.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import lmdb
import pytest
import structlog

from mirror.sandbox.data.documents import DocumentError
from mirror.sandbox.data.manifest import ManifestError
from mirror.sandbox.dcp import producer_stream as sandbox_stream
from mirror.wire.constants import Status, StreamEndReason
from mirror.wire.events import CollectionCreated, CollectionDropped, SystemEventContent
from mirror.wire.flow_control import counted_size
from mirror.wire.frame import decode
from storage.errors import StorageError
from storage.format import keys as storage_keys
from storage.format import runs
from storage.history import chain, index, merge, purge, removal
from storage.read import bulk, scan, vbucket_reader
from storage.write import background
from tests.manual_clock import ManualClock
from tests.sandbox.past import expire
from tests.sim.checkers import Checker
from tests.sim.loop import SimLoop, drive
from tests.sim.mirror import GROUPS, Fate, Mirror, MirrorDied, PowerCut
from tests.sim.reader import SimReader
from tests.sim.source import SimProducer, SimStream, Source

VBUCKETS = 4
KEYS = 14
TEMPORARY = (Status.ETMPFAIL, Status.ENOMEM, Status.NOT_MY_VBUCKET, Status.EBUSY, Status.KEY_EEXISTS)
ENDS = (
    StreamEndReason.OK,
    StreamEndReason.CLOSED,
    StreamEndReason.STATE_CHANGED,
    StreamEndReason.DISCONNECTED,
    StreamEndReason.SLOW,
    StreamEndReason.BACKFILL_FAIL,
)
MEMORY_FOLDER = Path("/dev/shm")


def folder() -> Path:
    """Return a folder in memory if there is one: the disk is simulated."""
    return Path(tempfile.mkdtemp(prefix="sim-", dir=MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None))


def all_keys() -> list[list[str]]:
    found: list[list[str]] = [[] for _ in range(VBUCKETS)]
    number = 0
    while min(map(len, found)) < KEYS:
        name = f"k{number}"
        pile = found[storage_keys.vbid_of(name.encode(), VBUCKETS)]
        if len(pile) < KEYS:
            pile.append(name)
        number += 1
    return found


NAMES = all_keys()


@contextmanager
def small_limits(rng: Random) -> Iterator[pytest.MonkeyPatch]:
    """Set limits that a few rows reach."""
    patch = pytest.MonkeyPatch()
    patch.setattr("storage.write.pending.INLINE_INDEX_ROWS", rng.choice((0, 1, 3, 10, 20_000)))
    patch.setattr(background, "PURGE_INTERVAL_MS", rng.choice((0, 10, 300)))
    patch.setattr(index, "SLICE_ROWS", rng.choice((1, 2, 5, 20_000)))
    patch.setattr(index, "RUN_ROWS", rng.choice((1, 3, 8, 200_000)))
    patch.setattr(runs, "_CHUNK_ROWS", rng.choice((1, 2, 2_000)))
    patch.setattr(purge, "STEP_ROWS", rng.choice((1, 2, 5, 1_000)))
    patch.setattr(purge, "LOOK_VBUCKETS", rng.choice((1, 8)))
    patch.setattr(merge, "LINKS_MAX", rng.choice((0, 0, 1)))
    patch.setattr(scan, "CHUNK_ROWS", rng.choice((1, 2, 5, 2_000)))
    patch.setattr(bulk, "GET_ROWS", rng.choice((1, 2, 128)))
    patch.setattr(bulk, "REMEMBERED_MAX", rng.choice((1, 500_000)))
    patch.setattr(chain, "SPAN_SEQNOS", rng.choice((1, 3, 100)))
    patch.setattr(removal, "RUN_ROWS", rng.choice((1, 3, 400_000)))
    patch.setattr(vbucket_reader, "CHAINS_MAX", rng.choice((1, 8)))
    patch.setattr(sandbox_stream, "BACKLOG_FOR_LARGE_SNAPSHOTS", rng.choice((10, 50, 2_000)))
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    try:
        yield patch
    finally:
        patch.undo()
        structlog.configure(**before)


class World:
    """A source, its mirror, and the events that may happen."""

    def __init__(self, seed: int, path: Path, counts: Counter[str]) -> None:
        self.seed = seed
        self.rng = rng = Random(seed)
        self.counts = counts
        self.clock = ManualClock(seed=seed)
        self.loop = SimLoop(self.clock)
        self.fate = Fate(counts)
        self.source = Source(rng, self.clock, counts, vbuckets=VBUCKETS)
        self.mirror = Mirror(path / "data", rng, self.clock, self.loop, self.source, self.fate, vbuckets=VBUCKETS)
        self.reader = SimReader(self.source, rng, self.clock, counts, vbuckets=VBUCKETS)
        self.checker = Checker(self.mirror, self.source, rng, counts)
        self.source.keeps_persisted = self.mirror.persisted
        self.paths = ["_default._default"]
        self.scope_count = 0
        self.written = 0
        self.steps = 0
        self.trace: list[str] = []
        weights: dict[Callable[[], None], float] = {
            self.write: 14,
            self.write_many: 4,
            self.write_group: 1,
            self.delete: 4,
            self.expire: 2,
            self.write_durably: 2,
            self.persist: 7 if self.mirror.persisted else 0,
            self.ask_persistence: 14 if self.mirror.persisted else 0,
            self.promote: 2 if self.mirror.persisted else 0,
            self.take_over: 0.1,
            self.set_clock: 0.15,
            self.change_collections: 3.0 if self.source.selection else 1.0,
            self.to_disk: 2,
            self.checkpoint: 1,
            self.purge: 1,
            self.fail_over: 1.2,
            self.start_over: 0.05,
            self.move: 0.4,
            self.end_stream: 0.6,
            self.refuse: 0.3,
            self.pump: 12,
            self.down: 22,
            self.up: 14,
            self.cut: 0.8,
            self.silence: 0.2,
            self.connect: 3,
            self.follow_map: 2,
            self.poll: 1,
            self.pass_time: 12,
            self.work: 8,
            self.flush: 1.5,
            self.die: 0.5,
            self.die_soon: 0.8,
            self.stop: 0.2,
            self.cut_power: 0.4 if self.mirror.sync != "unsafe" else 0,
            self.cut_power_soon: 0.6 if self.mirror.sync != "unsafe" else 0,
            self.disk_error: 0.3 if self.mirror.sync == "unsafe" else 1,
            self.operator_rolls_back: 0.3,
            self.break_protocol: 0.15,
            self.follow: 3,
            self.read_slowly: 10,
            self.lease: 1.2,
            self.release: 0.2,
            self.read_source: 12,
            self.interrupt_backfill: 0.6,
            self.look_at_collections: 2 if self.source.selection else 0.1,
            self.verify: 1,
            self.walk: 0.25,
            self.go_on: 14,
        }
        self.actions = list(weights)
        chaos = rng.choice((0.2, 1, 1, 2))
        faults = {
            self.fail_over, self.purge, self.cut, self.die, self.die_soon, self.end_stream, self.refuse, self.silence,
            self.disk_error, self.break_protocol, self.promote, self.take_over, self.stop, self.move, self.cut_power,
            self.cut_power_soon, self.operator_rolls_back,
        }  # fmt: skip
        self.weights = [
            weights[action] * rng.choice((0.3, 1, 1, 1, 3)) * (chaos if action in faults else 1)
            for action in self.actions
        ]

    # --- running

    def run(self, steps: int) -> None:
        """Live through some steps, then calm down and catch up."""
        with self.loop.running():
            self.guarded(lambda: None)
            for _ in range(steps):
                (action,) = self.rng.choices(self.actions, self.weights)
                self.step(action)
            self.calm_down()
            self.mirror.stop()

    def step(self, action: Callable[[], None]) -> None:
        self.steps += 1
        self.trace.append(action.__name__)
        self.guarded(action)
        self.checker.after_step()

    def guarded(self, action: Callable[[], None]) -> None:
        """Do an action; start the process again if it dies."""
        try:
            if not self.mirror.alive:
                self.mirror.start()
            action()
            self.loop.run_due()
            if self.mirror.alive and self.mirror.refused:
                self.counts["restarted after a disk error"] += 1
                self.die_and_start()
        except PowerCut:
            self.lose_power()
        except MirrorDied:
            self.counts["died at a commit"] += 1
            self.die_and_start()
        self.mirror.lost()
        self.checker.catch_up()

    def die_and_start(self) -> None:
        self.mirror.die()
        for _ in range(3):
            try:
                self.mirror.start()
            except PowerCut:
                self.mirror.lose_power()
            except MirrorDied:
                self.mirror.die()
            else:
                return
        raise AssertionError("the mirror dies whenever it is started")

    def lose_power(self) -> None:
        self.mirror.lose_power()
        self.checker.power_was_cut()
        self.die_and_start()
        for each in self.mirror.writers:
            self.checker.on_commit(each)

    def calm_down(self) -> None:
        """End all faults, and check that the mirror catches up."""
        self.fate.die_in = self.fate.fail_in = self.fate.cut_in = 0
        self.fate.idle_sync_fails = False
        self.source.refuse_next.clear()
        if not self.mirror.alive:
            self.guarded(lambda: None)
        for wire in list(self.mirror.wires):
            if wire is not None and getattr(wire, "silent", False):
                wire.cut()
        for vbid in range(VBUCKETS):  # in the default collection: without collections nothing else is shown
            self.source.bucket.set(self.free_keys(vbid)[0], self.value(vbid), vbid=vbid)
            if self.source.selection and len(self.paths) > 1:
                self._set(vbid, NAMES[vbid][0], self.paths[-1])
        for count in range(3000):
            self.steps += 1
            for action in (self.all_on, self.pump_all, self.work):
                self.guarded(action)
                self.checker.after_step()
            if self.caught_up():
                break
            if count % 1000 == 999:
                self.guarded(self.ask_for_ends)
        else:
            raise AssertionError("not caught up:\n" + "\n".join(map(self._situation, range(VBUCKETS))))
        self.read_the_rest()
        self.checker.check_everything()

    def ask_for_ends(self) -> None:
        """As `SourceWatch` does once a stream has stopped for long in the middle of a snapshot."""
        for actor in self.mirror.actors.values():
            if actor.host.machine is not None and actor.host.machine.waits_for_end:
                self.counts["ends of snapshots asked for"] += 1
                self.mirror.consumer.reopen(actor, "stalled")

    def read_the_rest(self) -> None:
        """Let the bounded reader read the rest. Its previous read may wait for lost changes."""
        self.reader.end()
        for _ in range(3000):
            self.steps += 1
            finished = False

            def read() -> None:
                nonlocal finished
                finished = self.reader.finish(self.mirror.lives, VBUCKETS)

            self.guarded(read)
            if finished:
                return
            self.clock.advance(min(self.loop.next_due_in() or 0.05, 5.0))
        raise AssertionError(f"the reader has not read all: {self.reader.positions}, {self.reader.until}")

    def _situation(self, vbid: int) -> str:
        vbucket = self.source.vbucket(vbid)
        actor = self.mirror.actors[vbid]
        machine, shown = actor.host.machine, actor.progress
        return (
            f"vb {vbid}: source {vbucket.high_seqno}, purged {vbucket.purge_seqno}, log {vbucket.failover_log}; "
            f"mirror {actor.writer.state}, {shown.status}: {shown.text}, {machine and machine.phase}"
        )

    def caught_up(self) -> bool:
        """True if everything that the source shows is published."""
        for vbid in range(VBUCKETS):
            vbucket = self.source.vbucket(vbid)
            high = vbucket.high_seqno
            state = self.mirror.writer_of(vbid).vbuckets[vbid].state
            asks = self.mirror.consumer.collections.resolved.streams
            if state.staging_branch != state.branch and asks:  # a resync is under way
                return False
            if self.checker.watched[vbid].seqno != high and not self._nothing_shown_above(vbid):
                return False
            if not self.mirror.actors[vbid].host.streaming and asks:
                return False
        return True

    def _nothing_shown_above(self, vbid: int) -> bool:
        if self.source.selection:
            if not self.mirror.consumer.collections.resolved.streams:  # it waits for collections that there are none of
                return True
            line, watched = self.source.vbucket(vbid).log, self.checker.watched[vbid]
            state = self.mirror.writer_of(vbid).vbuckets[vbid].state
            if state.staging_branch != watched.branch or state.staged_seqno > state.staging_published_seqno:
                return False
            if self.mirror.view.manifest(vbid).collections.keys() - self.source.bucket.manifest.collections.keys():
                return False  # the end of a collection is yet to be published
            if not watched.seqno:  # no commit has said yet what is shown
                return not self.source.seen(self.source.state(line, len(line)), line, state.stream_filter or None)
            newest = self.checker.seen(vbid, line, len(line))
            return watched.seqno <= len(line) and newest == self.checker.seen(vbid, line, watched.seqno)
        if self.source.collections:
            return False
        published = self.checker.watched[vbid].seqno
        return published >= self.source.vbucket(vbid).collection_high_seqno.get(0, 0)

    def all_on(self) -> None:
        for number in range(2):
            self.mirror.connect(number)
        self.mirror.look_at_collections()
        for vbid in range(VBUCKETS):
            self.mirror.follow_map(vbid)
            self.mirror.poll(vbid)
            self.source.persisted[vbid] = self.source.vbucket(vbid).high_seqno
            self.mirror.ask_persistence(vbid)
        self.mirror.consumer._source_watch.judge()
        self.clock.advance(min(self.loop.next_due_in() or 0.05, 5.0))
        self.loop.run_due()

    def pump_all(self) -> None:
        for number in range(2):
            for _ in range(4):
                wire = self.mirror.wires[number]
                if wire is None:
                    break
                wire.deliver_up(1 << 20)
                self.pump_one(number)
                wire.deliver_down(1 << 20)

    # --- the source lives

    def vbid(self) -> int:
        return self.rng.randrange(VBUCKETS)

    def value(self, vbid: int) -> bytes:
        self.written += 1
        text = f'{{"n":{self.written},"of":"{self.source.vbucket(vbid).vbuuid:x}"}}'
        return text.encode() + b" " * self.rng.choice((0, 0, 0, 10, 300))

    def place(self) -> tuple[int, str, str]:
        vbid = self.vbid()
        return vbid, self.rng.choice(NAMES[vbid]), self.rng.choice(self.paths)

    def write(self) -> None:
        vbid, key, path = self.place()
        self._set(
            vbid,
            key,
            path,
            expiry=self.rng.choice((0, 0, 0, 0, 1, 5, 3600)),
            compressed=self.rng.random() < 0.2,
            xattrs={"_s": 1, "u": "x"} if self.rng.random() < 0.15 else None,
        )

    def _set(self, vbid: int, key: str, path: str, **more: Any) -> None:
        try:
            self.source.bucket.set(key, self.value(vbid), vbid=vbid, collection=path, **more)
        except DocumentError:  # a durable write of it is under way
            self.counts["writes refused by the source"] += 1

    def write_many(self) -> None:
        vbid, _, path = self.place()
        for _ in range(self.rng.randint(2, 30)):
            key = self.rng.choice(NAMES[vbid])
            if self.rng.random() < 0.2:
                self._delete(vbid, key, path)
            else:
                self._set(vbid, key, path)

    def free_keys(self, vbid: int, path: str = "_default._default") -> list[str]:
        """Return the keys without a durable write under way."""
        bucket, prepared = self.source.bucket, self.source.vbucket(vbid).prepared
        return [key for key in NAMES[vbid] if bucket.wire_key(key, path) not in prepared]

    def write_group(self) -> None:
        vbid, _, path = self.place()
        free = self.free_keys(vbid, path)
        chosen = self.rng.sample(free, min(len(free), self.rng.randint(2, 6)))
        self.source.bucket.multi_write(vbid, [(key, self.value(vbid)) for key in chosen], collection=path)

    def _delete(self, vbid: int, key: str, path: str) -> None:
        try:
            self.source.bucket.delete(key, vbid=vbid, collection=path)
        except DocumentError:
            return
        self.counts["deletes"] += 1

    def delete(self) -> None:
        vbid, key, path = self.place()
        self._delete(vbid, key, path)

    def expire(self) -> None:
        vbid, key, path = self.place()
        try:
            expire(self.source.bucket, key, vbid=vbid, collection=path)
        except DocumentError:
            self.counts["expiries"] += self.source.bucket.expire_all(vbid)
        else:
            self.counts["expiries"] += 1

    def write_durably(self) -> None:
        vbid, key, path = self.place()
        bucket, vbucket = self.source.bucket, self.source.vbucket(vbid)
        under_way = sorted(vbucket.prepared, key=lambda wire_key: vbucket.prepared[wire_key].seqno)
        # They end in the order in which they began (the server's durability monitor sees to it).
        what = self.rng.choice(("begin", "end", "end") if under_way else ("at once", "at once", "never", "begin"))
        try:
            if what == "at once":
                bucket.set(key, self.value(vbid), vbid=vbid, collection=path, durable=True)
            elif what == "never":
                begun = vbucket.high_seqno + 1
                bucket.prepare(key, "never", vbid=vbid, collection=path)
                bucket.abort(key, vbid=vbid, collection=path)
                vbucket.lose_together(begun)
            elif what == "begin":
                bucket.prepare(key, self.value(vbid) if self.rng.random() < 0.8 else None, vbid=vbid, collection=path)
            elif under_way:
                end = bucket.documents.commit if self.rng.random() < 0.6 else bucket.documents.abort
                end(vbucket, under_way[0])
        except DocumentError:
            self.counts["writes refused by the source"] += 1

    def change_collections(self) -> None:
        """Create, drop or flush: in all vbuckets at once, as a manifest change is."""
        if not self.source.collections and self.rng.random() < 0.7:
            return
        bucket = self.source.bucket
        named = self.paths[1:]
        what = self.rng.choice(("create", "create", "drop", "flush", "flush default", "drop scope"))
        try:
            if what == "create" and len(named) < 4:
                if not self.scope_count or (not self.source.selection and self.rng.random() < 0.3):
                    self.scope_count += 1
                    bucket.create_scope(f"s{self.scope_count}")
                path = f"s{self.scope_count}.c{self.rng.randrange(3)}"
                scope, name = path.split(".")
                bucket.create_collection(scope, name, max_ttl=self.rng.choice((None, None, 100)))
                self.paths.append(path)
                self.counts["collections created"] += 1
            elif what == "drop" and named:
                path = self.rng.choice(named)
                bucket.drop_collection(path)
                self.paths.remove(path)
                self.counts["collections dropped"] += 1
            elif what == "flush" and named:
                bucket.flush_collection(self.rng.choice(named))
                self.counts["collections flushed"] += 1
            elif what == "flush default" and self.source.collections and self.rng.random() < 0.3:
                bucket.flush_collection("_default._default")
                self.counts["collections flushed"] += 1
            elif what == "drop scope" and named and self.rng.random() < 0.3:
                scope = self.rng.choice(named).split(".")[0]
                bucket.drop_scope(scope)
                self.paths = [path for path in self.paths if not path.startswith(f"{scope}.")]
                if not self.source.selection:  # else one of the same name takes its place
                    self.scope_count += 1
                bucket.create_scope(f"s{self.scope_count}")
        except ManifestError:
            return

    def to_disk(self) -> None:
        self.source.vbucket(self.vbid()).to_disk()
        self.counts["cursors dropped"] += 1

    def checkpoint(self) -> None:
        self.source.vbucket(self.vbid()).open_checkpoint()

    def purge(self) -> None:
        vbid = self.vbid()
        high = self.source.vbucket(vbid).high_seqno
        below = self.rng.choice((None, self.rng.randint(0, max(1, high))))
        before = self.source.vbucket(vbid).purge_seqno
        self.source.purge(vbid, below)
        self.counts["source purges"] += self.source.vbucket(vbid).purge_seqno > before

    def fail_over(self) -> None:
        """Fail over to another copy, perhaps with a loss; sometimes several times in a row."""
        vbid = self.vbid()
        for _ in range(self.rng.choice((1, 1, 1, 2, 4))):
            beyond = self.source.vbucket(vbid).high_seqno - self.checker.watched[vbid].seqno
            into = max(0, beyond) + self.rng.choice((1, 2, 5, 20, 60))
            lost = self.source.fail_over(vbid, self.rng.choice((0, 0, 1, 3, 10, into, into, into)))
            self.counts["failovers"] += 1
            self.counts["failovers that lost changes"] += lost > 0
            self.counts["changes lost"] += lost
            if self.rng.random() < 0.6:
                for _ in range(self.rng.randint(1, 8)):
                    self._set(vbid, self.rng.choice(NAMES[vbid]), self.paths[0])
        self._heal_manifest(vbid)

    def promote(self) -> None:
        """Fail over without a loss to a replica that had persisted part of a snapshot."""
        vbid = self.vbid()
        kept = [seqno for seqno in self.checker.watched[vbid].boundaries if seqno >= self.checker.watched[vbid].floor]
        begin = self.rng.choice(kept or [0]) + self.rng.choice((0, 0, 1))
        self.source.promote(vbid, min(begin, self.source.vbucket(vbid).high_seqno))
        self._heal_manifest(vbid)
        self.counts["replicas promoted with part of a snapshot"] += 1

    def persist(self) -> None:
        for vbid in range(VBUCKETS):
            high = self.source.vbucket(vbid).high_seqno
            known = self.source.persisted[vbid]
            self.source.persisted[vbid] = self.rng.choice((known, high, high, self.rng.randint(known, high)))

    def ask_persistence(self) -> None:
        for vbid in range(VBUCKETS):
            self.mirror.ask_persistence(vbid)

    def _heal_manifest(self, vbid: int) -> None:
        """The manifest is the cluster's: a vbucket that lost a change of it is sent it again, in the right order."""
        vbucket = self.source.vbucket(vbid)
        manifest = self.source.bucket.manifest
        known = set(vbucket.newest)
        gone = sorted(known - manifest.collections.keys())
        new = [manifest.collections[cid] for cid in sorted(manifest.collections.keys() - known)]
        changes: list[SystemEventContent] = [
            CollectionDropped(manifest.uid, self.source.scope_of(vbid, cid), cid) for cid in gone
        ]
        changes += [
            CollectionCreated(manifest.uid, each.scope_id, each.collection_id, each.name, each.max_ttl) for each in new
        ]
        if changes:
            self.source.bucket.documents.apply(vbucket, changes)

    def start_over(self) -> None:
        vbid = self.vbid()
        self.source.start_over(vbid)
        self.checker.watched[vbid].recreated = True
        self._heal_manifest(vbid)
        self.counts["vbuckets deleted and recreated"] += 1

    def move(self) -> None:
        vbid = self.vbid()
        self.source.fail_over(vbid, 0)
        owners = self.source.bucket.map.owners
        owners[vbid] = 1 - owners[vbid]
        self.counts["vbuckets moved"] += 1

    # --- the conversation

    def producer(self, number: int) -> SimProducer | None:
        wire = self.mirror.wires[number]
        if wire is None or not wire.open or wire.server is None:
            return None
        producer = wire.server.session.producer
        return producer if isinstance(producer, SimProducer) else None

    def end_stream(self) -> None:
        producer = self.producer(self.rng.randrange(2))
        if producer is not None and producer.streams:
            vbid = self.rng.choice(sorted(producer.streams))[0]
            producer.end_streams(vbid, self.rng.choice(ENDS))
            self.counts["streams ended by the source"] += 1

    def refuse(self) -> None:
        self.source.refuse_next.append(self.rng.choice(TEMPORARY))

    def pump_one(self, number: int) -> None:
        producer = self.producer(number)
        if producer is not None and not getattr(self.mirror.wires[number], "silent", False):
            drive(producer._round())

    def pump(self) -> None:
        number = self.rng.randrange(2)
        for _ in range(self.rng.choice((1, 1, 3))):
            self.pump_one(number)

    def _piece(self, waiting: int) -> int:
        return self.rng.choice((1, 23, 24, 60, 300, 2_000, waiting, waiting, self.rng.randint(0, waiting)))

    def down(self) -> None:
        wire = self.mirror.wires[self.rng.randrange(2)]
        if wire is not None and wire.down:
            wire.deliver_down(self._piece(len(wire.down)))

    def up(self) -> None:
        wire = self.mirror.wires[self.rng.randrange(2)]
        if wire is not None and wire.up and not getattr(wire, "silent", False):
            wire.deliver_up(self._piece(len(wire.up)))

    def go_on(self) -> None:
        """Let everything work for a moment."""
        number = self.rng.randrange(2)
        self.mirror.connect(number)
        for _ in range(self.rng.randint(1, 3)):
            wire = self.mirror.wires[number]
            if wire is None or getattr(wire, "silent", False):
                return
            wire.deliver_up(1 << 20)
            self.pump_one(number)
            wire.deliver_down(self.rng.choice((1 << 20, self._piece(len(wire.down)))))

    def cut(self) -> None:
        wire = self.mirror.wires[self.rng.randrange(2)]
        if wire is not None and wire.open:
            self.counts["connections cut"] += 1
            self.counts["connections cut inside a frame"] += bool(wire.client._have)
            wire.cut()

    def silence(self) -> None:
        """A connection that falls silent; the watchdog of stalled streams, or a cut, ends it."""
        wire = self.mirror.wires[self.rng.randrange(2)]
        if wire is not None and wire.open:
            wire.silent = True  # type: ignore[attr-defined]
            self.counts["connections silenced"] += 1

    def interrupt_backfill(self) -> None:
        """A backfill that reaches into what is in memory is cut there: the stream goes on, a checkpoint at a time."""
        vbid, _, path = self.place()
        vbucket = self.source.vbucket(vbid)
        self._write_some(vbid, path, self.rng.randint(2, 12))
        vbucket.to_disk()
        for _ in range(self.rng.choice((1, 2, 3))):
            self._write_some(vbid, path, self.rng.randint(2, 8))
            vbucket.open_checkpoint()
        number = self.source.bucket.map.owners[vbid]
        wire = self.mirror.wires[number]
        if wire is not None:
            wire.cut()
        self.loop.run_due()
        self.mirror.lost()
        self.mirror.follow_map(vbid)
        self.mirror.connect(number)
        for _ in range(30):
            wire = self.mirror.wires[number]
            if wire is None or not wire.open:
                return
            wire.deliver_up(1 << 20)
            self.pump_one(number)
            wire.deliver_down(self.rng.choice((60, 200, 600)))
            state = self.mirror.writer_of(vbid).vbuckets[vbid].state
            snapshot = state.open_snapshot
            if snapshot is not None and vbucket.memory_floor_seqno <= state.staged_seqno < snapshot.end_seqno:
                wire.cut()
                self.counts["backfills cut in memory's reach"] += 1
                return

    def _write_some(self, vbid: int, path: str, count: int) -> None:
        keys = self.rng.sample(NAMES[vbid], 4)
        for _ in range(count):
            self._set(vbid, self.rng.choice(keys), path)

    def look_at_collections(self) -> None:
        self.mirror.look_at_collections()

    def connect(self) -> None:
        self.mirror.connect(self.rng.randrange(2))

    def follow_map(self) -> None:
        for vbid in range(VBUCKETS):
            self.mirror.follow_map(vbid)

    def poll(self) -> None:
        self.mirror.poll(self.vbid())
        self.mirror.consumer._source_watch.judge()

    def pass_time(self) -> None:
        """Move the clock, mostly to the next timer."""
        due = self.loop.next_due_in()
        self.clock.advance(self.rng.choice((0.001, 0.03, 0.5, due or 0.01, due or 0.01, due or 0.01, 3.0)))
        self.loop.run_due()

    def work(self) -> None:
        for _ in range(self.rng.choice((1, 3, 20))):
            for group in range(GROUPS):
                self.mirror.step_writer(group)

    def flush(self) -> None:
        """Memory pressure: rows of open snapshots go to the disk."""
        group = self.rng.choice(self.mirror.consumer.commits.groups)
        if group.error is None:
            if any(vbucket.rows for vbucket in group.writer.vbuckets.values()):
                self.counts["open snapshots written down"] += 1
            try:
                group.commit(flush_open=True)
            except StorageError as error:
                group.failed(error)

    # --- the mirror's fate

    def die(self) -> None:
        self.counts["died between commits"] += 1
        self.mirror.die()
        self.die_and_start()

    def die_soon(self) -> None:
        self.fate.die_in, self.fate.die_after = self.rng.randint(1, 6), self.rng.random() < 0.5

    def cut_power(self) -> None:
        self.counts["power cuts between commits"] += 1
        self.lose_power()

    def cut_power_soon(self) -> None:
        self.fate.cut_in = self.rng.randint(1, 6)

    def take_over(self) -> None:
        """Another process claims a group (its lock is on another host's file system): this one must write no more."""
        writer = self.rng.choice(self.mirror.writers)
        if (
            writer.owner.closed
            or self.mirror.consumer.commits.groups[self.mirror.writers.index(writer)].error is not None
        ):
            return
        fence = (writer.owner.fence + 1).to_bytes(8)
        writer.owner.write_while_opening(lambda txn: txn.put(storage_keys.DB_META, b"fence", fence))
        if writer.disk is not None:
            writer.disk.committed(writer.environment.env)
        self.fate.fenced.add(writer)
        self.counts["groups taken over"] += 1

    def set_clock(self) -> None:
        self.mirror.wall_offset_ms = self.rng.choice((0, 3_600_000, -3_600_000, 86_400_000 * 400, -86_400_000 * 400))
        self.counts["clocks set"] += 1

    def stop(self) -> None:
        try:
            self.mirror.stop()
        except StorageError:
            self.mirror.die()
        self.mirror.start()
        self.counts["stopped and started"] += 1

    def disk_error(self) -> None:
        if self.mirror.sync != "unsafe" and self.rng.random() < 0.5:
            self.fate.idle_sync_fails = True
            return
        self.fate.fail_in = self.rng.randint(1, 4)
        self.fate.failed_sync = self.rng.random() < 0.6
        code = self.rng.choice((errno.ENOSPC, errno.EIO, None))
        self.fate.error = (
            (lambda: lmdb.DiskError("mdb_txn_commit")) if code is None else (lambda: OSError(code, "disk"))
        )
        self.counts["disk errors"] += 1

    def operator_rolls_back(self) -> None:
        vbid = self.vbid()
        watched = self.checker.watched[vbid]
        if self.mirror.actors[vbid].group.error is None:
            try:
                boundary = self.mirror.roll_back(vbid, self.rng.randint(0, watched.seqno))
            except StorageError:
                return  # the disk failed; the requester gets the error
            self.counts["rollbacks by command"] += boundary > 0

    def break_protocol(self) -> None:
        """Let the source repeat a message that it has sent."""
        number = self.rng.randrange(2)
        producer, wire = self.producer(number), self.mirror.wires[number]
        if producer is None or wire is None or not producer.streams:
            return
        stream = self.rng.choice(list(producer.streams.values()))
        # Only what was sent before: a row that comes too early hides those before it, and no check could notice.
        assert isinstance(stream, SimStream)
        is_inside = stream.in_snapshot_until and not stream.ended
        sent = stream._last_sent if is_inside else min(stream.seqno, len(stream.log))
        if not sent:
            return
        item = stream.log[self.rng.randrange(sent)]
        frame = bytearray(stream._encoder.encode(item, from_disk=True))
        frame[12:16] = stream.opaque.to_bytes(4)
        producer.window.sent(counted_size(decode(bytes(frame))[0]))  # a prepare counts for more than its bytes
        wire.down += frame
        self.counts["protocol broken"] += 1

    # --- readers

    def follow(self) -> None:
        follower = self.rng.choice(self.checker.followers)
        stop_after = self.rng.choice((None, None, None, self.rng.randint(0, 12)))
        self.checker.follow(follower, stop_after=stop_after)

    def read_slowly(self) -> None:
        self.checker.read_slowly()

    def read_source(self) -> None:
        self.reader.step(self.mirror.lives)

    def lease(self) -> None:
        follower = self.rng.choice([each for each in self.checker.followers if each.token is not None] or [None])
        if follower is not None and not self.mirror.writer_of(follower.vbid).owner.lost:
            self.checker.lease(follower, self.rng.choice((1, 5, 20, 3600)))

    def release(self) -> None:
        if self.mirror.leases:
            self.mirror.release(self.rng.choice(sorted(self.mirror.leases)))
            self.counts["leases released"] += 1

    def verify(self) -> None:
        self.checker.verify(self.vbid(), every=self.rng.random() < 0.3)

    def walk(self) -> None:
        self.checker.check_store()


class Failed(AssertionError):
    """A world went wrong; the text tells how to repeat it."""


def live_through(seed: int, steps: int, counts: Counter[str]) -> int:
    """Run one world; return its steps. Raises Failed with the command that repeats it."""
    path = folder()
    rng = Random(seed)
    world = None
    try:
        with small_limits(Random(rng.random())) as patch:
            world = World(seed, path, counts)
            patch.setattr("storage.env.environment.os", world.mirror.disks)
            try:
                world.run(steps)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                last = " ".join(world.trace[-12:])
                raise Failed(
                    f"DCP_MIRROR_SIM_SEED={seed} DCP_MIRROR_SIM_STEPS={steps} pytest tests/sim: "
                    f"after step {world.steps} (... {last})\n{type(error).__name__}: {error}"
                ) from error
            finally:
                if world.mirror.alive:
                    world.mirror.die()
    finally:
        shutil.rmtree(path, ignore_errors=True)
    return world.steps
