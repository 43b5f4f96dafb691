"""Reads of documents; case by case over real connections in test_kv_documents and in the embedded source's tests."""

from __future__ import annotations

import pytest

from mirror.document.jsonpath import PathError
from mirror.document.walk import STEP_BYTES
from mirror.sandbox import SandboxCluster
from mirror.server import dispatch
from mirror.server.document_requests import KEY_BYTES_MAX, LARGE_BYTES, OPERATIONS, check_path_order, path_text
from mirror.server.errors import Refused
from mirror.server.session import Later, Reply
from mirror.wire import frame as fr
from mirror.wire.codec_kv import LookupSpec
from mirror.wire.constants import Opcode, Status
from tests.oracle import kv_client
from tests.sandbox.client import Client


def test_paths_of_xattrs_come_first() -> None:
    check_path_order([4, 4, 0])
    with pytest.raises(Refused) as error:
        check_path_order([0, 4])
    assert error.value.status == Status.SUBDOC_INVALID_XATTR_ORDER


def test_a_path_that_is_not_text_is_an_error_of_the_path() -> None:
    assert path_text(b"a.b") == "a.b"
    with pytest.raises(PathError):
        path_text(b"\xff")


@pytest.mark.parametrize(
    ("key", "status"),
    [
        (b"\0" + b"k" * KEY_BYTES_MAX, Status.KEY_ENOENT),
        (b"\0" + b"k" * (KEY_BYTES_MAX + 1), Status.EINVAL),
        (b"\0", Status.EINVAL),
        (b"\x80", Status.EINVAL),
    ],
)
async def test_keys_have_1_to_250_bytes(cluster: SandboxCluster, key: bytes, status: int) -> None:
    client = await Client.login(cluster)
    assert (await client.ask(fr.request(Opcode.GET, key=key))).status == status


async def test_a_lookup_has_no_value_and_no_flags_of_a_change(cluster: SandboxCluster) -> None:
    cluster.set("k", {"a": 1})
    client = await Client.login(cluster)
    good = fr.request(Opcode.SUBDOC_GET, key=b"\0k", extras=b"\0\1\0", value=b"a")
    assert (await client.ask(good)).value == b"1"
    with_value = fr.request(Opcode.SUBDOC_GET, key=b"\0k", extras=b"\0\1\0", value=b"a1")
    assert (await client.ask(with_value)).status == Status.EINVAL
    specs = kv_client.encode_lookup_specs([LookupSpec(int(Opcode.SUBDOC_GET), b"a")])
    make = fr.request(Opcode.SUBDOC_MULTI_LOOKUP, key=b"\0k", extras=b"\x01", value=specs)
    assert (await client.ask(make)).status == Status.EINVAL


async def test_other_clients_have_their_turn_between_the_paths_of_a_large_document(cluster: SandboxCluster) -> None:
    cluster.set("small", {"a": 1})
    cluster.set("large", {"a": 1, "text": "x" * LARGE_BYTES})
    client = await Client.login(cluster)
    (connection,) = cluster.nodes[0].connections
    paths = [LookupSpec(int(Opcode.SUBDOC_GET), b"a"), LookupSpec(int(Opcode.SUBDOC_EXISTS), b"b")]
    value = kv_client.encode_lookup_specs(paths)

    def answered(key: bytes) -> Reply | Later | None:
        frame = fr.request(Opcode.SUBDOC_MULTI_LOOKUP, key=key, value=value)
        return dispatch.answer(connection.session, OPERATIONS, frame)

    small, large = answered(b"\0small"), answered(b"\0large")
    assert isinstance(small, Reply)
    assert isinstance(large, Later)
    replies = [large.step()]
    while replies[-1] is None:
        replies.append(large.step())
    last = replies[-1]
    assert isinstance(last, Reply)
    walked = 2 * (len('{"a": 1}') + LARGE_BYTES)
    assert len(replies) > walked // STEP_BYTES // 2 > 0, "the second path is looked for to the end, in steps"
    assert last.value == small.value
    reply = await client.ask(fr.request(Opcode.SUBDOC_MULTI_LOOKUP, key=b"\0large", value=value))
    assert reply.value == small.value
