"""Sends a command to a running service, over its control socket `<data>/control.sock`.

Without a service `ask` returns None and raises no error, because most callers also work without a service. The kernel
limits a socket's path to 107 bytes, so `socket_address` makes a short path from a descriptor of the directory.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mirror.errors import ExitCode, MirrorError, SupervisionError
from mirror.messages import ControlCommand, Reply, encode

SOCKET_NAME = "control.sock"
TIMEOUT_S = 35.0
"""Limit of each wait: slightly more than the service's own limit for a command."""
ANSWER_LENGTH_MAX = 256 * 1024 * 1024
"""Bytes of the longest answer: five times a status of 65,536 vbuckets."""


@contextmanager
def socket_address(directory: Path) -> Iterator[str]:
    """Yield a short path of the control socket, even if the directory's own path is long. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_NAME}"
    finally:
        os.close(descriptor)


class AccessDenied(SupervisionError):
    """This user may not use the control socket."""


class ServiceSaidNo(MirrorError):
    """The service refused a command. The error has the service's message and exit code."""

    def __init__(self, answer: Reply) -> None:
        super().__init__(str(answer.get("error") or "the service refused"))
        self.exit_code = ExitCode(answer.get("exit_code") or ExitCode.FAILED)
        self.retryable = bool(answer.get("retryable"))


def ask(directory: Path, command: ControlCommand, *, timeout_s: float = TIMEOUT_S) -> Reply | None:
    """Send a command to the service of `directory`. Return the answer, or None if no service runs or the service goes
    away. Raises ServiceSaidNo, SupervisionError.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(timeout_s)
        try:
            with socket_address(directory) as address:
                line.connect(address)
        except PermissionError:
            raise AccessDenied(
                f"this user may not use the control socket of {directory}",
                hint="run this command as the service's user, or as root",
            ) from None
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
            return None
        except OSError as error:
            raise SupervisionError(
                f"the control socket of {directory} cannot be used: {error.strerror}", retryable=True
            ) from error
        try:
            with suppress(ConnectionError):  # a refusal may come before the whole command is sent
                line.sendall(json.dumps(encode(command)).encode() + b"\n")
            answer = _read_line(line)
        except TimeoutError:
            raise SupervisionError(
                f"the service of {directory} does not answer",
                hint="look at its logs; `kill -9` of it loses no data",
                retryable=True,
            ) from None
        except OSError:
            return None
    if not answer.get("ok"):
        raise ServiceSaidNo(answer)
    return answer


def _read_line(line: socket.socket) -> Reply:
    with line.makefile("rb", buffering=1 << 20) as answers:
        text = answers.readline(ANSWER_LENGTH_MAX + 1)
    if len(text) > ANSWER_LENGTH_MAX:
        raise SupervisionError(f"the service's answer is longer than {ANSWER_LENGTH_MAX} bytes")
    try:
        answer = json.loads(text)
    except ValueError:
        raise ConnectionResetError("the service went away in mid-answer") from None
    if not isinstance(answer, dict):
        raise SupervisionError("invalid answer from the service", hint="is it of another version?")
    return answer
