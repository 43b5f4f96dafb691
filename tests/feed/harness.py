"""A consumer over a real store in a temporary directory, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mirror.clock import SystemClock
from mirror.config_reader import validated
from mirror.feed.connection.connection_string import parse
from mirror.feed.follow import commands
from mirror.feed.follow.consumer import Consumer
from mirror.feed.follow.mirrored_vbucket import MirroredVbucket
from mirror.feed.follow.status import ConsumerStatus
from mirror.ingest.selection import Selection
from mirror.messages import ProcessReport, Resync, RollBack
from mirror.sandbox.cluster import SandboxCluster
from storage.admin.check import check
from storage.env import directory
from storage.model import Identity
from storage.read.view import open_view
from storage.write.writer import GroupWriter, WriterOptions
from tests.sandbox.past import state_at

VBUCKETS = 8
WAIT_S = 30.0


class ReportingConsumer(Consumer):
    def status(self) -> ProcessReport:
        return ConsumerStatus(self).report()

    def request(self, command: RollBack | Resync) -> dict[str, int]:
        return commands.execute(self, command)


class Mirror:
    """A data directory and, between `start` and `stop`, the consumer that fills it."""

    consumer: ReportingConsumer
    task: asyncio.Task[None]

    def __init__(
        self,
        path: Path,
        *,
        bucket: str,
        bucket_uuid: str,
        vbuckets: int,
        password: str,
        groups: int = 1,
        own_groups: list[int] | None = None,
        selection: Selection | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.path = str(path / "data")
        selected = (selection or Selection()).text
        self.identity = Identity("cluster", bucket, bucket_uuid, vbuckets, groups, selection=selected)
        if not directory.exists(self.path):
            directory.create(self.path, self.identity)
        self.password_file = path / "password"
        self.password_file.write_text(password)
        self.settings = validated(
            {
                "password_file": self.password_file,
                "map_poll_interval_s": 0.1,
                "retry_delay_max_ms": 100,
                "request_timeout_s": 10,
                **(settings or {}),
            }
        )
        self.own_groups = own_groups if own_groups is not None else list(range(groups))
        self.writers: list[GroupWriter] = []
        self.cluster: SandboxCluster | None = None

    def start(self, connection_string: str, **more: Any) -> ReportingConsumer:
        clock = SystemClock()
        self.writers = [
            GroupWriter(
                directory.group_path(self.path, group),
                WriterOptions(group=group, identity=self.identity, sync="unsafe", clock_ms=clock.wall_ms),
            )
            for group in self.own_groups
        ]
        self.consumer = ReportingConsumer(
            self.settings,
            source=parse(connection_string),
            writers=self.writers,
            identity=self.identity,
            clock=clock,
            **more,
        )
        self.task = asyncio.create_task(self.consumer.run())
        return self.consumer

    async def stop(self) -> None:
        await self.consumer.stop()
        try:
            await self.task
        finally:
            self.close()

    def close(self) -> None:
        for writer in self.writers:
            writer.close()
        self.writers = []

    async def fails(self) -> BaseException:
        """Wait for the consumer to give up; return why."""
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait([self.task])
        self.close()
        error = self.task.exception()
        assert error is not None, "the consumer ended without an error"
        return error

    def status(self) -> ProcessReport:
        return self.consumer.status()

    def row(self, vbid: int) -> dict[str, Any]:
        return next(row for row in self.status()["vbuckets"] if row["vbid"] == vbid)

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds; fail with the status if it does not, or if the consumer ended."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not holds():
                    if self.task.done():
                        self.task.result()
                        raise AssertionError(f"the consumer ended before {what}")
                    await asyncio.sleep(0.005)
        except TimeoutError:
            status = self.status()
            rows = [row for row in status["vbuckets"] if row["state"] != "no-active-node"]
            raise AssertionError(f"not reached: {what}; {rows[:4]} {status['nodes']} {status['error']}") from None

    async def until_published(self, vbid: int, seqno: int) -> None:
        await self.until(lambda: self.row(vbid)["published_seqno"] >= seqno, f"vb {vbid} published {seqno}")

    async def until_state(self, vbid: int, *states: str) -> None:
        await self.until(lambda: self.row(vbid)["state"] in states, f"vb {vbid} in {states}")

    async def follow(self) -> None:
        """Wait until everything that the cluster has now is published, and nothing else."""
        assert self.cluster is not None
        vbuckets = self.cluster.vbuckets
        targets = {vbid: vbuckets[vbid].high_seqno for writer in self.writers for vbid in writer.vbids}
        await self.until(lambda: streams_from(self.consumer, targets), "caught up")

        def is_there(row: dict[str, Any]) -> bool:
            vbuuid = vbuckets[row["vbid"]].vbuuid if row["published_seqno"] else row["vbuuid"]
            return (row["published_seqno"], row["vbuuid"]) == (targets[row["vbid"]], vbuuid)

        await self.until(lambda: all(map(is_there, self.status()["vbuckets"])), "exactly there")


def source_high_seqnos(consumer: Consumer) -> dict[int, int]:
    """Return the last polled high seqno of each vbucket, if known."""
    polled = {vbid: vbucket.source_high_seqno for vbid, vbucket in consumer.vbuckets.items()}
    return {vbid: seqno for vbid, seqno in polled.items() if seqno is not None}


def has_published(vbucket: MirroredVbucket, seqno: int) -> bool:
    """Return True if readers see the streamed history, at least up to `seqno`."""
    state = vbucket.writer.base
    return state.staging_branch == state.branch and state.published_seqno >= seqno


def streams_from(consumer: Consumer, seqnos: Mapping[int, int]) -> bool:
    """Return True if each vbucket streams, and has published its seqno."""
    targets = {vbucket: seqnos[vbid] for vbid, vbucket in consumer.vbuckets.items() if vbid in seqnos}
    return all(vbucket.host.streaming and has_published(vbucket, seqno) for vbucket, seqno in targets.items())


class Mirrors:
    """Mirrors of one cluster, in one folder. At the end they are stopped and compared with it."""

    def __init__(self, cluster: SandboxCluster, path: Path, *, compares: bool = True, **options: Any) -> None:
        """`options` are those of every mirror; see `make`. Without `compares`, only check the store."""
        self.compares = compares
        self._cluster = cluster
        self._path = path
        self._options = {"noop_interval_s": 0.5, "connection_buffer_size": 64 * 1024, "groups": 2, **options}
        self._made: list[Mirror] = []

    async def __aenter__(self) -> Mirrors:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        for mirror in self._made:
            if mirror.writers:
                await mirror.stop()
        if kind is None:
            for mirror in self._made:
                self._compare(mirror)

    def make(self, **options: Any) -> Mirror:
        """Make one that is not started. Options other than the parameters of `Mirror` are settings."""
        options = {"password": "demo", **self._options, **options}
        own = {name: options.pop(name) for name in ("password", "groups", "own_groups", "selection") if name in options}
        mirror = Mirror(
            self._path,
            bucket=self._cluster.bucket.name,
            bucket_uuid=self._cluster.bucket.map.bucket_uuid,
            vbuckets=len(self._cluster.vbuckets),
            settings=options,
            **own,
        )
        mirror.cluster = self._cluster
        self._made.append(mirror)
        return mirror

    def start(self, url: str = "", *, run: Mapping[str, Any] | None = None, **options: Any) -> Mirror:
        """Make and start one; `run` are options of the consumer."""
        mirror = self.make(**options)
        mirror.start(url or self._cluster.connection_string, **(run or {}))
        return mirror

    async def follow(self, url: str = "", *, run: Mapping[str, Any] | None = None, **options: Any) -> Mirror:
        """Start one, and wait until it has everything."""
        mirror = self.start(url, run=run, **options)
        await mirror.follow()
        return mirror

    def _compare(self, mirror: Mirror) -> None:
        assert check(mirror.path).problems == []
        if not self.compares:
            return
        with open_view(mirror.path, partial=True) as view:
            for vbid, vbucket in enumerate(self._cluster.vbuckets):
                source = state_at(vbucket, view.state(vbid).published_seqno)
                seen = {
                    b"\0" + document.key: (document.seqno, document.cas, document.rev_seqno, document.flags)
                    for document in view.scan(vbid, now=0)
                }
                expected = {key: (item.seqno, item.cas, item.rev_seqno, item.flags) for key, item in source.items()}
                assert seen == expected, f"vb {vbid}"


def write(cluster: SandboxCluster, count: int, name: str = "doc") -> None:
    for number in range(count):
        cluster.set(f"{name}-{number}", {"name": name, "number": number})
