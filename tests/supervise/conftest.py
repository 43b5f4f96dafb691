"""Waiting for what a test waits for, with a limit that only a broken program reaches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from mirror.supervise.reports import collector

T = TypeVar("T")
LIMIT_S = 60.0
POLL_S = 0.05


async def eventually(look: Callable[[], T]) -> T:
    """The first true answer of `look`."""
    until = time.monotonic() + LIMIT_S
    while not (answer := look()):
        assert time.monotonic() < until, "it never came true"
        await asyncio.sleep(POLL_S)
    return answer


def eventually_now(look: Callable[[], T]) -> T:
    """Like `eventually`, without an event loop."""
    until = time.monotonic() + LIMIT_S
    while not (answer := look()):
        assert time.monotonic() < until, "it never came true"
        time.sleep(POLL_S)
    return answer


@pytest.fixture(autouse=True)
def _plain_script(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SCRIPT", "NOTIFY_SOCKET", "WATCHDOG_USEC"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _frequent_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "REPORT_INTERVAL_S", 0.1)
