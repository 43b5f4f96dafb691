"""A consumer over a real store in a temporary directory, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mirror.clock import SystemClock
from mirror.config_reader import validated
from mirror.feed.connection.connection_string import parse
from mirror.feed.follow import commands
from mirror.feed.follow.consumer import Consumer
from mirror.feed.follow.status import ConsumerStatus
from mirror.ingest.selection import Selection
from mirror.messages import ProcessReport, Resync, RollBack
from mirror.sandbox.cluster import SandboxCluster
from storage.env import directory
from storage.model import Identity
from storage.write.writer import GroupWriter, WriterOptions

WAIT_S = 30.0


class ReportingConsumer(Consumer):
    def status(self) -> ProcessReport:
        return ConsumerStatus(self).report()

    def request(self, command: RollBack | Resync) -> dict[str, int]:
        return commands.execute(self, command)


class Mirror:
    """A data directory and, between `start` and `stop`, the consumer that fills it."""

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
        secrets = path / "secrets"
        secrets.mkdir(exist_ok=True)
        self.password_file = secrets / "password"
        self.password_file.write_text(password)
        self.settings = validated(
            {
                "secrets_dir": secrets,
                "commit_interval_ms": 5,
                "seqno_poll_interval_s": 0.05,
                "map_poll_interval_s": 0.1,
                "retry_delay_min_ms": 10,
                "retry_delay_max_ms": 100,
                "storage_retry_interval_s": 0.1,
                "connect_timeout_s": 5,
                "request_timeout_s": 10,
                **(settings or {}),
            }
        )
        self.own_groups = own_groups if own_groups is not None else list(range(groups))
        self.writers: list[GroupWriter] = []
        self.consumer: ReportingConsumer | None = None
        self.task: asyncio.Task[None] | None = None

    def start(self, connection_string: str, **more: Any) -> ReportingConsumer:
        clock = SystemClock()
        self.writers = [
            GroupWriter(
                directory.group_path(self.path, group),
                WriterOptions(
                    group=group,
                    vbids=directory.group_vbids(self.identity, group),
                    identity=self.identity,
                    sync="unsafe",
                    clock_ms=clock.wall_ms,
                ),
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
        assert self.consumer is not None
        assert self.task is not None
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
        assert self.task is not None
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait([self.task])
        self.close()
        error = self.task.exception()
        assert error is not None, "the consumer ended without an error"
        return error

    def row(self, vbid: int) -> dict[str, Any]:
        assert self.consumer is not None
        return next(row for row in self.consumer.status()["vbuckets"] if row["vbid"] == vbid)

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds; fail with the status if it does not, or if the consumer ended."""
        assert self.task is not None
        try:
            async with asyncio.timeout(WAIT_S):
                while not holds():
                    if self.task.done():
                        self.task.result()
                        raise AssertionError(f"the consumer ended before {what}")
                    await asyncio.sleep(0.005)
        except TimeoutError:
            assert self.consumer is not None
            status = self.consumer.status()
            rows = [row for row in status["vbuckets"] if row["state"] != "no-active-node"]
            raise AssertionError(f"not reached: {what}; {rows[:4]} {status['nodes']} {status['error']}") from None

    async def until_published(self, vbid: int, seqno: int) -> None:
        await self.until(lambda: self.row(vbid)["published_seqno"] >= seqno, f"vb {vbid} published {seqno}")

    async def until_state(self, vbid: int, *states: str) -> None:
        await self.until(lambda: self.row(vbid)["state"] in states, f"vb {vbid} in {states}")


def mirror_of(cluster: SandboxCluster, path: Path, *, own_groups: list[int] | None = None, **options: Any) -> Mirror:
    """A mirror of the cluster's bucket; `groups` and `selection` are the mirror's, the other options settings."""
    return Mirror(
        path,
        bucket=cluster.bucket.name,
        bucket_uuid=cluster.bucket.map.bucket_uuid,
        vbuckets=len(cluster.vbuckets),
        password="demo",
        groups=options.pop("groups", 1),
        own_groups=own_groups,
        selection=options.pop("selection", None),
        settings=options,
    )
