"""One vbucket with `publish=persisted` over a real store, without sockets. The test is the source, and tells what every
copy has persisted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from mirror.feed.follow.mirrored_vbucket import MirroredVbucket
from mirror.feed.follow.store_sink import PersistenceGate
from mirror.ingest import events
from mirror.ingest.instructions import RequestStream
from mirror.wire.constants import MarkerVersion
from mirror.wire.events import SnapshotMarker
from storage.env import directory
from storage.errors import StorageError
from storage.history.purge import Window
from storage.model import FailoverLog, Identity
from storage.read.view import Change, Token, View, open_view
from storage.write.writer import GroupWriter, WriterOptions
from tests.manual_clock import ManualClock
from tests.storage.model import row

VBID = 0


class _Handshake:
    collections = True
    by_mirror = False


class ScriptedSession:
    """Takes requests and remembers them."""

    handshake = _Handshake
    sends_purge_seqno = False
    ready = True
    backfill_at = 0.0
    received_at = silent_s = 0.0
    address = "node"

    def __init__(self) -> None:
        self.requests: list[RequestStream] = []

    def request_stream(self, vbid: int, request: RequestStream, *_: Any) -> int:
        self.requests.append(request)
        return 100 + len(self.requests)

    def close_stream(self, vbid: int, opaque: int | None) -> None: ...

    def get_failover_log(self, vbid: int, settle: Any) -> None: ...


class _Shown:
    filter = None
    scope_names: ClassVar[dict[int, str]] = {}


class _Around:
    clock = ManualClock()
    resolved = _Shown

    def refresh_map(self, config: bytes, vbid: int) -> None: ...

    def look(self, vbid: int) -> None: ...


class _Group:
    commit_waits = True
    error: StorageError | None = None
    free_bytes = 2**40

    def __init__(self, rig: GatedVbucket) -> None:
        self.writer = rig.writer
        self.commits = self
        self.commit = rig.commit

    def schedule(self) -> None: ...

    def failed(self, error: StorageError) -> None:
        raise error

    def flush_over_budget(self) -> None: ...


class GatedVbucket:
    """The vbucket, its store and its source."""

    def __init__(self, path: Path, window: Window | None = None) -> None:
        self.path = str(path / "data")
        self.identity = Identity("c", "b", "u", 1, 1)
        self.window = window or Window()
        self.now_ms = 1_000
        directory.create(self.path, self.identity)
        self.open()

    def open(self, *, gated: bool = True) -> None:
        """A process starts on what is stored."""
        self.writer = GroupWriter(
            directory.group_path(self.path, 0),
            WriterOptions(
                group=0, identity=self.identity, sync="unsafe", clock_ms=lambda: self.now_ms, window=self.window
            ),
        )
        self.session = ScriptedSession()
        around: Any = _Around()
        group: Any = _Group(self)
        self.actor = MirroredVbucket(VBID, group, around.clock, around, around, PersistenceGate() if gated else None)
        self.host = self.actor.host
        self.host.start_machine()
        self.connect()

    def connect(self) -> None:
        session: Any = self.session
        self.actor.attach(session)

    def reconnect(self) -> None:
        self.actor.detach(events.ConnectionLost("lost"))
        self.connect()

    def close(self) -> None:
        self.writer.close()

    def commit(self) -> None:
        for _, seqno in self.writer.commit().published:
            self.host.handle(events.Published(seqno))

    # --- the source

    def accept(self, *log: tuple[int, int]) -> None:
        entries = FailoverLog.of(log)
        assert self.host.opaque is not None
        self.actor.on_answer(events.StreamAccepted(self.host.opaque, entries))

    def roll_back(self, seqno: int) -> None:
        assert self.host.opaque is not None
        self.actor.on_answer(events.StreamRollback(self.host.opaque, seqno))

    def snapshot(
        self,
        start: int,
        end: int,
        items: dict[int, tuple[bytes, bytes | None]],
        *,
        flush: bool = False,
        purge_seqno: int = 0,
    ) -> None:
        """Rows (seqno -> key, value) of one snapshot, and a commit."""
        opaque = self.host.opaque
        assert opaque is not None
        version = int(MarkerVersion.V2_2 if purge_seqno else MarkerVersion.V1)
        self.host.handle(SnapshotMarker(VBID, start, end, 1, purge_seqno=purge_seqno, version=version, opaque=opaque))
        rows = [row(self.writer.vbuckets[VBID].prefix, key, value, seqno) for seqno, (key, value) in items.items()]
        self.actor.on_rows(opaque, rows, 100)
        for _, seqno in self.writer.commit(flush_open=flush).published:
            self.host.handle(events.Published(seqno))

    def persisted(self, vbuuid: int, seqno: int) -> None:
        self.actor.persisted(vbuuid, seqno)
        self.commit()
        while self.writer.vbuckets[VBID].complete_seqno is not None:
            self.writer.step()
            self.commit()

    def high_seqno(self, seqno: int, times: int = 2) -> None:
        for _ in range(times):
            self.actor.on_high_seqno(seqno)

    # --- readers

    @property
    def published(self) -> int:
        return int(self.writer.vbuckets[VBID].state.published_seqno)

    def view(self) -> View:
        return open_view(self.path, partial=True)

    def seen(self) -> dict[bytes, tuple[int, bytes]]:
        with self.view() as view:
            return {each.key: (int(each.seqno), each.value) for each in view.scan(VBID)}

    def changes(self, since: Token | None = None) -> list[Change]:
        with self.view() as view:
            return list(view.changes(VBID, since=since))
