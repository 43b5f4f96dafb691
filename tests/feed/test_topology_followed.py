"""A consumer whose source changes around it: maps that are announced, names that move, certificates that are exchanged.

Polling for maps is off (ten minutes) wherever an announcement is what is tried.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mirror.sandbox import NodeTls, SandboxCluster
from mirror.sandbox.data.clustermap import SandboxMap
from mirror.server.cluster_config import NOWHERE
from mirror.wire.constants import Status, VbucketRole
from tests.feed.authority import Authority
from tests.feed.harness import VBUCKETS, Mirror, Mirrors, write
from tests.feed.name_server import NameServer

NO_POLLING: dict[str, Any] = {"map_poll_interval_s": 600}


@asynccontextmanager
async def source_of(path: Path, **options: Any) -> AsyncIterator[tuple[SandboxCluster, Mirrors]]:
    cluster = SandboxCluster(nodes=2, vbuckets=VBUCKETS, seed=1, **options)
    async with cluster, Mirrors(cluster, path) as mirrors:
        yield cluster, mirrors


@pytest.mark.parametrize("profile", ["7.2", "8.0"])
async def test_a_rebalance_is_followed_by_announced_maps(profile: str, tmp_path: Path) -> None:
    """Version 7.2 sends the map along, 8.0 says only that there is another."""
    async with source_of(tmp_path, profile=profile) as (cluster, mirrors):
        write(cluster, 100)
        mirror = await mirrors.follow(**NO_POLLING)
        added = await cluster.add_node()
        await cluster.rebalance([0, added])
        write(cluster, 100, "after")
        await mirror.follow()
        # The node that is out is let go of, the new one is in; nothing that was published came again.
        ports = {cluster.nodes[0].port, cluster.nodes[added].port}
        await mirror.until(
            lambda: {int(str(node["address"]).rpartition(":")[2]) for node in mirror.status()["nodes"]} == ports,
            "only the nodes of the map",
        )
        assert mirror.status()["counters"]["requested_again_bytes"] == 0


@pytest.mark.parametrize("profile", ["5.0", "8.0"])
async def test_a_vbucket_that_has_a_node_again_is_found_by_polling(profile: str, tmp_path: Path) -> None:
    """A vbucket without a node is not streamed, so only the map says where it is."""
    async with source_of(tmp_path, profile=profile) as (cluster, mirrors):
        write(cluster, 50)
        mirror = await mirrors.follow(map_poll_interval_s=0.1)
        owners = cluster.bucket.map.owners
        home, owners[3] = owners[3], NOWHERE
        cluster.bucket.map_changed(3)
        await mirror.until_state(3, "no-active-node")
        owners[3] = home
        cluster.bucket.map_changed(3)
        write(cluster, 50, "after")
        await mirror.follow()
        assert mirror.status()["map"]["rev"] == cluster.bucket.map.rev


def has_map(mirror: Mirror, rev: int) -> bool:
    followed = mirror.consumer.map_follower.current
    return followed is not None and followed.rev == rev


@pytest.mark.parametrize("profile", ["7.2", "8.0"])
async def test_a_stream_refused_by_a_node_without_a_newer_map_is_requested_again(profile: str, tmp_path: Path) -> None:
    """NOT_MY_VBUCKET with the map that we have (7.2), and without one (8.0, which knows that we have it)."""
    async with source_of(tmp_path, profile=profile) as (cluster, mirrors):
        mirror = await mirrors.follow(**NO_POLLING)
        cluster.bucket.states[5] = VbucketRole.DEAD
        cluster.bucket.map_changed(5)
        await mirror.until(lambda: "does not serve" in (mirror.row(5)["last_error"] or ""), "NOT_MY_VBUCKET")
        write(cluster, 50)
        await mirror.until_published(4, cluster.vbucket(4).high_seqno)
        cluster.bucket.states.clear()
        cluster.move(5, cluster.bucket.map.owners[5])
        await mirror.follow()


def waits_for_its_node(mirror: Mirror, vbid: int) -> bool:
    """Between two requests, which are answered alike."""
    row = mirror.row(vbid)
    return row["state"] == "waiting" and "warming up" in (row["last_error"] or "")


async def test_a_node_that_refuses_streams_is_reported_and_does_not_delay_others(tmp_path: Path) -> None:
    """As while it warms up: it lets us in, has its map, and says of each stream that it is too early."""
    async with source_of(tmp_path) as (cluster, mirrors):
        theirs = [vbid for vbid, owner in enumerate(cluster.bucket.map.owners) if owner == 1]
        cluster.faults.streams.refuse(Status.ETMPFAIL, theirs)
        mirror = mirrors.start()
        write(cluster, 100)
        for vbid in set(range(VBUCKETS)) - set(theirs):
            await mirror.until_published(vbid, cluster.vbucket(vbid).high_seqno)
        for vbid in theirs:
            await mirror.until(partial(waits_for_its_node, mirror, vbid), "the reason")
            assert mirror.row(vbid)["published_seqno"] == 0
        assert all(node["ready"] for node in mirror.status()["nodes"])
        cluster.faults.clear()
        await mirror.follow()


async def test_a_name_is_looked_up_again_when_its_hosts_are_gone(tmp_path: Path) -> None:
    """Every node that was known is gone; the name in DNS leads to where the cluster is now."""
    async with source_of(tmp_path) as (cluster, mirrors):
        write(cluster, 50)
        record = "_couchbase._tcp.db.invalid"
        with NameServer({record: [f"0 0 {cluster.nodes[0].port} localhost."]}) as server:
            mirror = await mirrors.follow("couchbase://demo@db.invalid/demo")
            added = await cluster.add_node()
            for number in (0, 1):
                await cluster.kill_node(number)
            for vbid in range(VBUCKETS):
                cluster.move(vbid, added)
            server.records[record] = [f"0 0 {cluster.nodes[added].port} localhost."]
            write(cluster, 50, "after")
            await mirror.follow()


async def test_one_node_without_an_alternate_address_does_not_change_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This node keeps its own address, also if it is the one that sends the map."""
    current = SandboxMap.to_json

    def mixed(found: SandboxMap, this_node: int, *, with_bucket: bool) -> bytes:
        config = json.loads(current(found, this_node, with_bucket=with_bucket))
        del config["nodesExt"][1]["alternateAddresses"]
        return json.dumps(config).encode()

    monkeypatch.setattr(SandboxMap, "to_json", mixed)
    async with source_of(tmp_path) as (cluster, mirrors):
        cluster.bucket.map.external_host = "localhost"
        cluster.bucket.map_changed()
        write(cluster, 50)
        mirror = await mirrors.follow(f"couchbase://demo@localhost:{cluster.nodes[0].port}/demo")
        for number in range(4):  # node 1 sends maps, too
            cluster.bucket.map_changed(number)
            cluster.faults.cut(node=1)
            write(cluster, 50, f"after-{number}")
            await mirror.follow()
        expected = {f"localhost:{cluster.nodes[0].port}", f"127.0.0.1:{cluster.nodes[1].port}"}
        assert {str(node["address"]) for node in mirror.status()["nodes"]} == expected


async def test_a_source_at_an_ipv6_address_is_mirrored(tmp_path: Path) -> None:
    async with source_of(tmp_path, host="::1") as (cluster, mirrors):
        write(cluster, 50)
        await mirrors.follow()


@pytest.mark.usefixtures("short_pauses")
async def test_node_certificates_are_exchanged_without_a_restart(tmp_path: Path) -> None:
    """The nodes get another certificate of another authority; the mirror's CA file is exchanged a while later."""
    first = Authority(tmp_path)
    (tmp_path / "second").mkdir()
    second = Authority(tmp_path / "second")
    tls = NodeTls(*first.sign("127.0.0.1"))
    async with source_of(tmp_path, tls=tls, tls_only=True) as (cluster, mirrors):
        write(cluster, 50)
        mirror = await mirrors.follow(tls_ca_file=first.ca_file)
        tls.rotate(*second.sign("127.0.0.1"))
        write(cluster, 50, "rotated")
        await mirror.follow()  # open connections go on
        cluster.faults.cut()
        await mirror.until(
            lambda: all("authorities" in str(node["error"]) for node in mirror.status()["nodes"]), "refusal"
        )
        write(cluster, 50, "cut")
        first.ca_file.write_bytes(first.ca_file.read_bytes() + second.ca_file.read_bytes())
        await mirror.follow()
        assert mirror.status()["counters"]["requested_again_bytes"] == 0
        await mirror.until(lambda: mirror.status()["error"] is None, "no word of what is over")


async def test_a_client_certificate_is_exchanged_without_a_restart(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    nodes = authority.sign("127.0.0.1")
    tls = NodeTls(*nodes, client_ca_file=authority.ca_file, clients_need_certificate=True)
    cert, key = authority.sign(into="client", common_name="demo")
    async with source_of(tmp_path, tls=tls) as (cluster, mirrors):
        mirror = await mirrors.follow(
            cluster.connection_string.replace("demo@", ""),
            tls_ca_file=authority.ca_file,
            tls_client_cert_file=cert,
            tls_client_key_file=key,
        )
        cert.write_text("half a file")  # as if it was just being written
        cluster.faults.cut()
        await mirror.until(
            lambda: all("client.pem cannot be used" in str(node["error"]) for node in mirror.status()["nodes"]),
            "the file to be complained of",
        )
        write(cluster, 50)
        authority.sign(into="client", common_name="demo")
        await mirror.follow()


async def test_a_node_without_a_tls_port_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    """A node joins that offers no TLS: its vbuckets wait, with the reason."""
    authority = Authority(tmp_path)
    async with source_of(tmp_path, tls=NodeTls(*authority.sign("127.0.0.1"))) as (cluster, mirrors):
        mirror = await mirrors.follow(tls_ca_file=authority.ca_file)
        cluster.tls, kept = None, cluster.tls
        added = await cluster.add_node()
        cluster.tls = kept
        cluster.move(5, added)
        await mirror.until(lambda: "does not offer the data service with TLS" in str(mirror.row(5)), "the reason")
        write(cluster, 50)
        await mirror.until(lambda: mirror.row(1)["published_seqno"] == cluster.vbucket(1).high_seqno, "the others")
        cluster.move(5, 0)
        await mirror.follow()
        assert mirror.status()["error"] is None
