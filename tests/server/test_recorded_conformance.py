"""The mirror's DCP port against the recordings: requests that a real 7.2.0 answered, sent to a mirror.

(`test_dcp_requests` asks the embedded source.) What an answer says is compared whole: status, datatype, extras,
failover log or error context. Where a mirror has to say something else, `DIFFERENT` says what, and why.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mirror.sandbox import SandboxCluster
from mirror.serve.access.auth import SourceUser
from mirror.wire import codec_dcp
from mirror.wire.constants import Opcode, SnapshotFlag, Status, VbucketRole
from mirror.wire.events import SnapshotMarker
from mirror.wire.frame import Frame
from tests.feed.harness import Mirror
from tests.recordings import frames
from tests.sandbox.recorded import answers, fill
from tests.serve.dcp_rig import DcpClient, serving_dcp
from tests.serve.kv_rig import mirror_of
from tests.server.test_dcp_requests import cluster_like_the_recorded, summary

DEAD = 14
HIGHS = {0: 3010, 1: 206, 2: 209, 7: 216}


async def mirrored(name: str, recording: list[tuple[str, Frame]], path: Path) -> tuple[SandboxCluster, Mirror]:
    """The source as the recorded engine was, and a mirror that has all of it."""
    cluster = await cluster_like_the_recorded(name, recording)
    cluster.add_user("demo", "demo")
    if name.startswith("72_k"):
        cluster.bucket.create_scope("inventory")
        cluster.bucket.create_collection("inventory", "hotel")
        cluster.bucket.create_scope("gone")
        cluster.bucket.drop_scope("gone")
        assert cluster.bucket.manifest.uid == 4
        cluster.set("document", {"n": 1}, vbid=13)
    for vbid in range(16):
        high = {9: 155 if "_d5" in name else 135 if "_d3" in name else 100}.get(vbid, HIGHS.get(vbid, 206))
        if not name.startswith("72_k"):
            fill(cluster.vbucket(vbid), {}, high)
    cluster.bucket.states[DEAD] = VbucketRole.DEAD
    cluster.bucket.to_disk()
    mirror = mirror_of(cluster, path)
    mirror.start(f"couchbase://demo@127.0.0.1:{cluster.nodes[0].port}/{cluster.bucket.name}")
    for vbid in set(range(16)) - {DEAD}:
        await mirror.until_published(vbid, cluster.vbucket(vbid).high_seqno)
    return cluster, mirror


SAME = [
    "72_a_backfill_then_live", "72_b_multiplex_8vb", "72_c2_resume_at_high_seqno", "72_c_resume_mid_snapshot",
    "72_d1_before_crash", "72_d2_rollback_after_crash", "72_d3_rollback_unknown_vbuuid", "72_d5_rollback_beyond_high",
    "72_e_flow_control_4096", "72_f_noop", "72_g1_end_by_seqno", "72_g3_close_stream", "72_g4_close_stream_with_end",
    "72_h10_deleted_user_xattrs", "72_h11_no_value_underlying_dt", "72_h12_delete_times_expiry_opcode",
    "72_h1_no_features", "72_h2_xattr_hello_only", "72_h3_include_xattrs", "72_h5_snappy_force_compression",
    "72_h6_delete_times", "72_h7_no_value", "72_h8_no_value_xattrs", "72_h9_expiry_opcode",
    "72_i1_bad_stream_requests", "72_i2_bad_extras_len", "72_i3_stream_req_without_open", "72_i4_open_without_bucket",
    "72_i5_open_twice", "72_i6_same_name_first", "72_i8_open_bad_flags", "72_i9_bad_auth", "72_j_odd_keys_and_values",
    "72_k10_err_manifest_ahead", "72_k11_err_bad_json", "72_k12_err_scope_and_collections", "72_k13_legacy_client",
    "72_k14_oso_collection", "72_k16_oso_no_filter", "72_k17_flatbuffers_system_events", "72_k18_stream_id",
    "72_k19_two_stream_ids", "72_k1_collections_live", "72_k20_durable_writes_plain_client", "72_k22_marker_v2_replica",
    "72_k23_pending_prepare_timeout", "72_k3_filter_collection", "72_k4_filter_scope", "72_k5_filter_default_coll",
    "72_k6_uid", "72_k7_err_unknown_collection", "72_k8_err_dropped_collection", "72_k9_err_unknown_scope",
    "72_l1_before_purge", "72_l3_resume_above_purge",
]  # fmt: skip

BELOW_THE_FIRST_SNAPSHOT = {Opcode.DCP_STREAM_REQ: Status.ROLLBACK}
"""7.2 does not say what it has purged: so a mirror has no position inside of the first snapshot that it got."""

AHEAD_OF_THE_MIRROR = {Opcode.DCP_STREAM_REQ: Status.NOT_MY_VBUCKET}
"""A mirror may be behind the source that its client followed: the client waits until it has caught up."""

DIFFERENT: dict[str, dict[Opcode, Status]] = {
    "72_c_resume_mid_snapshot": BELOW_THE_FIRST_SNAPSHOT,
    "72_d2_rollback_after_crash": BELOW_THE_FIRST_SNAPSHOT,
    "72_d5_rollback_beyond_high": AHEAD_OF_THE_MIRROR,
    "72_g1_end_by_seqno": BELOW_THE_FIRST_SNAPSHOT,
    "72_l1_before_purge": BELOW_THE_FIRST_SNAPSHOT,
    "72_k22_marker_v2_replica": {Opcode.DCP_CONTROL: Status.NOT_SUPPORTED},  # no sync writes
}
"""Recording -> the requests that get another answer, and that answer."""


ALWAYS = ("72_d3", "72_g1", "72_i1_", "72_k19", "72_k22", "72_k7")
"""Those that the default suite asks; the others are for .ci/run."""


@pytest.mark.parametrize(
    "name", [name if name.startswith(ALWAYS) else pytest.param(name, marks=pytest.mark.ci) for name in SAME]
)
async def test_a_mirror_gives_the_recorded_answers_of_a_server(name: str, tmp_path: Path) -> None:
    recording = frames(name)
    cluster, mirror = await mirrored(name, recording, tmp_path)
    readers = SourceUser("@admin", lambda: "password")
    different: dict[Opcode, Status] = {}
    async with serving_dcp(mirror.path, readers=readers) as endpoint:
        client = await endpoint.connect()
        for request, recorded in answers(recording):
            answer = await client.say_frame(request)
            if summary(answer, request) != summary(recorded, request):
                opcode = Opcode(request.opcode)
                status = different.setdefault(opcode, Status(answer.status))
                assert answer.status == status, f"opaque {request.opaque:x} {request.extras.hex()}"
            elif request.opcode == Opcode.DCP_STREAM_REQ and answer.status == Status.SUCCESS:
                await same_beginning(client, recording, request.opaque)
    assert different == DIFFERENT.get(name, {})
    await mirror.stop()
    await cluster.stop()


async def same_beginning(client: DcpClient, recording: list[tuple[str, Frame]], opaque: int) -> None:
    """Assert that the mirror's stream begins with a disk marker if the recorded one does, with its flags."""
    first = next((f for way, f in recording if way == "s2c" and f.opaque == opaque and not f.is_response), None)
    if first is None or first.opcode != Opcode.DCP_SNAPSHOT_MARKER:
        return
    marker = codec_dcp.decode(first)
    assert isinstance(marker, SnapshotMarker)
    if not marker.flags & SnapshotFlag.DISK:
        return
    while not (found := [f for f in client.early if f.opaque == opaque]):
        frame = await client.receive()
        assert frame is not None
        client.early.append(frame)
    begun = codec_dcp.decode(found[0])
    assert isinstance(begun, SnapshotMarker)
    assert begun.flags == marker.flags
    assert (begun.start_seqno, begun.stream_id) == (marker.start_seqno, marker.stream_id)
