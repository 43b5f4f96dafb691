"""Turns an error into one clear line and an exit code, for all commands.

Exit codes: 0 done; 1 failed while running; 2 wrong usage or configuration; 3 the mirror's data is damaged or belongs to
another bucket; 4 the source refused; 5 the requested document or user does not exist; 130 interrupted.
`DCP_MIRROR_LOG_LEVEL=debug` adds a traceback. No command runs without asserts (`python -O`), because they guard the
data.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import typer

from mirror.errors import ExitCode, MirrorError
from mirror.units import printable
from storage.errors import StorageError

UsageError = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")
"""Base class of typer's usage errors, which typer does not export."""


class Absent(Exception):
    """The requested document or user does not exist: exit code 5."""


class CommandEnded(Exception):
    """Ends a command that has already printed its result."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def complain(text: str) -> None:
    typer.echo(f"dcp-mirror: {printable(' '.join(text.split()))}", err=True)


def code_of(error: BaseException) -> tuple[int, str]:
    """Return the exit code and line of an error. If the line is empty, the caller prints nothing."""
    from mirror.wire.errors import ProtocolError  # imports the protocol's tables, which few commands need

    if isinstance(error, CommandEnded):
        return error.code, ""
    if isinstance(error, Absent):
        return ExitCode.ABSENT, str(error)
    if isinstance(error, MirrorError | StorageError):
        return int(error.exit_code), str(error)
    if isinstance(error, ProtocolError):
        return ExitCode.FAILED, str(error)
    if isinstance(error, UsageError):
        if type(error).__name__ == "NoArgsIsHelpError":  # typer does not export it
            typer.echo(str(error))
            return ExitCode.USAGE, ""
        context: Any = getattr(error, "ctx", None)
        where = context.command_path if context else "dcp-mirror"
        return ExitCode.USAGE, f"{_message_of(error)} (`{where} --help` shows what it takes)"
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return ExitCode.INTERRUPTED, ""
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename else ""
        return ExitCode.FAILED, f"{name}{error.strerror or error}"
    return ExitCode.FAILED, f"internal error: {type(error).__name__}: {error} (set DCP_MIRROR_LOG_LEVEL=debug for more)"


def _message_of(error: BaseException) -> str:
    return str(getattr(error, "format_message", error.__str__)()) or "a command is missing"


def guarded(command: Callable[[], Any]) -> int:
    if not __debug__:
        complain("asserts are switched off (python -O, PYTHONOPTIMIZE): they guard the data, so nothing runs")
        return ExitCode.USAGE
    try:
        result = command()
        sys.stdout.flush()
    except BaseException as error:
        cause = error.__context__ if isinstance(error, SystemExit) else error  # typer turns a broken pipe into an exit
        if isinstance(cause, OSError) and cause.errno == errno.EPIPE:
            # A success: the reader of stdout closed it early, as `head` does.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return ExitCode.DONE
        if isinstance(error, SystemExit):
            return error.code if isinstance(error.code, int) else ExitCode.FAILED if error.code else ExitCode.DONE
        code, line = code_of(error)
        if os.environ.get("DCP_MIRROR_LOG_LEVEL", "").lower() == "debug" and line:
            traceback.print_exception(error)
        if line:
            complain(line)
        return int(code)
    return result if isinstance(result, int) else ExitCode.DONE
