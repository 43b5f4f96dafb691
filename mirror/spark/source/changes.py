"""Changes of a mirror's directory, for Spark: the end of each batch, and the rows between two offsets.

The rows of a vbucket between two offsets depend on these two alone. An offset names a published boundary by (branch,
seqno). Branches are never renumbered. Above the floor, neither rows nor the starts of branches change. So the way from
one offset to the other is always the same: back to the history that both share, with retractions and restorations, then
forward. A later rollback does not change the way, even if it takes the end offset off the served chain.

Only the purger removes versions, and none while a lease holds the start offset. `View.check_way` finds lost history:
the floor is above the end offset, or the purger has removed a retracted row, or a tombstone above the start offset. Any
other version that was removed between the offsets has a newer version of its key at or below the end offset. So the
documents at the end offset are the same.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mirror.client import ServiceSaidNo
from mirror.errors import MirrorError
from mirror.lease import Lease
from mirror.spark.source.columns import change_row, control_row
from mirror.spark.source.local import dealt
from mirror.spark.source.offsets import BEGINNING, RESTART, At, Lag, Offset, admit, decode
from mirror.spark.source.options import Options
from storage.env.directory import MapRecord
from storage.errors import Unavailable, ViewInvalidated
from storage.model import SEQNO_MAX, Boundary, Branch, Manifest, Seqno
from storage.read import states
from storage.read.changes import manifest_at, resolve_range
from storage.read.view import Token, View, open_view


class LostHistory(MirrorError):
    default_hint = (
        "set onLostHistory=resync (sync: --on-lost-history resync): a row says so, and all of the vbucket is sent "
        f"again; or {RESTART}"
    )


class Way(NamedTuple):
    vbid: int
    start: At
    end: At
    again: bool
    """True to read all of the vbucket, after a row of kind resync, instead of the changes since `start`."""
    last_seqno: int = SEQNO_MAX
    """Rows above this seqno are left out: those that the next batch has, after an end that is not kept any more."""


@dataclass(frozen=True)
class ChangesTask:
    ways: tuple[Way, ...] = ()
    names: Mapping[int, str] = field(default_factory=dict)
    """Collection names by id; only if the source is a connection, not a directory."""
    known: frozenset[int] = frozenset()
    """Ids of the collections that existed at the start of the batch; only for a connection."""
    followed: MapRecord | None = None
    """The driver's newest cluster map; only for a connection. Tasks follow no older one."""


class ChangesDriver(ABC):
    """Chooses the offsets of a stream, and plans tasks that read the changes between two of them."""

    def __init__(self, options: Options, origin: str, bucket_uuid: str, group_count: int = 1) -> None:
        self._options = options
        self._origin = origin
        self.bucket_uuid = bucket_uuid
        self._group_count = group_count
        self._turn = 0
        self._target: Mapping[int, int] | None = None

    def beginning(self) -> Offset:
        return Offset(self._origin, self.bucket_uuid, selection=self._options.selection)

    def decode(self, given: Mapping[str, Any]) -> Offset:
        return decode(given, self._origin, self.bucket_uuid, self._options.selection)

    def plan(self, start: Offset, end: Offset) -> list[ChangesTask]:
        """Return tasks whose rows come in the order of vbuckets: a reader of their files finds a vbucket by bounds."""
        ways: dict[int, Way] = {}
        for vbid, to in end.at.items():
            since = start.of(vbid)
            if to != since and to.seqno and (way := self._way(vbid, since, to)) is not None:
                ways[vbid] = way
        shares = dealt(list(ways), self._options.partitions, self._group_count)
        task = self._task(start, end)
        return [replace(task, ways=tuple(ways[vbid] for vbid in sorted(share))) for share in shares if share]

    @abstractmethod
    def seqnos(self) -> Mapping[int, int]:
        """Return the newest seqno of each vbucket."""

    @abstractmethod
    def _way(self, vbid: int, since: At, to: At) -> Way | None:
        """Return the way between two positions. None if the end is lost: the next batch finds that, too."""

    def _task(self, start: Offset, end: Offset) -> ChangesTask:
        return ChangesTask()

    def _refuse(self, vbid: int, lost: str) -> None:
        if not self._options.resync:
            source = f"{self._options.path}: " if self._options.path else ""
            raise LostHistory(f"{source}vbucket {vbid}: {lost}")


class LocalChanges(ChangesDriver):
    def __init__(self, options: Options) -> None:
        assert options.path is not None
        self._view = open_view(options.path)
        try:
            self._vbids = options.vbids_of(self._view.vbids)
        except BaseException:
            self._view.close()
            raise
        identity = self._view.identity
        super().__init__(options, "path", identity.bucket_uuid, identity.group_count)
        self._checked = not options.collections
        self._known: set[int] = set()
        self._lease: Lease | None = None
        self._leased_s = 0.0

    def close(self) -> None:
        if self._lease is not None:
            self._lease.leave()
        self._view.close()

    # -- offsets --------------------------------------------------------------------------------------------------

    def published(self) -> Offset:
        found = {}
        for vbid in self._vbids:
            published = states.published_since(self._view.reader(vbid), None)[0]
            if published is not None:
                found[vbid] = at_of(published)
        return replace(self.beginning(), at=found)

    def seqnos(self) -> Mapping[int, int]:
        published = self._view.published()
        return {vbid: int(published[vbid].pub.seqno) for vbid in self._vbids if vbid in published}

    def stop_at_published(self) -> None:
        self._target = {vbid: at.seqno for vbid, at in self.published().at.items()}

    def latest(self, start: Offset, limited: bool) -> Offset:
        self._hold(start)
        lags: dict[int, Lag] = {}
        again: set[int] = set()
        for vbid, published in self._view.published().items():
            at = start.of(vbid)
            if vbid not in self._vbids or (vbid in self._known and place(at) == published.position):
                continue
            lag, lost = self._lag(vbid, at, limited, is_served=at.branch == published.pub.branch)
            self._known.add(vbid)
            if lag is not None:
                lags[vbid] = lag
            if lost:
                again.add(vbid)
        ends, self._turn = admit(lags, self._turn, self._newest, self._following)
        moved = {vbid: end._replace(fresh=int(vbid in again)) for vbid, end in ends.items()}
        return replace(start, at={**start.at, **moved})

    def _lag(self, vbid: int, at: At, limited: bool, *, is_served: bool) -> tuple[Lag | None, bool]:
        """Return how far a vbucket is behind (None: leave it out), and True if the whole vbucket must be sent again.
        `is_served`: `at` is on the served branch.
        """
        try:
            published, common = states.published_since(self._view.reader(vbid), token(self._view, vbid, at))
        except Unavailable:
            return None, False  # a resync is under way: leave the vbucket out
        if (
            published is not None
            and self._target is not None
            and published.seqno > (limit := self._target.get(vbid, 0))
        ):
            published = states.newest(self._view.reader(vbid), limit) if limit else None
            if published is None and limit:  # the planned end is no longer kept: take the next boundary
                published = states.following(self._view.reader(vbid), limit)
        if published is None or (vbid in self._known and place(at) == place(at_of(published))):
            return None, False
        ahead = is_served and at.seqno > published.seqno and at.vbuuid == published.vbuuid
        if ahead and at.history_id in states.history_ids(self._view.reader(vbid), at.branch):
            return None, False  # wait: a power cut undid the mirror's last commits, and it fetches their rows again
        lost = self._lost(vbid, at, published)
        if lost:
            self._refuse(vbid, lost)
            base_seqno = 0
        elif place(at) == place(at_of(published)):
            return None, False
        else:
            base_seqno = min(at.seqno, common or 0)
        weight = 0.0
        if limited:
            history = self._view.history(vbid)
            row_bytes = history.row_bytes / max(1, history.versions)
            weight = max(1 / self._options.max_rows, row_bytes / self._options.max_bytes)
            weight *= min(1.0, history.versions / max(1, published.seqno - base_seqno))
        return Lag(base_seqno, at_of(published), bool(lost) or base_seqno < at.seqno, weight or 1e-18), bool(lost)

    def _lost(self, vbid: int, at: At, published: Boundary) -> str:
        if not at.seqno:
            return ""
        try:
            self._view.check_way(token(self._view, vbid, at), token(self._view, vbid, at_of(published)))
            if vbid not in self._known:
                there = states.boundaries_between(self._view.reader(vbid), at.branch, at.seqno - 1, at.seqno)
                if there and there[0].vbuuid != at.vbuuid:
                    return f"the position {at.branch}:{at.seqno} is of another history of the source"
        except ViewInvalidated as error:
            return f"the position {at.branch}:{at.seqno} cannot be followed: {error.message}"
        return ""

    def _newest(self, vbid: int, seqno: int) -> At | None:
        found = states.newest(self._view.reader(vbid), seqno)
        return at_of(found) if found is not None else None

    def _following(self, vbid: int, seqno: int) -> At | None:
        found = states.following(self._view.reader(vbid), seqno)
        return at_of(found) if found is not None else None

    def _hold(self, start: Offset) -> None:
        """Lease the history that the batches after `start` need. The earlier lease holds more, so a new one can wait.

        If nothing of a vbucket was sent yet, the lease holds its first kept boundary, because the first batch may end
        at any boundary.
        """
        if self._lease is not None and time.monotonic() - self._leased_s < self._options.lease_seconds / 3:
            return
        held = {}
        for vbid in self._vbids:
            at = start.of(vbid)
            if not at.seqno:
                with suppress(Unavailable):
                    at = self._following(vbid, 0) or at
            if at.seqno:
                held[vbid] = (at.branch, at.seqno)
        if not held:
            return
        assert self._options.path is not None
        before = self._lease
        try:
            self._lease = Lease(self._options.path, held, name="spark changes", seconds=self._options.lease_seconds)
        except ServiceSaidNo:  # too many leases, or a position below the floor that can still be followed
            return
        self._leased_s = time.monotonic()
        if before is not None:
            before.release()

    # -- batches --------------------------------------------------------------------------------------------------

    def plan(self, start: Offset, end: Offset) -> list[ChangesTask]:
        if not self._checked:
            since = [token(self._view, vbid, start.of(vbid)) for vbid in self._vbids]
            with suppress(Unavailable, ViewInvalidated):
                for name in self._options.collections or ():
                    self._view.check_followed(name, self._vbids, since)
                self._checked = True
        return super().plan(start, end)

    def _way(self, vbid: int, since: At, to: At) -> Way | None:
        again = bool(to.fresh)
        if not again and since.seqno and (lost := self._lost_between(vbid, since, to)):
            self._refuse(vbid, lost)
            again = True
        if (again or not since.seqno) and self._lost_between(vbid, BEGINNING, to):
            # The batch was planned, then the query stood still until the purger removed its end. The next batch begins
            # at this end. So send what a newer boundary still has up to there, and leave the rest to the next batch.
            newer, common = states.published_since(self._view.reader(vbid), token(self._view, vbid, to))
            if newer is None:
                return None
            return Way(vbid, since, self._following(vbid, to.seqno) or at_of(newer), again, common or 0)
        return Way(vbid, since, to, again)

    def _lost_between(self, vbid: int, since: At, to: At) -> str:
        try:
            start = token(self._view, vbid, since) if since.seqno else None
            self._view.check_way(start, token(self._view, vbid, to))
        except ViewInvalidated as error:
            return (
                f"the changes between {since.branch}:{since.seqno} and {to.branch}:{to.seqno} are gone: {error.message}"
            )
        return ""


def at_of(boundary: Boundary) -> At:
    return At(int(boundary.branch), int(boundary.seqno), int(boundary.vbuuid), history_id=boundary.history_id)


def place(at: At) -> tuple[int, int, int]:
    return at.branch, at.seqno, at.history_id


def token(view: View, vbid: int, at: At) -> Token:
    """Return the token of a position.

    A power cut may undo the mirror's last commits. A position that they published is valid again when the mirror has
    published the same history of the source (vbuuid) up to it.
    """
    given = Token(vbid, Branch(at.branch), Seqno(at.seqno), at.history_id)
    if at.history_id not in states.history_ids(view.reader(vbid), at.branch):
        return given
    known = view.token(vbid, at.branch, at.seqno)
    if known != given:
        there = states.following(view.reader(vbid), at.seqno - 1)
        if there is not None and (there.branch, there.vbuuid) == (at.branch, at.vbuuid):
            return known
    return given


def read(path: str, work: ChangesTask) -> Iterator[tuple[Any, ...]]:
    with open_view(path) as view:
        for way in work.ways:
            yield from rows_between(view, way)


def rows_between(view: View, way: Way) -> Iterator[tuple[Any, ...]]:
    vbid, end = way.vbid, way.end
    since = None
    if way.again:
        yield control_row("resync", vbid, "", end.branch, 0, end.vbuuid, end.seqno)
    elif way.start.seqno:
        since = token(view, vbid, way.start)
    until_token = token(view, vbid, end)
    reader = view.reader(vbid)
    passed = resolve_range(reader, since, until_token)
    base_seqno = int(passed.after_seqno)
    boundaries = states.boundaries_between(reader, end.branch, base_seqno, end.seqno)
    ahead = iter(boundaries)
    until = next(ahead, None)
    manifest = manifest_at(reader, passed, end.branch, base_seqno)
    names = manifest.names()
    names_lost: dict[int, str] = {}
    at = (end.branch, base_seqno)
    vbuuids = (way.start.vbuuid, end.vbuuid)
    for change in view.changes_between(since, until_token):
        document = change.document
        if document is None:
            assert change.rollback is not None
            at = (change.rollback.to_branch, change.rollback.to_seqno)
            vbuuids = (way.start.vbuuid, change.rollback.to_vbuuid)
            names_lost = manifest_at(reader, passed, way.start.branch, way.start.seqno).names()
        elif change.kind in ("retraction", "restoration"):
            retracted = change.kind == "retraction"
            if retracted and document.collection_id not in names_lost:  # dropped before the start: the row's manifest
                where = int(document.branch), int(document.seqno)
                names_lost |= manifest_at(reader, passed, *where).names()
            name = name_of(names_lost if retracted else names, document.collection_id)
            here = (at[0], 0) if retracted else at
            yield change_row(document, name, change.kind, vbuuids[not retracted], at[1], here)
        elif document.seqno > way.last_seqno:
            break
        else:
            while until is not None and until.seqno < document.seqno:
                until = next(ahead, None)
            ends, vbuuid = (until.seqno, until.vbuuid) if until is not None else (end.seqno, end.vbuuid)
            here = (int(document.branch), int(document.seqno))
            if change.kind == "system_event":
                before, manifest = manifest, manifest_at(reader, passed, *here)
                for kind, name in gone_collections(before, manifest):
                    yield control_row(kind, vbid, name, *here, vbuuid, ends)
                names = manifest.names()
            else:
                name = name_of(names, document.collection_id)
                yield change_row(document, name, change.kind, vbuuid, ends, here)


def gone_collections(before: Manifest, after: Manifest) -> Iterator[tuple[str, str]]:
    """Yield kind and name of each collection that a system event ended."""
    names = before.names()
    for collection_id, entry in before.collections.items():
        now = after.collections.get(collection_id)
        if now is None:
            yield "collection_dropped", names[collection_id]
        elif now.begin_seqno != entry.begin_seqno:
            yield "collection_flushed", names[collection_id]


def name_of(names: Mapping[int, str], collection_id: int) -> str:
    """Return the collection's name; `?.0x<id>` if it ended before the kept history or between two batches."""
    return names.get(collection_id) or f"?.0x{collection_id:x}"
