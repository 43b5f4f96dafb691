"""`compare`: compare a mirror with its source, in tasks that compare some vbuckets each.

A task runs `inspection.verify`, which explains why the result is exact although mirror and source change. The task has
its own connections to the source, and reads the mirror's directory on its own machine. Invariants: a vbucket has one
result; mirror and source are not changed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mirror import client
from mirror.config import Settings, Values, from_wire, to_wire
from mirror.errors import ConfigError
from mirror.feed.read.reader import SourceReader
from mirror.ingest.topology import check_bucket
from mirror.inspection.comparison import VbucketResult
from mirror.inspection.verify import WAIT_S, Verifier
from mirror.messages import Ping
from mirror.spark.pipeline.runner import Progress, Runner, quiet_logs
from mirror.spark.source.local import dealt
from storage.env import directory
from storage.read.view import open_view

TASKS_PER_CORE = 4


class CompareTask(NamedTuple):
    data: str
    source: str
    settings: Values
    """Without the password, which the task reads on its own machine."""
    vbids: list[int]
    bucket_uuid: str
    wait_s: float


@dataclass(frozen=True)
class Compared:
    vbuckets: list[VbucketResult]
    elapsed_s: float

    @property
    def different(self) -> bool:
        return any(each.wrong for each in self.vbuckets)

    @property
    def unfinished(self) -> bool:
        return not all(each.equal or each.wrong for each in self.vbuckets)


def compare(
    data: Path,
    source: str,
    settings: Settings,
    runner: Runner,
    *,
    vbids: Sequence[int] | None = None,
    wait_s: float = WAIT_S,
    progress: Progress | None = None,
) -> Compared:
    start_s = time.monotonic()
    data = data.absolute()
    with open_view(str(data), stale_reads=True) as view:
        identity, held = view.identity, [int(vbid) for vbid in view.vbids]
    missing = sorted(set(vbids or ()) - set(held))
    if missing:
        raise ConfigError(f"{data} does not hold vbucket {missing[0]}", hint=f"it holds {held[0]} to {held[-1]}")
    shares = dealt(list(vbids or held), runner.parallelism * TASKS_PER_CORE, identity.group_count)
    wire = to_wire(settings)
    tasks = [CompareTask(str(data), source, wire, share, identity.bucket_uuid, wait_s) for share in shares]
    found = [each for results in runner.run(compare_task, tasks, progress) for each in results]
    return Compared(sorted(found, key=lambda each: each.vbid), time.monotonic() - start_s)


def compare_task(task: CompareTask) -> list[VbucketResult]:
    quiet_logs()
    with (
        open_view(task.data, stale_reads=True, partial=True) as view,
        SourceReader(
            task.source, settings=from_wire(task.settings), followed=directory.load_map(task.data, task.bucket_uuid)
        ) as reader,
    ):
        check_bucket(view.identity, reader.bucket_uuid, reader.vbucket_count)
        service = client.ask(Path(task.data), Ping()) is not None
        return Verifier(task.data, view, reader, service=service, wait_s=task.wait_s).run(task.vbids)
