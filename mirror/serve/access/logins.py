"""Password checks outside of the event loop. Refusals are delayed after repeated failures, each twice as long.

- PBKDF2 runs in a thread of its own, so users who are logged in do not wait.
- A peer with `PEER_FAILURES_FREE` failures is guessing. Guessing peers share a queue with one check in `PACE_S`, so a
  peer gains no time by hanging up before the refusal.
- A right password waits in that queue at most; only refusals are delayed, up to `DELAY_MAX_S`.
- A password that this process has accepted is checked again only for a guessing peer, and over HTTP only until the
  peer's connection has logged in.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from mirror.clock import Clock
from mirror.serve.access.auth import Reader, Users
from mirror.server.admission import Periodic
from mirror.server.session import LoginAttempt, checked

NICENESS = 10
"""Niceness of the thread that checks passwords: requests come first."""
USER_FAILURES_FREE = 3
"""Failures of a user before refusals are delayed, because people mistype."""
PEER_FAILURES_FREE = 20
"""Failures of a peer before refusals are delayed, because many users may share a peer."""
DELAY_MIN_S = 0.1
DELAY_MAX_S = 4.0
COUNTED_MAX = 12
"""Limit of counted failures beyond the free ones: enough for the longest delay, and forgotten within minutes."""
PACE_S = 0.01
"""Pause before each check for a guessing peer."""
FORGET_S = 5.0
"""Time in which one failure is forgotten."""
REMEMBERED_MAX = 4096
"""Limit of users, and of peers, whose failures are kept; the oldest are forgotten first."""
NAME_LENGTH_MAX = 64

T = TypeVar("T")


class Failures:
    def __init__(self, free: int) -> None:
        self._free = free
        self._found: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Name -> failures and time of the last failure. The name that failed last is at the end."""

    def add(self, name: str, now_s: float) -> None:
        count = min(self._count(name, now_s) + 1, self._free + COUNTED_MAX)
        self._found[name] = (count, now_s)
        self._found.move_to_end(name)
        if len(self._found) > REMEMBERED_MAX:
            self._found.popitem(last=False)

    def forget(self, name: str) -> None:
        self._found.pop(name, None)

    def delay_s(self, name: str, now_s: float) -> float:
        excess = int(self._count(name, now_s)) - self._free
        return 0.0 if excess < 0 else min(DELAY_MIN_S * 2 ** min(excess, 20), DELAY_MAX_S)

    def _count(self, name: str, now_s: float) -> float:
        count, last_s = self._found.get(name, (0.0, now_s))
        return max(0.0, count - (now_s - last_s) / FORGET_S)


def _step_back() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class Logins:
    def __init__(self, users: Users, clock: Clock) -> None:
        self.clock = clock
        self.failed_count = 0
        self._users = users
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="login", initializer=_step_back)
        self._by_user, self._by_peer = Failures(USER_FAILURES_FREE), Failures(PEER_FAILURES_FREE)
        self._line = asyncio.Lock()
        """Held by the next attempt of a guessing peer while it waits for `PACE_S`."""
        self._events = Periodic("warning", "logins failed")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def begin(self, user: str, peer: str, check: Callable[[], T | None]) -> LoginAttempt[T]:
        """Begin an attempt. `check` runs in a thread; it returns None or raises SaslError to refuse."""
        return LoginAttempt(partial(self._outcome, user, peer, check))

    def by_password(self, name: str, password: str, peer: str) -> LoginAttempt[Reader]:
        proven = None if self.guesses(peer) else self._users.proven(name, password)
        outcome = partial(self.check, name, password, peer)
        return LoginAttempt(outcome, None if proven is None else (proven,))

    async def check(self, name: str, password: str, peer: str) -> Reader | None:
        return await self._outcome(name, peer, partial(self._users.check, name, password))

    def guesses(self, peer: str) -> bool:
        return self._by_peer.delay_s(peer, self.clock.monotonic()) > 0

    async def _outcome(self, user: str, peer: str, check: Callable[[], T | None]) -> T | None:
        """Return the result of `check`. None (refused) comes after a delay that grows with each failure."""
        try:
            if self.guesses(peer):
                async with self._line:
                    await self.clock.sleep(PACE_S)
        except asyncio.CancelledError:
            self.failed(user, peer)
            raise
        try:
            future = self._pool.submit(partial(checked, check))
        except RuntimeError:  # the process stops
            return None
        checking = asyncio.wrap_future(future)
        checking.add_done_callback(partial(self._count, user, peer))  # even if the client hangs up
        try:
            await asyncio.wait([checking])
        except asyncio.CancelledError:
            future.cancel()
            raise
        if checking.cancelled():  # the process stops
            return None
        found = checking.result()
        if found is None:
            now_s = self.clock.monotonic()
            delay_s = max(self._by_user.delay_s(user, now_s), self._by_peer.delay_s(peer, now_s))
            if delay_s:
                await self.clock.sleep(delay_s)
        return found

    def _count(self, user: str, peer: str, checked: asyncio.Future[T | None]) -> None:
        if checked.cancelled():
            return
        if checked.exception() is not None or checked.result() is None:
            self.failed(user, peer)
        else:
            self._by_user.forget(user)

    def failed(self, user: str, peer: str) -> None:
        now_s = self.clock.monotonic()
        self.failed_count += 1
        self._by_user.add(user, now_s)
        self._by_peer.add(peer, now_s)
        self._events.note(now_s, user=user[:NAME_LENGTH_MAX], peer=peer)
