"""A node that was failed over and still believes that it is active, against the whole service: its old map is not
followed, what it has is not published, and nothing good is rolled back.

There are two workers, and the vbuckets of each lie on one node: a worker learns of a newer map from the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mirror.sandbox import SandboxCluster, SandboxThread
from mirror.sandbox.data.bucket import Bucket
from storage.read.view import open_view
from tests.cli.conftest import call
from tests.crash.service import Service, until
from tests.sandbox.past import state_at

VBUCKETS = 8
FLAGS = ("--groups", "2", "--workers", "2", "--set", "map_poll_interval_s=0.2")


@pytest.fixture(params=["6.6", pytest.param("8.0", marks=pytest.mark.ci)])
def source(request: pytest.FixtureRequest) -> Iterator[SandboxThread]:
    """A server that does not announce maps, and one that does."""
    with SandboxThread(SandboxCluster(nodes=2, vbuckets=VBUCKETS, seed=5, profile=request.param)) as running:
        yield running


def url(source: SandboxThread, *numbers: int) -> str:
    hosts = ",".join(f"127.0.0.1:{source.cluster.nodes[number].port}" for number in numbers)
    return f"couchbase://demo@{hosts}/demo"


def write(source: SandboxThread, name: str, bucket: Bucket | None = None) -> None:
    def each() -> None:
        for vbid in range(VBUCKETS):
            for number in range(5):
                (bucket or source.cluster.bucket).set(f"{name}-{number}", {"from": name}, vbid=vbid)

    source.call(each)


def level(source: SandboxThread, data: Path) -> bool:
    if not (data / "mirror.json").exists():
        return False
    highs = source.call(lambda: [(each.high_seqno, each.vbuuid) for each in source.cluster.vbuckets])
    with open_view(str(data), partial=True) as view:
        found = [(view.state(vbid).published_seqno, view.state(vbid).failover_log) for vbid in range(VBUCKETS)]
    return all(seqno == high and log and log[0].vbuuid == uuid
               for (seqno, log), (high, uuid) in zip(found, highs, strict=True))  # fmt: skip


def assert_true_to_the_cluster(source: SandboxThread, data: Path) -> None:
    with open_view(str(data), partial=True) as view:
        for vbid in range(VBUCKETS):
            vbucket = source.cluster.vbucket(vbid)
            expected = set(source.call(state_at, vbucket, vbucket.high_seqno))
            assert {b"\0" + each.key for each in view.scan(vbid, now=0)} == expected, f"vb {vbid}"


def rollbacks(data: Path) -> list[Any]:
    with open_view(str(data), partial=True) as view:
        return [each for vbid in range(VBUCKETS) for each in view.rollbacks(vbid)]


@contextmanager
def levelled(source: SandboxThread, data: Path, *numbers: int) -> Iterator[Service]:
    """A service that has mirrored what was written before; `numbers` are the nodes that it is told. Ends it cleanly."""
    write(source, "before")
    with Service(url(source, *numbers), data, *FLAGS) as service:
        service.start()
        until("the mirror to be level", lambda: level(source, data))
        yield service


def fail_over_node_1(source: SandboxThread) -> Bucket:
    """Node 1 is stopped and failed over; it comes back only when it is restarted. Returns what it has."""
    source.run(source.cluster.kill_node(1))
    alone = source.call(source.cluster.split_off, 1)
    source.run(source.cluster.failover_node(1))
    return alone


def test_a_restart_that_finds_the_old_node_first_follows_the_newer_map(source: SandboxThread, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with levelled(source, data, 1, 0) as service:
        fail_over_node_1(source)
        write(source, "good")
        until("the mirror to be level after the failover", lambda: level(source, data))
        assert service.terminate() == 0
        before = rollbacks(data)
        source.run(source.cluster.restart_node(1))
        service.start()
        service.wait_workers(2)
        write(source, "later")
        until("the mirror to be level after the restart", lambda: level(source, data))
        assert rollbacks(data) == before == []
        assert_true_to_the_cluster(source, data)
        result = call("verify", "--data", data, "--source", url(source, 1, 0), "--json")
        assert result.code == 0, (result.out, result.err)


def test_an_old_map_is_not_followed_even_if_no_other_node_answers(source: SandboxThread, tmp_path: Path) -> None:
    """Node 0 is away for a while: the mirror waits for it, says why, and serves what it has."""
    data = tmp_path / "data"
    with levelled(source, data, 1, 0) as service:
        fail_over_node_1(source)
        write(source, "good")
        until("the mirror to be level after the failover", lambda: level(source, data))
        assert service.terminate() == 0
        followed = source.call(lambda: (source.cluster.bucket.map.epoch, source.cluster.bucket.map.rev))
        source.run(source.cluster.kill_node(0))
        source.run(source.cluster.restart_node(1))
        service.start()
        service.wait_workers(2)
        until("the reason", lambda: "map.json" in str((service.status() or {}).get("source_error")))
        assert rollbacks(data) == []
        source.run(source.cluster.restart_node(0))
        write(source, "later")
        until("the mirror to be level when node 0 is back", lambda: level(source, data))
        assert rollbacks(data) == []
    stored = json.loads((data / "map.json").read_text())
    assert (stored["rev_epoch"], stored["rev"])[1] == followed[1]


def test_streams_of_a_stale_node_end_when_another_worker_learns_of_the_newer_map(
    source: SandboxThread, tmp_path: Path
) -> None:
    """The node never stops: cut off from its cluster, it goes on serving the mirror."""
    data = tmp_path / "data"
    with levelled(source, data, 0):
        alone = source.call(source.cluster.split_off, 1)
        write(source, "stale", alone)
        source.run(source.cluster.failover_node(1))
        write(source, "good")
        until("the mirror to be level", lambda: level(source, data))
        assert_true_to_the_cluster(source, data)


def test_a_restored_cluster_is_followed_once_the_operator_allows_it(source: SandboxThread, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with levelled(source, data, 0):
        pass
    source.call(setattr, source.cluster.bucket.map, "rev", 0)
    source.call(source.cluster.bucket.map.bump)
    write(source, "restored")
    refused = call("run", "--source", url(source, 0), "--data", data, "--until-caught-up",
                   "--set", "bootstrap_timeout_s=0.5")  # fmt: skip
    assert refused.code == 1, (refused.out, refused.err)
    assert "map.json" in refused.err
    (data / "map.json").unlink()
    taken = call("run", "--source", url(source, 0), "--data", data, "--until-caught-up")
    assert taken.code == 0, (taken.out, taken.err)
    assert level(source, data)
    again = call("run", "--source", url(source, 0), "--data", data, "--until-caught-up")
    assert again.code == 0, (again.out, again.err)
