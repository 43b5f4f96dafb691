"""The differences between server releases; test_dcp_requests compares recorded answers."""

from __future__ import annotations

import json

import pytest

from mirror.errors import ConfigError
from mirror.sandbox import SandboxCluster
from mirror.sandbox.data.manifest import ManifestError
from mirror.sandbox.data.profile import CONTROLS, PROFILES, profile_named
from mirror.wire import codec_dcp, codec_kv
from mirror.wire import events as ev
from mirror.wire.constants import Feature, Status
from tests.oracle import kv_client

from .client import Client

ALL_FEATURES = tuple(sorted(int(feature) for feature in Feature))
EXACT = [name for name in PROFILES if not name.endswith("x")]


def test_a_profile_has_exact_and_short_names_and_an_unknown_one_is_refused() -> None:
    assert [profile_named(name).name for name in ("5.x", "6.x", "7.x", "8.x")] == ["5.5", "6.6", "7.6", "8.0"]
    assert profile_named("7.2").version == b"7.2.0"
    with pytest.raises(ConfigError, match=r"no server profile '9\.9' \(take 5\.0, 5\.5"):
        SandboxCluster(profile="9.9")


def test_newer_releases_refuse_controls_that_were_removed() -> None:
    known = {profile: profile_named(profile).abilities(keeps_history=False).controls for profile in EXACT}
    taken = {name: [profile for profile in EXACT if name in known[profile]] for name in CONTROLS}
    assert taken[b"enable_value_compression"] == ["5.0"]
    assert taken[b"supports_cursor_dropping"] == EXACT, "kv_engine takes both names (dcp/producer.cc)"
    assert taken[b"enable_ext_metadata"] == ["5.0", "5.5", "6.0", "6.5", "6.6"]
    assert known["8.0"] <= CONTROLS.keys()


@pytest.mark.parametrize(
    ("profile", "collections", "sync_replication", "known_version"),
    [("5.0", False, False, False), ("6.6", False, True, False), ("7.2", True, True, False), ("7.6", True, True, True)],
)
async def test_each_release_has_its_features(
    profile: str, collections: bool, sync_replication: bool, known_version: bool
) -> None:
    async with SandboxCluster(vbuckets=1, profile=profile) as cluster:
        client = await Client.login(cluster, features=ALL_FEATURES)
        assert (Feature.COLLECTIONS in client.features) is collections
        assert (Feature.SYNC_REPLICATION in client.features) is sync_replication
        assert (Feature.GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION in client.features) is known_version
        assert (b'"collections"' in cluster.bucket.map.to_json(0, with_bucket=True)) is collections
        manifest = await client.ask(kv_client.get_collections_manifest())
        old = Status.NOT_SUPPORTED if profile == "6.6" else Status.UNKNOWN_COMMAND
        assert manifest.status == (Status.SUCCESS if collections else old)
        assert (await client.ask(kv_client.get_collection_id(b"_default._default"))).status == manifest.status
        assert (await client.ask(kv_client.get_scope_id(b"_default"))).status == manifest.status
        if not collections:
            with pytest.raises(ManifestError, match="has no collections"):
                cluster.bucket.create_scope("s")


CONTROLS_REQUESTED = {
    "enable_expiry_opcode=true": "6.5", "backfill_order=sequential": "6.6",
    "enable_out_of_order_snapshots=true": "7.0", "enable_out_of_order_snapshots=true_with_seqno_advanced": "7.1",
    "v7_dcp_status_codes=true": "7.0", "flatbuffers_system_events=true": "7.2", "set_noop_interval=0.5": "7.6",
    "max_marker_version=2.2": "8.0",
}  # fmt: skip


@pytest.mark.parametrize("profile", EXACT)
async def test_controls_begin_with_their_release(profile: str) -> None:
    async with SandboxCluster(vbuckets=1, profile=profile) as cluster:
        client = await Client.dcp(cluster, set_noop_interval="1")
        for control, since in CONTROLS_REQUESTED.items():
            expected = Status.SUCCESS if EXACT.index(since) <= EXACT.index(profile) else Status.EINVAL
            assert await client.control(*control.split("=")) == expected, control


@pytest.mark.parametrize(("profile", "status"), [("6.0", Status.EINVAL), ("6.6", Status.SUCCESS)])
async def test_open_flags_begin_with_their_release(profile: str, status: int) -> None:
    async with SandboxCluster(vbuckets=1, profile=profile) as cluster:
        client = await Client.login(cluster)
        assert (await client.ask(codec_dcp.to_frame(ev.DcpOpen(b"n", 0x101)))).status == status


async def test_a_server_before_collections_streams_the_default_one_and_has_other_markers() -> None:
    async with SandboxCluster(vbuckets=1, profile="6.0") as cluster:
        cluster.set("k", {})
        cluster.bucket.to_disk()
        client = await Client.dcp(cluster)
        assert (await client.stream(0, value=b'{"uid":"0"}')).status == Status.EINVAL
        assert (await client.stream(0)).status == 0
        await client.until_seqno(0, 1)
        assert client.markers() == [(0, 1, 2)]
        assert [e.key for e in client.of(ev.Mutation)] == [b"k"]


@pytest.mark.parametrize(("profile", "status"), [("7.6", Status.ROLLBACK), ("8.0", Status.SUCCESS)])
async def test_the_purge_seqno_of_a_request_is_read_from_8_on(profile: str, status: int) -> None:
    async with SandboxCluster(vbuckets=1, profile=profile) as cluster:
        for index in range(10):
            cluster.set(f"k{index}", {})
        for index in range(9):
            cluster.delete(f"k{index}")
        cluster.bucket.purge()
        client = await Client.dcp(cluster)
        uuid = cluster.vbucket(0).vbuuid
        value = b'{"uid":"0","purge_seqno":"18"}'
        assert (await client.stream(0, start=5, snap=(0, 19), uuid=uuid, value=value)).status == status


@pytest.mark.parametrize(("profile", "status"), [("7.1", Status.ROLLBACK), ("7.2", Status.SUCCESS)])
async def test_purged_tombstones_are_ignored_on_request_from_7_2_on(profile: str, status: int) -> None:
    async with SandboxCluster(vbuckets=1, profile=profile) as cluster:
        for index in range(3):
            cluster.set(f"k{index}", {})
        cluster.delete("k0")
        cluster.set("last", {})
        cluster.bucket.purge()
        client = await Client.dcp(cluster)
        assert (await client.stream(0, start=2, uuid=cluster.vbucket(0).vbuuid, flags=0x80)).status == status


@pytest.mark.parametrize(
    ("profile", "alone", "epoch"), [("6.0", False, False), ("6.6", True, False), ("7.0", True, True)]
)
async def test_maps_of_old_servers_have_no_epoch_and_need_a_bucket(profile: str, alone: bool, epoch: bool) -> None:
    async with SandboxCluster(vbuckets=1, profile=profile) as cluster:
        client = await Client.connect(cluster)
        await client.ask(kv_client.sasl_auth(b"PLAIN", b"\0demo\0demo"))
        status = (await client.ask(codec_kv.get_cluster_config())).status
        assert status == (Status.SUCCESS if alone else Status.NO_BUCKET)
        await client.ask(kv_client.select_bucket(b"demo"))
        config = json.loads((await client.ask(codec_kv.get_cluster_config())).value)
        assert ("revEpoch" in config, config["rev"]) == (epoch, cluster.bucket.map.rev)


async def test_streams_need_a_privilege_of_their_own_from_7_on() -> None:
    for profile, status in (("6.6", Status.SUCCESS), ("7.0", Status.EACCESS)):
        async with SandboxCluster(vbuckets=1, profile=profile) as cluster:
            cluster.add_user("half", "pw", frozenset({"DcpProducer"}))
            client = await Client.dcp(cluster, user="half", password="pw")
            assert (await client.stream(0)).status == status
