"""Compares the newest version of every key of a mirror with the source.

Reads the mirror and the source, and decides when to compare again; `comparison` has the rules. It changes nothing.
Memory is bounded: fingerprints of the source's versions are sorted in temporary files, and the mirror is read in the
order of keys.

Each vbucket is read from the source, from seqno 0 to the end E of a snapshot: this is the copy `there`. With a service,
verify waits until the mirror has published E. The copy `here` is the mirror's at its published boundary B, which a
lease holds during the scan. A key that changed between B and E cannot be compared yet. So the source is read on from E,
and these keys are compared again; a key that keeps changing is `not_compared`. Without a service B stays, and changes
of the source above B are `not_compared`.

Three things can interfere:
- A rollback. At the end, stream requests at (vbuuid, B) and (vbuuid, E) show if the source still has both positions. If
  not, the mirror has to roll back as the source did; then the vbucket is compared again. Without a service the state is
  `rollback`: the mirror has history that the source lost.
- The source's purge, which removes only tombstones. If B < E and the source has purged above B (the same requests show
  that), it may have purged a tombstone that the mirror lacks. A document that only the mirror has is then
  `not_compared`, otherwise a difference.
- The mirror's purger. The lease stops the floor from passing B.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mirror import client, lease
from mirror.config import Settings
from mirror.errors import MirrorError
from mirror.feed.read.reader import Position, ReadEnded, Snapshot, SourceReader, SourceRolledBack
from mirror.ingest import collections
from mirror.ingest.topology import check_bucket
from mirror.inspection.comparison import OutOfOrder, Side, VbucketResult, Verdict, compare, judge
from mirror.messages import Ping
from mirror.wire.codec_dcp import decode
from mirror.wire.events import SystemEvent
from mirror.wire.frame import decode as decode_frame
from mirror.wire.system_events import decode_system_event
from storage.env import directory
from storage.errors import CorruptedError, NotPublished, StorageError, ViewInvalidated, WriteLost
from storage.format import keys
from storage.format.digest import Fingerprint, Runs, fingerprint
from storage.model import Kind, Manifest, Seqno, Vbuuid
from storage.read.reading import BoundaryRead
from storage.read.scan import KeySelection
from storage.read.states import vbuuid_at
from storage.read.view import View, open_view
from storage.read.wait import MutationToken

ATTEMPTS_MAX = 4
"""Maximum number of comparisons of a whole vbucket. A rollback or too many changes make a comparison useless."""
ROUNDS_MAX = 40
SCANS_MAX = 5
"""Maximum number of scans of a mirror's vbucket. Rollbacks and the purger may end a scan early."""
WAIT_S = 60.0
"""Longest time in all to wait for the mirror to publish the seqnos read from the source."""


class VerifyTask(NamedTuple):
    """Some vbuckets of a mirror. The task opens mirror and source itself, on its own machine."""

    path: str
    source: str
    settings: Settings
    """Without the password, which the task reads on its own machine."""
    collections: list[str] | None
    vbids: list[int]
    wait_s: float


def verify_task(task: VerifyTask) -> list[VbucketResult]:
    """Raises MirrorError, StorageError."""
    with open_view(task.path, stale_reads=True, partial=True) as view:
        followed = directory.load_map(task.path, view.identity.bucket_uuid)
        with SourceReader(
            task.source, settings=task.settings, collections=task.collections, followed=followed
        ) as reader:
            check_bucket(view.identity, reader.bucket_uuid, reader.vbucket_count)
            service = client.ask(Path(task.path), Ping()) is not None
            return Verifier(task.path, view, reader, service=service, wait_s=task.wait_s).run(task.vbids)


@dataclass(slots=True)
class _Vbucket:
    result: VbucketResult
    runs: Runs
    position: Position = field(default_factory=Position)
    manifest: Manifest = field(default_factory=Manifest.initial)
    moved: dict[bytes, Fingerprint | None] = field(default_factory=dict)
    here: Position = field(default_factory=Position)
    again: bool = False


class Verifier:
    def __init__(
        self,
        path: str,
        view: View,
        reader: SourceReader,
        *,
        service: bool,
        wait_s: float = WAIT_S,
    ) -> None:
        """`view` was opened with `stale_reads` and `partial`. Without a `service` the mirror makes no progress."""
        self._path = path
        self._view = view
        self._reader = reader
        self._service = service
        self._left_s = wait_s if service else 0.0

    def run(self, vbids: Sequence[int]) -> list[VbucketResult]:
        """Compare vbuckets; return results in the order of `vbids`. Raises MirrorError."""
        done: dict[int, VbucketResult] = {}
        todo = list(vbids)
        for attempt in range(ATTEMPTS_MAX):
            looked_at = self._compare_all(todo)
            self._settle(looked_at)
            self._check_histories(looked_at)
            todo = []
            for vbid, vbucket in looked_at.items():
                done[vbid] = vbucket.result
                if vbucket.again:
                    todo.append(vbid)
            if not todo or not self._service:
                break
            if attempt + 1 < ATTEMPTS_MAX:
                time.sleep(min(1.0, self._left_s))
        for vbid, result in done.items():
            if result.equal and (result.not_compared or vbid in todo):
                result.state = "unsure"
                result.detail = result.detail or "it changed faster than it could be compared; try again"
        return [done[vbid] for vbid in vbids]

    # -- a whole vbucket ------------------------------------------------------------------------------------------

    def _compare_all(self, vbids: Sequence[int]) -> dict[int, _Vbucket]:
        looked_at = {vbid: _Vbucket(VbucketResult(vbid), Runs()) for vbid in vbids}
        high_seqnos = self._reader.high_seqnos()
        until = {vbid: high_seqnos[vbid] for vbid in vbids}
        try:
            for item in self._reader.read(dict.fromkeys(vbids, Position()), until):
                vbucket = looked_at[item.vbid]
                if isinstance(item, Snapshot):
                    self._take(vbucket, item)
                    continue
                if isinstance(item, ReadEnded):
                    self._compare(vbucket)
                else:
                    vbucket.again = True
                    vbucket.result.state = "unsure"
                    vbucket.result.detail = "the source lost history while it was read"
                vbucket.runs.close()
        except OSError as error:
            raise MirrorError(
                f"fingerprints cannot be kept in the temporary folder: {error.strerror or error}",
                hint="free space there, or name another folder in TMPDIR",
            ) from None
        finally:
            for vbucket in looked_at.values():
                vbucket.runs.close()
        return looked_at

    def _take(self, vbucket: _Vbucket, snapshot: Snapshot) -> None:
        for document in snapshot.documents(raw=True):
            if document.kind is not Kind.SYSTEM_EVENT:
                vbucket.runs.add(fingerprint(document))
        vbucket.position = snapshot.position
        vbucket.manifest = snapshot.manifest

    def _compare(self, vbucket: _Vbucket) -> None:
        try:
            late = self._wait_for(vbucket)
            moved = self._scan_and_compare(vbucket)
        except (StorageError, OutOfOrder) as error:
            self._failed(vbucket, error)
            return
        result = vbucket.result
        result.detail = late
        if moved is None:
            vbucket.again = True
        elif not result.published_seqno and result.source_seqno:
            result.state, result.detail, result.not_compared = "unsure", "nothing is published here", result.moved
        elif self._service:
            vbucket.moved = moved
        else:
            result.not_compared = result.moved

    @staticmethod
    def _failed(vbucket: _Vbucket, error: StorageError | OutOfOrder) -> None:
        """Only damage is `unreadable`, which a repair fetches again."""
        result, damaged = vbucket.result, isinstance(error, CorruptedError | OutOfOrder)
        if result.equal or damaged:
            result.state, result.detail = "unreadable" if damaged else "unsure", str(error)
        vbucket.again, vbucket.moved = isinstance(error, ViewInvalidated), {}

    def _wait_for(self, vbucket: _Vbucket) -> str:
        """Wait until the mirror has published the seqno read from the source. Return the reason if it does not. If a
        failover lost the seqno, return "" and have the vbucket compared again.
        """
        position, vbid = vbucket.position, vbucket.result.vbid
        if not position.seqno:
            return ""
        token = MutationToken(vbid, Vbuuid(position.vbuuid), Seqno(position.seqno))
        began_s = time.monotonic()
        try:
            self._view.wait_for(token, self._left_s)
        except NotPublished:
            if self._service:
                return "the mirror did not publish the source's changes in time"
            return "no service runs: later changes of the source are not compared"
        except WriteLost:
            vbucket.again = True
        finally:
            self._left_s = max(0.0, self._left_s - (time.monotonic() - began_s))
        return ""

    def _scan_and_compare(self, vbucket: _Vbucket) -> dict[bytes, Fingerprint | None] | None:
        vbid = vbucket.result.vbid
        for _ in range(SCANS_MAX - 1):
            with contextlib.suppress(ViewInvalidated):
                return self._scan_once(vbucket, vbid)
        return self._scan_once(vbucket, vbid)

    def _scan_once(self, vbucket: _Vbucket, vbid: int) -> dict[bytes, Fingerprint | None] | None:
        with self._view.reading((vbid,), lease=lease.of_reading(self._path, "verify")) as reading:
            reading.hold()
            mirror = self._side(reading, vbid)
            source = Side(vbucket.position.seqno, vbucket.manifest)
            branch = int(reading.pin(vbid).branch)
            result = VbucketResult(
                vbid, branch=branch, published_seqno=mirror.seqno, source_seqno=vbucket.position.seqno
            )
            filtered = self._view.state(vbid).stream_filter is not None
            there = (
                each
                for each in vbucket.runs.newest()
                if source.has_collection(each)
                and (not filtered or keys.split_key(each.key)[0] in mirror.manifest.collections)
            )
            here = self._fingerprints(reading, vbid)
            moved = compare(result, here, there, mirror, source, remember=self._service)
            result.behind_seqnos = max(0, source.seqno - mirror.seqno)
            vbucket.result = result
            vbucket.here = self._position(reading, vbid)
            return moved

    # -- reads of the mirror --------------------------------------------------------------------------------------

    def _side(self, reading: BoundaryRead, vbid: int) -> Side:
        manifest, state = reading.manifest(vbid), self._view.state(vbid)
        missing_seqno = int(state.history_floor_seqno)
        if state.has_served_log or state.rollback_deferred:  # a resync forgets it; it was no higher
            missing_seqno = min(state.missing_seqno, missing_seqno)
        seqno = int(reading.pin(vbid).seqno)
        return Side(seqno, manifest, lambda: int(self._view.state(vbid).local_purge_seqno), missing_seqno)

    def _fingerprints(self, reading: BoundaryRead, vbid: int) -> Iterator[Fingerprint]:
        for collection_id in sorted(reading.manifest(vbid).collections, key=keys.encode_collection_id):
            start = b""
            while True:
                page, start = reading.page(vbid, collection_id, KeySelection(start=start, deletions=True, raw=True))
                yield from map(fingerprint, page)
                if not start:
                    break

    def _lookup(self, reading: BoundaryRead, vbid: int, wire_key: bytes) -> Fingerprint | None:
        collection_id, key = keys.split_key(wire_key)
        selection = KeySelection(start=key, deletions=True, raw=True)
        page, _ = reading.page(vbid, collection_id, selection, limit=1)
        found = fingerprint(page[0]) if page else None
        return found if found is not None and found.key == wire_key else None

    def _position(self, reading: BoundaryRead, vbid: int) -> Position:
        pin = reading.pin(vbid)
        return Position(int(vbuuid_at(self._view.reader(vbid), pin)), int(pin.seqno))

    # -- moved keys -----------------------------------------------------------------------------------------------

    def _settle(self, looked_at: dict[int, _Vbucket]) -> None:
        for _ in range(ROUNDS_MAX):
            todo = {vbid: vbucket for vbid, vbucket in looked_at.items() if vbucket.moved}
            if not todo:
                return
            high_seqnos = self._reader.high_seqnos()
            until = {vbid: max(high_seqnos[vbid], vbucket.position.seqno) for vbid, vbucket in todo.items()}
            for item in self._reader.read({vbid: vbucket.position for vbid, vbucket in todo.items()}, until):
                vbucket = todo[item.vbid]
                if isinstance(item, Snapshot):
                    for frame, document in zip(item.frames(), item.documents(raw=True), strict=True):
                        if document.kind is Kind.SYSTEM_EVENT:
                            event = decode(decode_frame(frame)[0])
                            assert isinstance(event, SystemEvent), "the row says so"
                            vbucket.manifest = collections.apply(
                                vbucket.manifest, decode_system_event(event), document.seqno
                            )
                            continue
                        key = keys.encode_collection_id(document.collection_id) + document.key
                        if key in vbucket.moved:
                            vbucket.moved[key] = fingerprint(document)
                    vbucket.position = item.position
                elif isinstance(item, ReadEnded):
                    self._look_again(vbucket)
                else:
                    vbucket.again, vbucket.moved = True, {}
        for vbucket in looked_at.values():
            vbucket.result.not_compared += len(vbucket.moved)

    def _look_again(self, vbucket: _Vbucket) -> None:
        result = vbucket.result
        try:
            late = self._wait_for(vbucket)
            reading = self._view.reading((result.vbid,))
            mirror = self._side(reading, result.vbid)
            source = Side(vbucket.position.seqno, vbucket.manifest)
            left: dict[bytes, Fingerprint | None] = {}
            for key, there in vbucket.moved.items():
                here = self._lookup(reading, result.vbid, key)
                seen = there if there is not None and source.has_collection(there) else None
                if here is None and seen is None:
                    continue
                verdict = judge(here, seen, mirror, source)
                if verdict is Verdict.MOVED:
                    left[key] = there
                else:
                    result.count(verdict, here, seen)
            vbucket.moved = {} if late else left
            result.detail = late
            if late:
                result.not_compared = len(left)
            if mirror.seqno >= result.source_seqno:
                result.behind_seqnos = 0
            vbucket.here = self._position(reading, result.vbid)
        except StorageError as error:
            self._failed(vbucket, error)

    # -- histories ------------------------------------------------------------------------------------------------

    def _check_histories(self, looked_at: dict[int, _Vbucket]) -> None:
        here = {vbid: vbucket.here for vbid, vbucket in looked_at.items() if vbucket.here.seqno and not vbucket.again}
        for item in self._reader.read(here, {vbid: position.seqno for vbid, position in here.items()}):
            if isinstance(item, SourceRolledBack):
                self._left_behind(looked_at[item.vbid], item.seqno)
        there = {vbid: each.position for vbid, each in looked_at.items() if each.position.seqno and not each.again}
        for item in self._reader.read(there, {vbid: position.seqno for vbid, position in there.items()}):
            if isinstance(item, SourceRolledBack):
                looked_at[item.vbid].again = True
        for vbid, vbucket in looked_at.items():
            with contextlib.suppress(StorageError):
                if vbucket.result.branch and self._view.pin(vbid).branch != vbucket.result.branch:
                    vbucket.again = True

    def _left_behind(self, vbucket: _Vbucket, seqno: int) -> None:
        result, position = vbucket.result, vbucket.here
        log = self._reader.failover_log(result.vbid)
        end_seqno = log.end_of(position.vbuuid, self._reader.high_seqnos()[result.vbid])
        if end_seqno is not None and end_seqno >= position.seqno:
            result.detail = "the source has forgotten deletions since; once the stream breaks, the vbucket is resynced"
            result.excuse_purged()
        elif self._service:
            vbucket.again = True
        else:
            result.state = "rollback"
            result.detail = (
                f"the source has no such history above seqno {seqno}: the service will take it back to there"
            )
