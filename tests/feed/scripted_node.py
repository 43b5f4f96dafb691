"""A node that does exactly what a test says: answers by opcode, everything else by default."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping
from typing import Any

from mirror.wire.constants import BODY_LENGTH_MAX, Feature, Opcode, Status
from mirror.wire.frame import Frame, FrameBuffer, encode, response
from mirror.wire.sasl import SaslError, ScramServer, plain_decode

USER, PASSWORD = "demo", "hunter2"
Answer = Callable[["ScriptedNode", Frame], list[Frame] | bytes | None]
"""Returns the answer to a request: frames, raw bytes, or None for no answer."""


class ScriptedNode:
    """`async with ScriptedNode({Opcode.X: answer})`; `received` holds every request, `send` pushes bytes."""

    def __init__(self, answers: Mapping[int, Answer] | None = None, *, ssl: Any = None) -> None:
        self.answers = dict(answers or {})
        self.received: list[Frame] = []
        self.answered: list[Frame] = []
        self.has_received = asyncio.Event()
        self.features = {Feature.SELECT_BUCKET, Feature.XATTR, Feature.COLLECTIONS, Feature.JSON, Feature.SNAPPY}
        self.mechanisms = b"SCRAM-SHA512 SCRAM-SHA256 SCRAM-SHA1 PLAIN"
        self.greeting = b""
        self.port = 0
        self.connections = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None
        self._ssl = ssl
        self._scram: ScramServer | None = None

    async def __aenter__(self) -> ScriptedNode:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._ssl)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.hang_up()
        await self._server.wait_closed()

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers = []

    def send(self, *frames: Frame | bytes) -> None:
        data = b"".join(frame if isinstance(frame, bytes) else encode(frame) for frame in frames)
        self._writers[-1].write(data)

    def received_requests(self, opcode: int) -> list[Frame]:
        return [frame for frame in self.received if frame.opcode == opcode]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self.connections += 1
        buffer = FrameBuffer(BODY_LENGTH_MAX)
        writer.write(self.greeting)
        try:
            while data := await reader.read(65536):
                buffer.feed(data)
                while (frame := buffer.next_frame()) is not None:
                    self._take(frame, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    def _take(self, frame: Frame, writer: asyncio.StreamWriter) -> None:
        if frame.is_response:
            self.answered.append(frame)
            return
        self.received.append(frame)
        self.has_received.set()
        answer = self.answers.get(frame.opcode, ScriptedNode.default)(self, frame)
        if isinstance(answer, bytes):
            writer.write(answer)
        else:
            writer.write(b"".join(map(encode, answer or [])))

    def default(self, frame: Frame) -> list[Frame] | bytes | None:
        if frame.opcode == Opcode.HELLO:
            received = [code for (code,) in struct.iter_unpack(">H", frame.value)]
            granted = b"".join(code.to_bytes(2) for code in received if code in self.features)
            return [response(frame, value=granted)]
        if frame.opcode == Opcode.SASL_LIST_MECHS:
            return [response(frame, value=self.mechanisms)]
        if frame.opcode == Opcode.SASL_AUTH and frame.key == b"PLAIN":
            known = plain_decode(frame.value) == (USER, PASSWORD)
            return [response(frame, Status.SUCCESS if known else Status.AUTH_ERROR)]
        if frame.opcode == Opcode.SASL_AUTH:
            self._scram = ScramServer(frame.key.decode(), {USER: PASSWORD}.get)
            return [response(frame, Status.AUTH_CONTINUE, value=self._scram.challenge(frame.value))]
        if frame.opcode == Opcode.SASL_STEP:
            assert self._scram is not None
            try:
                return [response(frame, value=self._scram.outcome(frame.value))]
            except SaslError:
                return [response(frame, Status.AUTH_ERROR)]
        if frame.opcode == Opcode.DCP_BUFFER_ACK:
            return None
        return [response(frame)]


def refuse(status: int, value: bytes = b"") -> Answer:
    return lambda _node, frame: [response(frame, status, value=value)]


def silent(_node: ScriptedNode, _frame: Frame) -> None:
    """No answer."""
