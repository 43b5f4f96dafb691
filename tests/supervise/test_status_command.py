"""What the status command answers, requested as `dcp-mirror status` does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from mirror.health import assess
from tests.supervise import in_process
from tests.supervise.conftest import eventually
from tests.supervise.in_process import Report, vbids_of, vbucket
from tests.supervise.service import ask


async def test_state_and_figures_of_an_answer_are_of_one_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer said `following` and `lag unknown`: figures of now with the judgement of the report before."""
    positions = itertools.cycle([(5, 5), (5, None), (0, 9)])

    def reports(groups: Sequence[int]) -> Report:
        published, high = next(positions)
        return {"vbuckets": [vbucket(vbid, published, high) for vbid in vbids_of(groups)], "counters": {}}

    in_process.use(monkeypatch, reports)
    async with in_process.serving(tmp_path) as service:
        await eventually(lambda: service.status_document()["vbuckets"])
        seen: set[str] = set()
        while len(seen) < 3:
            document = (await ask(tmp_path, {"op": "status"}))["status"]
            seen.add(document["state"])
            health = assess(document["vbuckets"], 8, lag_limit_s=30)
            assert (document["state"], document["reasons"]) == (health.state, health.reasons)
        assert seen == {"following", "source unreachable", "catching up"}
