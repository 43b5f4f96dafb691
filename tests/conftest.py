"""Options that hold for all tests."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

# How long an example takes says how busy the machine is. The first text of a fresh checkout takes seconds: hypothesis
# then makes its tables of Unicode, which it keeps in .hypothesis.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped fails (.ci/run)")


def failed_if_skipped(report: Report, config: pytest.Config) -> Report:
    if report.skipped and not hasattr(report, "wasxfail") and config.getoption("no_skips"):
        report.outcome = "failed"
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        report.longrepr = f"--no-skips: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return failed_if_skipped((yield), item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return failed_if_skipped((yield), collector.config)
