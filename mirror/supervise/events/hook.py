"""The operator's command `on_event`: runs for each event, with the event as JSON on its stdin.

Only a stopping service waits for the command, at most `TIMEOUT_S`. The command gets no password of the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
from collections import deque
from collections.abc import Mapping

from mirror.errors import ConfigError
from mirror.log import get_logger

RUNNING_MAX = 2
WAITING_MAX = 100
TIMEOUT_S = 10.0
SECRETS = ("DCP_MIRROR_PASSWORD", "CREDENTIALS_DIRECTORY")

log = get_logger("on_event")


def words_of(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"on_event {command!r} cannot be parsed: {error}", hint="close its quotes") from None
    if not words:
        raise ConfigError("on_event is empty", hint="name a program, or leave the setting out")
    return words


class Hook:
    def __init__(self, command: str | None) -> None:
        self._waiting: deque[Mapping[str, object]] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._failed = False
        self._dropped = False
        self.use(command)

    def use(self, command: str | None) -> None:
        self._words = None if command is None else words_of(command)

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting

    def put(self, event: Mapping[str, object]) -> None:
        if self._words is None:
            return
        if len(self._waiting) >= WAITING_MAX:
            if not self._dropped:
                self._dropped = True
                log.error("on-event-too-slow", waiting=WAITING_MAX)
            return
        self._waiting.append(event)
        self._start()

    def _start(self) -> None:
        while self._waiting and self._words is not None and len(self._running) < RUNNING_MAX:
            task = asyncio.create_task(self._run(self._words, self._waiting.popleft()))
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            self._dropped = self._dropped and bool(self._waiting)
            self._start()

    async def _run(self, words: list[str], event: Mapping[str, object]) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in SECRETS}
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env=environment,
                # A session of its own, so that the timeout can kill what the command has started, too.
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            self._complain(words, str(error))
            return
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await process.communicate(json.dumps(event).encode() + b"\n")
        except TimeoutError:
            self._complain(words, f"it did not end within {TIMEOUT_S:g} s and was killed")
            return
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode:
            self._complain(words, f"exit code {process.returncode}")
        else:
            self._failed = False

    def _complain(self, words: list[str], why: str) -> None:
        if not self._failed:
            self._failed = True
            log.error("on-event-failed", program=words[0], error=why)

    async def close(self) -> None:
        """Run the command for the waiting events. After `TIMEOUT_S` kill it and drop the rest."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                while self._running:
                    await asyncio.wait(self._running)
        if self._waiting:
            log.error("on-event-too-slow", waiting=len(self._waiting))
        self._waiting.clear()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
