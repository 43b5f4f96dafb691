"""A vbucket for tests of the executor and of the store's sink: a real writer, and a record of everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from mirror.feed.connection.session import NodeSession
from mirror.feed.follow.store_sink import StoreSink
from mirror.feed.stream.host import VbucketHost
from mirror.ingest import instructions as ins
from mirror.ingest.events import Answer, Start
from mirror.ingest.instructions import Instruction
from mirror.ingest.machine import VbucketMachine
from mirror.wire import events as ev
from mirror.wire.codec_dcp import encode as encode_event
from storage.env import directory
from storage.model import Identity, Seqno, SnapshotRange
from storage.write.writer import GroupWriter, WriterOptions
from tests.manual_clock import ManualClock

VBID = 0


class FakeVbucket(VbucketHost):
    """Writes down its calls, over the sink of a real writer."""

    sink: StoreSink
    connected = True
    stream_filter: ClassVar[dict[str, Any]] = {}

    def __init__(self, writer: GroupWriter) -> None:
        super().__init__(int(VBID), StoreSink(writer.vbuckets[0], self.commit), ManualClock())
        self.writer = writer
        self.machine = VbucketMachine(VBID, self.sink.state())
        self.done: list[Any] = []
        self.answers_given: list[Any] = []
        self.answers: dict[type, list[Instruction]] = {}

    def start_event(self, session: NodeSession) -> Start:
        return Start()

    def answered(self, answer: Answer) -> list[Instruction]:
        self.answers_given.append(answer)
        return self.answers.get(type(answer), [])

    def request_stream(self, request: ins.RequestStream) -> int:
        self.done.append(("request", request.offset.start_seqno))
        return 42

    def close_stream(self, opaque: int | None) -> None:
        self.done.append(("close", opaque))

    def get_failover_log(self) -> None:
        self.done.append("log")

    def answer_marker(self, opaque: int) -> None:
        self.done.append(("marker", opaque))

    def commit(self) -> None:
        self.done.append("commit")
        self.writer.commit()

    def refresh_map(self, config: bytes) -> None:
        self.done.append(("map", config))

    def refresh_collections(self) -> None:
        self.done.append("collections")

    def reconnect(self, cause: str) -> None:
        self.done.append(("reconnect", cause))

    def retry_after(self, reason: ins.RetryReason, attempt: int) -> None:
        self.done.append(("retry", reason, attempt))

    def report(self, status: ins.VbucketStatus, text: str) -> None:
        self.done.append(("report", status))


def open_writer(path: Path) -> GroupWriter:
    identity = Identity("c", "b", "u", 1, 1)
    data = str(path / "data")
    directory.create(data, identity)
    return GroupWriter(
        directory.group_path(data, 0),
        WriterOptions(group=0, identity=identity, sync="unsafe", clock_ms=lambda: 1000),
    )


def rows(writer: GroupWriter, *seqnos: int, prefix: bytes | None = None) -> list[tuple[bytes, bytes]]:
    branch = writer.vbuckets[0].prefix if prefix is None else prefix
    return [
        (branch + seqno.to_bytes(8), encode_event(ev.Mutation(0, b"\0k%d" % seqno, seqno, 1, 1, value=b"{}")))
        for seqno in seqnos
    ]


def stage(vbucket: FakeVbucket, *seqnos: int, prefix: bytes | None = None) -> ins.StageRows:
    made = rows(vbucket.writer, *seqnos, prefix=prefix)
    return ins.StageRows(made, 100, SnapshotRange(Seqno(0), Seqno(seqnos[-1])))


def publish(seqno: int) -> ins.PublishSnapshot:
    return ins.PublishSnapshot(Seqno(seqno), Seqno(0))
