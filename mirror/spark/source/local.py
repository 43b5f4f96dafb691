"""Documents of a mirror's directory, for Spark: what a job reads is decided once, and read by its tasks.

Knows views, pins and leases; must never know Spark. `plan` runs where a job is planned, `read` where its tasks run,
which is on the same machine. Invariants: a job reads one boundary of each vbucket, chosen by `plan`, whatever is
written, rolled back or purged meanwhile; a lease holds that history from the plan until `lease_seconds` after the last
task was heard of (without a running service nothing is purged); if it is gone all the same, the job fails and says so.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from mirror.errors import ConfigError
from mirror.lease import Lease
from mirror.spark.source.options import Options
from mirror.spark.source.rows import BATCH_BYTES, Documents
from mirror.typed.bodies import AS_DECLARED, Bodies, Parsed, Reading
from storage.errors import Unavailable, UnknownCollection, ViewInvalidated
from storage.format import keys, seal
from storage.model import Vbid
from storage.read import bulk
from storage.read.bulk import KeyRange
from storage.read.view import Pin, Time, View, open_view


@dataclass
class Restriction:
    """What filters have left of all keys, collections and vbuckets."""

    start: bytes = b""
    end: bytes | None = None
    prefix: bytes = b""
    key: bytes | None = None
    """The one key that is requested, if it is one: it names the vbucket, too."""
    collections: frozenset[str] | None = None
    vbid_tests: list[Callable[[int], bool]] = field(default_factory=list)

    @property
    def keys(self) -> KeyRange:
        """The keys that are left."""
        return KeyRange(self.start, self.prefix, self.end)

    def takes(self, vbid: int) -> bool:
        """True when rows of this vbucket are left."""
        return all(test(vbid) for test in self.vbid_tests)

    def narrow(self, start: bytes = b"", end: bytes | None = None) -> None:
        """Leave keys from `start` on, below `end`."""
        self.start = max(self.start, start)
        if end is not None:
            self.end = end if self.end is None else min(self.end, end)


@dataclass(frozen=True, slots=True)
class Job:
    """What all tasks of a job have in common."""

    path: str
    lease_id: str
    lease_seconds: float
    pins: tuple[Pin, ...]
    collections: tuple[str, ...] | None
    keys: KeyRange


@dataclass(frozen=True, slots=True)
class Shape:
    """Which columns a job makes: names of `columns.DOCUMENTS`, or fields of the body (`from_body`)."""

    schema: Any
    from_body: tuple[bool, ...]
    reading: Reading = AS_DECLARED


@dataclass(slots=True)
class Counts:
    """What a task has read."""

    documents: int = 0
    misfits: int = 0
    """Documents that do not fit the schema (bodies.py)."""


def opened(path: str) -> View:
    """The mirror at `path`; also the old copy of what is being resynced is refused, as its settings want."""
    return open_view(path)


def chosen_vbids(view: View, options: Options) -> list[int]:
    """The vbuckets that were requested. Raises ConfigError for one that is not there."""
    if options.vbuckets is None:
        return list(view.vbids)
    missing = sorted(options.vbuckets - set(view.vbids))
    if missing:
        raise ConfigError(
            f"option vbuckets: {options.path} does not hold vbucket {missing[0]}",
            hint=f"it holds {view.vbids[0]} to {view.vbids[-1]}",
        )
    return sorted(options.vbuckets)


def dealt(vbids: Sequence[int], parts: int, group_count: int) -> list[list[int]]:
    """Vbuckets in `parts` equal shares at most, each out of as few groups as can be."""
    order = sorted(vbids, key=lambda vbid: (vbid % group_count, vbid))
    parts = min(parts, len(order)) or 1
    cuts = [len(order) * part // parts for part in range(parts + 1)]
    return [order[first:last] for first, last in pairwise(cuts)]


def plan(options: Options, restriction: Restriction) -> tuple[Job, list[list[int]]]:
    """Choose the boundaries of what filters have left, hold them, and deal the vbuckets to tasks."""
    assert options.path is not None
    with opened(options.path) as view:
        chosen = [vbid for vbid in chosen_vbids(view, options) if restriction.takes(vbid)]
        if restriction.key is not None:
            chosen = [vbid for vbid in chosen if vbid == view.vbid_of(restriction.key)]
        filling = [vbid for vbid in chosen if not view.state(vbid).is_whole]
        if filling:
            raise Unavailable(
                f"{len(filling)} of {len(chosen)} vbuckets are not filled yet",
                path=options.path,
                vbid=Vbid(filling[0]),
                hint="wait until `dcp-mirror status --ready` succeeds",
            )
        as_of = None if options.as_of_ms is None else Time(options.as_of_ms)
        now = None if as_of is not None else time.time()
        pins = tuple(view.pin(vbid, as_of, now=now) for vbid in chosen)
        if options.collections is not None:
            for name in options.collections:
                check_collection(view, pins, name)
        group_count = view.identity.group_count
    collections = options.collections
    if restriction.collections is not None:
        collections = tuple(sorted(restriction.collections & set(collections or restriction.collections)))
    job = Job(options.path, uuid.uuid4().hex, options.lease_seconds, pins, collections, restriction.keys)
    hold(job).leave()
    return job, dealt(chosen, options.partitions, group_count)


def check_collection(view: View, pins: Sequence[Pin], name: str) -> None:
    """Raise UnknownCollection unless some vbucket knows the collection; they hear of it one after the other."""
    known: set[str] = set()
    for pin in pins:
        known |= set(bulk.collection_names(view, pin).values())
        if name in known:
            return
    if pins:
        raise UnknownCollection(
            f"no collection {name!r}", path=view.path, hint=f"known here: {', '.join(sorted(known)[:20]) or 'none'}"
        )


def hold(job: Job) -> Lease:
    """Hold what the job reads. All of it, for every reader: tasks that have yet to begin need theirs."""
    positions = {int(pin.vbid): (int(pin.branch), int(pin.seqno)) for pin in job.pins if pin.seqno}
    return Lease(job.path, positions, name="spark documents", seconds=job.lease_seconds, lease_id=job.lease_id)


def read(job: Job, vbids: Sequence[int], shape: Shape, counts: Counts | None = None) -> Iterator[Any]:
    """The record batches of a task; what was read is added to `counts`."""
    mine = set(vbids)
    maker = Maker(shape, counts, seal.SIZE)
    lease = hold(job)
    try:
        with opened(job.path) as view:
            for pin in job.pins:
                if pin.vbid in mine:
                    yield from _of_vbucket(view, pin, job, maker)
            yield from maker.rest()
    except ViewInvalidated as error:
        raise ViewInvalidated(
            f"what this job reads is not kept any more: {error.message}",
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


class Maker:
    """Makes record batches of the rows of many vbuckets: few large ones, also where vbuckets are small."""

    def __init__(self, shape: Shape, counts: Counts | None = None, checksum_size: int = 0) -> None:
        """Nothing is held yet. Rows have a checksum of this size behind them."""
        self._shape = shape
        self._checksum_size = checksum_size
        self._counts = counts or Counts()
        fields = [field for field, of_body in zip(shape.schema, shape.from_body, strict=True) if of_body]
        self._bodies = Bodies(pa.schema(fields), shape.reading) if fields else None
        self._rows = Documents(checksum_size)
        self._now_ms = 0

    def add(self, pin: Pin, collection: str, prefix_length: int, frames: list[bytes], byte_count: int) -> Iterator[Any]:
        """Take rows; give batches as they are full."""
        if pin.now_ms != self._now_ms:
            yield from self.rest()
            self._now_ms = pin.now_ms
        whole = byte_count <= BATCH_BYTES
        for part in [frames] if whole else [[frame] for frame in frames]:
            self._rows.add(pin.vbid, collection, prefix_length, part, byte_count if whole else len(part[0]))
            if self._rows.full:
                yield from self.rest()

    def rest(self) -> Iterator[Any]:
        """What is held."""
        rows, self._rows = self._rows, Documents(self._checksum_size)
        if len(rows):
            rows.close()
            yield self._batch(rows)

    def _batch(self, rows: Documents) -> Any:
        parsed = Parsed([], {})
        if self._bodies is not None:
            parsed = self._bodies.columns(rows.values, rows.datatypes, rows.keys)
        body = iter(parsed.columns)
        columns = [
            next(body) if of_body else rows.column(field.name.removeprefix("_"))
            for field, of_body in zip(self._shape.schema, self._shape.from_body, strict=True)
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._shape.schema)
        kept = rows.alive(self._now_ms)
        misfits = [row for row in parsed.misfits if kept is None or kept[row].as_py()]
        self._counts.documents += len(rows) if kept is None else kept.true_count
        self._counts.misfits += len(misfits)
        if misfits and self._shape.reading.mode == "dropmalformed":
            fitting = [True] * len(rows)
            for row in misfits:
                fitting[row] = False
            kept = pa.array(fitting) if kept is None else pc.and_(kept, pa.array(fitting))
        return batch if kept is None else batch.filter(kept)
