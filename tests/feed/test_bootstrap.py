"""The way in: each refusal is one typed error, and nothing stays open behind it."""

from __future__ import annotations

import json
import struct
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mirror.clock import SystemClock
from mirror.config import PasswordSource, Settings
from mirror.config_reader import validated
from mirror.errors import (
    AuthRejected,
    BucketMissing,
    ClusterError,
    ConfigError,
    HandshakeFailed,
    NotSupported,
    SourceTimeout,
)
from mirror.feed.connection.bootstrap import (
    Access,
    Handshake,
    enter,
    fetch_high_seqnos,
    fetch_map,
    fetch_newer_config,
    host_allowed,
    read_map,
)
from mirror.feed.connection.connection_string import NodeAddress, parse
from mirror.ingest.topology import parse_cluster_map
from mirror.sandbox import SandboxCluster
from mirror.wire.codec_dcp import encode_all_vb_seqnos
from mirror.wire.constants import Feature, Opcode, Status
from mirror.wire.sasl import ScramClient
from tests.feed.authority import Authority
from tests.feed.scripted_node import PASSWORD, Answer, ScriptedNode, refuse, silent

MAP = {
    "rev": 7,
    "revEpoch": 2,
    "name": "b",
    "uuid": "u",
    "nodesExt": [{"services": {"kv": 11210}}],
    "vBucketServerMap": {"serverList": ["$HOST:11210"], "vBucketMap": [[0], [-1]]},
}

SECURE_MAP = MAP | {"nodesExt": [{"services": {"kv": 11210, "kvSSL": 11207}}]}


def access_to(node: ScriptedNode, path: Path, *, password: str = PASSWORD, **settings: Any) -> Access:
    file = path / "password"
    file.write_text(password)
    values = {"password_file": file, "request_timeout_s": 5, **settings}
    source = parse(f"couchbase://demo@127.0.0.1:{node.port}/b")
    made = validated(values)
    return Access(source, PasswordSource.of(made), made)


def secure_access_to(
    node: ScriptedNode, path: Path, authority: Authority, *, user: str = "demo@", **settings: Any
) -> Access:
    made = access_to(node, path).settings
    merged = replace(made, **{"tls_ca_file": authority.ca_file, **settings})
    return Access.of(parse(f"couchbases://{user}127.0.0.1:{node.port}/b"), merged)


def first(access: Access) -> NodeAddress:
    return access.source.addresses[0]


async def test_the_login_uses_the_strongest_mechanism_and_selects_the_bucket(tmp_path: Path) -> None:
    async with ScriptedNode() as node:
        access = access_to(node, tmp_path)
        link, handshake = await enter(access, first(access), SystemClock())
        assert handshake.collections
        assert [frame.key for frame in node.received_requests(Opcode.SASL_AUTH)] == [b"SCRAM-SHA512"]
        assert [frame.key for frame in node.received_requests(Opcode.SELECT_BUCKET)] == [b"b"]
        (hello,) = node.received_requests(Opcode.HELLO)
        assert json.loads(hello.key)["a"] == "dcp-mirror"
        assert node.received[0].opcode == Opcode.HELLO
        link.close()


async def test_features_that_were_not_requested_are_ignored(tmp_path: Path) -> None:
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


async def test_plain_is_used_only_if_it_is_allowed(tmp_path: Path) -> None:
    async with ScriptedNode() as node:
        node.mechanisms = b"PLAIN"
        access = access_to(node, tmp_path, plain_allowed=True)
        link, _ = await enter(access, first(access), SystemClock())
        link.close()
        assert [frame.key for frame in node.received_requests(Opcode.SASL_AUTH)] == [b"PLAIN"]


async def test_a_node_that_does_not_answer_is_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirror.feed.connection.bootstrap.CONNECT_TIMEOUT_S", 0.05)
    async with ScriptedNode({Opcode.HELLO: silent}) as node:
        access = access_to(node, tmp_path)
        with pytest.raises(SourceTimeout, match="HELLO"):
            await enter(access, first(access), SystemClock())


async def test_a_map_is_parsed_or_refused_with_the_reason(tmp_path: Path) -> None:
    async with ScriptedNode({Opcode.GET_CLUSTER_CONFIG: refuse(Status.SUCCESS, json.dumps(MAP).encode())}) as node:
        access = access_to(node, tmp_path)
        link, _ = await enter(access, first(access), SystemClock())
        found = await fetch_map(link, access.settings)
        assert (found.rev_epoch, found.rev, found.bucket_uuid, found.vbucket_count) == (2, 7, "u", 2)
        assert found.nodes[0].host == "127.0.0.1"
        for answer, said in ((refuse(Status.NO_BUCKET), "NO_BUCKET"), (refuse(0, b"<html>"), "invalid cluster map")):
            node.answers[Opcode.GET_CLUSTER_CONFIG] = answer
            with pytest.raises(HandshakeFailed, match=said):
                await fetch_map(link, access.settings)
        link.close()


async def test_a_known_map_is_not_sent_again_if_the_node_supports_that(tmp_path: Path) -> None:
    config = json.dumps(MAP).encode()
    known = parse_cluster_map(config, "127.0.0.1")
    newer = json.dumps(MAP | {"rev": 8}).encode()
    async with ScriptedNode({Opcode.GET_CLUSTER_CONFIG: refuse(Status.SUCCESS)}) as node:
        access = access_to(node, tmp_path)
        link, _ = await enter(access, first(access), SystemClock())
        old, new = Handshake(frozenset()), Handshake(frozenset({Feature.GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION}))
        assert await fetch_newer_config(link, new, known, timeout_s=5) == b""
        assert node.received[-1].extras == struct.pack(">QQ", 2, 7)
        node.answers[Opcode.GET_CLUSTER_CONFIG] = refuse(Status.SUCCESS, newer)
        huge = replace(known, rev=2**63)
        for handshake, have in ((new, known), (old, known), (new, None), (new, huge)):
            assert await fetch_newer_config(link, handshake, have, timeout_s=5) == newer
        assert [frame.extras for frame in node.received[-3:]] == [b"", b"", b""]
        link.close()


async def test_the_network_of_the_first_map_is_kept(tmp_path: Path) -> None:
    inside = {"services": {"kv": 11210}, "hostname": "node.internal"}
    outside = {"alternateAddresses": {"external": {"hostname": "127.0.0.1", "ports": {"kv": 31210}}}}
    config = MAP | {
        "nodesExt": [inside | outside],
        "vBucketServerMap": {"serverList": ["node.internal:11210"], "vBucketMap": [[0]]},
    }
    here = NodeAddress("127.0.0.1", 31210)
    chosen = {
        (setting, kept): read_map(json.dumps(config).encode(), here, Settings(network=setting), network=kept)
        for setting in ("auto", "default", "external")
        for kept in (None, "default", "external")
    }
    for (setting, kept), found in chosen.items():
        network = kept or ("external" if setting == "auto" else setting)
        assert found.network == network
        assert found.nodes[0].host == ("127.0.0.1" if network == "external" else "node.internal")


async def test_an_impostor_does_not_get_the_password(tmp_path: Path) -> None:
    """A server that cannot prove that it knows the password is not sent it in the clear, not even inside TLS."""
    authority = Authority(tmp_path)
    answers: dict[int, Answer] = {Opcode.SASL_STEP: refuse(Status.SUCCESS, b"v=AAAA")}
    async with ScriptedNode(answers, ssl=authority.node_context("127.0.0.1")) as node:
        with pytest.raises(AuthRejected, match="impostor"):
            await enter(secure_access_to(node, tmp_path, authority), NodeAddress("127.0.0.1", node.port), SystemClock())
        assert [frame.key for frame in node.received_requests(Opcode.SASL_AUTH)] == [b"SCRAM-SHA512"]


async def test_plain_is_tried_inside_tls_for_users_of_a_directory_service(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with ScriptedNode(ssl=authority.node_context("127.0.0.1")) as node:
        node.answers[Opcode.SASL_STEP] = refuse(Status.AUTH_ERROR)
        access = secure_access_to(node, tmp_path, authority)
        link, _ = await enter(access, NodeAddress("127.0.0.1", node.port), SystemClock())
        assert [frame.key for frame in node.received_requests(Opcode.SASL_AUTH)] == [b"SCRAM-SHA512", b"PLAIN"]
        link.close()


@pytest.mark.parametrize("mechanisms", [None, b"SCRAM-SHA512 EXTERNAL"])
async def test_a_certificate_login_is_repeated_by_sasl_if_the_server_requires_it(
    tmp_path: Path, mechanisms: bytes | None
) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.sign(into="client", common_name="demo")
    offered = refuse(Status.NOT_SUPPORTED) if mechanisms is None else refuse(Status.SUCCESS, mechanisms)
    answers: dict[int, Answer] = {Opcode.SASL_LIST_MECHS: offered, Opcode.SASL_AUTH: refuse(Status.SUCCESS)}
    async with ScriptedNode(answers, ssl=authority.node_context("127.0.0.1", demand=True)) as node:
        ours = {"tls_client_cert_file": cert, "tls_client_key_file": key}
        access = secure_access_to(node, tmp_path, authority, user="", **ours)
        link, _ = await enter(access, NodeAddress("127.0.0.1", node.port), SystemClock())
        link.close()
        assert [frame.key for frame in node.received_requests(Opcode.SASL_AUTH)] == (
            [b"EXTERNAL"] if mechanisms else []
        )
        node.answers[Opcode.SASL_AUTH] = refuse(Status.AUTH_ERROR)
        if mechanisms:
            with pytest.raises(AuthRejected, match="does not know the user"):
                await enter(access, NodeAddress("127.0.0.1", node.port), SystemClock())


async def test_a_port_that_speaks_tls_is_an_error_that_says_so(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with ScriptedNode(ssl=authority.node_context("127.0.0.1")) as node:
        access = access_to(node, tmp_path)
        with pytest.raises(ClusterError) as caught:
            await enter(access, first(access), SystemClock())
    assert "couchbases://" in caught.value.hint


def test_a_client_certificate_without_tls_is_refused_before_a_connection(tmp_path: Path) -> None:
    for name in ("tls_ca_file", "tls_client_cert_file"):
        with pytest.raises(ConfigError, match=name):
            Access.of(parse("couchbase://demo@h/b"), validated({name: tmp_path / "some.pem"}))


def test_the_network_of_the_connection_string_outranks_the_setting() -> None:
    settings = Settings(network="default")
    assert Access.of(parse("couchbase://demo@h/b?network=external"), settings).settings.network == "external"
    assert Access.of(parse("couchbase://demo@h/b"), settings).settings.network == "default"


async def test_high_seqnos_are_parsed_or_refused(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("db1", True), ("DB1.", True), ("n7.cluster.example", True), ("10.1.2.3", True), ("::1", False),
        ("10.2.0.1", False), ("cluster.example", False), ("n7.cluster.example.evil", False), ("db11", False),
    ],
)  # fmt: skip
def test_a_map_with_a_forbidden_host_is_refused(host: str, allowed: bool) -> None:
    """Anyone who sends a map decides which hosts our name and proof go to."""
    assert host_allowed(host, ("db1", "*.cluster.example", "10.1.0.0/16")) is allowed
    settings = validated({"source_hosts": "db1,*.cluster.example, 10.1.0.0/16"})
    config = json.dumps({"rev": 1, "nodesExt": [{"services": {"kv": 1}}, {"hostname": host, "services": {"kv": 2}}]})
    here = NodeAddress("first.example", 11210)
    if allowed:
        assert len(read_map(config.encode(), here, settings).nodes) == 2
    else:
        with pytest.raises(HandshakeFailed, match="which source_hosts does not allow"):
            read_map(config.encode(), here, settings)
    assert len(read_map(config.encode(), here, Settings()).nodes) == 2


async def test_the_password_is_derived_outside_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server chooses how much work that is."""
    threads: list[threading.Thread] = []
    final = ScramClient.final

    def noted(self: ScramClient, challenge: bytes) -> bytes:
        threads.append(threading.current_thread())
        return final(self, challenge)

    monkeypatch.setattr(ScramClient, "final", noted)
    monkeypatch.setenv("DCP_MIRROR_PASSWORD", "demo")
    async with SandboxCluster(vbuckets=1) as cluster:
        settings = Settings()
        access = Access.of(parse(cluster.connection_string), settings)
        link, _ = await enter(access, NodeAddress("127.0.0.1", cluster.nodes[0].port or 0), SystemClock())
        link.close()
    assert threads
    assert threading.main_thread() not in threads
