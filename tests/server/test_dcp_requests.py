"""DCP requests that real engines were recorded answering: refusals, filters, controls, and the backfills they gave."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from mirror.sandbox import SandboxCluster
from mirror.wire import codec_dcp
from mirror.wire import events as ev
from mirror.wire.constants import Opcode, Status, StreamEndReason, StreamRequestFlag, VbucketRole
from mirror.wire.frame import Frame
from storage.model import SEQNO_MAX, FailoverLog
from tests.recordings import frames
from tests.sandbox.client import Client
from tests.sandbox.recorded import STREAM, answers, fill, seqno_of, stream_of

PASSWORDS = {"@admin": "password", "mirror": "mirror", "reader": "readerpw"}


async def cluster_like_the_recorded(name: str, recording: list[tuple[str, Frame]]) -> SandboxCluster:
    profile = {"605": "6.0", "72": "7.2"}[name.split("_")[0]]
    cluster = SandboxCluster(vbuckets=16, bucket="default", user="@admin", password="password", profile=profile)
    cluster.add_user("reader", "readerpw", frozenset({"Read"}))
    logs = {}
    for request, answer in answers(recording):
        if request.opcode in (Opcode.DCP_STREAM_REQ, Opcode.DCP_GET_FAILOVER_LOG) and answer.status == Status.SUCCESS:
            logs[request.vbucket] = codec_dcp.decode_failover_log(answer.value)
        if request.opcode == Opcode.SASL_AUTH and answer.status == Status.SUCCESS:
            name, password = request.value.decode().split("\0")[1:]
            cluster.add_user(name, password, cluster.user.privileges if name != "reader" else frozenset({"Read"}))
    for vbid, log in logs.items():
        cluster.vbucket(vbid).failover_log = FailoverLog.of(log)
    await cluster.start()
    Client.clusters.append(cluster)
    return cluster


def summary(frame: Frame, request: Frame) -> dict[str, object]:
    seen: dict[str, object] = {"status": frame.status, "datatype": frame.datatype, "extras": frame.extras}
    value = frame.value
    if frame.status == Status.NOT_MY_VBUCKET:
        del seen["datatype"]  # the recorded server was never given a map to put there
        return seen
    if value.startswith(b"{") and b'"ref"' in value:
        body = json.loads(value)
        body["error"].pop("ref")
        return seen | {"value": body}
    return seen | {"value": value}


REFUSALS = [
    "72_i1_bad_stream_requests", "72_i2_bad_extras_len", "72_i3_stream_req_without_open", "72_i4_open_without_bucket",
    "72_i5_open_twice", "72_i8_open_bad_flags", "72_i9_bad_auth", "72_i10_no_privilege",
    "72_k7_err_unknown_collection", "72_k8_err_dropped_collection", "72_k9_err_unknown_scope", "72_k11_err_bad_json",
    "72_k12_err_scope_and_collections", "72_d2_rollback_after_crash", "72_d3_rollback_unknown_vbuuid",
    "72_d5_rollback_beyond_high", "72_l3_resume_above_purge", "72_g3_close_stream", "72_k14_oso_collection",
    "605_i4_open_without_bucket", "605_i10_no_privilege", "605_d2_rollback_after_crash",
    "605_d3_rollback_unknown_vbuuid", "605_d5_rollback_beyond_high", "605_l2_rollback_after_purge",
    "605_l3_resume_above_purge", "605_g3_close_stream",
]  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
async def test_requests_are_answered_as_recorded(name: str) -> None:
    recording = frames(name)
    cluster = await cluster_like_the_recorded(name, recording)
    high = {1: 206, 2: 209, 9: 155 if "_d5" in name else 135 if "_d3" in name else 100, 7: 216}
    for vbid in range(16):
        fill(cluster.vbucket(vbid), {}, high.get(vbid, 206))
    if name.startswith("605_l"):
        cluster.vbucket(7).purge_seqno = 170
    cluster.bucket.states[15] = VbucketRole.REPLICA
    cluster.bucket.states[14] = VbucketRole.DEAD
    if "_k" in name:
        cluster.bucket.create_scope("inventory")
        cluster.bucket.create_collection("inventory", "hotel")
        cluster.bucket.manifest.uid = 4
    client = await Client.connect(cluster)
    requests_sent = 0
    for request, recorded in answers(recording):
        answer = await client.ask(request)
        assert summary(answer, request) == summary(recorded, request), (
            f"opaque {request.opaque:x} {request.extras.hex()}"
        )
        requests_sent += 1
        bounded = request.opcode == Opcode.DCP_STREAM_REQ and answer.status == Status.SUCCESS
        if bounded and int.from_bytes(request.extras[16:24]) < 2**32:
            await client.until_end(request.opaque)
    assert requests_sent >= 3


HANGING_UP = ["605_i2_bad_extras_len", "605_i3_stream_req_without_open", "605_i5_open_twice", "605_i8_open_bad_flags"]


@pytest.mark.parametrize("name", HANGING_UP)
async def test_an_old_server_hangs_up_as_recorded(name: str) -> None:
    recording = frames(name)
    answered = {request.opaque: answer for request, answer in answers(recording)}
    client = await Client.connect(await cluster_like_the_recorded(name, recording))
    for direction, request in recording:
        if direction == "c2s":
            opaque = client.send(request)
            if request.opaque in answered:
                await client.until(lambda: opaque in client.answers)  # noqa: B023
                assert summary(client.answers[opaque], request) == summary(answered[request.opaque], request)
    await client.until_closed()
    assert client.answers.keys() == answered.keys()


def contents(names: list[str], vbid: int) -> dict[int, Frame]:
    """Seqno -> the message, as the most capable of the recorded clients got it."""
    by_seqno: dict[int, Frame] = {}
    for name in names:
        for frame in stream_of(frames(f"72_{name}"), vbid):
            if frame.opcode in STREAM[:3] or frame.opcode == Opcode.DCP_SYSTEM_EVENT:
                by_seqno.setdefault(seqno_of(frame), frame)
    return by_seqno


FEATURE_SETS = [
    "72_h1_no_features", "72_h2_xattr_hello_only", "72_h3_include_xattrs", "72_h5_snappy_force_compression",
    "72_h6_delete_times", "72_h7_no_value", "72_h8_no_value_xattrs", "72_h9_expiry_opcode",
    "72_h10_deleted_user_xattrs", "72_h11_no_value_underlying_dt", "72_h12_delete_times_expiry_opcode",
]  # fmt: skip
# without 605_h7: there the datatype of the values that were left out stayed, which no later server does
OLD_FEATURE_SETS = [
    "605_h1_no_features", "605_h2_xattr_hello_only", "605_h3_include_xattrs", "605_h4_include_xattrs_snappy",
    "605_h5_snappy_force_compression", "605_h6_delete_times", "605_h8_no_value_xattrs", "605_h9_expiry_opcode",
]  # fmt: skip


@pytest.mark.parametrize("name", FEATURE_SETS)
async def test_a_client_gets_each_document_in_the_shape_it_negotiated(name: str) -> None:
    by_seqno = contents(["h12_delete_times_expiry_opcode"], 11)
    for frame in stream_of(frames("72_h11_no_value_underlying_dt"), 11):
        if frame.opcode == Opcode.DCP_MUTATION and frame.datatype & 2:  # kept compressed by the server
            packed = next(
                f
                for f in stream_of(frames("72_h5_snappy_force_compression"), 11)
                if f.opcode == frame.opcode and seqno_of(f) == seqno_of(frame)
            )
            by_seqno[seqno_of(frame)] = packed
    for seqno, frame in list(by_seqno.items()):  # the sandbox keeps keys with their collection
        by_seqno[seqno] = replace(frame, key=b"\0" + frame.key)
    recording = frames(name)
    cluster = await cluster_like_the_recorded(name, recording)
    fill(cluster.vbucket(11), by_seqno, 56)
    client = await Client.connect(cluster)
    for request, recorded in answers(recording):
        assert summary(await client.ask(request), request) == summary(recorded, request)
    expected = stream_of(recording, 11)
    await client.until(lambda: len(client.frames) >= len(expected))
    if name.startswith(
        "72_h11"
    ):  # deleted documents: whether their xattrs were kept compressed cannot be seen from here
        expected = [replace(f, datatype=f.datatype & ~2) if f.opcode == Opcode.DCP_DELETION else f for f in expected]
    if name.startswith("72_h5"):  # what compresses to which bytes is snappy's affair
        assert [(f.opcode, f.extras, f.key, f.datatype) for f in client.frames] == [
            (f.opcode, f.extras, f.key, f.datatype) for f in expected
        ]
    else:
        assert client.frames == expected


@pytest.mark.parametrize("name", OLD_FEATURE_SETS)
async def test_a_client_of_an_old_server_gets_each_document_in_the_shape_it_negotiated(name: str) -> None:
    stored, timed = (
        {seqno_of(f): replace(f, key=b"\0" + f.key) for f in stream_of(frames(whole), 11)[1:]}
        for whole in ("605_h4_include_xattrs_snappy", "605_h6_delete_times")
    )
    by_seqno = {
        seqno: replace(timed[seqno], datatype=frame.datatype, value=frame.value) for seqno, frame in stored.items()
    }
    recording = frames(name)
    cluster = await cluster_like_the_recorded(name, recording)
    fill(cluster.vbucket(11), by_seqno, 56)
    client = await Client.connect(cluster)
    for request, recorded in answers(recording):
        assert summary(await client.ask(request), request) == summary(recorded, request)
    expected = stream_of(recording, 11)
    await client.until(lambda: len(client.frames) >= len(expected))
    assert client.frames == expected


COLLECTION_STREAMS = [
    ("72_k3_filter_collection", 0x9C),
    ("72_k4_filter_scope", 0xA7),
    ("72_k5_filter_default_coll", 0xB2),
    ("72_k6_uid", None),
    ("72_k10_err_manifest_ahead", None),
    ("72_k13_legacy_client", 0xD3),
    ("72_k16_oso_no_filter", 0xF4),
    ("72_k17_flatbuffers_system_events", 0xFF),
    ("72_k18_stream_id", None),
    ("72_k19_two_stream_ids", 0x115),
]


@pytest.mark.parametrize(("name", "high"), COLLECTION_STREAMS)
async def test_a_backfill_with_collections_is_the_recorded_one(name: str, high: int | None) -> None:
    """The same vbucket as of each recording: the documents that its filter shows, and the events in their shape."""
    recording = frames(name)
    expected: list[Frame] = []
    ended = False
    for frame in stream_of(recording, 13):
        memory = frame.opcode == Opcode.DCP_SNAPSHOT_MARKER and int.from_bytes(frame.extras[-4:]) & 1
        if memory:
            ended = True
        if not ended:
            expected.append(frame)
    marker = next((f for f in expected if f.opcode == Opcode.DCP_SNAPSHOT_MARKER), None)
    if high is None:
        high = (
            int.from_bytes(marker.extras[8:16])
            if marker
            else max(seqno_of(f) for f in expected if f.opcode in STREAM[:3])
        )
    by_seqno = contents(["k1_collections_live"], 13)
    for other in ("k3_filter_collection", "k4_filter_scope", "k5_filter_default_coll", "k6_uid", "k13_legacy_client"):
        for seqno, frame in contents([other], 13).items():
            key = b"\0" + frame.key if other.startswith("k13") else frame.key
            by_seqno.setdefault(seqno, replace(frame, key=key))
    for frame in expected:  # what this recording alone knows: written after the others ended
        if frame.opcode in STREAM[:3]:
            plain = replace(
                frame, magic=0x80, framing=b"", key=b"\0" + frame.key if name.startswith("72_k13") else frame.key
            )
            by_seqno.setdefault(seqno_of(frame), plain)
    cluster = await cluster_like_the_recorded(name, recording)
    bucket = cluster.bucket
    bucket.create_scope("inventory")
    bucket.create_collection("inventory", "hotel")
    changes = {int.from_bytes(f.extras[:8]): f for f in by_seqno.values() if f.opcode == Opcode.DCP_SYSTEM_EVENT}
    assert len(changes) == 10
    fill(cluster.vbucket(13), {seqno: f for seqno, f in by_seqno.items() if seqno <= high}, high)
    client = await Client.connect(cluster)
    for request, recorded in answers(recording):
        assert summary(await client.ask(request), request) == summary(recorded, request)
    await client.until(lambda: len(client.frames) >= len(expected))
    await asyncio.sleep(0)
    got: list[Any] = client.frames
    want: list[Any] = expected
    if name.startswith("72_k17"):  # the shape of these events is checked in test_manifest; here: which and where
        got, want = ([(f.opcode, f.extras[:12], f.key) for f in side] for side in (got, want))
    if name.startswith("72_k19"):
        for stream_id in (5, 6):
            assert [f for f in got if f.stream_id == stream_id] == [f for f in want if f.stream_id == stream_id]
    else:
        assert got == want


WHOLE_BACKFILLS = [
    "605_a_backfill_then_live", "605_c_resume_mid_snapshot", "605_e_flow_control_4096", "605_j_odd_keys_and_values",
    "72_a_backfill_then_live", "72_c_resume_mid_snapshot", "72_e_flow_control_4096", "72_f_noop",
    "72_i11_ordinary_user", "72_j_odd_keys_and_values",
]  # fmt: skip


@pytest.mark.parametrize("name", WHOLE_BACKFILLS)
async def test_a_backfill_is_the_recorded_one_byte_for_byte(name: str) -> None:
    """A vbucket with the recorded documents (and gaps for what was not sent) gives the recorded frames again."""
    recording = frames(name)
    expected: list[Frame] = []
    for frame in stream_of(recording):
        if frame.opcode == Opcode.DCP_SNAPSHOT_MARKER and int.from_bytes(frame.extras[-4:]) & 1:
            break
        expected.append(frame)
    vbid = expected[0].vbucket
    high = int.from_bytes(expected[0].extras[8:16])
    documents = {seqno_of(f): replace(f, key=b"\0" + f.key) for f in expected if f.opcode in STREAM[:3]}
    cluster = await cluster_like_the_recorded(name, recording)
    start = next(f for d, f in recording if d == "c2s" and f.opcode == Opcode.DCP_STREAM_REQ)
    first = int.from_bytes(start.extras[8:16])
    fill(cluster.vbucket(vbid), documents, high)
    for item in cluster.vbucket(vbid).log[:first]:
        item.next_seqno = high
    client = await Client.connect(cluster)
    acked = 0
    for request, recorded in answers(recording):
        assert summary(await client.ask(request), request) == summary(recorded, request)
    while len(client.frames) < len(expected):
        client.ack(sum(client.sizes) - acked)
        acked = sum(client.sizes)
        await client.until(lambda: len(client.frames) == len(expected) or sum(client.sizes) > acked)  # noqa: B023
    assert client.frames == expected


def request(start: int, vbuuid: int, flags: int = 0, end: int = SEQNO_MAX) -> ev.StreamRequest:
    return ev.StreamRequest(0, flags, start, end, vbuuid, start, start, opaque=7)


@pytest.mark.parametrize(
    ("profile", "flags", "status"),
    [("8.x", 0x200, Status.EINVAL), ("7.0", 0x08, Status.SUCCESS), ("7.0", 0x80, Status.SUCCESS)],
)
async def test_flags_that_a_server_does_not_know_are_refused_from_7_2_on(profile: str, flags: int, status: int) -> None:
    """kv_engine, daemon/mcbp_validators.cc of 7.0.0 and 7.2.4."""
    async with SandboxCluster(vbuckets=1, profile=profile) as cluster:
        cluster.set("k", {})
        client = await Client.dcp(cluster)
        assert (await client.ask(codec_dcp.to_frame(request(0, 0, flags)))).status == status


@pytest.mark.parametrize(("profile", "status"), [("7.2", Status.EINVAL), ("8.0", Status.SUCCESS)])
async def test_a_stream_of_no_collection_ends_at_once_from_8_0_on(profile: str, status: int) -> None:
    async with SandboxCluster(vbuckets=1, profile=profile) as cluster:
        cluster.set("k", {})
        client = await Client.dcp(cluster)
        value = b'{"collections":[]}'
        assert (await client.ask(codec_dcp.to_frame(replace(request(0, 0), value=value)))).status == status
        if status == Status.SUCCESS:
            await client.until(lambda: client.of(ev.StreamEnd))
            assert [event.reason for event in client.of(ev.StreamEnd)] == [StreamEndReason.FILTER_EMPTY]


async def test_a_node_of_8_0_hangs_up_on_a_purge_seqno_that_is_too_long() -> None:
    async with SandboxCluster(vbuckets=1, profile="8.0") as cluster:
        client = await Client.dcp(cluster)
        client.send(codec_dcp.to_frame(replace(request(0, 0), value=b'{"purge_seqno":"%023d"}' % 1)))
        await asyncio.wait_for(client.closed.wait(), 10)


async def test_a_stream_from_the_latest_begins_at_the_high_seqno() -> None:
    """kv_engine 7.6.2, DcpProducer::streamRequest."""
    async with SandboxCluster(vbuckets=1, profile="8.x") as cluster:
        cluster.set("old", {})
        client = await Client.dcp(cluster)
        flags = int(StreamRequestFlag.FROM_LATEST)
        assert (await client.ask(codec_dcp.to_frame(request(0, 0, flags)))).status == Status.SUCCESS
        cluster.set("new", {})
        await client.until(lambda: client.of(ev.Mutation))
        assert [event.seqno for event in client.of(ev.Mutation)] == [2]
