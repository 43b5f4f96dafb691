"""The way in: each refusal is one typed error, and nothing stays open behind it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mirror.clock import SystemClock
from mirror.config import PasswordSource, Settings
from mirror.errors import (
    AuthRejected,
    BucketMissing,
    ClusterError,
    ConnectFailed,
    HandshakeFailed,
    NotSupported,
    SourceTimeout,
)
from mirror.feed.bootstrap import Access, discover, enter, fetch_high_seqnos, fetch_map
from mirror.feed.connection_string import Address, parse
from mirror.wire.codec_dcp import encode_all_vb_seqnos
from mirror.wire.constants import Feature, Opcode, Status
from tests.feed.scripted_node import PASSWORD, Answer, ScriptedNode, refuse, silent

MAP = {
    "rev": 7,
    "revEpoch": 2,
    "name": "b",
    "uuid": "u",
    "nodesExt": [{"services": {"kv": 11210}}],
    "vBucketServerMap": {"serverList": ["$HOST:11210"], "vBucketMap": [[0], [-1]]},
}


def access_to(node: ScriptedNode, path: Path, *, password: str = PASSWORD, **settings: object) -> Access:
    file = path / "password"
    file.write_text(password)
    values = {"password_file": file, "connect_timeout_s": 5, "request_timeout_s": 5, **settings}
    source = parse(f"couchbase://demo@127.0.0.1:{node.port}/b")
    made = Settings.model_validate(values)
    return Access(source, PasswordSource.of(made), made)


def first(access: Access) -> Address:
    return access.source.addresses[0]


async def test_login_goes_by_the_strongest_mechanism_and_selects_the_bucket(tmp_path: Path) -> None:
    async with ScriptedNode() as node:
        access = access_to(node, tmp_path)
        link, handshake = await enter(access, first(access), SystemClock())
        assert handshake.collections
        assert [frame.key for frame in node.asked_for(Opcode.SASL_AUTH)] == [b"SCRAM-SHA512"]
        assert [frame.key for frame in node.asked_for(Opcode.SELECT_BUCKET)] == [b"b"]
        (hello,) = node.asked_for(Opcode.HELLO)
        assert json.loads(hello.key)["a"] == "dcp-mirror"
        assert node.asked[0].opcode == Opcode.HELLO
        link.close()


async def test_features_that_were_not_asked_for_are_not_believed(tmp_path: Path) -> None:
    async with ScriptedNode({Opcode.HELLO: refuse(Status.SUCCESS, b"\x00\x08\x00\x0e\x12\x34")}) as node:
        access = access_to(node, tmp_path)
        link, handshake = await enter(access, first(access), SystemClock())
        assert handshake.features == {Feature.SELECT_BUCKET}
        assert not handshake.collections
        link.close()


REFUSALS: list[tuple[dict[int, Answer], type[ClusterError], str]] = [
    ({Opcode.HELLO: refuse(Status.UNKNOWN_COMMAND)}, HandshakeFailed, "HELLO"),
    ({Opcode.HELLO: refuse(Status.SUCCESS, b"\x00\x06")}, NotSupported, "SELECT_BUCKET"),
    ({Opcode.HELLO: refuse(Status.SUCCESS, b"\x00")}, HandshakeFailed, "HELLO"),
    ({Opcode.SASL_LIST_MECHS: refuse(Status.SUCCESS, b"CRAM-MD5")}, AuthRejected, "no mechanism"),
    ({Opcode.SASL_LIST_MECHS: refuse(Status.SUCCESS, b"PLAIN")}, AuthRejected, "in the clear"),
    ({Opcode.SASL_LIST_MECHS: refuse(Status.ETMPFAIL)}, HandshakeFailed, "cannot authenticate now"),
    ({Opcode.SASL_AUTH: refuse(Status.AUTH_ERROR)}, AuthRejected, "wrong user or password"),
    ({Opcode.SASL_AUTH: refuse(Status.AUTH_CONTINUE, b"nonsense")}, AuthRejected, "SCRAM"),
    ({Opcode.SASL_STEP: refuse(Status.SUCCESS, b"v=AAAA")}, AuthRejected, "impostor"),
    ({Opcode.SELECT_BUCKET: refuse(Status.KEY_ENOENT)}, BucketMissing, "no bucket b"),
    ({Opcode.SELECT_BUCKET: refuse(Status.EACCESS)}, BucketMissing, "user demo may use"),
    ({Opcode.SELECT_BUCKET: refuse(Status.ETMPFAIL)}, HandshakeFailed, "ETMPFAIL"),
    ({Opcode.SELECT_BUCKET: lambda _node, _frame: b"HTTP/1.1 400 Bad Request\r\n\r\n"}, HandshakeFailed, "protocol"),
]


@pytest.mark.parametrize(("answers", "kind", "said"), REFUSALS)
async def test_each_refusal_is_one_clear_error(
    answers: dict[int, Answer], kind: type[ClusterError], said: str, tmp_path: Path
) -> None:
    async with ScriptedNode(answers) as node:
        access = access_to(node, tmp_path)
        with pytest.raises(kind, match=said) as caught:
            await enter(access, first(access), SystemClock())
        assert PASSWORD not in str(caught.value)
        assert caught.value.hint


async def test_wrong_password_is_refused(tmp_path: Path) -> None:
    async with ScriptedNode() as node:
        access = access_to(node, tmp_path, password="wrong")
        with pytest.raises(AuthRejected, match="refused user demo"):
            await enter(access, first(access), SystemClock())


async def test_plain_is_used_only_where_it_is_allowed(tmp_path: Path) -> None:
    async with ScriptedNode() as node:
        node.mechanisms = b"PLAIN"
        access = access_to(node, tmp_path, plain_allowed=True)
        link, _ = await enter(access, first(access), SystemClock())
        link.close()
        assert [frame.key for frame in node.asked_for(Opcode.SASL_AUTH)] == [b"PLAIN"]


async def test_node_that_answers_nothing_is_a_timeout(tmp_path: Path) -> None:
    async with ScriptedNode({Opcode.HELLO: silent}) as node:
        access = access_to(node, tmp_path, connect_timeout_s=0.05)
        with pytest.raises(SourceTimeout, match="HELLO"):
            await enter(access, first(access), SystemClock())


async def test_map_is_read_or_refused_by_name(tmp_path: Path) -> None:
    async with ScriptedNode({Opcode.GET_CLUSTER_CONFIG: refuse(Status.SUCCESS, json.dumps(MAP).encode())}) as node:
        access = access_to(node, tmp_path)
        link, _ = await enter(access, first(access), SystemClock())
        found = await fetch_map(link, access.settings)
        assert (found.rev_epoch, found.rev, found.bucket_uuid, found.vbucket_count) == (2, 7, "u", 2)
        assert found.nodes[0].host == "127.0.0.1"
        for answer, said in ((refuse(Status.NO_BUCKET), "NO_BUCKET"), (refuse(0, b"<html>"), "makes no sense")):
            node.answers[Opcode.GET_CLUSTER_CONFIG] = answer
            with pytest.raises(HandshakeFailed, match=said):
                await fetch_map(link, access.settings)
        link.close()


async def test_high_seqnos_are_read_or_refused(tmp_path: Path) -> None:
    body = encode_all_vb_seqnos([(0, 5), (1023, 2**64 - 1)])
    async with ScriptedNode({Opcode.GET_ALL_VB_SEQNOS: refuse(Status.SUCCESS, body)}) as node:
        access = access_to(node, tmp_path)
        link, _ = await enter(access, first(access), SystemClock())
        assert await fetch_high_seqnos(link, access.settings) == {0: 5, 1023: 2**64 - 1}
        for answer in (refuse(Status.SUCCESS, b"abc"), refuse(Status.EACCESS)):
            node.answers[Opcode.GET_ALL_VB_SEQNOS] = answer
            with pytest.raises(HandshakeFailed):
                await fetch_high_seqnos(link, access.settings)
        link.close()


async def test_discovery_goes_on_to_the_next_address_but_not_past_a_refusal(tmp_path: Path) -> None:
    async with ScriptedNode({Opcode.GET_CLUSTER_CONFIG: refuse(Status.SUCCESS, json.dumps(MAP).encode())}) as node:
        access = access_to(node, tmp_path)
        here = first(access)
        nowhere = Address("127.0.0.1", 1)
        assert (await discover(access, SystemClock(), addresses=[nowhere, here])).rev == 7
        with pytest.raises(ConnectFailed):
            await discover(access, SystemClock(), addresses=[nowhere])
        wrong = access_to(node, tmp_path, password="wrong")
        asked = node.connections
        with pytest.raises(AuthRejected):
            await discover(wrong, SystemClock(), addresses=[here, here])
        assert node.connections == asked + 1
