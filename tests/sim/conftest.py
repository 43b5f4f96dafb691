"""Print the simulated events at the end of a run: the seed that repeats them, and their numbers."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            facts = dict(report.user_properties)
            if "simulated" in facts:
                terminalreporter.write_line(f"{report.nodeid}: {facts['simulated']}")
