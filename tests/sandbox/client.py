"""A client for the tests of this room: plain requests and answers, and DCP streams collected as events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from mirror.sandbox import SandboxCluster
from mirror.sandbox.control import SandboxControl, ask
from mirror.wire import codec_dcp, codec_kv
from mirror.wire import events as ev
from mirror.wire import frame as fr
from mirror.wire.constants import Magic, Opcode, Status
from mirror.wire.errors import ProtocolError
from mirror.wire.frame import Frame, FrameBuffer
from tests.oracle import kv_client

ENDLESS = 2**64 - 1
DATA = (ev.Mutation, ev.Deletion, ev.Expiration)
PLAIN_FEATURES = (0x06, 0x07, 0x08, 0x0B, 0x04)
FEATURES = (*PLAIN_FEATURES, 0x12)
TIMEOUT_SECONDS = 60.0


class Client:
    """A connection."""

    opened: ClassVar[list[Client]] = []
    """Closed behind each test."""
    clusters: ClassVar[list[SandboxCluster]] = []
    """Stopped behind each test; for those that are not contexts."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.features: tuple[int, ...] = ()
        self.events: list[Any] = []
        self.sizes: list[int] = []
        self.frames: list[Frame] = []
        """The frames of all streams, without opaques."""
        self.pushed: list[Frame] = []
        self.stats: dict[bytes, bytes] = {}
        self.closed = asyncio.Event()
        self.answer_noops = True
        self.truncated = False
        """The connection ended inside of a frame."""
        self._reader = reader
        self.answers: dict[int, Frame] = {}
        self._news = asyncio.Event()
        self._opaque = 0x1000
        self._task = asyncio.create_task(self._read())

    @staticmethod
    async def connect(cluster: SandboxCluster, node: int = 0) -> Client:
        reader, writer = await asyncio.open_connection(cluster.host, cluster.nodes[node].port)
        client = Client(reader, writer)
        Client.opened.append(client)
        return client

    @staticmethod
    async def login(
        cluster: SandboxCluster,
        *,
        node: int = 0,
        features: tuple[int, ...] = FEATURES,
        user: str = "demo",
        password: str = "demo",
    ) -> Client:
        client = await Client.connect(cluster, node)
        client.features = codec_kv.decode_features((await client.ask(kv_client.hello(b"test", features))).value)
        answer = await client.ask(kv_client.sasl_auth(b"PLAIN", f"\0{user}\0{password}".encode()))
        assert answer.status == Status.SUCCESS
        assert (await client.ask(kv_client.select_bucket(cluster.bucket.name.encode()))).status == Status.SUCCESS
        return client

    @staticmethod
    async def dcp(
        cluster: SandboxCluster,
        *,
        node: int = 0,
        features: tuple[int, ...] = FEATURES,
        flags: int = 0x01,
        name: str = "test",
        user: str = "demo",
        password: str = "demo",
        **controls: str,
    ) -> Client:
        client = await Client.login(cluster, node=node, features=features, user=user, password=password)
        opened = await client.ask(codec_dcp.to_frame(ev.DcpOpen(name.encode(), flags)))
        assert opened.status == Status.SUCCESS, opened
        for key, value in {"enable_noop": "true", **controls}.items():
            assert await client.control(key, value) == Status.SUCCESS, key
        return client

    @staticmethod
    async def streamed(cluster: SandboxCluster, seqno: int, value: bytes = b"", **more: Any) -> Client:
        """One with a stream of vbucket 0 that has come to a seqno."""
        client = await Client.dcp(cluster, **more)
        await client.stream(0, value=value)
        await client.until_seqno(0, seqno)
        return client

    @classmethod
    async def close_all(cls) -> None:
        """Close what a test opened, and stop its clusters."""
        for client in cls.opened:
            await client.close()
        cls.opened.clear()
        for cluster in cls.clusters:
            await cluster.stop()
        cls.clusters.clear()

    async def close(self) -> None:
        self._task.cancel()
        self.writer.close()
        await asyncio.gather(self._task, return_exceptions=True)

    # --- asking

    def send(self, frame: Frame) -> int:
        self._opaque += 1
        opaque = frame.opaque or self._opaque
        self.writer.write(fr.encode(replace(frame, opaque=opaque)))
        return opaque

    async def ask(self, frame: Frame) -> Frame:
        opaque = self.send(frame)
        await self.until(lambda: opaque in self.answers)
        return self.answers.pop(opaque)

    async def control(self, name: str, value: str) -> int:
        return (await self.ask(codec_dcp.to_frame(ev.DcpControl(name.encode(), value.encode())))).status

    async def stream(
        self,
        vbid: int,
        *,
        start: int = 0,
        end: int = ENDLESS,
        uuid: int = 0,
        snap: tuple[int, int] | None = None,
        flags: int = 0,
        value: bytes = b"",
        opaque: int = 0,
    ) -> Frame:
        snap_start, snap_end = snap or (start, start)
        request = ev.StreamRequest(vbid, flags, start, end, uuid, snap_start, snap_end, value, opaque=opaque)
        return await self.ask(codec_dcp.to_frame(request))

    async def stream_without_answer(self, vbid: int) -> None:
        """Ask for everything of a vbucket, and do not wait for the answer."""
        self.send(codec_dcp.to_frame(ev.StreamRequest(vbid, 0, 0, ENDLESS, 0, 0, 0, b"")))
        await self.writer.drain()

    def pause(self) -> None:
        """Stop reading the socket."""
        self.writer.transport.pause_reading()  # type: ignore[attr-defined]

    def resume(self) -> None:
        self.writer.transport.resume_reading()  # type: ignore[attr-defined]

    async def breathe(self) -> None:
        """Let the other side do what it can."""
        await asyncio.sleep(0)

    def ack(self, count: int) -> None:
        self.send(codec_dcp.to_frame(ev.BufferAck(count)))

    # --- hearing

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not condition():
                self._news.clear()
                assert not self.closed.is_set() or condition(), "the connection was closed"
                await self._news.wait()

    async def until_seqno(self, vbid: int, seqno: int) -> None:
        await self.until(lambda: self.seqno(vbid) >= seqno)

    async def until_end(self, opaque: int) -> None:
        await self.until(lambda: any(e.opaque == opaque for e in self.of(ev.StreamEnd)))

    async def until_closed(self) -> None:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await self.closed.wait()

    def of(self, *kinds: type[ev.Event], vbid: int | None = None) -> list[Any]:
        found: list[Any] = [each for each in self.events if isinstance(each, kinds)]
        return [each for each in found if vbid is None or each.vbid == vbid]

    def markers(self, vbid: int | None = None) -> list[tuple[int, int, int]]:
        return [(m.start_seqno, m.end_seqno, int(m.flags)) for m in self.of(ev.SnapshotMarker, vbid=vbid)]

    def seqno(self, vbid: int) -> int:
        kinds = (*DATA, ev.SystemEvent, ev.SeqnoAdvanced, ev.Prepare, ev.Commit, ev.Abort)
        return max((e.seqno for e in self.of(*kinds, vbid=vbid)), default=0)

    def state(self, vbid: int) -> dict[bytes, bytes]:
        """Key -> value after all that came, as a consumer sees it (drops of collections included)."""
        found: dict[bytes, bytes] = {}
        for event in self.of(*DATA, ev.SystemEvent, vbid=vbid):
            if isinstance(event, ev.Mutation):
                found[event.key] = event.value
            elif isinstance(event, ev.SystemEvent):
                if event.event in (0, 1):
                    collection_id = int.from_bytes(event.value[12:16])
                    found = {key: value for key, value in found.items() if key[0] != collection_id}
            else:
                found.pop(event.key, None)
        return found

    async def _read(self) -> None:
        buffer = FrameBuffer()
        try:
            while data := await self._reader.read(1 << 18):
                buffer.feed(data)
                while (frame := buffer.next_frame()) is not None:
                    self._take(frame)
                self._news.set()
            self.truncated = len(buffer) > 0
        except (ConnectionError, ProtocolError):
            pass
        finally:
            self.closed.set()
            self._news.set()

    def _take(self, frame: Frame) -> None:
        if frame.magic == Magic.SERVER_REQUEST:
            self.pushed.append(frame)
        elif frame.opcode == Opcode.STAT and frame.key:
            self.stats[frame.key] = frame.value
        elif frame.is_response:
            self.answers[frame.opaque] = frame
        elif frame.opcode == Opcode.DCP_NOOP:
            self.events.append(codec_dcp.decode(frame))
            if self.answer_noops:
                self.writer.write(fr.encode(fr.response(frame)))
        else:
            self.sizes.append(frame.wire_size)
            self.frames.append(replace(frame, opaque=0))
            self.events.append(codec_dcp.decode(frame))


async def send_command(server: SandboxControl, command: str, **arguments: object) -> Any:
    return await asyncio.to_thread(ask, server.path, command, **arguments)
