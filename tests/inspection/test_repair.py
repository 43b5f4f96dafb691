"""Vbuckets fetched again without a service: served as they were until whole, and a group that is owned stays so."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mirror.errors import AuthRejected, MirrorError
from mirror.inspection.repair import resync
from mirror.sandbox.cluster import SandboxCluster
from mirror.wire.constants import Status
from storage.admin.check import check
from storage.errors import Locked
from storage.read.view import open_view
from tests.inspection.test_verify import VBUCKETS, cluster, filled, mirror_of, states, verified, write
from tests.sandbox.past import state_at

__all__ = ["cluster"]


def resync_now(path: str, source: str, settings: object, vbids: list[int], **options: object) -> None:
    resync(path, source, settings, vbids, **options)  # type: ignore[arg-type]


async def test_resynced_vbuckets_are_complete_on_new_branches(cluster: SandboxCluster, tmp_path: Path) -> None:
    write(cluster, 200)
    mirror = await filled(cluster, tmp_path)
    write(cluster, 20, "later")
    reported: list[tuple[int, int]] = []
    await asyncio.to_thread(
        resync_now,
        mirror.path,
        cluster.connection_string,
        mirror.settings,
        [1, 2],
        progress=lambda done, of: reported.append((done, of)),
    )
    assert reported[-1] == (2, 2)
    results = await verified(mirror, cluster, service=False, vbids=[1, 2])
    assert states(results) == ["equal", "equal"]
    assert all(result.branch > 1 and result.not_compared == 0 for result in results)
    with open_view(mirror.path) as view:
        assert [view.pin(vbid).branch for vbid in (0, 3)] == [1, 1]
    assert check(mirror.path).problems == []


async def test_a_group_with_an_owner_is_refused(cluster: SandboxCluster, tmp_path: Path) -> None:
    write(cluster, 20)
    mirror = mirror_of(cluster, tmp_path)
    mirror.start(cluster.connection_string)
    with pytest.raises(Locked):
        await asyncio.to_thread(resync_now, mirror.path, cluster.connection_string, mirror.settings, [1])
    await mirror.stop()


async def test_a_source_that_refuses_leaves_the_old_copy_and_a_resync(cluster: SandboxCluster, tmp_path: Path) -> None:
    write(cluster, 100)
    mirror = await filled(cluster, tmp_path)
    cluster.faults.streams.refuse(Status.ETMPFAIL, [1])
    with pytest.raises(MirrorError, match=r"vb 1 and 0 more are not whole.*start the service"):
        await asyncio.to_thread(resync_now, mirror.path, cluster.connection_string, mirror.settings, [1], timeout_s=0.5)
    with open_view(mirror.path, stale_reads=True) as view:
        assert view.count(1) == sum(1 for _ in state_at(cluster.vbucket(1)))
    cluster.faults.clear()
    mirror.start(cluster.connection_string)
    await mirror.until(lambda: mirror.row(1)["branch"] > 1 and mirror.row(1)["state"] == "streaming", "resynced")
    await mirror.stop()
    assert states(await verified(mirror, cluster, service=False)) == ["equal"] * VBUCKETS
    mirror.password_file.write_text("wrong")
    with pytest.raises(AuthRejected):
        await asyncio.to_thread(resync_now, mirror.path, cluster.connection_string, mirror.settings, [1])
