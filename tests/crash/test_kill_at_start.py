"""Kills during start-up: before, while and after the directory is made, the workers are spawned, the streams opened.

Whatever an interrupted start leaves behind, the next one works with: an empty folder, half-made groups, a description
that was not renamed yet.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import pytest

from mirror.sandbox import SandboxCluster, SandboxThread
from storage.env import directory
from tests.crash.judge import is_level, judge
from tests.crash.load import Load
from tests.crash.service import Service, until

VBUCKETS = 16
FLAGS = ("--groups", "4", "--workers", "2")


@pytest.fixture
def source(seed: int) -> Iterator[SandboxThread]:
    cluster = SandboxCluster(nodes=2, vbuckets=VBUCKETS, seed=seed)
    with SandboxThread(cluster) as thread:
        thread.call(Load(cluster, seed, rate=0, keys=1000).write, 4000)
        yield thread


@pytest.mark.parametrize(
    "kills",
    [pytest.param(6, marks=pytest.mark.ci), pytest.param(60, marks=[pytest.mark.long, pytest.mark.timeout(3600)])],
)
def test_a_start_killed_at_any_moment_does_not_hinder_the_next_start(
    source: SandboxThread, tmp_path: Path, seed: int, kills: int
) -> None:
    rng = Random(seed)
    places = [tmp_path / "mirror" / str(number) / "data" for number in range(min(3, kills))]
    for data in places:
        data.parent.mkdir(parents=True)
    took_s = 2.0
    for number in range(kills):
        data = places[number % len(places)]
        with Service(source.connection_string, data, *FLAGS) as service:
            service.start()
            time.sleep(rng.random() * took_s)
            assert service.ended() is None, f"the start failed: {service.tail()}"
            service.kill_supervisor()
            if directory.exists(str(data)):
                judge(source.cluster, data, live=False)
    for data in places:
        with Service(source.connection_string, data, *FLAGS) as service:
            service.start()
            until("a mirror after the kills", partial(is_followed, source, service))
            service.wait_workers(2)  # there already: a process that is to stop must listen first
            assert service.terminate() == 0
        judge(source.cluster, data, live=False)
        assert not service.tracebacks()


def is_followed(source: SandboxThread, service: Service) -> bool:
    assert service.ended() is None, f"the start failed: {service.tail()}"
    return is_level(source.cluster, service.data)


def test_a_directory_that_was_half_made_is_recreated(source: SandboxThread, tmp_path: Path) -> None:
    """The moments inside of the making are short: they are put together by hand from a directory that was made."""
    whole = tmp_path / "whole" / "data"
    whole.parent.mkdir()
    with Service(source.connection_string, tmp_path / "other", *FLAGS) as service:
        service.start()
        until("the description of a mirror", lambda: directory.exists(str(service.data)))
        service.kill_supervisor()
    directory.create(str(whole), directory.load(str(tmp_path / "other")))
    (whole / "mirror.json").rename(whole / "mirror.json.new")
    (whole / "group-0003" / "data.mdb").unlink()
    (whole / "group-0002" / "data.mdb").write_bytes(b"\0" * 5000)
    with Service(source.connection_string, whole, *FLAGS) as service:
        service.start()
        until("a mirror from what was half made", lambda: is_followed(source, service))
        assert service.terminate() == 0
    judge(source.cluster, whole, live=False)
