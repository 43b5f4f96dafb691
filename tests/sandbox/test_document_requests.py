"""Requests for documents beyond what the SDK was recorded asking."""

from __future__ import annotations

from typing import Any

import cramjam
import pytest

from mirror.sandbox import SandboxCluster
from mirror.wire import codec_kv
from mirror.wire import frame as fr
from mirror.wire.constants import Opcode, Status
from mirror.wire.frame import Frame
from tests.oracle import kv_client

from .client import FEATURES, Client


def store(key: bytes, value: bytes, opcode: Opcode = Opcode.SET, **more: Any) -> Frame:
    extras = kv_client.encode_store(codec_kv.Store(more.pop("flags", 0), more.pop("expiry", 0)))
    return fr.request(opcode, key=key, value=value, extras=extras, **more)


def get(key: bytes, opcode: Opcode = Opcode.GET) -> Frame:
    return fr.request(opcode, key=key)


async def test_compressed_values_are_accepted_and_checked(cluster: SandboxCluster) -> None:
    packed = bytes(cramjam.snappy.compress_raw(b'{"a":"%b"}' % (b"x" * 300)))
    able = await Client.login(cluster, features=(*FEATURES, 0x0A))
    assert (await able.ask(store(b"\0k", packed, datatype=2))).status == 0
    assert (await able.ask(get(b"\0k"))).datatype == 3
    assert (await able.ask(store(b"\0k", b"\xff\xff\xff\xff\xff", datatype=2))).status == Status.EINVAL
    unable = await Client.login(cluster)
    assert (await unable.ask(store(b"\0k", packed, datatype=2))).status == Status.EINVAL
    assert (await unable.ask(get(b"\0k"))).value == b'{"a":"%b"}' % (b"x" * 300)


async def test_another_node_refuses_with_the_map() -> None:
    async with SandboxCluster(nodes=2, vbuckets=2, replicas=1) as cluster:
        cluster.set("k", {}, vbid=1)
        client = await Client.login(cluster)
        refused = await client.ask(fr.request(Opcode.GET, key=b"\0k", vbucket=1))
        assert (refused.status, refused.value[:7]) == (Status.NOT_MY_VBUCKET, b'{"rev":')
        replica = await client.ask(fr.request(Opcode.GET_REPLICA, key=b"\0k", vbucket=1))
        assert (replica.status, replica.value) == (0, b"{}")
        mine = await client.ask(fr.request(Opcode.GET_REPLICA, key=b"\0k", vbucket=0))
        assert mine.status == Status.NOT_MY_VBUCKET


@pytest.mark.parametrize(
    ("frame", "status"),
    [
        (fr.request(Opcode.SET, key=b"\0k", value=b"1"), Status.EINVAL),
        (fr.request(Opcode.SET, key=b"\0k", value=b"1", extras=bytes(8), datatype=4), Status.EINVAL),
        (fr.request(0x7E), Status.UNKNOWN_COMMAND),
        (fr.request(Opcode.INCREMENT, key=b"\0k", extras=bytes(20)), Status.UNKNOWN_COMMAND),
        (fr.request(Opcode.SUBDOC_DICT_UPSERT, key=b"\0k", extras=b"\0\1\0", value=b"a1"), Status.UNKNOWN_COMMAND),
    ],
)
async def test_a_malformed_request_is_refused_and_the_connection_stays(
    cluster: SandboxCluster, frame: Frame, status: Status
) -> None:
    client = await Client.login(cluster)
    assert (await client.ask(frame)).status == status
    assert (await client.ask(kv_client.noop())).status == 0


async def test_durability_and_preserved_expiry_are_read_from_the_frame_infos(cluster: SandboxCluster) -> None:
    client = await Client.login(cluster, features=(*FEATURES, 0x10, 0x11, 0x14))
    await client.ask(store(b"\0k", b"1", expiry=1000))
    kept = fr.request(Opcode.SET, key=b"\0k", value=b"2", extras=bytes(8), framing=b"\x50")
    assert (await client.ask(kept)).status == 0
    assert cluster.vbucket(0).log[-1].expiry > 0
    durable = fr.request(Opcode.SET, key=b"\0k", value=b"3", extras=bytes(8), framing=b"\x11\x01")
    assert (await client.ask(durable)).status == 0
    assert cluster.vbucket(0).high_seqno == 4
    odd = fr.request(Opcode.SET, key=b"\0k", value=b"3", extras=bytes(8), framing=b"\x11\x09")
    assert (await client.ask(odd)).status == Status.DURABILITY_INVALID_LEVEL
