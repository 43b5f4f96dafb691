"""`backfill`: fill a mirror in many tasks. Each task pulls one group of vbuckets from the source.

A task runs the same consumer as the service's workers. The consumer writes the group to LMDB on the disk of the task's
machine, because the target may be on a network file system, where no LMDB environment may be open. When the group has
caught up, the task copies it to the target as one compacted file. Invariants: the target becomes a mirror
(`mirror.json`) when it has every group. Until then its name is `<target>.incomplete`, and the next run with the same
`Identity` pulls the missing groups. A vbucket has caught up when it has published the high seqno that the source had at
the task's start.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mirror.clock import SystemClock
from mirror.config import Settings, Values, from_wire, to_wire
from mirror.errors import ConfigError, MirrorError, SourceTimeout
from mirror.feed.cluster.discovery import find_source
from mirror.feed.connection.bootstrap import Access
from mirror.feed.connection.connection_string import parse
from mirror.feed.follow.consumer import Consumer
from mirror.feed.follow.status import ConsumerStatus
from mirror.spark.pipeline.runner import Progress, Runner, quiet_logs
from mirror.spark.places import LocalFolder
from mirror.spark.tables.delta import LOCK_FILE, FolderLock
from storage.env import directory, handover
from storage.history.purge import Window
from storage.model import Identity
from storage.write.writer import GroupWriter, WriterOptions

IDENTITY_FILE = "backfill.json"
POLL_S = 0.05
SILENCE_S = 120.0
"""A task gives up if it is behind and the source sends no data for this long."""


class BackfillTask(NamedTuple):
    settings: Values
    """Without the password, which the task reads on its own machine."""
    identity: Identity
    group: int
    scratch: str | None
    folder: str
    silence_s: float


class Pulled(NamedTuple):
    group: int
    seqnos: int
    received_documents: int
    received_bytes: int
    file_bytes: int


@dataclass(frozen=True)
class Backfilled:
    target: str
    bucket: str
    vbuckets: int
    groups: int
    groups_done_before: int
    seqnos: int
    received_documents: int
    received_bytes: int
    file_bytes: int
    elapsed_s: float


def backfill(
    target: Path,
    settings: Settings,
    runner: Runner,
    *,
    scratch: str | None = None,
    silence_s: float = SILENCE_S,
    progress: Progress | None = None,
) -> Backfilled:
    """Pull the bucket of `settings.source` into `target`, which becomes a mirror. Every machine has a folder `scratch`
    on its own disk. Raises MirrorError and the store's errors.
    """
    assert settings.source is not None
    start_s = time.monotonic()
    target = target.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: exists already", hint="give a new folder; `run --data` continues a mirror")
    found = asyncio.run(find_source(Access.of(parse(settings.source), settings), SystemClock()))
    identity = found.identity(settings)
    folder = target.with_name(target.name + ".incomplete")
    with FolderLock(folder):
        _begin(folder, identity)
        missing = [group for group in range(identity.group_count) if not handover.is_packed(str(folder), group)]
        wire = to_wire(settings)
        tasks = [BackfillTask(wire, identity, group, scratch, str(folder), silence_s) for group in missing]
        pulled = runner.run(backfill_task, tasks, progress)
        for each in pulled:
            path = Path(directory.group_path(str(folder), each.group))
            if not handover.is_packed(str(folder), each.group):
                raise MirrorError(
                    f"{path} was written by an executor and is not here",
                    hint="give a folder that the driver and all executors share",
                )
        _finish(folder, target, identity)
    return Backfilled(
        target=str(target),
        bucket=identity.bucket_name,
        vbuckets=len(identity.vbids),
        groups=identity.group_count,
        groups_done_before=identity.group_count - len(missing),
        seqnos=sum(each.seqnos for each in pulled),
        received_documents=sum(each.received_documents for each in pulled),
        received_bytes=sum(each.received_bytes for each in pulled),
        file_bytes=sum(each.file_bytes for each in pulled),
        elapsed_s=time.monotonic() - start_s,
    )


def _begin(folder: Path, identity: Identity) -> None:
    """Keep the groups of an earlier run with the same identity. Remove others."""
    note = folder / IDENTITY_FILE
    expected = json.dumps(asdict(identity), sort_keys=True)
    try:
        if not note.exists() or note.read_text() != expected:
            for each in folder.iterdir():
                if each.is_dir():
                    shutil.rmtree(each)
            note.write_text(expected)
        for left in folder.glob("*.new"):  # left by attempts that were killed during the copy
            shutil.rmtree(left, ignore_errors=True)
    except OSError as error:
        raise LocalFolder(folder).error(error) from error


def _finish(folder: Path, target: Path, identity: Identity) -> None:
    handover.describe(str(folder), identity)
    try:
        for name in (IDENTITY_FILE, LOCK_FILE):
            (folder / name).unlink()
        if target.exists():
            target.rmdir()  # `backfill` has checked that it is empty
        folder.rename(target)
        directory.sync_directory(str(target.parent))
    except OSError as error:
        raise LocalFolder(target).error(error) from error


def backfill_task(task: BackfillTask) -> Pulled:
    """Pull a group and copy it to the target."""
    quiet_logs()
    settings = from_wire(task.settings)
    clock = SystemClock()
    try:
        scratch = tempfile.TemporaryDirectory(prefix="dcp-mirror-backfill-", dir=task.scratch)
    except OSError as error:
        raise LocalFolder(Path(task.scratch or tempfile.gettempdir())).error(error) from error
    with scratch as place:
        directory.create_environment(place, task.group, task.identity, time_ms=clock.wall_ms())
        writer = GroupWriter(
            place,
            WriterOptions(
                group=task.group,
                identity=task.identity,
                sync="unsafe",  # after a crash of this machine the group is pulled again
                clock_ms=clock.wall_ms,
                monotonic_ms=lambda: int(clock.monotonic() * 1000),
                window=Window(
                    time_ms=settings.history_s * 1000,
                    boundaries=settings.history_boundaries,
                    size_bytes=settings.history_bytes,
                ),
            ),
        )
        try:
            figures = asyncio.run(_pull(task, settings, writer))
        finally:
            writer.close()
        return figures._replace(file_bytes=handover.pack(place, task.group, task.identity, task.folder))


async def _pull(task: BackfillTask, settings: Settings, writer: GroupWriter) -> Pulled:
    assert settings.source is not None
    consumer = Consumer(
        settings,
        source=parse(settings.source),
        writers=[writer],
        identity=task.identity,
        worker=f"backfill-{task.group}",
    )
    status = ConsumerStatus(consumer)
    running = asyncio.create_task(consumer.run())
    marks: dict[int, int] = {}
    received, last_received_s = -1, time.monotonic()
    try:
        while True:
            await asyncio.wait({running}, timeout=POLL_S)
            if running.done():
                running.result()
                raise MirrorError(f"group {task.group}: the consumer ended by itself")
            for vbid, seqno in consumer.source_high_seqnos().items():
                marks[vbid] = min(seqno, marks.get(vbid, seqno))  # a failover that lost writes lowers it
            if len(marks) == len(writer.vbids) and consumer.caught_up(marks):
                break
            report = status.report()
            if (problem := report["groups"][0]["error"]) is not None:
                raise MirrorError(f"group {task.group}: {problem}")
            now_received = report["counters"]["received_bytes"]
            if now_received != received:
                received, last_received_s = now_received, time.monotonic()
            elif time.monotonic() - last_received_s > task.silence_s:
                late = next(row for row in report["vbuckets"] if not _there(row, marks))
                raise SourceTimeout(
                    f"vbucket {late['vbid']} makes no progress: {late['last_error'] or late['state']}",
                    hint="check the cluster's health; another run pulls the missing groups",
                )
        counters = status.report()["counters"]
    finally:
        await consumer.stop()
        await asyncio.gather(running, return_exceptions=True)
    while writer.step():
        writer.commit()
    seqnos = sum(int(writer.vbuckets[vbid].state.published_seqno) for vbid in writer.vbids)
    return Pulled(task.group, seqnos, counters["received_documents"], counters["received_bytes"], 0)


def _there(row: dict[str, Any], marks: dict[int, int]) -> bool:
    return row["vbid"] in marks and row["state"] == "streaming" and row["published_seqno"] >= marks[row["vbid"]]
