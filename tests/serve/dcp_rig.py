"""A DCP endpoint for tests, over a store that the test fills; and a client that says and hears single messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal

from mirror.serve.dcp.dcp_session import DcpServer
from mirror.wire import codec_dcp
from mirror.wire import events as ev
from mirror.wire import frame as fr
from mirror.wire.constants import DcpOpenFlag, Feature, Opcode
from mirror.wire.flow_control import counted_size
from mirror.wire.frame import Frame
from mirror.wire.system_events import encode_system_event
from storage.model import SEQNO_MAX, Collection, Manifest, ManifestUid, Seqno, SnapshotRange
from tests.oracle import kv_client
from tests.serve.kv_rig import PASSWORD, USER, WAIT_S, Client, Hosted, Store

ALL = (Feature.XATTR, Feature.XERROR, Feature.SELECT_BUCKET, Feature.SNAPPY, Feature.JSON, Feature.COLLECTIONS)
XATTRS = int(DcpOpenFlag.PRODUCER | DcpOpenFlag.INCLUDE_XATTRS)
TIMES = XATTRS | int(DcpOpenFlag.INCLUDE_DELETE_TIMES)


async def until(holds: Callable[[], bool]) -> None:
    """Return once it holds."""
    async with asyncio.timeout(WAIT_S):
        while True:
            if holds():
                return
            await asyncio.sleep(0.01)


class DcpClient(Client):
    """A plain connection that speaks DCP."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self.early: list[Frame] = []
        """Messages that came while an answer was waited for."""
        self.counted = 0
        """Bytes that flow control counts, received so far."""

    async def receive(self) -> Frame | None:
        frame = await super().receive()
        if frame is not None:
            self.counted += counted_size(frame)
        return frame

    async def say(self, event: ev.Event) -> Frame:
        """Ask by an event; messages of streams that come before the answer are kept."""
        return await self.say_frame(codec_dcp.to_frame(event))

    async def say_frame(self, request: Frame) -> Frame:
        """The same by a frame."""
        await self.send(request)
        while True:
            frame = await self.receive()
            assert frame is not None, "the server hung up"
            if frame.is_response and (frame.opcode, frame.opaque) == (request.opcode, request.opaque):
                return frame
            self.early.append(frame)

    async def event(self) -> ev.DcpEvent:
        """The next message of a stream; noops are answered and passed over."""
        while True:
            frame = self.early.pop(0) if self.early else await self.receive()
            assert frame is not None, "the server hung up"
            if frame.is_response:
                continue
            if frame.opcode == Opcode.DCP_NOOP:
                await self.send(fr.response(frame))
                continue
            return codec_dcp.decode(frame)

    async def events(self, count: int) -> list[ev.DcpEvent]:
        return [await self.event() for _ in range(count)]

    async def until_end(self, seqno: int) -> list[ev.DcpEvent]:
        """Messages up to the one that carries `seqno`."""
        found: list[ev.DcpEvent] = []
        while not found or getattr(found[-1], "seqno", 0) < seqno:
            found.append(await self.event())
        return found

    async def silent(self) -> bool:
        """Assert that no message comes for a moment."""
        assert not self.early
        try:
            async with asyncio.timeout(0.2):
                await self.receive()
        except TimeoutError:
            return True
        return False

    async def control(self, name: bytes, value: bytes) -> int:
        return (await self.say(ev.DcpControl(name, value, opaque=2))).status

    async def open(
        self,
        bucket: str,
        *,
        features: Sequence[int] = ALL,
        flags: int = XATTRS,
        name: str = "test",
        noop: bool = True,
        controls: dict[bytes, bytes] | None = None,
        login: tuple[str, str] | Literal[False] = (USER, PASSWORD),
    ) -> DcpClient:
        """All that comes before the first stream."""
        await self.hello(*features)
        if login:
            assert await self.login(*login) == 0
        assert (await self.ask(kv_client.select_bucket(bucket.encode()))).status == 0
        assert (await self.say(ev.DcpOpen(name.encode(), flags, opaque=1))).status == 0
        if noop:
            assert await self.control(b"enable_noop", b"true") == 0
        for key, value in (controls or {}).items():
            assert await self.control(key, value) == 0, key
        return self

    async def stream(
        self,
        vbid: int,
        start: int = 0,
        *,
        end: int = SEQNO_MAX,
        vbuuid: int = 0,
        snap: tuple[int, int] | None = None,
        flags: int = 0,
        value: bytes = b"",
        opaque: int = 0x77,
    ) -> ev.StreamResponse:
        """Ask for a stream; the answer, taken apart."""
        low, high = snap or (start, start)
        answer = await self.say(ev.StreamRequest(vbid, flags, start, end, vbuuid, low, high, value, opaque=opaque))
        found = codec_dcp.decode(answer)
        assert isinstance(found, ev.StreamResponse)
        return found


class DcpEndpoint(Hosted[DcpServer, DcpClient]):
    client_type = DcpClient
    server_type = DcpServer

    @property
    def url(self) -> str:
        """Connection string of a mirror that reads from here."""
        return f"couchbase://demo@127.0.0.1:{self.port}/{self.bucket.name}"

    async def client(self, **options: Any) -> DcpClient:
        """A client with a DCP connection."""
        return await (await self.connect()).open(self.bucket.name, **options)


serving_dcp = DcpEndpoint.serving


def system_event(store: Store, seqno: int, content: ev.SystemEventContent, *collections: Collection) -> None:
    """A change of collections at the source, as it would be stored."""
    version = 2 if isinstance(content, ev.CollectionModified) else 1
    frame = codec_dcp.encode(encode_system_event(content, vbid=0, seqno=seqno, version=version))
    manifest = Manifest(
        ManifestUid(seqno), {0: "_default", 8: "shop"}, {each.collection_id: each for each in collections}
    )
    store.writer.vbuckets[0].system_event(seqno, frame, manifest, SnapshotRange(Seqno(seqno), Seqno(seqno)))
    store.publish(0, seqno)
