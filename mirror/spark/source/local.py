"""Documents of a mirror's directory, for Spark: `plan` chooses a job's boundaries, and tasks `read` the documents.

Planning and tasks run on the same machine. `plan` takes a lease on the boundaries, and each running task renews it. The
lease ends `lease_seconds` after the last renewal. If the history is gone all the same, the job fails with an error.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mirror.lease import Lease, of_reading
from mirror.spark.source.options import Options
from mirror.typed.rows import Counts, Maker, Shape
from storage.format import seal
from storage.format.tokens import positions_of
from storage.read.view import Pin, Time, open_view

NAME = "spark documents"


@dataclass(frozen=True, slots=True)
class Job:
    path: str
    lease_id: str
    lease_seconds: float
    pins: tuple[Pin, ...]
    collections: tuple[str | int, ...] | None


def dealt(vbids: Sequence[int], parts: int, group_count: int) -> list[list[int]]:
    """Return at most `parts` equal shares of vbuckets, each from as few groups as possible."""
    order = sorted(vbids, key=lambda vbid: (vbid % group_count, vbid))
    parts = min(parts, len(order)) or 1
    cuts = [len(order) * part // parts for part in range(parts + 1)]
    return [order[first:last] for first, last in pairwise(cuts)]


def plan(options: Options) -> tuple[Job, list[list[int]]]:
    """Choose and lease a boundary of each vbucket, and deal the vbuckets to tasks."""
    assert options.path is not None
    with open_view(options.path) as view:
        chosen = options.vbids_of(view.vbids)
        as_of = None if options.as_of_ms is None else Time(options.as_of_ms)
        lease_id = uuid.uuid4().hex
        lease = of_reading(options.path, NAME, seconds=options.lease_seconds, lease_id=lease_id)
        with view.reading(chosen, as_of=as_of, lease=lease) as reading:
            for name in (options.collections or ()) if chosen else ():
                reading.collection_id(name)
            pins = tuple(reading.hold())
        job = Job(options.path, lease_id, options.lease_seconds, pins, options.collections)
        return job, dealt(chosen, options.partitions, view.identity.group_count)


def hold(job: Job) -> Lease:
    return Lease(job.path, positions_of(job.pins), name=NAME, seconds=job.lease_seconds, lease_id=job.lease_id)


def read(job: Job, vbids: Sequence[int], shape: Shape, counts: Counts | None = None) -> Iterator[Any]:
    """Yield the record batches of a task, and add its documents to `counts`."""
    maker = Maker(shape, counts, seal.SIZE)
    lease = of_reading(job.path, NAME, seconds=job.lease_seconds, lease_id=job.lease_id)
    with (
        open_view(job.path) as view,
        view.reading((pin.vbid for pin in job.pins), pins=job.pins, lease=lease) as reading,
    ):
        reading.hold()
        for vbid in set(vbids).intersection(reading.vbids):
            for rows in reading.rows(vbid, job.collections):
                yield from (make() for make in maker.add(*rows))
        yield from (make() for make in maker.rest())
