"""Logs of every process: structlog writes each message to stderr as a line of text or JSON.

Nothing is logged to standard output, because commands print data there. Only an internal error is logged with its
traceback; other errors need none, because their text names the remedy. structlog would import rich to draw tracebacks.
This module prevents that import, which takes a fifth of a worker's start time.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, TextIO, cast

from mirror.units import printable

_rich = sys.modules.get("rich")
sys.modules["rich"] = None  # type: ignore[assignment]  # structlog takes rich as not installed
try:
    import structlog
    from structlog import get_logger
finally:
    del sys.modules["rich"]
    if _rich is not None:
        sys.modules["rich"] = _rich

__all__ = ["get_logger", "set_up_logs", "structlog"]


class Patient:
    """A stream that ignores write errors: if its terminal or pipe is closed, the service goes on without logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError:
            self._let_go()
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._let_go()

    def _let_go(self) -> None:
        """Redirect the stream to /dev/null: at exit Python flushes the stream's buffer, which would fail again."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def set_up_logs(level: str, *, json: bool = False, process: str = "") -> None:
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    if json:
        processors.append(structlog.processors.JSONRenderer())
    else:
        processors.append(_readable)
        processors.append(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0))
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(file=cast(TextIO, Patient(sys.stderr))),
        cache_logger_on_first_use=False,
    )
    if process:
        structlog.contextvars.bind_contextvars(process=process)


def _readable(_logger: Any, _level: str, event: dict[str, Any]) -> dict[str, Any]:
    return {
        name: printable(value) if isinstance(value, str) else value
        for name, value in event.items()
        if value is not None
    }
