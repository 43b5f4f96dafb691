"""The official SDK's recorded conversation with a real engine, repeated with the sandbox; and what goes beyond it."""

from __future__ import annotations

import json

import pytest

from mirror.sandbox import SandboxCluster
from mirror.sandbox.node.node import OPERATIONS
from mirror.server.session import ALL_PRIVILEGES, DCP_STREAM, SYSTEM_COLLECTIONS
from mirror.wire import codec_dcp, codec_kv
from mirror.wire import events as ev
from mirror.wire import frame as fr
from mirror.wire.constants import Opcode, Status
from mirror.wire.frame import Frame
from tests.oracle import kv_client
from tests.recordings import frames
from tests.sandbox.client import Client
from tests.sandbox.recorded import answers

VOLATILE = {"CAS", "last_modified", "seqno", "vbucket_uuid"}


def shape(frame: Frame) -> dict[str, object]:
    """The comparable part of an answer: without the server's own values (CAS, seqnos, times, texts)."""
    seen: dict[str, object] = {
        "magic": frame.magic,
        "status": frame.status,
        "datatype": frame.datatype,
        "extras length": len(frame.extras),
        "framing length": len(frame.framing),
        "cas": "none" if frame.cas == 0 else "some",
        "key": frame.key,
    }
    if frame.opcode in (Opcode.GET_CLUSTER_CONFIG, Opcode.GET_ERROR_MAP):
        seen["value"] = sorted(set(json.loads(frame.value)) & {"rev", "nodesExt", "vBucketServerMap", "name", "errors"})
    elif frame.opcode == Opcode.SUBDOC_MULTI_LOOKUP and frame.value:
        seen["value"] = [looked_up(result) for result in kv_client.decode_lookup_results(frame.value)]
    else:
        seen["value"] = frame.value
    if frame.opcode in (Opcode.GET, Opcode.GET_COLLECTION_ID):
        seen["extras"] = frame.extras[-4:]
    return seen


def looked_up(result: kv_client.LookupResult) -> object:
    text = result.value.decode()
    if text.startswith('{"CAS"'):
        return {key: value for key, value in json.loads(text).items() if key not in VOLATILE}, list(json.loads(text))
    return result.status, ("a time" if text.isdigit() and len(text) == 10 else text)


async def sandbox_for_the_sdk() -> SandboxCluster:
    cluster = SandboxCluster(vbuckets=16, bucket="orders", profile="7.2")
    await cluster.start()
    Client.clusters.append(cluster)
    cluster.bucket.create_scope("inventory")
    cluster.bucket.create_collection("inventory", "items")
    cluster.bucket.manifest.uid = 1
    return cluster


UNKNOWN = (Opcode.SUBDOC_MULTI_MUTATION, Opcode.TOUCH, Opcode.GAT, Opcode.GET_LOCKED, Opcode.INCREMENT)
"""The session's requests that the sandbox does not know."""


@pytest.mark.parametrize("recording", ["sdk_72_conn1", "sdk_72_conn2"])
async def test_every_request_of_the_sdk_is_answered_as_recorded(recording: str) -> None:
    cluster = await sandbox_for_the_sdk()
    client = await Client.connect(cluster)
    sent = 0
    for request, recorded in answers(frames(recording)):
        if request.opcode == Opcode.SASL_STEP:
            continue
        if request.opcode == Opcode.SASL_AUTH:
            answer = await client.ask(kv_client.sasl_auth(b"PLAIN", b"\0demo\0demo"))
            assert answer.status == Status.SUCCESS
            continue
        if request.opcode in UNKNOWN:
            assert (await client.ask(request)).status == Status.UNKNOWN_COMMAND
            if request.opcode == Opcode.SUBDOC_MULTI_MUTATION:
                found = cluster.bucket.get("a")
                assert found is not None
                cluster.set("a", found.value, xattrs={"meta": {"k": "v"}})
            continue
        answer = await client.ask(request)
        assert shape(answer) == shape(recorded), f"opcode 0x{request.opcode:02x} opaque {request.opaque}"
        sent += 1
    assert sent >= (4 if recording.endswith("1") else 35)


NEVER_SENT = {"30", "31", "32", "33", "34", "89", "d5", "d6", "d7"}
"""Limits of rates and sizes, no manifest, unknown macros as paths, and documents that a write revives."""


async def test_the_error_map_is_the_recorded_one_without_unused_statuses() -> None:
    recorded = next(
        json.loads(answer.value)
        for request, answer in answers(frames("sdk_72_conn1"))
        if request.opcode == Opcode.GET_ERROR_MAP
    )
    async with SandboxCluster(vbuckets=1) as cluster:
        client = await Client.login(cluster)
        ours = json.loads((await client.ask(kv_client.get_error_map())).value)
    assert set(ours["errors"]) == set(recorded["errors"]) - NEVER_SENT
    for code in ours["errors"]:
        assert sorted(ours["errors"][code]["attrs"]) == sorted(recorded["errors"][code]["attrs"]), code


async def test_high_seqnos_are_answered_for_vbuckets_of_the_requested_state() -> None:
    async with SandboxCluster(nodes=2, vbuckets=4, replicas=1) as cluster:
        cluster.set("k", {}, vbid=2)

        async def seqnos(state: int | None) -> dict[int, int]:
            extras = codec_dcp.encode_all_vb_seqnos_request(state)
            answer = await client.ask(fr.request(Opcode.GET_ALL_VB_SEQNOS, extras=extras))
            assert answer.status == Status.SUCCESS
            return dict(codec_dcp.decode_all_vb_seqnos(answer.value))

        client = await Client.login(cluster)
        assert await seqnos(1) == {0: 0, 2: 1}
        assert await seqnos(2) == {1: 0, 3: 0}
        assert await seqnos(None) == {0: 0, 1: 0, 2: 1, 3: 0}


async def test_statistics_end_with_an_empty_key() -> None:
    async with SandboxCluster(vbuckets=2) as cluster:
        cluster.set("k", {}, vbid=1)
        client = await Client.login(cluster)
        last = await client.ask(fr.request(Opcode.STAT, key=b"vbucket-seqno 1"))
        assert (last.status, last.key, last.value) == (0, b"", b"")
        assert client.stats[b"vb_1:high_seqno"] == b"1"
        assert b"vb_0:high_seqno" not in client.stats
        await client.ask(fr.request(Opcode.STAT, key=b"failovers"))
        assert client.stats[b"vb_0:num_entries"] == b"1"
        assert (await client.ask(fr.request(Opcode.STAT, key=b"nonsense"))).status == Status.KEY_ENOENT


@pytest.mark.parametrize(
    ("privilege", "request_"),
    [
        ("Read", fr.request(Opcode.GET, key=b"\0k")),
        ("Read", fr.request(Opcode.SUBDOC_GET, key=b"\0k", extras=b"\0\1\0", value=b"a")),
        ("Upsert", fr.request(Opcode.DELETE, key=b"\0k")),
        ("MetaRead", fr.request(Opcode.GET_META, key=b"\0k")),
        ("MetaRead", fr.request(Opcode.GET_ALL_VB_SEQNOS)),
        ("MetaRead", codec_kv.observe_seqno(0, 1)),
        ("DcpProducer", codec_dcp.to_frame(ev.DcpOpen(b"x", 1))),
    ],
)
async def test_each_operation_needs_its_privilege(cluster: SandboxCluster, privilege: str, request_: Frame) -> None:
    cluster.set("k", {"a": 1})
    user = cluster.add_user("most", "pw", ALL_PRIVILEGES - {privilege})
    client = await Client.login(cluster, user="most", password="pw")
    refused = await client.ask(request_)
    assert refused.status == Status.EACCESS
    assert f"without the {privilege} privilege" in json.loads(refused.value)["error"]["context"]
    assert (await client.ask(kv_client.get_collections_manifest())).status == 0
    user.privileges = ALL_PRIVILEGES
    assert (await client.ask(request_)).status != Status.EACCESS, "it is looked up for each operation"


def test_every_privilege_is_needed_somewhere() -> None:
    needed = {operation.privilege for operation in OPERATIONS.values()} - {""}
    assert needed | {DCP_STREAM, SYSTEM_COLLECTIONS} == ALL_PRIVILEGES  # those two are checked stream by stream
