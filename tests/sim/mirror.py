"""The mirror as one process: real writers, consumer, actors, sessions and links, which can die at any commit.

What is not here is what needs tasks: looking for nodes, logging in, following maps. The simulation connects, moves
vbuckets, lets time pass and gives the store its turns; every commit is shown to the checker before anything follows it.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import lmdb

from mirror.config import Settings
from mirror.errors import ConnectFailed, MirrorError
from mirror.feed.connection.bootstrap import Handshake
from mirror.feed.connection.connection_string import NodeAddress, parse
from mirror.feed.connection.node_session import NodeSession
from mirror.feed.connection.transport import Link
from mirror.feed.follow import commands
from mirror.feed.follow.consumer import Consumer
from mirror.ingest.selection import SourceManifest
from mirror.messages import RollBack
from mirror.wire.constants import Feature
from storage.env import directory
from storage.env.environment import SHARED
from storage.env.transaction import Transaction
from storage.errors import NoSuchBoundary
from storage.format.records import Pub
from storage.history.chain import Chain
from storage.history.leases import Leases
from storage.history.purge import Purger, Step, Window
from storage.history.removal import Dead
from storage.model import Identity
from storage.read.view import View, open_view
from storage.write.background import Background
from storage.write.owner import GroupOwner
from storage.write.writer import GroupWriter, RollbackResult, VbucketWriter, WriterOptions
from tests.manual_clock import ManualClock
from tests.sim.disk import Disk, FailingCommit, FailingSync, WatchedOs
from tests.sim.loop import SimLoop
from tests.sim.network import Wire
from tests.sim.source import Source

GROUPS = 2


class MirrorDied(BaseException):
    """The process was killed."""


class PowerCut(MirrorDied):
    """The power failed: bytes that were not synced may be gone, too."""


class Fate:
    """The next failures of the process and its disk, counted in commits."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts
        self.die_in = 0
        self.die_after = False
        self.cut_in = 0
        self.failed_sync = False
        """True if the next disk error is that of a sync."""
        self.idle_sync_fails = False
        self.fail_in = 0
        self.error: Callable[[], Exception] = lambda: OSError(errno.EIO, "I/O error")
        self.before_failure: Callable[[], None] = lambda: None
        self.fenced: set[GroupWriter] = set()
        """Writers whose group another process has claimed."""
        self.committed: Callable[[GroupWriter], None] = lambda _writer: None
        self.rolling_back: Callable[[int, int], None] = lambda _vbid, _seqno: None
        self.rolled_back: Callable[[int, int, RollbackResult], None] = lambda _vbid, _seqno, _result: None
        self.purged_rows: Callable[[int, Dead], None] = lambda _vbid, _dead: None
        self.merged: Callable[[int], None] = lambda _vbid: None
        self.lease_lost: Callable[[HeldLease], None] = lambda _lease: None

    def dies(self, *, after: bool) -> bool:
        if not self.die_in or self.die_after != after:
            return False
        self.die_in -= 1
        return self.die_in == 0


@dataclass(slots=True)
class HeldLease:
    """A position that a follower holds, as the service's book of leases has it."""

    name: str
    vbid: int
    position: tuple[int, int]
    boundary: int | None
    """The newest kept boundary at or below it, where that is on the branch that was served then."""
    undone: bool
    """True if a power cut undid the position and no boundary below is kept: the first publish may pass it."""
    resyncs: int
    until_wall_ms: int
    until_ms: int = 0
    """By the monotonic clock."""


class SimPurger(Purger):
    """Reports the dead rows that it removes, its merges, and the floors that leases hold."""

    fate: Fate

    def _target_floor(self, txn: Transaction, vbid: int, pub: Pub, links: Chain, now_ms: int, looks: int) -> int:
        target = super()._target_floor(txn, vbid, pub, links, now_ms, looks)
        if self.leases.of(vbid, now_ms):
            held, self.leases = self.leases, Leases()
            if super()._target_floor(txn, vbid, pub, links, now_ms, looks) > target:
                self.fate.counts["floors held by a lease"] += 1
            self.leases = held
        return target

    def step(self, txn: Transaction, planned: Step) -> int:
        vbid, removed = planned.vbid, super().step(txn, planned)
        if self.moved is not None:
            self.fate.counts["links merged"] += 1
            self.fate.merged(vbid)
        if self._removal is None:
            self.fate.counts["versions purged"] += removed
        else:
            dead = self._removal.dead
            self.fate.counts["abandoned rows purged" if dead.since_ms is None else "retracted rows purged"] += removed
            self.fate.purged_rows(vbid, dead)
        return removed


class SimOwner(GroupOwner):
    """Commits that fail or die as the fate has it."""

    writer: SimWriter

    def open(self, *, claim: bool) -> None:
        super().open(claim=claim)
        if self.writer.disk is not None:
            self.writer.disk.committed(self.environment.env)

    def write(self, work: Callable[[Transaction], Any]) -> Any:
        fate = self.writer.fate
        if fate.dies(after=False):
            raise MirrorDied
        if fate.fail_in:
            fate.fail_in -= 1
            if not fate.fail_in:
                fate.before_failure()
                if self.writer.disk is not None and fate.failed_sync:
                    return self._write_with_failing_sync(work, self.writer.disk)

                def failing(txn: Transaction) -> Any:
                    work(txn)
                    raise fate.error()

                return super().write(failing)
        if self.writer in fate.fenced:
            fate.before_failure()
        grown = self.environment.env.info()["map_size"]
        result = super().write(work)
        assert self.writer not in fate.fenced, "a writer wrote after another process had claimed its group"
        if self.environment.env.info()["map_size"] > grown:
            fate.counts["maps grown"] += 1
        if self.writer.disk is not None:
            self._to_disk(self.writer.disk)
        fate.committed(self.writer)
        if fate.dies(after=True):
            raise MirrorDied
        return result

    def _to_disk(self, disk: Disk) -> None:
        fate = self.writer.fate
        if fate.cut_in:
            fate.cut_in -= 1
            if not fate.cut_in:
                fate.counts["power cuts in a commit"] += 1
                if disk.rng.random() < 0.5:
                    disk.cut_in_commit(self.environment.env)
                else:
                    disk.committed(self.environment.env)
                raise PowerCut
        disk.committed(self.environment.env)

    def _write_with_failing_sync(self, work: Callable[[Transaction], Any], disk: Disk) -> Any:
        environment = self.environment
        begin = environment.begin

        def failing(*, write: bool = False, buffers: bool = False) -> Any:
            txn = begin(write=write, buffers=buffers)
            return FailingCommit(txn, environment.env, disk, self.writer.fate.error()) if write else txn

        environment.begin = failing  # type: ignore[method-assign]
        self.writer.fate.counts["syncs of a commit failed"] += 1
        return super().write(work)

    def sync(self) -> None:
        disk, fate = self.writer.disk, self.writer.fate
        if disk is None:
            super().sync()
            return
        if fate.idle_sync_fails:
            fate.idle_sync_fails = False
            fate.before_failure()
            fate.counts["syncs of an idle group failed"] += 1
            failing: Any = FailingSync(self.environment.env, disk, lmdb.DiskError("mdb_env_sync"))
            self.environment.env = failing
        super().sync()
        disk.synced()


class SimBackground(Background):
    fate: Fate

    def new_purger(self) -> Purger:
        purger = SimPurger(self.owner.environment, self.owner.vbids, self.window, self.leases)
        purger.fate = self.fate
        return purger


class SimVbucketWriter(VbucketWriter):
    fate: Fate

    def begin_job(self) -> None:
        self.fate.counts["key rows made in steps"] += 1
        super().begin_job()

    def rollback(self, to_seqno: int, *, deferred: bool = False) -> RollbackResult:
        self._commit()
        self.fate.rolling_back(self.vbid, to_seqno)
        result = super().rollback(to_seqno, deferred=deferred)
        self.fate.rolled_back(self.vbid, to_seqno, result)
        return result


class SimWriter(GroupWriter):
    fate: Fate
    disk: Disk | None

    def _new_owner(self) -> GroupOwner:
        owner = SimOwner(self.path, self.options, load=self._load, forget=self._forget)
        owner.writer = self
        return owner

    def _new_background(self) -> Background:
        background = SimBackground(self.owner, self.vbuckets, self._pending)
        background.fate = self.fate
        return background

    def _new_vbucket(self, txn: Transaction, vbid: int) -> VbucketWriter:
        vbucket = SimVbucketWriter(txn, vbid, self.owner, self._pending, commit=self.commit)
        vbucket.fate = self.fate
        return vbucket


class Keeper:
    def __init__(self, number: int) -> None:
        self.number = number
        self.address = NodeAddress("node", 10_000 + number)
        self.session: NodeSession | None = None
        self.error: MirrorError | None = None
        self.reconnects = 0

    @property
    def ready(self) -> bool:
        return self.session is not None and self.session.ready


class SimConsumer(Consumer):
    map_news: set[int]

    def refresh_map(self, config: bytes, vbid: int) -> None:
        self.map_news.add(vbid)


class Mirror:
    """A data directory and, while it lives, the process that fills it."""

    def __init__(
        self, path: Path, rng: Random, clock: ManualClock, loop: SimLoop, source: Source, fate: Fate, *, vbuckets: int
    ) -> None:
        self.path = str(path)
        self.rng = rng
        self.clock = clock
        self.loop = loop
        self.source = source
        self.fate = fate
        self.identity = Identity("cluster", "demo", "uuid", vbuckets, GROUPS, selection=source.selection)
        directory.create(self.path, self.identity)
        self.window = rng.choice(
            (
                Window(),
                Window(),
                Window(boundaries=rng.choice((1, 2, 5, 20))),
                Window(time_ms=rng.choice((0, 500, 5_000, 60_000))),
                Window(size_bytes=rng.choice((300, 3_000, 30_000))),
                Window(time_ms=rng.choice((500, 20_000)), boundaries=rng.choice((2, 10)), size_bytes=5_000),
            )
        )
        self.sync = rng.choice(("unsafe", "unsafe", "unsafe", "unsafe", "safe", "safe", "full"))
        self.disks = WatchedOs()
        if self.sync != "unsafe":
            for group in range(GROUPS):
                folder = str(Path(directory.group_path(self.path, group)).resolve())
                self.disks.disks[f"{folder}/data.mdb"] = Disk(folder, rng)
        self.window_bytes = rng.choice((0, 600, 5_000, 1 << 20))
        self.settings = Settings(
            batch_bytes_max=rng.choice((1, 500, 3_000, 1 << 20)),
            connection_buffer_size=self.window_bytes,
            stall_timeout_s=5.0,
        )
        self.persisted = rng.random() < 0.35
        """`publish=persisted`: what is published is on the disk of every copy."""
        if self.persisted:
            self.settings = replace(self.settings, publish="persisted")
        self.wall_offset_ms = 0
        self.map_size = rng.choice((64 << 30, 400 << 10, 120 << 10, 90 << 10))
        self.writers: list[SimWriter] = []
        self.keepers = [Keeper(number) for number in range(2)]
        self.wires: list[Wire | None] = [None, None]
        self._view: View | None = None
        self.lives = 0
        self.alive = False
        self.leases: dict[str, HeldLease] = {}

    # --- life

    def start(self) -> None:
        """Open what is stored and get ready to connect."""
        self.lives += 1
        self.alive = True
        self.source.lines.clear()
        self.writers = []
        for group in range(GROUPS):
            self.writers.append(self._open_writer(group))
        for lease in list(self.leases.values()):
            self._resume_lease(lease)
        self.consumer = SimConsumer(
            self.settings,
            source=parse("couchbase://demo@node/demo"),
            writers=self.writers,
            identity=self.identity,
            worker=str(self.lives),
            clock=self.clock,
        )
        self.consumer.map_news = set()
        self.consumer._ending = self.loop.create_future()
        self.keepers = [Keeper(number) for number in range(2)]
        for keeper in self.keepers:
            self.consumer.connections.keepers[keeper.address] = keeper  # type: ignore[assignment]
        self.actors = self.consumer.vbuckets
        for vbid, actor in self.actors.items():
            self.consumer._node_of[vbid] = self.keepers[self.source.bucket.map.owners[vbid]].address
            actor.host.start_machine()

    def _open_writer(self, group: int) -> SimWriter:
        writer = SimWriter.__new__(SimWriter)
        writer.fate = self.fate
        path = directory.group_path(self.path, group)
        writer.disk = self.disks.disks.get(f"{Path(path).resolve()}/data.mdb")
        GroupWriter.__init__(
            writer,
            path,
            WriterOptions(
                group=group,
                identity=self.identity,
                sync=self.sync,
                clock_ms=self.wall_ms,
                monotonic_ms=self.monotonic_ms,
                map_size=self.map_size,
                window=self.window,
            ),
        )
        return writer

    def monotonic_ms(self) -> int:
        return int(self.clock.monotonic() * 1000)

    def wall_ms(self) -> int:
        return self.clock.wall_ms() + self.wall_offset_ms

    def die(self) -> None:
        """Kill the process: memory is gone, connections break, commits stay."""
        self.alive = False
        self.drop_view()
        self.fate.die_in = self.fate.fail_in = self.fate.cut_in = 0
        self.fate.idle_sync_fails = False
        for wire in self.wires:
            if wire is not None and wire.open:
                wire.open = False
                wire.server.connection_lost(None)
        self.wires = [None, None]
        self.loop.forget()
        for writer in self.writers:
            if writer.owner.closed:
                continue  # it died while it was closing, and its `finally` has let go of everything
            for vbucket in writer.background.jobs:
                if vbucket.job is not None:
                    vbucket.job.close()
            if SHARED.open.get(writer.environment.path, (None, 0))[0] is writer.environment:
                SHARED.release(writer.environment)
            writer.owner.unlock()
            writer.owner.closed = True
        self.writers = []

    def lose_power(self) -> None:
        """Kill the process and lose some of the bytes that were not synced."""
        self.die()
        for disk in self.disks.disks.values():
            disk.cut()

    def stop(self) -> None:
        """Stop as SIGTERM does: commit complete snapshots, then close."""
        for actor in self.actors.values():
            actor.host.drop_machine()
        for wire in self.wires:
            if wire is not None:
                wire.cut()
        for group in self.consumer.commits.groups:
            if group.error is None:
                group.writer.commit()
        for writer in self.writers:
            writer.close()
        self.drop_view()
        self.writers = []
        self.alive = False
        self.wires = [None, None]
        self.loop.forget()

    # --- leases

    def writer_of(self, vbid: int) -> SimWriter:
        return self.writers[vbid % GROUPS]

    def lease(self, lease: HeldLease) -> None:
        """Grant or renew a lease. Raises NoSuchBoundary if its position is no longer kept."""
        positions = {lease.vbid: lease.position}
        writer = self.writer_of(lease.vbid)
        if not writer.background.renew_lease(lease.name, positions, lease.until_wall_ms):
            writer.background.lease(lease.name, positions, lease.until_wall_ms)
        lease.until_ms = self.monotonic_ms() + lease.until_wall_ms - self.wall_ms()
        self.leases[lease.name] = lease

    def release(self, name: str) -> None:
        lease = self.leases.pop(name, None)
        if lease is not None:
            self.writer_of(lease.vbid).background.leases.release(name)

    def active_leases(self, vbid: int) -> list[HeldLease]:
        """Return a vbucket's leases that have not ended."""
        now_ms = self.monotonic_ms()
        for lease in list(self.leases.values()):
            if lease.until_ms <= now_ms:
                del self.leases[lease.name]
                self.fate.counts["leases ended by time"] += 1
        return [lease for lease in self.leases.values() if lease.vbid == vbid]

    def _resume_lease(self, lease: HeldLease) -> None:
        """Grant a lease again after a restart, before the writer may purge."""
        del self.leases[lease.name]
        if lease.until_wall_ms <= self.wall_ms() or lease.until_ms <= self.monotonic_ms():
            return
        try:
            self.lease(lease)
        except NoSuchBoundary:
            self.fate.lease_lost(lease)
        else:
            self.fate.counts["leases resumed after a restart"] += 1

    # --- collections

    def look_at_collections(self) -> None:
        """Receive the source's manifest if a node is connected."""
        if self.source.collections and any(keeper.ready for keeper in self.keepers):
            watch = self.consumer.collections
            watch.take(SourceManifest.parse(self.source.bucket.manifest.to_json()))
            if watch.selection.whole and watch._waiting:
                watch._notify()

    # --- connections

    def connect(self, number: int) -> None:
        keeper = self.keepers[number]
        if keeper.ready:
            return
        consumer = self.consumer
        session = NodeSession(
            consumer._access, keeper.address, consumer, self.clock, name=f"{self.lives}:{number}",
            opaques=consumer.connections.opaques,
        )  # fmt: skip
        features = {Feature.COLLECTIONS} if self.source.collections else set()
        session.handshake = Handshake(frozenset(int(feature) for feature in features))
        session.controls["max_marker_version"] = self.source.marker_v2_2
        link = Link(keeper.address, self.clock, consumer.connections.opaques)
        session._link = link
        link.on_batch, link.on_lost = session.on_batch, session.on_lost
        server = self.source.connect(number)
        wire = Wire()
        self.wires[number] = wire
        wire.join(link, server)
        server.open_sim(self.source, window_bytes=self.window_bytes, name=session.name)
        session.ready = True
        keeper.session = session
        consumer.on_node_ready(keeper)  # type: ignore[arg-type]

    def lost(self) -> None:
        """Let the keepers notice that their sessions are over."""
        for number, keeper in enumerate(self.keepers):
            if keeper.session is not None and not keeper.session.ready:
                keeper.session = None
                self.wires[number] = None

    def follow_map(self, vbid: int) -> None:
        """Tell the mirror the node of a vbucket."""
        self.consumer.map_news.discard(vbid)
        address = self.keepers[self.source.bucket.map.owners[vbid]].address
        if self.consumer._node_of[vbid] != address:
            self.consumer._move(vbid, address)

    def poll(self, vbid: int) -> None:
        """Tell the mirror the source's high seqno."""
        actor = self.actors[vbid]
        vbucket = self.source.vbucket(vbid)
        polled = self.consumer.collections.polled_collections
        high = vbucket.high_seqno
        if polled is not None:
            high = max((vbucket.collection_high_seqno.get(each, 0) for each in polled), default=0)
        if actor.host.session is not None:
            actor.polled = (actor.host.session, high)
        actor.on_high_seqno(high)

    def ask_persistence(self, vbid: int) -> None:
        """Tell the mirror the seqno that every copy has persisted of the stream's history."""
        actor = self.actors[vbid]
        vbuuid = actor.observed_vbuuid
        if vbuuid is None:
            return
        seqno = self.source.persisted_of(vbid, vbuuid)
        if seqno is not None:
            actor.persisted(vbuuid, seqno)

    def step_writer(self, group: int) -> bool:
        """Give a turn of background work as the consumer does."""
        entry = self.consumer.commits.groups[group]
        if entry.error is not None:
            return False
        return entry.step()

    def roll_back(self, vbid: int, to_seqno: int) -> int:
        """Roll back as the operator's command does."""
        result = commands.execute(self.consumer, RollBack(vbid, to_seqno))
        return int(result["boundary_seqno"])

    @property
    def refused(self) -> bool:
        """True if a group waits for people: its disk failed for good."""
        return any(group.error is not None and group.retry_timer is None for group in self.consumer.commits.groups)

    # --- reading

    @property
    def view(self) -> View:
        if self._view is None:
            self._view = open_view(self.path, partial=True)
        return self._view

    def drop_view(self) -> None:
        if self._view is not None:
            self._view.close()
            self._view = None

    def hang_up(self, number: int) -> None:
        session = self.keepers[number].session
        if session is not None:
            session.close(ConnectFailed("hung up"))
