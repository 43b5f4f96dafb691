"""The figures of a run, in one line at its end: a limit that held says more with the distance to it."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how much memory the large backfill took, what the story of each cluster had sent, and what was killed."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        facts = dict(report.user_properties)
        for name in ("memory", "sent", "kills"):
            if name in facts:
                terminalreporter.write_line(f"{report.nodeid}: {facts[name]}")
