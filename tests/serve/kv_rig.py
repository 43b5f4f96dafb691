"""A KV endpoint for tests: over a store that the test fills, or over one that a consumer fills from a sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.sandbox import SandboxCluster, SandboxThread
from mirror.serve.access.auth import Reader, SourceUser, Users, entry_of
from mirror.serve.bucket.bucket import ServedBucket
from mirror.serve.bucket.map import ServedMap, own_node
from mirror.serve.bucket.mirror_session import MirrorClients
from mirror.serve.dcp.dcp_session import DcpServer
from mirror.serve.kv.server import KvServer, KvSession
from mirror.server.admission import LOCAL
from mirror.server.listener import Address, Reserved, listening_socket, reserve
from mirror.wire import codec_dcp, codec_kv
from mirror.wire import frame as fr
from mirror.wire.constants import Feature, Opcode
from mirror.wire.events import CollectionCreated
from mirror.wire.frame import Frame, FrameBuffer
from mirror.wire.system_events import encode_system_event
from storage.env import directory
from storage.format import keys, records
from storage.model import Collection, FailoverLog, Identity, Manifest, ManifestUid, Seqno, SnapshotRange
from storage.write.writer import GroupWriter, WriterOptions
from tests.feed.harness import Mirror
from tests.oracle import kv_client
from tests.storage.frames import encode_deletion
from tests.storage.rig import Clock

T = TypeVar("T")
S = TypeVar("S", bound=KvServer | DcpServer)
C = TypeVar("C", bound="Client")
WAIT_S = 60.0
USER = PASSWORD = "demo"
ALL_FEATURES = (0x03, 0x04, 0x06, 0x07, 0x08, 0x0A, 0x0B, 0x0C, 0x0E, 0x0F, 0x10, 0x11, 0x12, 0x14, 0x15, 0x1D)
DEFAULT = Collection(0, 0, "_default", Seqno(0))


def users() -> Users:
    return SourceUser(USER, lambda: PASSWORD)


class NoStrangers(SourceUser):
    """Users that have to log in, even on this machine."""

    def __init__(self) -> None:
        super().__init__(USER, lambda: PASSWORD)

    @property
    def anonymous(self) -> Reader | None:
        return None


def with_users(file: Path, entries: Mapping[str, Any], anonymous: Sequence[str] = ()) -> Path:
    """Write a file of users: a password, or a whole entry, for each name."""
    users = {name: entry_of(entry) if isinstance(entry, str) else entry for name, entry in entries.items()}
    file.write_text(json.dumps({"users": users} | ({"anonymous": {"read": anonymous}} if anonymous else {})))
    return file


def session_of(bucket: ServedBucket, reader: Reader | None = None) -> KvSession:
    cluster_map = ServedMap(bucket.identity, [own_node([Address("127.0.0.1", 5)])], 1)
    session = KvSession(MirrorClients(bucket, users(), cluster_map, SystemClock(), KvSession), Address(), LOCAL)
    session.reader = reader
    return session


class Store:
    """A mirror's directory, and its writers while the test fills it."""

    def __init__(
        self,
        path: Path,
        *,
        vbuckets: int = 16,
        bucket: str = "orders",
        uuid: str = "0123456789abcdef",
        held: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        self.path = str(path / "data")
        self.identity = Identity("cluster", bucket, uuid, vbuckets, 1, held)
        directory.create(self.path, self.identity)
        self.clock = Clock()  # the age of boundaries decides where a follower begins again
        self.clock.now = SystemClock().wall_ms()
        self.writer = GroupWriter(
            directory.group_path(self.path, 0),
            WriterOptions(
                group=0,
                identity=self.identity,
                **{"sync": "unsafe", "resync_reads": "unavailable", "clock_ms": self.clock, **options},
            ),
        )

    def log(self, vbid: int, *entries: tuple[int, int]) -> None:
        """The source's failover log, newest first."""
        self.writer.vbuckets[vbid].save(failover_log=FailoverLog.of(entries))
        self.writer.commit()

    def logs(self, vbuuid: int = 77) -> None:
        """Every stream is accepted, and the source has nothing that is not staged already."""
        for vbid in self.identity.vbids:
            self.log(vbid, (vbuuid, 0))
            if not self.writer.vbuckets[vbid].state.staged_seqno:
                self.writer.vbuckets[vbid].publish(0, 0)
        self.writer.commit()

    def publish(self, vbid: int, seqno: int) -> None:
        self.writer.vbuckets[vbid].publish(seqno, seqno)
        self.writer.commit()

    def put(
        self,
        key: bytes,
        value: bytes,
        seqno: int,
        *,
        cid: int = 0,
        cas: int = 0,
        rev: int = 1,
        publish: bool = True,
        **fields: int,
    ) -> int:
        """Store one document as a snapshot of its own; returns its vbucket."""
        frame = records.encode_mutation(key, value, seqno, collection_id=cid, cas=cas or seqno, rev_seqno=rev, **fields)
        return self._stage(key, seqno, frame, publish)

    def delete(self, key: bytes, seqno: int, *, cid: int = 0, cas: int = 0) -> None:
        self._stage(key, seqno, encode_deletion(key, seqno, collection_id=cid, cas=cas or seqno), True)

    def _stage(self, key: bytes, seqno: int, frame: bytes, publish: bool) -> int:
        vbid = keys.vbid_of(key, self.identity.vbucket_count)
        row = (self.writer.vbuckets[vbid].prefix + seqno.to_bytes(8), frame[:6] + vbid.to_bytes(2) + frame[8:])
        self.writer.vbuckets[vbid].stage([row], len(frame), SnapshotRange(Seqno(seqno), Seqno(seqno)))
        if publish:
            self.publish(vbid, seqno)
        else:
            self.writer.commit(flush_open=True)
        return vbid

    def collections(
        self,
        seqno: int,
        scopes: dict[int, str],
        *collections: Collection,
        uid: int | None = None,
        vbids: Sequence[int] = (),
    ) -> None:
        """A system event in every vbucket (or in these)."""
        named = {entry.collection_id: entry for entry in collections}
        manifest = Manifest(ManifestUid(uid or seqno), {0: "_default", **scopes}, named)
        begun = collections[-1] if collections else DEFAULT
        content = CollectionCreated(uid or seqno, begun.scope_id, begun.collection_id, begun.name)
        frame = codec_dcp.encode(encode_system_event(content, vbid=0, seqno=seqno))
        for vbid in vbids or range(self.identity.vbucket_count):
            self.writer.vbuckets[vbid].system_event(seqno, frame, manifest, SnapshotRange(Seqno(seqno), Seqno(seqno)))
            self.writer.vbuckets[vbid].publish(seqno, seqno)
        self.writer.commit()

    def close(self) -> None:
        self.writer.close()


class Client:
    """A plain connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.buffer = FrameBuffer()
        self._opaque = 0

    async def send(self, *frames: Frame) -> None:
        self.writer.write(b"".join(fr.encode(frame) for frame in frames))
        await self.writer.drain()

    async def receive(self) -> Frame | None:
        """The next frame; None when the server hung up."""
        async with asyncio.timeout(WAIT_S):
            while (frame := self.buffer.next_frame()) is None:
                try:
                    data = await self.reader.read(1 << 18)
                except ConnectionError:
                    return None
                if not data:
                    return None
                self.buffer.feed(data)
            return frame

    async def answer(self) -> Frame:
        answer = await self.receive()
        assert answer is not None, "the server hung up"
        return answer

    async def ask(self, frame: Frame) -> Frame:
        await self.send(frame)
        answer = await self.answer()
        assert (answer.opcode, answer.opaque) == (frame.opcode, frame.opaque)
        return answer

    async def get(self, key: bytes, *, opcode: int = Opcode.GET, vbid: int = 0) -> Frame:
        return await self.ask(fr.request(opcode, vbucket=vbid, key=key, opaque=7))

    async def hello(self, *features: int) -> tuple[int, ...]:
        return codec_kv.decode_features((await self.ask(kv_client.hello(b"test", features))).value)

    async def login(self, user: str = USER, password: str = PASSWORD) -> int:
        return (await self.ask(kv_client.sasl_auth(b"PLAIN", f"\0{user}\0{password}".encode()))).status

    async def alive(self) -> bool:
        await self.send(kv_client.noop())
        return await self.receive() is not None

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            return


def get(key: bytes = b"a", opaque: int = 0) -> Frame:
    return fr.request(Opcode.GET, key=key, opaque=opaque)


class Hosted(Generic[S, C]):
    """A server of a mirror on free ports, or on Unix sockets, in the running loop, and its clients."""

    client_type: type[C]
    server_type: type[S]

    def __init__(self, held: Sequence[Reserved], server: S, bucket: ServedBucket) -> None:
        self.held = held
        self.server = server
        self.bucket = bucket
        self.clients: list[C] = []

    @classmethod
    @asynccontextmanager
    async def serving(
        cls,
        path: str,
        *,
        readers: Users | None = None,
        addresses: Sequence[Address] = (Address(),),
        publishes_persisted: bool = False,
        tls: Any = None,
        **settings: Any,
    ) -> AsyncIterator[Self]:
        clock = SystemClock()
        bucket = ServedBucket(path, clock, publishes_persisted=publishes_persisted)
        held = [reserve(address, "kv") for address in addresses]
        served = ServedMap(bucket.identity, [own_node([each.address for each in held])], 5)
        made = cls(held, cls.server_type(bucket, readers or users(), served, clock, Settings(**settings)), bucket)
        async with made.running(tls):
            yield made

    @property
    def port(self) -> int:
        return self.held[0].address.port

    async def connect(self, which: int = 0, **kwargs: Any) -> C:
        address = self.held[which].address
        if address.path is not None:
            streams = await asyncio.open_unix_connection(address.path)
        else:
            streams = await asyncio.open_connection(address.host, address.port, **kwargs)
        self.clients.append(self.client_type(*streams))
        return self.clients[-1]

    @asynccontextmanager
    async def running(self, tls: Any) -> AsyncIterator[None]:
        """Serve, until the bucket is closed and the ports are free again."""
        sockets = []
        for each in self.held:
            inherited = None if each.inherited is None else os.dup(each.inherited)
            sockets.append((each.address, listening_socket(each.address, inherited)))
        await self.server.start(sockets, tls)
        try:
            yield
        finally:
            for client in self.clients:
                await client.close()
            await self.server.stop(0.2)
            self.bucket.close()
            for each in self.held:
                each.release()


class Endpoint(Hosted[KvServer, Client]):
    client_type = Client
    server_type = KvServer

    async def sdk(self) -> Client:
        """A client as an SDK is one: features, login, bucket."""
        client = await self.connect()
        await client.hello(*(each for each in ALL_FEATURES if each != Feature.TRACING))
        assert await client.login() == 0
        assert (await client.ask(kv_client.select_bucket(self.bucket.name.encode()))).status == 0
        return client


serving = Endpoint.serving


def mirror_of(cluster: SandboxCluster, path: Path, **options: Any) -> Mirror:
    path.mkdir(exist_ok=True)
    bucket = cluster.bucket
    vbuckets, uuid = len(bucket.vbuckets), bucket.map.bucket_uuid
    return Mirror(path, bucket=bucket.name, bucket_uuid=uuid, vbuckets=vbuckets, password=PASSWORD, **options)


class MirrorThread:
    """A consumer of a sandbox and a KV endpoint over its store, in a thread of their own."""

    def __init__(self, source: SandboxThread, path: Path, *, settings: dict[str, Any] | None = None) -> None:
        self.source = source
        self.mirror = mirror_of(source.cluster, path, groups=2, settings=settings)
        self.path = self.mirror.path
        self.port = 0
        self.server: KvServer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mirror", daemon=True)
        self._stack: Any = None

    @property
    def connection_string(self) -> str:
        return f"couchbase://127.0.0.1:{self.port}"

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        async def called() -> T:
            return function(*args)

        return self.run(called())

    def caught_up(self) -> None:
        """Wait until everything that the source has now is published."""
        vbuckets = self.source.cluster.bucket.vbuckets
        for vbid, seqno in enumerate(self.source.call(lambda: [each.high_seqno for each in vbuckets])):
            self.run(self.mirror.until_published(vbid, seqno))

    def __enter__(self) -> MirrorThread:
        self._thread.start()
        self.run(self._start())
        return self

    async def _start(self) -> None:
        self.mirror.start(self.source.connection_string)
        self._stack = serving(self.path)
        endpoint = await self._stack.__aenter__()
        self.port, self.server = endpoint.port, endpoint.server

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async def stop() -> None:
            await self._stack.__aexit__(None, None, None)
            await self.mirror.stop()

        try:
            self.run(stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
