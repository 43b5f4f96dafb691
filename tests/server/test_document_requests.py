"""Reads of documents; case by case over real connections in test_kv_documents and in the embedded source's tests."""

from __future__ import annotations

from mirror.document.walk import STEP_BYTES
from mirror.sandbox import SandboxCluster
from mirror.server import dispatch
from mirror.server.document_requests import LARGE_BYTES, OPERATIONS
from mirror.server.session import Later, Reply
from mirror.wire import frame as fr
from mirror.wire.codec_kv import LookupSpec
from mirror.wire.constants import Opcode
from tests.oracle import kv_client
from tests.sandbox.client import Client


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
