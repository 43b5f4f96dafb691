"""Documents of a mirror's directory, for Spark: `plan` chooses a job's boundaries, and tasks `read` the documents.

Knows views, leases and pins (a pin: the position at which a vbucket is read); must never know Spark. Planning and tasks
run on the same machine. Invariants: a job reads one boundary of each vbucket, despite later writes, rollbacks and
purges. `plan` takes a lease on these boundaries, and each running task renews it. The lease ends `lease_seconds` after
the last renewal. If the history is gone all the same, the job fails with an error.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from mirror.lease import Lease
from mirror.spark.source.options import Options
from mirror.typed.rows import Counts, Maker, Shape
from storage.errors import Unavailable, ViewInvalidated
from storage.format import keys, seal
from storage.format.tokens import positions_of, unknown_collection
from storage.read import bulk
from storage.read.bulk import KeyRange
from storage.read.view import Pin, Time, View, open_view


@dataclass
class Restriction:
    start: bytes = b""
    end: bytes | None = None
    prefix: bytes = b""
    key: bytes | None = None
    """The key, if the filters allow only one; only its vbucket is read then."""
    collections: frozenset[str] | None = None
    vbid_tests: list[Callable[[int], bool]] = field(default_factory=list)

    @property
    def keys(self) -> KeyRange:
        return KeyRange(self.start, self.prefix, self.end)

    def takes(self, vbid: int) -> bool:
        return all(test(vbid) for test in self.vbid_tests)

    def narrow(self, start: bytes = b"", end: bytes | None = None) -> None:
        """Restrict the keys to those from `start` on and below `end`."""
        self.start = max(self.start, start)
        if end is not None:
            self.end = end if self.end is None else min(self.end, end)


@dataclass(frozen=True, slots=True)
class Job:
    path: str
    lease_id: str
    lease_seconds: float
    pins: tuple[Pin, ...]
    collections: tuple[str, ...] | None
    keys: KeyRange


def dealt(vbids: Sequence[int], parts: int, group_count: int) -> list[list[int]]:
    """Return at most `parts` equal shares of vbuckets, each from as few groups as possible."""
    order = sorted(vbids, key=lambda vbid: (vbid % group_count, vbid))
    parts = min(parts, len(order)) or 1
    cuts = [len(order) * part // parts for part in range(parts + 1)]
    return [order[first:last] for first, last in pairwise(cuts)]


def plan(options: Options, restriction: Restriction) -> tuple[Job, list[list[int]]]:
    """Choose and lease a boundary of each vbucket that the restriction leaves, and deal these vbuckets to tasks."""
    assert options.path is not None
    with open_view(options.path) as view:
        chosen = [vbid for vbid in options.vbids_of(view.vbids) if restriction.takes(vbid)]
        if restriction.key is not None:
            chosen = [vbid for vbid in chosen if vbid == view.vbid_of(restriction.key)]
        filling = [vbid for vbid in chosen if not view.state(vbid).is_whole]
        if filling:
            raise Unavailable(
                f"{len(filling)} of {len(chosen)} vbuckets are not filled yet",
                path=options.path,
                vbid=filling[0],
                hint="wait until `dcp-mirror status --ready` succeeds",
            )
        as_of = None if options.as_of_ms is None else Time(options.as_of_ms)
        now = None if as_of is not None else time.time()
        pins = tuple(view.pin(vbid, as_of, now=now) for vbid in chosen)
        check_collections(view, pins, options.collections or ())
        group_count = view.identity.group_count
    collections = options.collections
    if restriction.collections is not None:
        collections = tuple(sorted(restriction.collections & set(collections or restriction.collections)))
    job = Job(options.path, uuid.uuid4().hex, options.lease_seconds, pins, collections, restriction.keys)
    hold(job).leave()
    return job, dealt(chosen, options.partitions, group_count)


def check_collections(view: View, pins: Sequence[Pin], names: Sequence[str]) -> None:
    """Raise UnknownCollection for a name that no vbucket knows. Vbuckets learn of a collection at different times."""
    known: set[str] = set()
    missing = list(names)
    for pin in pins:
        known |= set(bulk.collection_names(view, pin).values())
        missing = [name for name in missing if name not in known]
        if not missing:
            return
    if pins:
        raise unknown_collection(missing[0], known, view.path)


def hold(job: Job) -> Lease:
    return Lease(
        job.path, positions_of(job.pins), name="spark documents", seconds=job.lease_seconds, lease_id=job.lease_id
    )


def read(job: Job, vbids: Sequence[int], shape: Shape, counts: Counts | None = None) -> Iterator[Any]:
    """Yield the record batches of a task, and add its documents to `counts`."""
    mine = set(vbids)
    maker = Maker(shape, counts, seal.SIZE)
    lease = hold(job)
    try:
        with open_view(job.path) as view:
            for pin in job.pins:
                if pin.vbid in mine:
                    yield from _of_vbucket(view, pin, job, maker)
            yield from maker.rest()
    except ViewInvalidated as error:
        raise ViewInvalidated(
            f"the history that this job reads is no longer kept: {error.message}",
            path=job.path,
            vbid=error.vbid,
            hint="run it again, with a longer leaseSeconds or history_s if this comes again",
        ) from error
    finally:
        lease.leave()


def _of_vbucket(view: View, pin: Pin, job: Job, maker: Maker) -> Iterator[Any]:
    names = bulk.collection_names(view, pin)
    ids = None if job.collections is None else [each for each, name in names.items() if name in job.collections]
    for chunk in bulk.documents(view, pin, ids, job.keys):
        prefix_length = len(keys.encode_collection_id(chunk.collection_id))
        yield from maker.add(pin, names[chunk.collection_id], prefix_length, chunk.stored, chunk.byte_count)
