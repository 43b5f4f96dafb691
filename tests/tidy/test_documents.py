"""The documents name all that a user can meet: settings, errors, exit codes, states, problems; and nothing else."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import mirror.errors
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


def test_the_tree_of_errors_has_each_with_its_exit_code_and_whether_it_is_retried() -> None:
    lines = re.findall(r"(?m)^[ │├└─]+(\w+) .*\((retried; )?exit (\d+)\)$", mirror.errors.__doc__ or "")
    shown = {name: (bool(retried), int(code)) for name, retried, code in lines}
    found = {
        name: each for name, each in errors_of(mirror.errors).items() if name not in ("MirrorError", "ClusterError")
    }
    assert shown == {name: (each.retryable, each.exit_code) for name, each in found.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("page", "places"), [("cli/JSON.md", "in_json"), ("docs/spark.md", "is_column")])
def test_every_field_of_a_document_is_named(page: str, places: str) -> None:
    (part,) = re.findall(r"(?ms)^## Documents.*?(?=^## )", (ROOT / page).read_text())
    assert {each.name for each in DOCUMENT_FIELDS if getattr(each, places)} <= set(re.findall("`([a-z_]+)`", part))


def test_every_exit_code_has_its_row() -> None:
    assert first_column("Exit codes") == [str(int(code)) for code in ExitCode]


def test_every_state_has_its_row() -> None:
    assert sorted(first_column("States of a vbucket")) == sorted(STATES)
    assert sorted(first_column("States of the service")) == sorted(health.STATES)
    known = set(re.findall(r'set_state\(\s*"([^"]+)"', inspect.getsource(supervisor)))
    known |= set(re.findall(r'"state": "([^"]+)"', inspect.getsource(status.stored_status)))
    assert known <= set(health.STATES)
    assert all(f"`{phase.value}`" in section("States of a vbucket") for phase in ProcessPhase)


def zip_problems(codes: list[str], names: list[str]) -> list[tuple[str, int]]:
    """Pair the names of a row with its statuses: one status for all of them, or one for each."""
    return [(name, int(code)) for name, code in zip(names, codes * (len(names) // len(codes)), strict=True)]


def test_every_http_problem_has_its_row_with_its_status() -> None:
    rows = re.findall(r"(?m)^\| ([\d, ]+) \| ([^|]+) \|", section("HTTP problems"))
    pairs = [pair for codes, names in rows for pair in zip_problems(codes.split(", "), re.findall("`(.+?)`", names))]
    assert dict(pairs) == {name: status for name, (status, _) in TITLES.items()}


def test_the_page_on_settings_is_generated() -> None:
    command = "dcp-mirror config explain --markdown > docs/settings.md"
    assert SETTINGS.read_text() == markdown_page(describe()), f"run: {command}"


def test_the_front_page_is_short_and_its_picture_small() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX
    assert all(image.stat().st_size < IMAGE_BYTES_MAX for image in (ROOT / "docs" / "images").iterdir())
