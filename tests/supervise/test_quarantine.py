"""A group in which workers die of signals is left alone, and the other groups go on."""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.sandbox import SandboxCluster, SandboxThread
from mirror.supervise.processes.quarantine import DEATHS, WINDOW_MS, GroupMark, Quarantine
from mirror.supervise.setup import look_up_with
from tests.supervise.conftest import eventually
from tests.supervise.service import service_of, serving

VBUCKETS = 4

DIES_IN_GROUP_1 = """
import os, signal, sys
from storage.write.owner import GroupOwner
from mirror.supervise.processes.life import main
from mirror.supervise.processes.worker import open_stores
write = GroupOwner.write
def dying(self, work):
    if self.options.group == 1:
        os.kill(os.getpid(), getattr(signal, os.environ["DIES_OF"]))
    return write(self, work)
GroupOwner.write = dying
sys.exit(main(sys.argv[1:], open_stores))
"""


def dying_command(descriptor: int) -> Sequence[str]:
    return [sys.executable, "-P", "-c", DIES_IN_GROUP_1, str(descriptor)]


@pytest.mark.parametrize(
    "name", ["SIGBUS", *(pytest.param(each, marks=pytest.mark.ci) for each in ("SIGSEGV", "SIGABRT"))]
)
async def test_a_group_that_kills_its_workers_is_quarantined_and_the_others_go_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIES_OF", name)
    monkeypatch.setenv("DCP_MIRROR_PASSWORD", "demo")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    with SandboxThread(SandboxCluster(vbuckets=VBUCKETS)) as source:
        for number in range(40):
            source.call(source.cluster.set, f"k{number}", {"n": number})
        settings = Settings(source=source.connection_string, data=tmp_path / "data", groups=2, workers=1)
        look_up = look_up_with(SystemClock())
        async with serving(service_of(tmp_path, settings=settings, look_up=look_up, command=dying_command)) as service:

            def settled() -> bool:
                rows = {row["vbid"]: row for row in service.reports.document()["vbuckets"]}
                return len(rows) == VBUCKETS and all(
                    row["state"] == "damaged" if vbid % 2 else row["published_seqno"] > 0 for vbid, row in rows.items()
                )

            await eventually(settled)
            document = copy.deepcopy(service.reports.document())
    (worker,) = document["workers"]
    assert worker["restarts"] == DEATHS
    for row in document["vbuckets"]:
        if row["vbid"] % 2:
            assert (
                f"group 1 is quarantined: its worker died in it {DEATHS} times within an hour ({name})" in row["detail"]
            )
            assert "group-0001" in row["detail"]
            assert "move this group's folder away" in row["detail"]
    assert any("group 1 is quarantined" in text for text in document["warnings"])


def test_deaths_that_do_not_accuse_a_group_do_not_count() -> None:
    book = Quarantine()
    for status in (-signal.SIGKILL, -signal.SIGTERM, 1, 0):
        for _ in range(DEATHS):
            assert not book.note_death(3, status, 0)
    for _ in range(DEATHS):
        assert not book.note_death(None, -signal.SIGSEGV, 0)
    assert book.groups == {}


def test_deaths_count_for_an_hour_and_each_for_its_group() -> None:
    book = Quarantine()
    for at_ms in range(0, 10 * WINDOW_MS, WINDOW_MS // 2):
        assert not book.note_death(0, -signal.SIGSEGV, at_ms)
    assert [book.note_death(1, -signal.SIGBUS, at) for at in (0, 1, 2, 3)] == [False, False, True, False]
    assert book.groups.keys() == {1}


def test_the_group_that_a_worker_marks_is_read_by_others() -> None:
    descriptor = GroupMark.descriptor()
    ours, theirs = GroupMark(os.dup(descriptor)), GroupMark(descriptor)
    assert ours.group is None
    with theirs.inside(0):
        assert ours.group == 0
        with theirs.inside(7):
            assert ours.group == 7
        assert ours.group == 0
    assert ours.group is None
