"""Backfills: a mirror like any other, of which `run` goes on without asking for anything again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from mirror.config import Settings
from mirror.config_reader import load
from mirror.errors import ConfigError, ConnectFailed, MirrorError, SourceTimeout
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.data.bucket import vbucket_of
from mirror.sandbox.thread import SandboxThread
from mirror.spark.pipeline import backfill as backfills
from mirror.spark.pipeline.backfill import Backfilled, backfill, backfill_task
from mirror.spark.pipeline.runner import LocalRunner, SparkRunner
from storage.admin.check import check
from storage.read.view import open_view
from tests.cli.conftest import call
from tests.crash.judge import judge
from tests.crash.service import Service, until

VBUCKETS = 16


@pytest.fixture
def settings(source: SandboxThread, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("DCP_MIRROR_PASSWORD", "demo")
    return replace(load().settings, source=source.connection_string, groups=4)


def fill(cluster: SandboxCluster) -> None:
    cluster.bucket.create_scope("s")
    cluster.bucket.create_collection("s", "c")
    for number in range(400):
        cluster.set(f"order::{number:03}", b'{"number": %d}' % number)
        cluster.set(f"line::{number:03}", b'{"line": %d}' % number, collection="s.c")
    for number in range(0, 400, 10):
        cluster.delete(f"order::{number:03}")
        cluster.set(f"line::{number:03}", b'{"line": -1}', collection="s.c")


@pytest.fixture
def source() -> Iterator[SandboxThread]:
    with SandboxThread(SandboxCluster(nodes=2, vbuckets=VBUCKETS)) as thread:
        thread.call(fill, thread.cluster)
        yield thread


def is_the_sources(source: SandboxThread, data: Path) -> None:
    assert check(str(data)).problems == []
    source.call(lambda: judge(source.cluster, data, live=False))


def requested_starts(source: SandboxThread) -> list[list[int]]:
    return [
        [each.start_seqno for each in source.call(source.cluster.sent, vbid).stream_requests]
        for vbid in range(VBUCKETS)
    ]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.ci)])
def test_the_mirror_is_the_sources_and_run_goes_on_without_a_resync(
    source: SandboxThread, settings: Settings, tmp_path: Path, processes: int
) -> None:
    seen: list[tuple[int, int]] = []
    done = backfill(tmp_path / "data", settings, LocalRunner(processes), progress=lambda *each: seen.append(each))
    assert (done.vbuckets, done.groups, done.groups_done_before) == (VBUCKETS, 4, 0)
    assert seen == [(number, 4) for number in range(1, 5)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]
    is_the_sources(source, tmp_path / "data")
    with open_view(str(tmp_path / "data")) as view:
        published = [int(state.published_seqno) for state in view.states()]
    assert requested_starts(source) == [[0]] * VBUCKETS
    source.call(source.cluster.set, "new", b"{}")
    result = call("run", "--source", source.connection_string, "--data", tmp_path / "data", "--until-caught-up")
    assert result.code == 0, result.err
    assert requested_starts(source) == [[0, seqno] for seqno in published]
    is_the_sources(source, tmp_path / "data")


def test_a_run_that_broke_off_is_gone_on_with(
    source: SandboxThread, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def some(task: backfills.BackfillTask) -> Any:
        if task.group == 2:
            raise MirrorError("the machine is gone")
        return backfill_task(task)

    with monkeypatch.context() as patch:
        patch.setattr(backfills, "backfill_task", some)
        with pytest.raises(MirrorError, match="the machine is gone"):
            backfill(tmp_path / "data", settings, LocalRunner(1))
    assert not (tmp_path / "data").exists()
    done: Backfilled = backfill(tmp_path / "data", settings, LocalRunner(1))
    assert done.groups_done_before == 2
    assert requested_starts(source) == [[0]] * VBUCKETS
    is_the_sources(source, tmp_path / "data")


def test_what_is_left_of_another_bucket_or_other_groups_is_begun_again(
    source: SandboxThread, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MirrorError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(backfills, "_finish", fail)
        with pytest.raises(MirrorError, match="killed"):
            backfill(tmp_path / "data", settings, LocalRunner(1))
    done = backfill(tmp_path / "data", replace(settings, groups=2), LocalRunner(1))
    assert (done.groups, done.groups_done_before) == (2, 0)
    is_the_sources(source, tmp_path / "data")


def test_the_source_may_write_and_lose_history_meanwhile(
    source: SandboxThread, settings: Settings, tmp_path: Path
) -> None:
    """Between two groups: what the first group has is rolled back by `run`, the rest is right at once."""

    def harm(done: int, of: int) -> None:
        if done == 2:
            for vbid in range(VBUCKETS):
                source.call(source.cluster.failover, vbid, lose=3)
            source.call(source.cluster.set, "after", b"{}")

    backfill(tmp_path / "data", settings, LocalRunner(1), progress=harm)
    with Service(source.connection_string, tmp_path / "data") as service:
        service.start()

        def needed() -> list[tuple[int, list[int]]]:
            return [
                (each.high_seqno, [log.vbuuid for log in each.failover_log[:1]]) for each in source.cluster.vbuckets
            ]

        def same() -> bool:
            with open_view(str(tmp_path / "data")) as view:
                found = [
                    (each.published_seqno, [log.vbuuid for log in each.failover_log[:1]])
                    for each in map(view.state, range(VBUCKETS))
                ]
                return found == source.call(needed)

        until("the mirror to follow the source", same)
        service.terminate()
    is_the_sources(source, tmp_path / "data")


def test_a_part_of_the_vbuckets_and_one_collection(source: SandboxThread, settings: Settings, tmp_path: Path) -> None:
    some = replace(settings, vbuckets="4-11", collections=("s.c",), groups=3)
    done = backfill(tmp_path / "data", some, LocalRunner(1))
    assert (done.vbuckets, done.groups) == (8, 3)
    assert check(str(tmp_path / "data")).problems == []
    with open_view(str(tmp_path / "data")) as view:
        assert list(view.vbids) == list(range(4, 12))
        found = {document.key for document in view.scan()}
    expected = {f"line::{number:03}".encode() for number in range(400)}
    assert found == {key for key in expected if 4 <= vbucket_of(key, VBUCKETS) <= 11}
    with pytest.raises(ConfigError, match="the bucket has 16"):
        backfill(tmp_path / "more", replace(settings, vbuckets="4-99"), LocalRunner(1))


def test_what_cannot_be_is_said_at_once(source: SandboxThread, settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.doc").touch()
    with pytest.raises(ConfigError, match="exists already"):
        backfill(tmp_path / "full", settings, LocalRunner(1))
    with pytest.raises(ConnectFailed):
        backfill(tmp_path / "data", replace(settings, source="couchbase://demo@127.0.0.1:1/demo"), LocalRunner(1))
    with pytest.raises(MirrorError, match="/no/such/folder"):
        backfill(tmp_path / "data", settings, LocalRunner(1), scratch="/no/such/folder")
    assert not (tmp_path / "data").exists()


def test_a_source_that_falls_silent_is_given_up_by_name(
    source: SandboxThread, settings: Settings, tmp_path: Path
) -> None:
    source.call(lambda: source.cluster.faults.streams.mute([5]))
    with pytest.raises(SourceTimeout, match="vbucket 5 makes no progress"):
        backfill(tmp_path / "data", settings, LocalRunner(1), silence_s=2)


def test_the_same_by_sparks_executors(
    source: SandboxThread, settings: Settings, tmp_path: Path, spark: SparkSession
) -> None:
    (tmp_path / "scratch").mkdir()
    done = backfill(
        tmp_path / "data",
        replace(settings, password_file=secret(tmp_path)),
        SparkRunner(spark),
        scratch=str(tmp_path / "scratch"),
    )
    assert (done.groups, list((tmp_path / "scratch").iterdir())) == (4, [])
    is_the_sources(source, tmp_path / "data")


def secret(folder: Path) -> Path:
    """The password where executors find it, too."""
    file = folder / "password"
    file.write_text("demo")
    file.chmod(0o600)
    return file
