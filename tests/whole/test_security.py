"""The mirror and a source that demands security, as an operator meets them: each thing that is wrong is one line that
says what and how to fix it, with the right exit code; certificates and passwords change while everything runs.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from couchbase.auth import CertificateAuthenticator, PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.options import ClusterOptions

from mirror.errors import ExitCode
from mirror.sandbox import NodeTls, SandboxCluster, SandboxThread
from mirror.server.privileges import ALL_PRIVILEGES, DCP_PRODUCER
from storage.read.view import open_view
from tests.cli.conftest import Result, call, environment
from tests.crash.judge import judge
from tests.crash.load import Load
from tests.crash.service import Service, until
from tests.feed.authority import Authority, Gatekeeper
from tests.feed.name_server import NameServer

VBUCKETS = 8
IMPATIENT = ("--set", "bootstrap_timeout_s=0.3", "--set", "request_timeout_s=10", "--until-caught-up")
NAMES = ("localhost", "127.0.0.1")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def source_of(authority: Authority, *names: str, **tls: object) -> SandboxThread:
    cert, key = authority.sign(*(names or NAMES))
    return SandboxThread(SandboxCluster(nodes=2, vbuckets=VBUCKETS, seed=3, tls=NodeTls(cert, key, **tls)))  # type: ignore[arg-type]


def run(url: str, data: Path, *flags: str | Path, **env: str) -> Result:
    return call("run", "--source", url, "--data", data, *IMPATIENT, *flags, env=env)


def refused(result: Result, code: ExitCode, *said: str) -> None:
    """One line with all of it, and nothing else that went wrong."""
    assert result.code == code, result.err
    for words in said:
        assert words in result.complaint


def test_the_certificate_of_the_source(authority: Authority, tmp_path: Path) -> None:
    data = tmp_path / "data"
    stranger = Authority(tmp_path, "stranger")
    with source_of(authority, "localhost") as source:
        url = source.connection_string
        refused(run(url, data), ExitCode.REFUSED, "none of the authorities of this machine", "give the cluster's CA")
        refused(run(url, data, "--tls-ca-file", stranger.ca_file), ExitCode.REFUSED, "authorities in", "stranger.pem")
        ours = ("--tls-ca-file", authority.ca_file)
        refused(run(url, data, *ours), ExitCode.REFUSED, "not for the name 127.0.0.1", "name of the certificate")
        assert source.cluster.tls is not None
        source.call(source.cluster.tls.rotate, *authority.sign(*NAMES, days=-1))
        refused(run(url, data, *ours), ExitCode.REFUSED, "has expired", "renew")
    assert not (data / "mirror.json").exists()


def test_the_port_and_the_protocol(authority: Authority, tmp_path: Path) -> None:
    data = tmp_path / "data"
    ours = ("--tls-ca-file", authority.ca_file)
    with source_of(authority) as source:
        tls_port, port = source.cluster.nodes[0].tls_port, source.cluster.nodes[0].port
        url = f"couchbases://demo@127.0.0.1:{port}/demo"
        refused(run(url, data, *ours), ExitCode.REFUSED, f"127.0.0.1:{port} does not speak TLS", "11207")
        url = f"couchbase://demo@127.0.0.1:{tls_port}/demo"
        refused(run(url, data), ExitCode.REFUSED, f"127.0.0.1:{tls_port} speaks TLS", "couchbases://")
        url = f"couchbase://demo@127.0.0.1:{port}/demo"
        refused(run(url, data, *ours), ExitCode.USAGE, "tls_ca_file is set", "not encrypted")
    with source_of(authority) as source:
        assert source.cluster.tls is not None
        source.cluster.tls.context.maximum_version = ssl.TLSVersion.TLSv1_2
        newer = ("--set", "tls_minimum_version=1.3")
        refused(run(source.connection_string, data, *ours, *newer), ExitCode.REFUSED, "TLS", "at least 1.3")
        assert run(source.connection_string, data, *ours).code == ExitCode.DONE


def test_an_alert_is_put_into_words(authority: Authority, tmp_path: Path) -> None:
    """A server that says what it holds against us, as real ones do."""

    async def tried() -> tuple[Result, Result]:
        context = authority.node_context(*NAMES, demand=True)
        async with Gatekeeper(context) as gate:
            url = f"couchbases://demo@127.0.0.1:{gate.port}/demo"
            without = await asyncio.to_thread(run, url, tmp_path / "data", "--tls-ca-file", authority.ca_file)
            cert, key = Authority(tmp_path, "stranger").sign(into="client", common_name="demo")
            flags = ("--tls-client-cert-file", cert, "--tls-client-key-file", key, "--tls-ca-file", authority.ca_file)
            return without, await asyncio.to_thread(run, url, tmp_path / "data", *flags)

    without, strange = asyncio.run(tried())
    refused(without, ExitCode.REFUSED, "it demands a client certificate", "tls_client_cert_file")
    refused(strange, ExitCode.REFUSED, "does not know the authority of our client certificate", "client.pem")


def test_users_by_certificate(authority: Authority, tmp_path: Path) -> None:
    data = tmp_path / "data"
    ca = ("--tls-ca-file", authority.ca_file)
    cert, key = authority.sign(into="client", common_name="nobody")
    ours = (*ca, "--tls-client-cert-file", cert, "--tls-client-key-file", key)
    with source_of(authority, client_ca_file=authority.ca_file) as source:
        url = source.connection_string.replace("demo@", "")
        refused(run(url, data, *ours), ExitCode.REFUSED, "has no user for our client certificate")
        refused(run(url, data, *ca), ExitCode.USAGE, "names no user", "tls_client_cert_file")
        authority.sign(into="client", common_name="demo")
        refused(run(source.connection_string, data, *ours), ExitCode.REFUSED, "knows us by our client certificate")
        source.call(source.cluster.set, "key", {"by": "certificate"})
        assert run(url, data, *ours).code == ExitCode.DONE
    with open_view(str(data)) as view:
        assert view.get("key") is not None


def test_files_of_ours_that_cannot_be_used(authority: Authority, tmp_path: Path) -> None:
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("not a certificate\n")
    cert, _ = authority.sign("localhost")
    url = "couchbases://demo@127.0.0.1:1/demo"
    for flags, said in (
        (("--tls-ca-file", tmp_path / "absent.pem"), "tls_ca_file"),
        (("--tls-ca-file", nonsense), "tls_ca_file"),
        (("--tls-client-cert-file", cert, "--tls-client-key-file", nonsense), "tls_client_key_file"),
        (("--network", "elsewhere"), "network"),
        (("--set", "tls_minimum_version=1.0"), "tls_minimum_version"),
        (("--set", "dns_server=10.0.0.1:x"), "dns_server"),
    ):
        target = "couchbases://demo@name.invalid/demo" if said == "dns_server" else url
        refused(run(target, tmp_path / "data", *flags), ExitCode.USAGE, said)


def test_user_password_bucket_and_privileges(authority: Authority, tmp_path: Path) -> None:
    data = tmp_path / "data"
    ca = ("--tls-ca-file", authority.ca_file)
    with source_of(authority) as source:
        url = source.connection_string
        refused(run(url, data, *ca, DCP_MIRROR_PASSWORD="wrong"), ExitCode.REFUSED, "wrong user or password")
        refused(run(url.replace("demo@", "who@"), data, *ca), ExitCode.REFUSED, "refused user who", "wrong user")
        refused(run(url.removesuffix("demo") + "other", data, *ca), ExitCode.REFUSED, "no bucket other")
        source.call(source.cluster.add_user, "reader", "demo", ALL_PRIVILEGES - {DCP_PRODUCER})
        result = run(url.replace("demo@", "reader@"), data, *ca)
        refused(result, ExitCode.REFUSED, "does not let this user", "DCP Reader")


def test_a_name_that_stands_for_the_hosts(authority: Authority, tmp_path: Path) -> None:
    with source_of(authority) as source:
        source.call(source.cluster.set, "key", {})
        record = f"0 0 {source.cluster.nodes[1].tls_port} localhost."
        with NameServer({"_couchbases._tcp.db.invalid": [record]}) as server:
            flags = ("--tls-ca-file", authority.ca_file, "--set", f"dns_server={server.address}")
            assert run("couchbases://demo@db.invalid/demo", tmp_path / "data", *flags).code == ExitCode.DONE
            result = run("couchbases://demo@other.invalid/demo", tmp_path / "data", *flags)
            refused(result, ExitCode.FAILED, "other.invalid cannot be resolved")


@pytest.fixture
def loaded(authority: Authority) -> Iterator[tuple[SandboxThread, Load]]:
    source = source_of(authority)
    load = Load(source.cluster, 3, rate=200, keys=400)
    with source:
        source.call(load.write, 300)
        writing = source.call(lambda: asyncio.get_running_loop().create_task(load.run()))
        yield source, load
        assert not writing.done(), writing
        source.call(writing.cancel)


def test_certificates_and_password_change_under_load(
    loaded: tuple[SandboxThread, Load], authority: Authority, tmp_path: Path
) -> None:
    """Another authority signs for the nodes, then another password is set: no restart, nothing requested again."""
    source, _ = loaded
    cluster = source.cluster
    password = tmp_path / "password"
    password.write_text("demo")
    (tmp_path / "second").mkdir()
    second = Authority(tmp_path / "second")
    flags = ["--groups", "2", "--workers", "2", "--set", "retry_delay_max_ms=300", "--set", f"password_file={password}"]
    ours = environment()
    del ours["DCP_MIRROR_PASSWORD"]  # it would outrank the file
    flags += ["--tls-ca-file", str(authority.ca_file)]
    with Service(source.connection_string, tmp_path / "data", *flags, env=ours) as service:
        service.start()
        service.wait_workers(2)

        def published() -> int:
            with open_view(str(service.data)) as view:
                return sum(int(state.published_seqno) for state in view.states())

        def goes_on(what: str) -> None:
            before = published()
            until(what, lambda: published() > before + 50, poll_s=0.1)

        def complains(words: str) -> bool:
            status = service.status() or {}
            return any(words in str(row["last_error"]) for row in status.get("vbuckets", ()))

        until("the mirror to be made", (tmp_path / "data" / "mirror.json").exists)
        goes_on("the mirror to follow")
        assert cluster.tls is not None
        source.call(cluster.tls.rotate, *second.sign(*NAMES))
        goes_on("the open connections to go on")
        source.call(cluster.faults.cut)
        until("the status to name the certificate", lambda: complains("authorities"), poll_s=0.1)
        authority.ca_file.write_bytes(authority.ca_file.read_bytes() + second.ca_file.read_bytes())
        goes_on("the new certificate to be taken")
        source.call(cluster.add_user, "demo", "another")
        source.call(cluster.faults.cut)
        until("the status to name the password", lambda: complains("wrong user or password"), poll_s=0.1)
        password.write_text("another\n")
        goes_on("the new password to be taken")
        judge(cluster, service.data, live=True)
        workers = service.wait_workers(2)
        assert not any(row["restarts"] for row in workers.values())
        assert not any(row["counters"]["requested_again_bytes"] for row in workers.values())
        assert service.terminate() == 0
        judge(cluster, service.data, live=False)
        assert not service.tracebacks()


def test_the_official_sdk_finds_the_sources_tls_right(authority: Authority) -> None:
    """The check of our own source: another TLS client, with its own ideas of names, chains and certificates."""
    with source_of(authority, client_ca_file=authority.ca_file) as source:
        nodes = ",".join(f"127.0.0.1:{node.tls_port}" for node in source.cluster.nodes)
        cert, key = authority.sign(into="client", common_name="demo")
        trusted = str(authority.ca_file)
        for login in (
            PasswordAuthenticator("demo", "demo", cert_path=trusted),
            CertificateAuthenticator(cert_path=str(cert), key_path=str(key), trust_store_path=trusted),
        ):
            cluster = Cluster(f"couchbases://{nodes}", ClusterOptions(login, enable_dns_srv=False))
            try:
                cluster.wait_until_ready(timedelta(seconds=30))
                collection = cluster.bucket("demo").default_collection()
                for number in range(20):
                    collection.upsert(f"key-{number}", {"number": number})
                assert [collection.get(f"key-{number}").content_as[dict]["number"] for number in range(20)] == list(
                    range(20)
                )
            finally:
                cluster.close()
