"""The judge itself must be able to say no."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mirror.sandbox import SandboxCluster, SandboxThread
from tests.cli.conftest import call
from tests.crash.judge import judge
from tests.crash.load import Load

pytestmark = pytest.mark.xdist_group("judge")  # which share a mirror
VBUCKETS = 4


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SandboxCluster, Path]]:
    data = tmp_path_factory.mktemp("judge") / "data"
    cluster = SandboxCluster(vbuckets=VBUCKETS, seed=5)
    with SandboxThread(cluster) as source:
        source.call(Load(cluster, 5, rate=0, keys=100).write, 600)
        arguments = ("run", "--source", source.connection_string, "--data", data, "--until-caught-up", "--groups", "2")
        result = call(*arguments)
        assert result.code == 0, result.err
        yield cluster, data


def test_a_true_mirror_passes(mirrored: tuple[SandboxCluster, Path]) -> None:
    cluster, data = mirrored
    high = {vbid: cluster.vbucket(vbid).high_seqno for vbid in range(VBUCKETS)}
    assert judge(cluster, data, live=True) == judge(cluster, data, live=False) == high


@pytest.mark.parametrize("live", [True, False])
def test_a_version_that_differs_is_found(
    mirrored: tuple[SandboxCluster, Path], monkeypatch: pytest.MonkeyPatch, *, live: bool
) -> None:
    cluster, data = mirrored
    log = cluster.vbucket(2).log
    alive = next(item for item in reversed(log) if not item.next_seqno and item.is_document and not item.deleted)
    frame = alive.frame
    monkeypatch.setattr(alive, "frame", frame[:40] + bytes((frame[40] ^ 1,)) + frame[41:])  # one bit of its flags
    with pytest.raises(AssertionError, match="vb 2 at seqno"):
        judge(cluster, data, live=live)


def test_a_missing_key_and_a_surplus_key_are_found(
    mirrored: tuple[SandboxCluster, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, data = mirrored
    item = next(item for item in cluster.vbucket(1).log if not item.next_seqno and item.is_document)
    monkeypatch.setattr(item, "key", item.key + b"x")
    with pytest.raises(AssertionError, match="2 differences"):
        judge(cluster, data, live=False)


def test_a_published_state_inside_a_snapshot_is_found(
    mirrored: tuple[SandboxCluster, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, data = mirrored
    monkeypatch.setattr(cluster.sent(3), "snapshot_ends", set())
    with pytest.raises(AssertionError, match="announced no snapshot's end"):
        judge(cluster, data, live=True)
