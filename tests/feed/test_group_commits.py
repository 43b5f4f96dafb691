"""Commits of groups: in turn, and a store that fails harms no other group and works again when it can."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import time
from typing import Any

import lmdb
import pytest

from mirror.feed.follow import group_commits
from mirror.feed.follow.group_commits import Group
from mirror.messages import RollBack
from mirror.sandbox.cluster import SandboxCluster
from storage.env import directory
from storage.env.transaction import Transaction
from storage.errors import CorruptedError, DeviceFailed, Full
from storage.history.purge import Window
from storage.write import commit
from storage.write.background import Background
from tests.feed.harness import Mirrors, write


async def test_a_full_disk_stops_one_group_until_there_is_space(
    cluster: SandboxCluster, mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(cluster, 100)
    mirror = await mirrors.follow()
    writer = mirror.writers[1]
    write_down = writer.owner.write

    def no_space(_work: Any) -> Any:
        writer.owner.reload()
        raise Full(os.strerror(errno.ENOSPC), path=writer.path)

    monkeypatch.setattr(writer.owner, "write", no_space)
    write(cluster, 100, "while-full")
    await mirror.until(lambda: mirror.status()["groups"][1]["error"] is not None, "error shown")
    for vbid in (0, 2, 4, 6):
        await mirror.until_published(vbid, cluster.vbucket(vbid).high_seqno)
    assert "No space left" in mirror.row(1)["last_error"]
    with monkeypatch.context() as patch:
        looks = []

        def unreadable(path: str) -> Any:
            looks.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

        patch.setattr(shutil, "disk_usage", unreadable)
        await mirror.until(lambda: len(looks) >= 2, "the free space is asked for again")
    monkeypatch.setattr(writer.owner, "write", write_down)
    await mirror.follow()
    assert mirror.status()["groups"][1]["error"] is None


@pytest.mark.parametrize("reopening_fails", [0, 1, 3])
async def test_a_group_whose_device_failed_returns_after_several_attempts(
    cluster: SandboxCluster, mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch, reopening_fails: int
) -> None:
    write(cluster, 100)
    mirror = await mirrors.follow()
    writer = mirror.writers[1]
    left = [1, reopening_fails]
    put, really_open = commit.put, writer.owner.open

    def failing(txn: Transaction, *arguments: Any, **options: Any) -> Any:
        if left[0] and txn.path == writer.path:
            left[0] -= 1
            raise lmdb.Error("mdb_txn_commit: Input/output error")
        return put(txn, *arguments, **options)

    def failing_to_open(*, claim: bool) -> None:
        if left[1]:
            left[1] -= 1
            raise DeviceFailed("input/output error", path=writer.path)
        really_open(claim=claim)

    monkeypatch.setattr(commit, "put", failing)
    monkeypatch.setattr(writer.owner, "open", failing_to_open)
    write(cluster, 100, "while-failing")
    await mirror.follow()
    assert left == [0, 0]
    assert [group["error"] for group in mirror.status()["groups"]] == [None, None]


async def test_any_error_of_a_group_store_stops_only_that_group(
    cluster: SandboxCluster, mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(cluster, 100)
    mirror = await mirrors.follow()
    writer = mirror.writers[1]

    def led_astray(*_: Any) -> Any:
        raise AssertionError("a reference without its row")

    monkeypatch.setattr(writer.background.purger, "plan", led_astray)
    monkeypatch.setattr(writer.background, "window", Window(time_ms=1))
    await mirror.until(lambda: mirror.status()["groups"][1]["error"] is not None, "error shown")
    write(cluster, 100, "afterwards")
    for vbid in (0, 2, 4, 6):
        await mirror.until_published(vbid, cluster.vbucket(vbid).high_seqno)
    assert "contradicts itself: AssertionError: a reference without its row" in mirror.row(1)["last_error"]
    assert mirror.row(1)["state"] == "damaged"
    with pytest.raises(CorruptedError):
        mirror.consumer.request(RollBack(1, 0))
    directory.GroupLock(writer.path).release()  # given up


async def test_a_group_whose_file_was_moved_away_is_reported_failed_then_damaged(
    cluster: SandboxCluster, mirrors: Mirrors
) -> None:
    """Until the group had noticed it itself, its worker gave no report at all, of no group."""
    write(cluster, 100)
    mirror = await mirrors.follow()
    path = mirror.writers[1].path
    os.rename(path, f"{path}.aside")
    good, lost = mirror.status()["groups"]
    assert (good["error"], good["pending_bytes"]) == (None, 0)
    assert "No such file or directory" in lost["error"]
    await mirror.until_state(1, "damaged")
    assert "moved, removed or replaced while the service runs" in mirror.status()["groups"][1]["error"]
    await mirror.stop()
    os.rename(f"{path}.aside", path)


async def test_busy_groups_commit_in_turn_and_receive_between_two_commits(
    cluster: SandboxCluster, mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow commits were spaced out, although nothing else was to be done: a write was visible 6 ms late."""
    mirror = await mirrors.follow(groups=4)
    order: list[tuple[int, int]] = []
    turn = 0

    def commit(group: Group) -> None:
        time.sleep(0.001)
        order.append((turn, group.writer.group))
        if len(order) <= 12:
            group.schedule()

    monkeypatch.setattr(Group, "commit", commit)
    for group in mirror.consumer.commits.groups:
        group.schedule()
    while len(order) < 12:
        await asyncio.sleep(0)  # a turn of the event loop, in which it looks at the sockets
        turn += 1
    turns, groups = zip(*order[:12], strict=True)
    assert turns == tuple(range(turns[0], turns[0] + 12))
    assert set(groups[:4]) == {0, 1, 2, 3}
    assert groups[4:] == groups[:8]
    monkeypatch.undo()


async def test_a_commit_begins_background_work_only_for_pending_key_rows(
    cluster: SandboxCluster, mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each commit would look at every vbucket of the worker."""
    steps: list[int] = []
    step = Background.step

    def counted(background: Background) -> bool:
        steps.append(len(background.jobs))
        return step(background)

    monkeypatch.setattr(Background, "step", counted)
    monkeypatch.setattr("storage.write.pending.INLINE_INDEX_ROWS", 0)
    monkeypatch.setattr(group_commits, "STEP_IDLE_S", 3600.0)
    cluster.bucket.load(((f"big-{n}".encode(), b'{"pad":"' + b"y" * 300 + b'"}') for n in range(1000)), vbid=1)
    mirror = await mirrors.follow(batch_bytes_max=64 * 1024, connection_buffer_size=32768)
    assert max(steps) > 0
    step_count, commit_count = len(steps), sum(group.count for group in mirror.consumer.commits.groups)
    for number in range(20):
        write(cluster, 5, f"small-{number}")
        await mirror.follow()
    assert len(steps) - step_count < 20 <= sum(group.count for group in mirror.consumer.commits.groups) - commit_count
