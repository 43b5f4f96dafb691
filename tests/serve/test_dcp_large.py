"""Large documents over DCP: made in the worker thread, and byte for byte what they would be elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cramjam
import pytest

from mirror.serve.dcp.dcp_stream import DcpStream
from mirror.server.turns import LARGE_BYTES
from mirror.wire import codec_dcp, xattr
from mirror.wire import events as ev
from mirror.wire.constants import DcpOpenFlag, Feature, Opcode, StreamEndReason, StreamRequestFlag
from mirror.wire.frame import Frame
from storage.read.vbucket_reader import VbucketReader
from tests.serve.dcp_rig import ALL, XATTRS, serving_dcp, until
from tests.serve.kv_rig import Store

JSON, SNAPPY, XATTR = 1, 2, 4
BODY = b'{"a":"%b"}' % (b"abcdefghij" * 40_000)
WITH_XATTRS = xattr.join({b"_sync": b"1", b"user": b'"u"'}, BODY)
DOCUMENTS = (
    (b"small", b"{}", JSON),
    (b"plain", BODY, JSON),
    (b"bytes", BODY[:-1], 0),
    (b"packed", bytes(cramjam.snappy.compress_raw(BODY)), JSON | SNAPPY),
    (b"xattrs", WITH_XATTRS, JSON | XATTR),
    (b"packed xattrs", bytes(cramjam.snappy.compress_raw(WITH_XATTRS)), JSON | XATTR | SNAPPY),
    (b"not snappy", b"\xff" * len(BODY), SNAPPY),
    (b"xattrs without end", b"\xff" * len(BODY), XATTR),
    (b"superseded", BODY, JSON),
    (b"superseded", b"{}", JSON),
    (b"superseded by a large one", b"{}", JSON),
    (b"superseded by a large one", BODY, JSON),
)
PLAIN = (Feature.SELECT_BUCKET, Feature.XERROR)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path, vbuckets=1)
    store.logs()
    for seqno, (key, value, datatype) in enumerate(DOCUMENTS, 1):
        store.put(key, value, seqno, datatype=datatype, publish=seqno == len(DOCUMENTS))
    store.close()
    return store


async def messages(store: Store, features: Sequence[int], flags: int, controls: dict[bytes, bytes]) -> list[Frame]:
    """A stream to its end."""
    async with serving_dcp(store.path) as endpoint:
        client = await endpoint.client(features=features, flags=flags, controls=controls)
        value = b'{"sid":5}' if b"enable_stream_id" in controls else b""
        assert (await client.stream(0, flags=int(StreamRequestFlag.TO_LATEST), value=value)).status == 0
        found = client.early
        while not found or found[-1].opcode != Opcode.DCP_STREAM_END:
            frame = await client.receive()
            assert frame is not None
            found.append(frame)
            if b"connection_buffer_size" in controls:
                await client.send(codec_dcp.to_frame(ev.BufferAck(client.counted)))
                client.counted = 0
        await until(lambda: endpoint.server.worker.budget.out_bytes == 0)
        return found


@pytest.mark.parametrize(
    ("features", "flags", "controls"),
    [
        (ALL, XATTRS, {}),
        (ALL, int(DcpOpenFlag.PRODUCER), {}),
        (PLAIN, int(DcpOpenFlag.PRODUCER), {}),
        (PLAIN, XATTRS, {}),
        (ALL, XATTRS | int(DcpOpenFlag.NO_VALUE), {}),
        (ALL, int(DcpOpenFlag.PRODUCER | DcpOpenFlag.NO_VALUE), {}),
        (ALL, XATTRS | int(DcpOpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE), {}),
        (ALL, XATTRS, {b"enable_stream_id": b"true"}),
        (ALL, XATTRS, {b"connection_buffer_size": b"1000"}),
    ],
)
async def test_a_large_document_is_sent_as_a_small_one_would_be(
    store: Store, monkeypatch: pytest.MonkeyPatch, features: Sequence[int], flags: int, controls: dict[bytes, bytes]
) -> None:
    found = await messages(store, features, flags, controls)
    take = DcpStream.take
    monkeypatch.setattr(DcpStream, "take", lambda stream, bytes_max, *_: take(stream, bytes_max, 1 << 40))
    assert found == await messages(store, features, flags, controls)
    assert sum(each.opcode == Opcode.DCP_MUTATION for each in found) == len({key for key, _, _ in DOCUMENTS})


async def test_a_stream_closed_while_its_large_document_is_read_sends_no_more(store: Store) -> None:
    async with serving_dcp(store.path) as endpoint:
        client = await endpoint.client(controls={b"send_stream_end_on_client_close_stream": b"true"})
        budget = endpoint.server.worker.budget
        budget.out_bytes = 1 << 40  # no memory for it
        assert (await client.stream(0)).status == 0
        await until(lambda: budget.waiting_count == 1)
        assert (await client.say(ev.CloseStream(0, opaque=3))).status == 0
        assert (await client.stream(0, opaque=4)).status == 0
        budget.give_back(1 << 40)
        found = [await client.event()]
        while not isinstance(found[-1], ev.StreamEnd):
            found.append(await client.event())
        assert found[-1].reason == StreamEndReason.CLOSED
        assert sum(isinstance(each, ev.Mutation) for each in found) <= 1, "the small one before it"
        assert isinstance(following := await client.event(), ev.SnapshotMarker)
        assert following.opaque == 4


async def test_a_large_document_that_is_gone_ends_the_stream(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_dcp(store.path) as endpoint:
        client = await endpoint.client()

        verify = VbucketReader.verify

        def gone(reader: VbucketReader, row_key: bytes, stored: bytes) -> None:
            verify(reader, row_key, stored)
            if len(stored) > LARGE_BYTES:
                raise reader.damaged(IndexError("gone"))

        monkeypatch.setattr(VbucketReader, "verify", gone)
        assert (await client.stream(0)).status == 0
        found = await client.events(3)
        assert isinstance(found[-1], ev.StreamEnd)
        assert found[-1].reason == StreamEndReason.BACKFILL_FAIL
        assert endpoint.server.worker.budget.out_bytes == 0
