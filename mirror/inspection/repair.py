"""Resyncs vbuckets of a mirror. A running service does the work, or else this process.

The old copy stays until the new one is complete (`resync_reads` decides if readers get the old copy). If this process
ends early, each vbucket is unchanged, or has a resync that a service continues.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from mirror import client
from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.errors import MirrorError, SourceTimeout, SupervisionError
from mirror.feed.connection.connection_string import parse
from mirror.feed.follow import commands
from mirror.feed.follow.consumer import Consumer
from mirror.messages import Resync
from storage.env import directory
from storage.read.view import View, open_view
from storage.write.writer import GroupWriter, WriterOptions

TIMEOUT_S = 60.0
"""Longest time without a finished vbucket."""
POLL_S = 0.05

Progress = Callable[[int, int], None]


def resync(
    path: str,
    source: str,
    settings: Settings,
    vbids: Sequence[int],
    *,
    timeout_s: float = TIMEOUT_S,
    progress: Progress = lambda _done, _of: None,
) -> None:
    """Resync vbuckets; return once all new copies are served. No view may be open in this process.

    Raises MirrorError, StorageError (Locked if another process owns a group).
    """
    target_branches: dict[int, int] = {}
    for vbid in vbids:
        answer = client.ask(Path(path), Resync(vbid))
        if answer is None and target_branches:
            raise SupervisionError("the service went away", hint="start it again: it goes on with the resyncs")
        if answer is None:
            asyncio.run(_resync_here(path, source, settings, vbids, timeout_s, progress))
            return
        target_branches[vbid] = int(answer["result"]["staging_branch"])
    with open_view(path, stale_reads=True, partial=True) as view:
        _wait(view, target_branches, timeout_s, progress)


def _wait(view: View, target_branches: dict[int, int], timeout_s: float, progress: Progress) -> None:
    since = time.monotonic()
    left = dict(target_branches)
    while left:
        done = [vbid for vbid, branch in left.items() if view.state(vbid).branch >= branch and not view.stale(vbid)]
        for vbid in done:
            del left[vbid]
            since = time.monotonic()
            progress(len(target_branches) - len(left), len(target_branches))
        if time.monotonic() - since > timeout_s:
            raise _late(left, timeout_s, hint="`dcp-mirror status` says why; the service goes on with the resync")
        time.sleep(POLL_S)


async def _resync_here(
    path: str, source: str, settings: Settings, vbids: Sequence[int], timeout_s: float, progress: Progress
) -> None:
    identity, clock = directory.load(path), SystemClock()
    with ExitStack() as stack:
        writers: list[GroupWriter] = []
        for group in sorted({vbid % identity.group_count for vbid in vbids}):
            options = WriterOptions(
                group=group,
                identity=identity,
                sync=settings.sync,
                clock_ms=clock.wall_ms,
                monotonic_ms=lambda: int(clock.monotonic() * 1000),
                resync_reads=settings.resync_reads,
            )
            writers.append(stack.enter_context(closing(GroupWriter(directory.group_path(path, group), options))))
        consumer = Consumer(settings, source=parse(source), writers=writers, identity=identity, clock=clock)
        work = asyncio.create_task(consumer.run())
        try:
            for vbid in vbids:
                commands.execute(consumer, Resync(vbid))
            writer_of = {int(vbid): writer for writer in writers for vbid in writer.vbids}
            left = set(vbids)
            since = clock.monotonic()
            while left and not work.done():
                await asyncio.sleep(POLL_S)
                states = {vbid: writer_of[vbid].vbuckets[vbid].state for vbid in left}
                done = {vbid for vbid, state in states.items() if state.staging_branch == state.branch}
                if done:
                    left -= done
                    since = clock.monotonic()
                    progress(len(vbids) - len(left), len(vbids))
                if clock.monotonic() - since > timeout_s:
                    why = consumer.map_follower.error or ""
                    raise _late(left, timeout_s, why, hint="start the service: it goes on with the resync")
        finally:
            await consumer.stop()
            await work


def _late(left: set[int] | dict[int, int], timeout_s: float, why: str = "", *, hint: str) -> MirrorError:
    more = f": {why}" if why else ""
    return SourceTimeout(
        f"vb {min(left)} and {len(left) - 1} more are not whole again after {timeout_s:g} s{more}",
        hint=hint,
    )
