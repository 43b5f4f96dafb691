"""Processes of the command without the start of an interpreter: one process imports every command, and forks.

Most of what a short command costs is its imports, about a second; most tests are about what it does then. Each call is
still a process of its own, in a group of its own, with its own arguments, environment, working directory, output and
exit code. What the start of an interpreter decides (flags and variables of Python, the width and the colours of the
terminal) is that of the server. Invariant: the server has one thread and opens nothing, so that whatever it forks
starts clean.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
MESSAGE_BYTES_MAX = 1 << 17


class ForkServer:
    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it; it ends with the process that started it."""
        self._lock = threading.Lock()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                env={**environment, "PYTHONPATH": os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def end(self) -> None:
        self._line.close()
        self._process.wait()

    def run(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        files: tuple[IO[bytes], IO[bytes], IO[bytes]],
        limit_s: float,
    ) -> int:
        """Run the command to its end; its exit code, below zero for the signal that ended it.

        `files` become its stdin, stdout and stderr.
        Raises TimeoutExpired when it takes longer than `limit_s`. It is killed then, and by whatever else ends this.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                message = json.dumps([list(arguments), dict(environment), str(folder)]).encode()
                with self._lock:
                    socket.send_fds(self._line, [message], [*(file.fileno() for file in files), theirs.fileno()])
            ours.settimeout(limit_s)
            pid = int(ours.recv(64))
            try:
                return int(ours.recv(64))
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                if isinstance(error, TimeoutError):
                    raise subprocess.TimeoutExpired(list(arguments), limit_s) from None
                raise


def serve(line: socket.socket) -> None:
    """Fork a keeper for each call, until the tests end. Returns only in a process that is to run its command."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(line, MESSAGE_BYTES_MAX, 4)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            line.close()
            keep(json.loads(message), descriptors[:3], descriptors[3])
            return
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):  # the keepers of earlier calls
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def keep(call: tuple[list[str], dict[str, str], str], files: list[int], reply: int) -> None:
    """Fork the command, and say its process id and its exit code. Returns in the command's process."""
    pid = os.fork()
    with contextlib.suppress(OSError):  # by both, so that it is done before either goes on
        os.setpgid(pid, pid)
    if pid:
        with socket.socket(fileno=reply) as answers:
            for file in files:
                os.close(file)
            with contextlib.suppress(OSError):  # the caller has gone
                answers.send(str(pid).encode())
                answers.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
        os._exit(0)
    os.close(reply)
    for standard, file in enumerate(files):
        os.dup2(file, standard)
        os.close(file)
    arguments, environment, folder = call
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments


if __name__ == "__main__":
    from cli.main import application, main

    application("")
    serve(socket.socket(fileno=int(sys.argv[1])))
    main()
