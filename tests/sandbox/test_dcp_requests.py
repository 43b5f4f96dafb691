"""DCP requests that real engines were recorded answering: refusals, filters, controls, and the backfills they gave."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from mirror.sandbox import SandboxCluster
from mirror.wire import codec_dcp
from mirror.wire import events as ev
from mirror.wire.constants import Opcode, Status, VbucketState
from mirror.wire.frame import Frame
from storage.model import FailoverEntry, Seqno, Vbuuid

from .client import Client
from .recorded import STREAM, answers, fill, frames, seqno_of, stream_of

PASSWORDS = {"@admin": "password", "mirror": "mirror", "reader": "readerpw"}


async def cluster_like_the_recorded(recording: list[tuple[str, Frame]], vbuckets: int = 16) -> SandboxCluster:
    cluster = SandboxCluster(vbuckets=vbuckets, bucket="default", user="@admin", password="password")
    cluster.add_user("reader", "readerpw", frozenset({"Read"}))
    logs = {}
    for request, answer in answers(recording):
        if request.opcode in (Opcode.DCP_STREAM_REQ, Opcode.DCP_GET_FAILOVER_LOG) and answer.status == Status.SUCCESS:
            logs[request.vbucket] = codec_dcp.decode_failover_log(answer.value)
        if request.opcode == Opcode.SASL_AUTH and answer.status == Status.SUCCESS:
            name, password = request.value.decode().split("\0")[1:]
            cluster.add_user(name, password, cluster.user.privileges if name != "reader" else frozenset({"Read"}))
    for vbid, log in logs.items():
        cluster.vbucket(vbid)._failover_log = [FailoverEntry(Vbuuid(u), Seqno(s)) for u, s in log]
    await cluster.start()
    Client.clusters.append(cluster)
    return cluster


def told(frame: Frame, request: Frame) -> dict[str, object]:
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
    "i1_bad_stream_requests",
    "i2_bad_extras_len",
    "i3_stream_req_without_open",
    "i4_open_without_bucket",
    "i5_open_twice",
    "i8_open_bad_flags",
    "i9_bad_auth",
    "i10_no_privilege",
    "k7_err_unknown_collection",
    "k8_err_dropped_collection",
    "k9_err_unknown_scope",
    "k10_err_manifest_ahead",
    "k11_err_bad_json",
    "k12_err_scope_and_collections",
    "k19_two_stream_ids",
    "d2_rollback_after_crash",
    "d3_rollback_unknown_vbuuid",
    "d5_rollback_beyond_high",
    "l3_resume_above_purge",
    "h3_include_xattrs",
    "h5_snappy_force_compression",
    "h9_expiry_opcode",
    "h12_delete_times_expiry_opcode",
    "g3_close_stream",
    "k14_oso_collection",
    "k17_flatbuffers_system_events",
    "k22_marker_v2_replica",
]


@pytest.mark.parametrize("name", REFUSALS)
async def test_requests_are_answered_as_recorded(captures: Path, name: str) -> None:
    recording = frames(captures / f"72_{name}.jsonl")
    cluster = await cluster_like_the_recorded(recording)
    high = {1: 206, 2: 209, 9: 155 if name.startswith("d5") else 135 if name.startswith("d3") else 100, 7: 216}
    for vbid in range(16):
        fill(cluster.vbucket(vbid), {}, high.get(vbid, 206))
    cluster.bucket.states[15] = VbucketState.REPLICA
    cluster.bucket.states[14] = VbucketState.DEAD
    if "_k" in f"_{name}":
        cluster.bucket.create_scope("inventory")
        cluster.bucket.create_collection("inventory", "hotel")
        cluster.bucket.manifest.uid = 4
    client = await Client.connect(cluster)
    asked = 0
    for request, recorded in answers(recording):
        answer = await client.ask(request)
        assert told(answer, request) == told(recorded, request), f"opaque {request.opaque:x} {request.extras.hex()}"
        asked += 1
        bounded = request.opcode == Opcode.DCP_STREAM_REQ and answer.status == Status.SUCCESS
        if bounded and int.from_bytes(request.extras[16:24]) < 2**32:
            await client.until_end(request.opaque)
    assert asked >= 3


def contents(captures: Path, names: list[str], vbid: int) -> dict[int, Frame]:
    """Seqno -> the message, as the most capable of the recorded clients got it."""
    by_seqno: dict[int, Frame] = {}
    for name in names:
        for frame in stream_of(frames(captures / f"72_{name}.jsonl"), vbid):
            if frame.opcode in STREAM[:3] or frame.opcode == Opcode.DCP_SYSTEM_EVENT:
                by_seqno.setdefault(seqno_of(frame), frame)
    return by_seqno


FEATURE_SETS = [
    "h1_no_features",
    "h2_xattr_hello_only",
    "h3_include_xattrs",
    "h5_snappy_force_compression",
    "h6_delete_times",
    "h7_no_value",
    "h8_no_value_xattrs",
    "h9_expiry_opcode",
    "h10_deleted_user_xattrs",
    "h11_no_value_underlying_dt",
    "h12_delete_times_expiry_opcode",
]


@pytest.mark.parametrize("name", FEATURE_SETS)
async def test_a_client_gets_each_document_in_the_shape_it_negotiated(captures: Path, name: str) -> None:
    by_seqno = contents(captures, ["h12_delete_times_expiry_opcode"], 11)
    for frame in stream_of(frames(captures / "72_h11_no_value_underlying_dt.jsonl"), 11):
        if frame.opcode == Opcode.DCP_MUTATION and frame.datatype & 2:  # kept compressed by the server
            packed = next(
                f
                for f in stream_of(frames(captures / "72_h5_snappy_force_compression.jsonl"), 11)
                if f.opcode == frame.opcode and seqno_of(f) == seqno_of(frame)
            )
            by_seqno[seqno_of(frame)] = packed
    for seqno, frame in list(by_seqno.items()):  # the sandbox keeps keys with their collection
        by_seqno[seqno] = replace(frame, key=b"\0" + frame.key)
    recording = frames(captures / f"72_{name}.jsonl")
    cluster = await cluster_like_the_recorded(recording)
    fill(cluster.vbucket(11), by_seqno, 56)
    client = await Client.connect(cluster)
    for request, recorded in answers(recording):
        assert (await client.ask(request)).status == recorded.status
    wanted = stream_of(recording, 11)
    await client.until(lambda: len(client.frames) >= len(wanted))
    if name.startswith("h11"):  # deleted documents: whether their xattrs were kept compressed cannot be told from here
        wanted = [replace(f, datatype=f.datatype & ~2) if f.opcode == Opcode.DCP_DELETION else f for f in wanted]
    if name.startswith("h5"):  # what compresses to which bytes is snappy's affair
        assert [(f.opcode, f.extras, f.key, f.datatype) for f in client.frames] == [
            (f.opcode, f.extras, f.key, f.datatype) for f in wanted
        ]
    else:
        assert client.frames == wanted


COLLECTION_STREAMS = [
    ("k3_filter_collection", 0x9C),
    ("k4_filter_scope", 0xA7),
    ("k5_filter_default_coll", 0xB2),
    ("k6_uid", None),
    ("k10_err_manifest_ahead", None),
    ("k13_legacy_client", 0xD3),
    ("k14_oso_collection", None),
    ("k16_oso_no_filter", 0xF4),
    ("k17_flatbuffers_system_events", 0xFF),
    ("k18_stream_id", None),
    ("k19_two_stream_ids", 0x115),
]


@pytest.mark.parametrize(("name", "high"), COLLECTION_STREAMS)
async def test_a_backfill_with_collections_is_the_recorded_one(captures: Path, name: str, high: int | None) -> None:
    """The same vbucket as of each recording: the documents that its filter shows, and the events in their shape."""
    recording = frames(captures / f"72_{name}.jsonl")
    wanted: list[Frame] = []
    ended = False
    for frame in stream_of(recording, 13):
        memory = frame.opcode == Opcode.DCP_SNAPSHOT_MARKER and int.from_bytes(frame.extras[-4:]) & 1
        if memory:
            ended = True
        if not ended:
            wanted.append(frame)
    marker = next((f for f in wanted if f.opcode == Opcode.DCP_SNAPSHOT_MARKER), None)
    if high is None:
        high = (
            int.from_bytes(marker.extras[8:16])
            if marker
            else max(seqno_of(f) for f in wanted if f.opcode in STREAM[:3])
        )
    by_seqno = contents(captures, ["k1_collections_live"], 13)
    for other in ("k3_filter_collection", "k4_filter_scope", "k5_filter_default_coll", "k6_uid", "k13_legacy_client"):
        for seqno, frame in contents(captures, [other], 13).items():
            key = b"\0" + frame.key if other.startswith("k13") else frame.key
            by_seqno.setdefault(seqno, replace(frame, key=key))
    for frame in wanted:  # what this recording alone knows: written after the others ended
        if frame.opcode in STREAM[:3]:
            plain = replace(
                frame, magic=0x80, framing=b"", key=b"\0" + frame.key if name.startswith("k13") else frame.key
            )
            by_seqno.setdefault(seqno_of(frame), plain)
    cluster = await cluster_like_the_recorded(recording)
    bucket = cluster.bucket
    bucket.create_scope("inventory")
    bucket.create_collection("inventory", "hotel")
    changes = {int.from_bytes(f.extras[:8]): f for f in by_seqno.values() if f.opcode == Opcode.DCP_SYSTEM_EVENT}
    assert len(changes) == 10
    fill(cluster.vbucket(13), {seqno: f for seqno, f in by_seqno.items() if seqno <= high}, high)
    client = await Client.connect(cluster)
    for request, recorded in answers(recording):
        assert (await client.ask(request)).status == recorded.status
    await client.until(lambda: len(client.frames) >= len(wanted))
    await asyncio.sleep(0)
    got, want = client.frames, wanted
    if name.startswith("k17"):  # the shape of these events is checked in test_manifest; here: which and where
        got, want = ([(f.opcode, f.extras[:12], f.key) for f in side] for side in (got, want))
    if name.startswith("k14"):
        assert sorted(got, key=lambda f: f.extras) == sorted(want, key=lambda f: f.extras)
        assert (got[0], got[-1]) == (want[0], want[-1])
    elif name.startswith("k19"):
        for stream_id in (5, 6):
            assert [f for f in got if f.stream_id == stream_id] == [f for f in want if f.stream_id == stream_id]
    else:
        assert got == want


async def test_an_answer_to_nothing_ends_the_connection() -> None:
    async with SandboxCluster(vbuckets=1) as cluster:
        client = await Client.dcp(cluster)
        client.send(Frame(0x81, int(Opcode.DCP_STREAM_REQ), opaque=5))
        await client.until_closed()


async def test_more_bytes_acknowledged_than_sent_is_refused() -> None:
    async with SandboxCluster(vbuckets=1) as cluster:
        client = await Client.dcp(cluster, connection_buffer_size="4096")
        answer = await client.ask(codec_dcp.to_frame(ev.BufferAck(10)))
        assert answer.status == Status.EINVAL


WHOLE_BACKFILLS = [
    "605_a_backfill_then_live",
    "605_c_resume_mid_snapshot",
    "605_e_flow_control_4096",
    "605_j_odd_keys_and_values",
    "72_a_backfill_then_live",
    "72_c_resume_mid_snapshot",
    "72_e_flow_control_4096",
    "72_f_noop",
    "72_i11_ordinary_user",
    "72_j_odd_keys_and_values",
]


@pytest.mark.parametrize("name", WHOLE_BACKFILLS)
async def test_a_backfill_is_the_recorded_one_byte_for_byte(captures: Path, name: str) -> None:
    """A vbucket with the recorded documents (and gaps for what was not sent) gives the recorded frames again."""
    recording = frames(captures / f"{name}.jsonl")
    wanted: list[Frame] = []
    for frame in stream_of(recording):
        if frame.opcode == Opcode.DCP_SNAPSHOT_MARKER and int.from_bytes(frame.extras[-4:]) & 1:
            break
        # 6.0.5 leaves the checkpoint flag out of disk markers
        flags = 6 if frame.opcode == Opcode.DCP_SNAPSHOT_MARKER else None
        wanted.append(frame if flags is None else replace(frame, extras=frame.extras[:16] + flags.to_bytes(4)))
    vbid = wanted[0].vbucket
    high = int.from_bytes(wanted[0].extras[8:16])
    documents = {seqno_of(f): replace(f, key=b"\0" + f.key) for f in wanted if f.opcode in STREAM[:3]}
    cluster = await cluster_like_the_recorded(recording)
    start = next(f for d, f in recording if d == "c2s" and f.opcode == Opcode.DCP_STREAM_REQ)
    first = int.from_bytes(start.extras[8:16])
    fill(cluster.vbucket(vbid), documents, high)
    for item in cluster.vbucket(vbid).log[:first]:
        item.next_seqno = high
    client = await Client.connect(cluster)
    acked = 0
    for request, recorded in answers(recording):
        assert (await client.ask(request)).status == recorded.status
    while len(client.frames) < len(wanted):
        client.ack(sum(client.sizes) - acked)
        acked = sum(client.sizes)
        await client.until(lambda: len(client.frames) == len(wanted) or sum(client.sizes) > acked)  # noqa: B023
    assert client.frames == wanted
