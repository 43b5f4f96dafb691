"""Options, order and printed durations of the suite."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

from tests.spark.sessions import object_store, spark

__all__ = ["object_store", "spark"]

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

FIRST = ("spark", "crash", "whole", "cli", "sim", "serve", "supervise", "tidy", "feed", "storage")
"""Packages by the length of their tests. With several pytest processes the last tests are then short ones, so that no
process waits long for another."""

# How long an example takes says how busy the machine is. The first text of a fresh checkout takes seconds: hypothesis
# then makes its tables of Unicode, which it keeps in .hypothesis.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("short", settings.get_profile("untimed"), max_examples=40)
settings.register_profile("repeatable", settings.get_profile("untimed"), max_examples=60, derandomize=True)  # .ci/run
settings.load_profile("short")


OURS = tuple(f"DCP_MIRROR_{name}" for name in ("FUZZ", "READERS", "SIM", "SOAK"))
"""Variables of the tests themselves. All other ones are settings of the person who runs the tests."""


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


def pytest_configure() -> None:
    """Let the processes that tests start load bytecode (without it each of some hundred compiles all sources again) and
    end by Ctrl-C. Remove the settings of the person who runs the tests.
    """
    for name in [name for name in os.environ if name.startswith("DCP_MIRROR_") and not name.startswith(OURS)]:
        del os.environ[name]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # run in the background of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)  # or what tests start would ignore Ctrl-C, too
    gc.disable()  # until all is imported and collected: nothing of it goes away


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


TAKES = {
    "not long and not ci": "about 4 minutes on two cores (-n auto); .ci/run runs more, -m long larger figures",
    "not long and not small": "about 12 minutes on two cores (-n auto)",
}
"""The time that the tests take, by the expression that chooses them."""


def pytest_report_header(config: pytest.Config) -> str:
    return f"these tests take {TAKES.get(config.getoption('markexpr'), 'hours')}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how much memory was taken, and what was simulated, sent or killed by which seed, also when all went well."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        facts = dict(report.user_properties)
        seed = f"; CRASH_SEED={facts['seed']}" if "seed" in facts else ""
        for name in facts.keys() & {"memory", "simulated", "sent", "kills"}:
            terminalreporter.write_line(f"{report.nodeid}: {facts[name]}{seed}")


@pytest.fixture(autouse=True)
def default_logs() -> Iterator[None]:
    """Restore the configuration of the logs after each test."""
    yield
    if (structlog := sys.modules.get("structlog")) is not None:
        structlog.reset_defaults()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Run two processes more than there are cores: tests wait for other processes a part of their time."""
    return len(os.sched_getaffinity(0)) + 2


def pytest_itemcollected(item: pytest.Item) -> None:
    """Send tests that need the Spark session, which takes half a minute to start, to one process, in .ci/run alone;
    those that have a group already, to that group's. xdist reads the mark before items are sorted.
    """
    if "spark" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.ci)
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        package = item.path.parent.name
        return FIRST.index(package) if package in FIRST else len(FIRST)

    items.sort(key=rank)


@pytest.fixture
async def untaken_errors(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Errors of streams that were never retrieved. asyncio logs one with a traceback if the garbage collector finds the
    stream's future before its protocol; here it always does. Call `gc.collect()` before looking.
    """
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(asyncio.StreamReaderProtocol, "__del__", lambda _: None)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    return found
