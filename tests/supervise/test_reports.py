"""The reports of workers: what the status shows, and a service that ends once it has caught up."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from mirror.client import SOCKET_NAME
from mirror.errors import ExitCode, MirrorError
from mirror.health import SILENT_S, assess
from mirror.messages import Turned
from mirror.supervise.processes import table
from mirror.supervise.processes.life import Send
from mirror.supervise.reports import collector as reports
from mirror.supervise.supervisor import RunOptions
from storage.env import directory
from storage.errors import StorageError
from storage.model import Identity
from tests.supervise import in_process
from tests.supervise.conftest import eventually
from tests.supervise.in_process import Report, vbids_of, vbucket
from tests.supervise.service import ask, phases, pids, service_of, serving


async def test_groups_are_divided_among_workers_and_each_worker_reports(tmp_path: Path) -> None:
    async with serving(service_of(tmp_path)) as service:
        await eventually(lambda: len(service.reports.document()["vbuckets"]) == 8)
        document = service.reports.document()
        assert [worker["groups"] for worker in document["workers"]] == [[0, 2], [1, 3]]
        assert document["service"] == "up"
        assert document["bucket_uuid"] == "b1"
        assert document["totals"]["documents"] == 8
        assert all(worker["private_bytes"] > 0 for worker in document["workers"])
        assert directory.load(str(tmp_path)) == Identity("c1", "demo", "b1", 8, 4)
    assert phases(service) == ["absent", "absent"]
    assert not (tmp_path / SOCKET_NAME).exists()


async def test_news_of_a_worker_does_not_wait_for_the_next_regular_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "REPORT_INTERVAL_S", 3600.0)
    published, sends = [0], list[Send]()
    in_process.use(
        monkeypatch, lambda groups: {"vbuckets": [vbucket(vbid, published[0]) for vbid in vbids_of(groups)]}, sends
    )
    async with in_process.serving(tmp_path) as service:
        await eventually(lambda: len(sends) == 1)
        sends[0](Turned())
        await eventually(lambda: service.reports.document()["state"] == "catching up")
        published[0] = 5
        sends[0](Turned())
        await eventually(lambda: service.reports.document()["state"] == "following")


async def test_a_run_until_caught_up_fails_with_the_refusal_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRIPT", "refused")
    with pytest.raises(MirrorError, match="wrong password") as caught:
        await service_of(tmp_path, options=RunOptions(until_caught_up=True)).run()
    assert caught.value.exit_code is ExitCode.REFUSED


async def test_a_stopped_worker_is_not_ready_and_delays_no_status(tmp_path: Path) -> None:
    """Its rows stayed `caught up` until its heartbeat was overdue, and each status waited for its report."""
    service = service_of(tmp_path)
    async with serving(service):
        await eventually(lambda: service.reports.document()["state"] == "following")
        stopped = pids(service)[1]
        os.kill(stopped, signal.SIGSTOP)
        try:
            await eventually(lambda: service.reports.document()["state"] == "degraded")
            document = service.reports.document()
            assert "4 of 8 vbuckets of worker 1, silent for " in document["message"]
            assert document["totals"]["lag_seqnos"] is None
            ages = {row["worker"]: row["report_age_s"] for row in document["vbuckets"]}
            assert ages[1] > SILENT_S > ages[0]
            answers = [await ask(tmp_path, {"op": "status"}) for _ in range(3)]
            assert all(each["status"]["state"] == "degraded" for each in answers)
        finally:
            os.kill(stopped, signal.SIGCONT)
        await eventually(lambda: service.reports.document()["state"] == "following")


@pytest.mark.parametrize(
    ("error", "text"),
    [(KeyError("a bug"), "internal error: KeyError: 'a bug'"), (StorageError("page 7"), "page 7")],
    ids=["a bug", "a failed read"],
)
async def test_a_worker_whose_reports_fail_makes_the_mirror_degraded_with_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    """Its rows stayed `following` with lag 0, because only heartbeats were counted."""
    failing = [True]

    def report(groups: Sequence[int]) -> Report:
        if failing[0]:
            raise error
        return {"vbuckets": [vbucket(vbid) for vbid in vbids_of(groups)]}

    in_process.use(monkeypatch, report)
    async with in_process.serving(tmp_path) as service:
        await eventually(lambda: service.reports.document()["message"] == f"0 of 8 vbuckets reported: {text}")
        failing[0] = False
        await eventually(lambda: service.reports.document()["state"] == "following")
        failing[0] = True
        await eventually(lambda: service.reports.document()["state"] == "degraded")
        document = service.reports.document()
        assert document["message"].startswith("8 of 8 vbuckets of worker 0, silent for ")
        assert document["reasons"][0].endswith(f"({text})")
        assert document["totals"]["lag_seqnos"] is None
        assert all(row["report_age_s"] > SILENT_S for row in document["vbuckets"])
        failing[0] = False
        await eventually(lambda: service.reports.document()["state"] == "following")


async def test_the_end_of_the_only_worker_is_not_reported_as_a_lost_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "restart_delay_ms", lambda _: 3_600_000)
    started = in_process.use(monkeypatch, lambda groups: {"vbuckets": [vbucket(vbid) for vbid in vbids_of(groups)]})
    async with in_process.serving(tmp_path) as service:
        await eventually(lambda: service.reports.document()["state"] == "following")
        started[0].send_signal(signal.SIGKILL)
        await eventually(lambda: service.reports.document()["state"] != "following")
        document = service.reports.document()
        assert (document["state"], document["reasons"]) == (
            "degraded",
            ["8 of 8 vbuckets without a worker (worker 0 ended: SIGKILL)"],
        )


async def test_the_state_and_figures_of_an_answer_are_of_one_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer said `following` and `lag unknown`: figures of now with the judgement of the report before."""
    positions = itertools.cycle([(5, 5), (5, None), (0, 9)])

    def reports(groups: Sequence[int]) -> Report:
        published, high = next(positions)
        return {"vbuckets": [vbucket(vbid, published, high) for vbid in vbids_of(groups)], "counters": {}}

    in_process.use(monkeypatch, reports)
    async with in_process.serving(tmp_path) as service:
        await eventually(lambda: service.reports.document()["vbuckets"])
        seen: set[str] = set()
        while len(seen) < 3:
            document = (await ask(tmp_path, {"op": "status"}))["status"]
            seen.add(document["state"])
            health = assess(document["vbuckets"], 8, lag_limit_s=30)
            assert (document["state"], document["reasons"]) == (health.state, health.reasons)
        assert seen == {"following", "source unreachable", "catching up"}
