"""A mirror and a source with TLS, as an operator meets them: an error is one line with a remedy and an exit code.

`tests/feed/test_tls.py` has every error, `tests/feed/test_topology_followed.py` certificates that are exchanged.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from couchbase.auth import CertificateAuthenticator, PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.options import ClusterOptions

from mirror.errors import ExitCode
from mirror.sandbox import NodeTls, SandboxCluster, SandboxThread
from storage.read.view import open_view
from tests.cli.conftest import Result, call
from tests.feed.authority import Authority

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
    """Assert that the error is one line with these texts, and that nothing else failed."""
    assert result.code == code, result.err
    for words in said:
        assert words in result.complaint


def test_an_untrusted_or_misnamed_certificate_of_the_source_is_refused(authority: Authority, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with source_of(authority, "localhost") as source:
        url = source.connection_string
        refused(run(url, data), ExitCode.REFUSED, "none of the authorities of this machine", "give the cluster's CA")
        ours = ("--tls-ca-file", authority.ca_file)
        refused(run(url, data, *ours), ExitCode.REFUSED, "not for the name 127.0.0.1", "name of the certificate")
    assert not (data / "mirror.json").exists()


def test_a_client_certificate_is_the_login_of_its_user(authority: Authority, tmp_path: Path) -> None:
    data = tmp_path / "data"
    ca = ("--tls-ca-file", authority.ca_file)
    cert, key = authority.sign(into="client", common_name="unknown")
    ours = (*ca, "--set", f"tls_client_cert_file={cert}", "--set", f"tls_client_key_file={key}")
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


def test_the_official_sdk_accepts_the_tls_of_the_source(authority: Authority) -> None:
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
