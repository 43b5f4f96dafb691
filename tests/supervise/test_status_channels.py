"""The states of the service (docs/troubleshooting.md): in each situation every channel says the same.

A supervisor with its control socket and the notifier of systemd, an HTTP server over the same directory, and the
commands; only the workers' reports are made up. How the page words each state: tests/serve/test_page.py.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli import status
from cli.exits import CommandEnded
from mirror.config import Settings
from mirror.errors import ConnectFailed
from mirror.feed.cluster.discovery import Source
from mirror.health import STATES
from mirror.supervise.reports.systemd import Notifier
from storage.env import directory
from storage.model import Identity
from tests.ports import fetched
from tests.serve.http_site import serving_http
from tests.supervise import in_process, scripted
from tests.supervise.conftest import eventually
from tests.supervise.in_process import Report, vbids_of, vbucket

DOCS = Path(__file__).parents[2] / "docs"
IDENTITY = Identity("c1", "demo", "b1", 8, 4)
REFUSED = "cannot connect to db1:11210: refused"


def away(vbid: int) -> Report:
    return vbucket(vbid, high=None, state="waiting", last_error=REFUSED)


def full(groups: Any) -> Report:
    """Group 1 cannot be written; its vbuckets have no streams."""
    rows = [
        vbucket(vbid, 5, None, state="waiting", last_error="no space left") if vbid % 4 == 1 else vbucket(vbid)
        for vbid in vbids_of(groups)
    ]
    return {"vbuckets": rows, "groups": [{"group": 1, "error": "no space left", "full": True}]}


def rows_of(row: Callable[[int], Report]) -> Callable[[Any], Report]:
    return lambda groups: {"vbuckets": [row(vbid) for vbid in vbids_of(groups)]}


def falls_behind() -> Callable[[Any], Report]:
    highs = itertools.chain([5], itertools.repeat(9))

    def report(groups: Any) -> Report:
        high = next(highs)
        return {"vbuckets": [vbucket(vbid, 5, high) for vbid in vbids_of(groups)]}

    return report


async def source_is_away(settings: Settings, bucket_uuid: str | None = None) -> Source:
    raise ConnectFailed(REFUSED)


@dataclass(frozen=True)
class Situation:
    """Reports of workers, and what every channel must show for them."""

    reports: Callable[[Any], Report] | None
    """None: no service runs."""
    state: str
    words: str
    """Of the message; a regular expression."""
    ready: bool = False
    reached: bool = True
    """False if the source did not answer at the start."""
    lag_limit_s: float = 3600.0


SITUATIONS: dict[str, Situation] = {
    "everything is published": Situation(rows_of(vbucket), "following", r"40 seqnos published, lag 0\.0 s", ready=True),
    "the first fill": Situation(
        rows_of(lambda vbid: vbucket(vbid, 0, 9, state="backfilling")), "catching up", "8 of 8 vbuckets not published"
    ),
    "more than `ready_lag_limit_s` behind": Situation(
        falls_behind(), "catching up", r"8 of 8 vbuckets more than 0\.05 s behind", lag_limit_s=0.05
    ),
    "behind since before the service started": Situation(
        rows_of(lambda vbid: vbucket(vbid, 5, 9)), "catching up",
        "8 of 8 vbuckets behind since before the service started",
    ),
    "the source was never reached": Situation(
        rows_of(vbucket), "source unreachable", f"the source cannot be reached: {REFUSED}", reached=False
    ),
    "one of several nodes is away": Situation(
        rows_of(lambda vbid: away(vbid) if vbid % 2 else vbucket(vbid)),
        "degraded", "4 of 8 vbuckets without contact to the source: groups 1, 3",
    ),
    "the disk is full": Situation(
        full, "disk full", "2 of 8 vbuckets cannot be written, the disk is full: group 1"
    ),
    "a worker has just started": Situation(
        rows_of(lambda vbid: vbucket(vbid, high=None, state="starting")), "starting", "no contact with the source yet"
    ),
    "no service runs": Situation(None, "stored", "no service runs"),
}  # fmt: skip


def test_the_documents_list_each_state_and_whether_it_is_ready() -> None:
    operations, troubles = ((DOCS / name).read_text() for name in ("operations.md", "troubleshooting.md"))
    table = troubles[troubles.index("## States of the service") :].split("\n\n")[1]
    assert {row.split("`")[1] for row in table.splitlines()[2:]} == set(STATES)
    assert {situation.state for situation in SITUATIONS.values()} | {"stopping"} == set(STATES)
    assert {situation.state for situation in SITUATIONS.values() if situation.ready} == {"following"}
    assert "Only `following` is ready." in operations


@pytest.mark.parametrize("name", SITUATIONS)
async def test_every_channel_reports_the_same_state(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    situation = SITUATIONS[name]
    data = tmp_path / "data"
    async with AsyncExitStack() as stack:
        manager = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        if situation.reports is None:
            directory.create(str(data), IDENTITY)
        else:
            in_process.use(monkeypatch, situation.reports)
            monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
            settings = scripted.settings_for(data, workers=1, ready_lag_limit_s=situation.lag_limit_s)
            look_up = scripted.look_up if situation.reached else source_is_away
            service = await stack.enter_async_context(
                in_process.serving(data, settings, look_up=look_up, notifier=Notifier())
            )

            def stands() -> bool:
                found = service.reports.document()
                return found["state"] == situation.state and re.search(situation.words, found["message"]) is not None

            await eventually(stands)
        _, address = await stack.enter_async_context(serving_http(scripted.settings_for(data)))
        url = f"http://{address.authority}"

        # `status`
        with_code: list[int] = []

        def command(*, as_json: bool) -> None:
            try:
                status.status(data=data, config=None, every=False, count=False, ready=True, as_json=as_json)
            except CommandEnded as ended:
                with_code.append(ended.code)
            else:
                with_code.append(0)

        capsys.readouterr()
        await asyncio.to_thread(command, as_json=True)
        document = json.loads(capsys.readouterr().out)
        assert document["state"] == situation.state
        assert (document["reasons"] == []) == situation.ready
        await asyncio.to_thread(command, as_json=False)
        text = " ".join(capsys.readouterr().out.split())
        assert re.search(rf"state {situation.state}( since \S+ \S+)? ", text)
        if situation.reports is not None:
            assert re.search(situation.words, text)
        assert with_code == [0 if situation.ready else 1] * 2

        # HTTP
        code, answer = await asyncio.to_thread(fetched, f"{url}/readyz")
        assert code == (200 if situation.ready else 503)
        if not situation.ready:
            assert re.search(situation.words, "; ".join(json.loads(answer)["reasons"]))
        lines = (await asyncio.to_thread(fetched, f"{url}/metrics"))[1].splitlines()
        assert f"dcp_mirror_ready {float(situation.ready)}" in lines
        judged = {state: f'dcp_mirror_state{{state="{state}"}} {float(state == situation.state)}' for state in STATES}
        assert [line for line in lines if line.startswith("dcp_mirror_state{")] == list(judged.values())
        if situation.state == "source unreachable":
            assert not [line for line in lines if line.startswith("dcp_mirror_lag_seqnos ")], "not known is not 0"
        page = json.loads((await asyncio.to_thread(fetched, f"{url}/v1/status"))[1])
        assert (page["state"], page["source_error"] is None) == (situation.state, situation.reached)

        # systemd
        if situation.reports is not None:
            said = []
            while True:
                try:
                    said.append(manager.recv(4096).decode())
                except BlockingIOError:
                    break
            statuses = [each.removeprefix("STATUS=") for each in said if each.startswith("STATUS=")]
            assert statuses[-1].startswith(situation.state)
            assert re.search(situation.words, statuses[-1])
            assert ("READY=1" in said) == situation.reached
