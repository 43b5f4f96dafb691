"""The nodes' TLS, tried with the program's own way in: both kinds of ports, users by certificate, a change of it."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest

from mirror.clock import SystemClock
from mirror.config_reader import validated
from mirror.errors import AuthRejected, ConfigError, TlsFailed
from mirror.feed.cluster.discovery import discover
from mirror.feed.connection.bootstrap import Access
from mirror.feed.connection.connection_string import parse
from mirror.ingest.topology import ClusterMap
from mirror.sandbox import NodeTls, SandboxCluster
from tests.feed.authority import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def node_tls(authority: Authority, **more: Any) -> NodeTls:
    return NodeTls(*authority.sign("localhost", "127.0.0.1"), **more)


async def found(url: str, password: str | None = "demo", **settings: Any) -> ClusterMap:
    """The cluster map, by way of login and bucket."""
    with pytest.MonkeyPatch.context() as patch:
        if password is not None:
            patch.setenv("DCP_MIRROR_PASSWORD", password)
        return await discover(Access.of(parse(url), validated(settings)), SystemClock())


async def test_plain_and_tls_ports_are_in_the_map_and_serve(authority: Authority) -> None:
    async with SandboxCluster(nodes=2, tls=node_tls(authority)) as cluster:
        assert cluster.connection_string.startswith("couchbases://")
        secure = await found(cluster.connection_string, tls_ca_file=authority.ca_file)
        plain = await found(cluster.plain_connection_string)
        assert secure == plain
        assert [(node.kv_port, node.tls_port) for node in plain.nodes] == [
            (node.port, node.tls_port) for node in cluster.nodes
        ]


async def test_the_map_of_a_tls_only_cluster_has_no_plain_ports(authority: Authority) -> None:
    async with SandboxCluster(nodes=2, tls=node_tls(authority), tls_only=True) as cluster:
        cluster_map = await found(cluster.connection_string, tls_ca_file=authority.ca_file)
        assert [(node.kv_port, node.tls_port) for node in cluster_map.nodes] == [
            (None, node.tls_port) for node in cluster.nodes
        ]


async def test_a_client_certificate_names_the_user_and_excludes_a_password_login(authority: Authority) -> None:
    tls = node_tls(authority, client_ca_file=authority.ca_file)
    cert, key = authority.sign(into="client", common_name="demo")
    ours: dict[str, Any] = {"tls_ca_file": authority.ca_file, "tls_client_cert_file": cert, "tls_client_key_file": key}
    async with SandboxCluster(tls=tls) as cluster:
        assert (await found(cluster.connection_string.replace("demo@", ""), None, **ours)).vbucket_count
        with pytest.raises(AuthRejected, match="knows us by our client certificate"):
            await found(cluster.connection_string, **ours)
        assert (await found(cluster.connection_string, tls_ca_file=authority.ca_file)).vbucket_count


async def test_a_client_without_a_required_certificate_is_not_served(authority: Authority) -> None:
    tls = node_tls(authority, client_ca_file=authority.ca_file, clients_need_certificate=True)
    cert, key = authority.sign(into="client", common_name="unknown")
    ca: dict[str, Any] = {"tls_ca_file": authority.ca_file}
    async with SandboxCluster(tls=tls) as cluster:
        for ours in (ca, ca | {"tls_client_cert_file": cert, "tls_client_key_file": key}):
            with pytest.raises(TlsFailed, match="hung up"):
                await found(cluster.connection_string, **ours)
        authority.sign(into="client", common_name="demo")
        assert (await found(cluster.connection_string.replace("demo@", ""), None, **ours)).vbucket_count


def test_unusable_certificate_files_are_one_error(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.sign("localhost")
    with pytest.raises(ConfigError, match=r"absent\.pem"):
        NodeTls(tmp_path / "absent.pem")
    with pytest.raises(ConfigError, match=r"absent\.pem"):
        NodeTls(cert, key, tmp_path / "absent.pem")
    with pytest.raises(ConfigError, match="no CA is given"):
        NodeTls(cert, key, clients_need_certificate=True)
    tls = NodeTls(cert, key)
    with pytest.raises(ConfigError, match=r"node\.key"):
        tls.rotate(key, key)
    assert tls.cert_file == cert
    assert tls.context.minimum_version == ssl.TLSVersion.TLSv1_2
