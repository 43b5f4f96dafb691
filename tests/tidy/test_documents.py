"""The documents name all that a user can meet: settings, errors, exit codes, states, problems; and nothing else."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mirror.errors
import storage.errors
from cli.config import markdown_page
from mirror import health
from mirror.config_reader import describe
from mirror.errors import ExitCode
from mirror.serve.http.problems import TITLES
from mirror.serve.metrics import STATES
from mirror.supervise import status, supervisor
from mirror.supervise.processes.plan import ProcessPhase
from storage.model import DOCUMENT_FIELDS

ROOT = Path(__file__).parents[2]
SETTINGS = ROOT / "docs" / "settings.md"
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()
README_LINES_MAX = 110
IMAGE_BYTES_MAX = 150_000


def section(title: str) -> str:
    found = re.search(rf"(?ms)^## {title}\n(.*?)(?=^## |\Z)", TROUBLESHOOTING)
    assert found, title
    return found[1]


def first_column(title: str) -> list[str]:
    return re.findall(r"(?m)^\| `([^`]+)` \|", section(title))


def errors_of(module: ModuleType) -> dict[str, type[Exception]]:
    found = inspect.getmembers(module, inspect.isclass)
    return {name: each for name, each in found if issubclass(each, Exception) and each.__module__ == module.__name__}


@pytest.mark.parametrize(
    ("title", "module", "others"),
    [
        ("Errors of the service and its source", mirror.errors, ["ServiceSaidNo"]),
        ("Errors of the stored data and of reading", storage.errors, []),
    ],
)
def test_every_error_has_its_row_with_its_exit_code(title: str, module: ModuleType, others: list[str]) -> None:
    assert sorted(first_column(title)) == sorted([*errors_of(module), *others])
    for name, code in re.findall(r"(?m)^\| `(\w+)` \| (\d+) \|", section(title)):
        assert int(code) == errors_of(module)[name].exit_code, name  # type: ignore[attr-defined]


@pytest.mark.parametrize(("page", "places"), [("cli/JSON.md", "in_json"), ("docs/spark.md", "is_column")])
def test_every_field_of_a_document_is_named(page: str, places: str) -> None:
    (part,) = re.findall(r"(?ms)^## Documents.*?(?=^## )", (ROOT / page).read_text())
    assert {each.name for each in DOCUMENT_FIELDS if getattr(each, places)} <= set(re.findall("`([a-z_]+)`", part))


def test_the_page_on_errors_says_which_are_retried() -> None:
    def retried(error: Any) -> str:
        return "yes" if error.retryable else "rarely" if issubclass(error, mirror.errors.ClusterError) else "no"

    rows = re.findall(r"(?m)^\| `(\w+)` \| \d+ \| (\w+) \|", section("Errors of the service and its source"))
    assert len(rows) > 10
    assert rows == [(name, retried(errors_of(mirror.errors)[name])) for name, _ in rows]


def test_every_exit_code_has_its_row() -> None:
    assert first_column("Exit codes") == [str(int(code)) for code in ExitCode]


def test_every_state_has_its_row() -> None:
    assert sorted(first_column("States of a vbucket")) == sorted(STATES)
    assert sorted(first_column("States of the service")) == sorted(health.STATES)
    known = set(re.findall(r'set_state\(\s*"([^"]+)"', inspect.getsource(supervisor)))
    known |= set(re.findall(r'"state": "([^"]+)"', inspect.getsource(status.stored_status)))
    assert known <= set(health.STATES)
    assert all(f"`{phase.value}`" in section("States of a vbucket") for phase in ProcessPhase)


def test_every_http_problem_has_its_row_with_its_status() -> None:
    rows = re.findall(r"(?m)^\| `([\w-]+)` \| (\d+) \|", section("HTTP problems"))
    assert {name: int(status) for name, status in rows} == {name: status for name, (status, _) in TITLES.items()}


def test_the_page_on_settings_is_generated() -> None:
    command = "dcp-mirror config explain --markdown > docs/settings.md"
    assert SETTINGS.read_text() == markdown_page(describe()), f"run: {command}"


def test_the_front_page_is_short_and_its_picture_small() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX
    assert all(image.stat().st_size < IMAGE_BYTES_MAX for image in (ROOT / "docs" / "images").iterdir())
