"""Commands at the control socket of a running service."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from mirror.client import ServiceSaidNo
from mirror.lease import Lease
from mirror.supervise import commands
from mirror.supervise.listeners import control
from tests.supervise.conftest import eventually
from tests.supervise.scripted import settings_for
from tests.supervise.service import ask, pids, running, service_of, serving


async def test_a_release_does_not_wait_for_a_worker_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused grant waited for the worker twice: longer than the control socket waits for an answer."""
    grant = {"op": "lease", "id": "a", "name": "job", "seconds": 30, "positions": [[0, 1, 5], [1, 1, 5]]}
    async with serving(service_of(tmp_path)) as service:
        await eventually(running(service))
        assert (await ask(tmp_path, grant))["ok"]
        stopped = pids(service)[1]
        os.kill(stopped, signal.SIGSTOP)
        try:
            monkeypatch.setattr(commands, "OWNER_TIMEOUT_S", 0.1)
            refused = await ask(tmp_path, grant | {"id": "b"})
            assert "worker 1 did not answer" in refused["error"]
            monkeypatch.setattr(commands, "OWNER_TIMEOUT_S", 3600.0)
            monkeypatch.setattr(control, "ANSWER_TIMEOUT_S", 5.0)
            assert await ask(tmp_path, {"op": "release", "id": "a"}) == {"ok": True, "released": True}
            assert service.reports.document()["leases"] == []
        finally:
            os.kill(stopped, signal.SIGCONT)


async def test_a_lease_outlives_a_stopped_worker_until_a_new_one_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(tmp_path, worker_heartbeat_timeout_s=1.2)
    async with serving(service_of(tmp_path, settings=settings)) as service:

        def is_another(victim: int) -> bool:
            return running(service)() and victim not in pids(service)

        await eventually(running(service))
        positions = {0: (1, 5), 1: (1, 5)}
        held = [[vbid, *position] for vbid, position in positions.items()]
        with pytest.raises(ServiceSaidNo, match="cannot last 0 s"):
            await asyncio.to_thread(Lease, tmp_path, positions, name="job", seconds=0)
        lease = await asyncio.to_thread(Lease, tmp_path, positions, name="job", seconds=3)
        renewal = {"op": "lease", "id": lease.id, "name": "job", "seconds": 30, "positions": held}
        victim = pids(service)[0]
        os.kill(victim, signal.SIGSTOP)
        assert (await ask(tmp_path, renewal))["ok"], "requested while it was stopped, and answered once it was dead"
        assert (await ask(tmp_path, renewal))["ok"], "it is not there, or still starting"
        await eventually(lambda: is_another(victim))
        worker = service.reports.document()["workers"][0]
        assert (worker["last_exit"], worker["last_error"]) == ("SIGKILL", "no heartbeat")
        assert not psutil.pid_exists(victim)
        assert (await ask(tmp_path, renewal))["ok"]
        assert lease.lost is None
        monkeypatch.setenv("SCRIPT", "forgetful")
        victim = pids(service)[1]
        os.kill(victim, signal.SIGKILL)
        await eventually(lambda: is_another(victim))
        await eventually(lambda: lease.lost)
        assert isinstance(lease.lost, ServiceSaidNo)
        assert "1:5 is not kept" in str(lease.lost)
        assert service.reports.document()["leases"] == []
        refused = await ask(tmp_path, renewal)
        assert (refused["ok"], refused["retryable"]) == (False, False)
        await asyncio.to_thread(lease.release)
