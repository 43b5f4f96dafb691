from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.errors import AuthRejected, BucketMissing, ConfigError, ConnectFailed
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.thread import SandboxThread
from mirror.supervise.setup import look_up_with


@pytest.fixture(scope="module")
def cluster() -> Iterator[SandboxThread]:
    with SandboxThread(SandboxCluster(nodes=2, vbuckets=8)) as thread:
        yield thread


@pytest.fixture(autouse=True)
def _password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_MIRROR_PASSWORD", "demo")


def settings(source: str | None) -> Settings:
    return Settings(source=source, data=Path("/nowhere"), connect_timeout_s=5)


async def test_a_bucket_says_who_it_is(cluster: SandboxThread) -> None:
    found = await look_up_with(SystemClock())(settings(cluster.connection_string))
    assert (found.bucket_name, found.vbucket_count) == ("demo", 8)
    assert found.bucket_uuid == cluster.call(lambda: cluster.cluster.bucket.map.bucket_uuid)


async def test_what_the_source_refuses_is_said_by_name(cluster: SandboxThread, monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = look_up_with(SystemClock())
    other_bucket = cluster.connection_string.rpartition("/")[0] + "/other"
    with pytest.raises(BucketMissing):
        await look_up(settings(other_bucket))
    monkeypatch.setenv("DCP_MIRROR_PASSWORD", "wrong")
    with pytest.raises(AuthRejected):
        await look_up(settings(cluster.connection_string))


async def test_nobody_there_may_be_there_later() -> None:
    with pytest.raises(ConnectFailed) as caught:
        await look_up_with(SystemClock())(settings("couchbase://demo@127.0.0.1:1/demo"))
    assert caught.value.retryable


async def test_no_source_is_no_question() -> None:
    with pytest.raises(ConfigError):
        await look_up_with(SystemClock())(settings(None))
