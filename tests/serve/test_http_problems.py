"""Errors as problem details: one shape, the right status, and nothing of the inside."""

from __future__ import annotations

import json

import pytest

from mirror.serve.http import problems as http_problems
from mirror.serve.http.problems import Problem
from storage import errors


@pytest.mark.parametrize("name", http_problems.TITLES)
def test_every_problem_has_the_shape_of_the_standard(name: str) -> None:
    answer = Problem(name, "what", hint="how", vbid=3).response()
    status, title = http_problems.TITLES[name]
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["cache-control"] == "no-store"
    assert json.loads(bytes(answer.body)) == {
        "type": f"urn:dcp-mirror:{name}", "title": title, "status": status, "detail": "what", "hint": "how", "vbid": 3,
    }  # fmt: skip
    assert ("retry-after" in answer.headers) == (status == 503)
    assert ("www-authenticate" in answer.headers) == (status == 401)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.UnknownCollection("no"), 404), (errors.NoSuchBoundary("no"), 410), (errors.ViewInvalidated("no"), 410),
        (errors.AnswerTooLarge("no"), 413), (errors.WriteLost("no"), 409), (errors.NotPublished("no"), 504),
        (errors.CorruptedError("no"), 500), (errors.NotAMirror("/secret: no"), 503), (errors.Closed("no"), 503),
        (errors.Full("no"), 503),
    ],
)  # fmt: skip
def test_what_the_store_says_has_a_status_and_no_path(error: errors.StorageError, status: int) -> None:
    error.path = "/secret/place"
    error.vbid = 5
    problem = http_problems.of_storage(error)
    assert problem.status == status
    assert "secret" not in json.dumps(problem.object())


def test_a_long_detail_is_cut() -> None:
    assert len(Problem("bad-request", "x" * 10_000).detail) == http_problems.DETAIL_LENGTH_MAX
