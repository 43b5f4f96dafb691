"""A worker process: the stores of its groups, and the consumer that writes the source's changes to them.

It has one Python thread, because a second busy thread slows LMDB writes to a fraction. Heartbeats, commands and the
consumer share one event loop, so a stuck loop sends no heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mirror.clock import Clock, SystemClock
from mirror.config import Settings, from_wire, required_data, required_source
from mirror.errors import ConfigError, SupervisionError
from mirror.feed.connection.connection_string import parse
from mirror.feed.follow import commands
from mirror.feed.follow.consumer import Consumer
from mirror.feed.follow.group_commits import STORE_RETRY_S, unusable
from mirror.feed.follow.status import ConsumerStatus, group_row
from mirror.ingest.instructions import VbucketStatus
from mirror.ingest.topology import ClusterMap
from mirror.log import get_logger, set_up_logs
from mirror.messages import (
    HoldPositions,
    NewClusterMap,
    ProcessCommand,
    ProcessReport,
    ReleaseLease,
    Reply,
    Resync,
    RollBack,
    StartMessage,
    StartWorker,
    Turned,
)
from mirror.ownership import readers_gid
from mirror.supervise.processes.life import Send, Work, main
from mirror.supervise.processes.pinned import PinnedPages
from mirror.supervise.processes.quarantine import GroupMark, quarantined
from storage.env import access, directory
from storage.env.environment import storage_error
from storage.errors import CorruptedError, Full, StorageError
from storage.history.purge import Window
from storage.model import Identity
from storage.write.writer import GroupWriter, WriterOptions

LOOK_S = 0.1
"""Interval between checks for news."""
BEHIND_S = 1.0
"""Catching up is news only if the worker was behind for this long: under live writes some vbucket is always behind."""

log = get_logger("worker")


class News:
    """Decides if the worker has news: all streams are open, a stream has ended, or all vbuckets have caught up."""

    def __init__(self) -> None:
        self._streaming = False
        self._behind_since_s: float | None = float("-inf")

    def turned(self, standing: tuple[bool, bool], now_s: float) -> bool:
        streaming, caught_up = standing
        since_s = self._behind_since_s
        if caught_up:
            self._behind_since_s = None
        elif since_s is None:
            self._behind_since_s = now_s
        turned = streaming != self._streaming or (caught_up and since_s is not None and now_s - since_s >= BEHIND_S)
        self._streaming = streaming
        return turned


class MirrorWork:
    """A consumer over the stores of some groups.

    If a group cannot be opened, its vbuckets are reported with the error, and the other groups work. Unless the group
    is damaged, it is tried again; once it can be opened, the worker ends, and its successor opens all groups. A full
    disk alone does not end a worker: opening a group for writing takes a commit, reading it does not.
    """

    def __init__(self, consumer: Consumer, stores: Stores, pins: PinnedPages, send: Send) -> None:
        self._send = send
        self._stores = stores
        self._openable: int | None = None
        self._consumer = consumer
        self._status = ConsumerStatus(consumer)
        self._pins = pins
        self._writers = stores.writers
        self._failures = stores.failures

    async def run(self) -> None:
        with contextlib.ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)
            for work in (self._tell_news(), self._retry_failed()):
                stack.callback(asyncio.create_task(work).cancel)
            await self._consumer.run()
        if self._openable is not None:
            raise SupervisionError(f"group {self._openable} can be opened now: the worker starts again with it")

    async def _retry_failed(self) -> None:
        while retried := [each for each, (_, error) in self._failures.items() if not isinstance(error, CorruptedError)]:
            await asyncio.sleep(STORE_RETRY_S)
            for group in retried:
                try:
                    self._stores.open(group).close()
                except StorageError as error:
                    self._failures[group] = (self._failures[group][0], error)
                    continue
                self._openable = group
                await self._consumer.stop()
                return

    async def _tell_news(self) -> None:
        news = News()
        while True:
            await asyncio.sleep(LOOK_S)
            if news.turned(self._status.standing(), time.monotonic()):
                self._send(Turned())

    async def stop(self) -> None:
        await self._consumer.stop()

    def status(self) -> ProcessReport:
        report = self._status.report()
        for writer in self._writers:
            with contextlib.suppress(StorageError):  # the group's vbuckets report the error
                self._pins.look(writer.group, writer.readers(), writer.figures()["file_bytes"])
        report["readers"] = self._pins.rows()
        report["warnings"] = [*report["warnings"], *self._pins.warnings()]
        report["failed_groups"] = [
            {"group": group, "message": str(error), "exit_code": int(error.exit_code)}
            for group, (_, error) in self._failures.items()
        ]
        report["vbuckets"] += [
            {"vbid": vbid, "text": str(error), "last_error": str(error)}
            | {"state": VbucketStatus.WAITING if isinstance(error, Full) else unusable(error)}
            for vbids, error in self._failures.values()
            for vbid in vbids
        ]
        report["groups"] += [group_row(group, error) for group, (_, error) in self._failures.items()]
        return report

    async def request(self, command: ProcessCommand) -> Reply:
        match command:
            case HoldPositions():
                self._hold(command)
            case ReleaseLease():
                for writer in self._writers:
                    writer.background.leases.release(command.id)
            case RollBack() | Resync():
                return commands.execute(self._consumer, command)
            case _:
                raise ConfigError(f"a worker knows no command {command.op!r}")
        return {}

    def follow_map(self, found: Mapping[str, Any]) -> None:
        self._consumer.follow(ClusterMap.from_wire(found))

    def _hold(self, command: HoldPositions) -> None:
        """Hold or renew positions. Raises NoSuchBoundary if a position is no longer kept, StorageError."""
        name, until_ms = command.id, command.until_ms
        for writer in self._writers:
            own = {vbid: (branch, seqno) for vbid, branch, seqno in command.positions if vbid in writer.vbids}
            if own and not writer.background.renew_lease(name, own, until_ms):
                writer.background.lease(name, own, until_ms)

    def resume_leases(self, leases: Sequence[HoldPositions]) -> None:
        """Hold leases granted before this process began. Only log a failure: the lease's reader gets an error later."""
        for lease in leases:
            try:
                self._hold(lease)
            except StorageError as error:
                log.warning("lease-not-resumed", error=str(error))


def restore_missing(data: str, identity: Identity, group: int, now_ms: int) -> None:
    """Create an empty group if its folder is missing: operators remove the folder of a damaged group."""
    path = directory.group_path(data, group)
    if os.path.isdir(path):
        return
    log.warning("group-folder-missing", group=group, path=path)
    unfinished = f"{path}.new"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        os.makedirs(unfinished, mode=0o700)
        directory.create_environment(unfinished, group, identity, time_ms=now_ms)
        # Whole or absent: a crash before leaves a `.new` folder, which the next start removes.
        os.rename(unfinished, path)
    except OSError as error:
        raise storage_error(error, path) from error


def share(path: str, gid: int) -> None:
    """Let members of `readers_group` read a group; if that fails, the group works without them."""
    try:
        access.share_group(path, gid)
    except StorageError as error:
        log.error("readers-group-refused", error=str(error))


class Stores:
    """The stores of the first message's groups: the writers of those that could be opened, and the other errors."""

    def __init__(self, start: StartWorker, settings: Settings, identity: Identity, clock: Clock) -> None:
        self.writers: list[GroupWriter] = []
        self.failures: dict[int, tuple[range, StorageError]] = {}
        self._settings = settings
        self._identity = identity
        self._clock = clock
        self._data = str(required_data(settings))
        self._mark = GroupMark(start.group_mark)
        self._left_alone = dict(start.quarantined)

    def open_all(self, groups: Sequence[int]) -> None:
        """Open the groups. Raises StorageError if none can be opened, unless a disk is full; ConfigError."""
        gid = readers_gid(self._settings)
        for group in groups:
            try:
                writer = self.open(group)
                writer.owner.at_work = self._mark.word
                self.writers.append(writer)
                if gid is not None:
                    share(directory.group_path(self._data, group), gid)
            except StorageError as error:
                log.error("group-not-opened", group=group, error=str(error))
                self.failures[group] = (self._identity.group_vbids(group), error)
        errors = [error for _, error in self.failures.values()]
        if not self.writers and not any(isinstance(error, Full) for error in errors):
            raise errors[0]

    def open(self, group: int) -> GroupWriter:
        path, settings, clock = directory.group_path(self._data, group), self._settings, self._clock
        if group in self._left_alone:
            raise quarantined(self._left_alone[group], path)
        restore_missing(self._data, self._identity, group, clock.wall_ms())
        options = WriterOptions(
            group=group,
            identity=self._identity,
            sync=settings.sync,
            clock_ms=clock.wall_ms,
            monotonic_ms=lambda: int(clock.monotonic() * 1000),
            window=Window(
                time_ms=settings.history_s * 1000,
                boundaries=settings.history_boundaries,
                size_bytes=settings.history_bytes,
            ),
            resync_reads=settings.resync_reads,
        )
        with self._mark.inside(group):
            return GroupWriter(path, options)


async def open_stores(start: StartMessage, send: Send) -> Work:
    """Open the groups of the first message, and make the consumer. Raises StorageError, ConfigError."""
    assert isinstance(start, StartWorker), "a server is another program"
    settings = from_wire(start.settings)
    set_up_logs(settings.log_level, json=settings.log_json, process=f"worker {start.slot}")
    clock = SystemClock()
    identity = directory.load(str(required_data(settings)))
    stores = Stores(start, settings, identity, clock)
    stores.open_all(start.groups)
    newest, floor = start.cluster_map, start.map_floor
    consumer = Consumer(
        settings,
        source=parse(required_source(settings)),
        writers=stores.writers,
        identity=identity,
        worker=str(start.slot),
        clock=clock,
        cluster_map=None if newest is None else ClusterMap.from_wire(newest),
        map_floor=None if floor is None else (floor[0], floor[1]),
        share_map=lambda found: send(NewClusterMap(found.to_wire())),
        ends_on_refusal=start.ends_on_refusal,
    )
    work = MirrorWork(consumer, stores, PinnedPages(clock.monotonic), send)
    work.resume_leases(start.leases)
    settle_collector()
    return work


NEW_CONTAINERS_MAX = 100_000
"""Number of new containers, about 10 MB, after which Python collects the youngest generation."""
OLDER_EVERY = 10
"""A generation is collected once in this many collections of the next younger one: Python's default."""


def settle_collector() -> None:
    """Set the garbage collector's thresholds after all long-lived objects were made.

    By default the collector runs after 700 new containers, and each waiting row is a container. It would search for
    cycles among rows in vain: rows have none, and reference counting frees them. A batch (`batch_bytes_max`) of
    documents of 80 bytes or more has fewer than 100,000 rows.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_CONTAINERS_MAX, OLDER_EVERY, OLDER_EVERY)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], open_stores))
