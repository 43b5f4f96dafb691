"""Keeping a connection to each node: open it, and open it again with growing pauses for as long as it is needed.

Knows sessions, failures and pauses; must never know vbuckets or the store. Invariants: at most one session per node;
the pause after a failure doubles up to its cap and starts again once a session was ready; a failure is remembered until
the next success, for status; an ended keeper leaves nothing open.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from mirror.clock import Clock
from mirror.config import Settings
from mirror.errors import MirrorError
from mirror.feed.connection.connection_string import NodeAddress
from mirror.feed.connection.session import NodeSession
from mirror.ingest.backoff import delay_s
from mirror.ingest.instructions import RetryReason
from mirror.log import get_logger
from mirror.wire.errors import ProtocolError

log = get_logger("feed")


class NodeOwner(Protocol):
    """The user of the connection."""

    def on_node_ready(self, keeper: NodeKeeper) -> None: ...

    def on_node_failed(self, keeper: NodeKeeper, error: MirrorError) -> None:
        """Learn that no session could be opened, or that the session is over; another try follows."""
        ...


def pause_s(attempt: int, settings: Settings, jitter: float, error: MirrorError | None = None) -> float:
    """Return the pause before try number `attempt` (0 is the first after a failure); after a refusal up to a minute."""
    if error is not None and not error.retryable:
        return delay_s(RetryReason.REFUSED_FOR_NOW, attempt, jitter)
    full_ms = min(settings.retry_delay_min_ms << min(max(attempt, 0), 20), settings.retry_delay_max_ms)
    return full_ms * (0.5 + 0.5 * jitter) / 1000


class NodeKeeper:
    """Keeps one node's session."""

    def __init__(
        self,
        address: NodeAddress,
        make: Callable[[NodeAddress], NodeSession],
        owner: NodeOwner,
        settings: Settings,
        clock: Clock,
    ) -> None:
        """`make` gives a session that is not open yet."""
        self.address = address
        self.session: NodeSession | None = None
        self.error: MirrorError | None = None
        self.failures = 0
        self.reconnects = 0
        self.on_died: Callable[[BaseException], None] | None = None
        """Called when a defect of this program ended the keeping: nothing would connect again."""
        self._make = make
        self._owner = owner
        self._settings = settings
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        assert self._task is None, "a keeper is started once"
        self._task = asyncio.create_task(self._keep(), name=f"node {self.address}")
        self._task.add_done_callback(self._ended)

    @property
    def ready(self) -> bool:
        return self.session is not None and self.session.ready

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self.session is not None:
            self.session.close()
            self.session = None

    async def _keep(self) -> None:
        while True:
            session = self._make(self.address)
            try:
                await session.open()
            except (MirrorError, ProtocolError) as error:
                self._failed(error)
            else:
                if self.failures:
                    log.info("node-back", node=str(self.address), failures=self.failures)
                self.session, self.error, self.failures = session, None, 0
                self._owner.on_node_ready(self)
                try:
                    self._failed(await asyncio.shield(session.closed))
                finally:
                    self.session = None
                    session.close()
            await self._clock.sleep(pause_s(self.failures - 1, self._settings, self._clock.jitter(), self.error))
            self.reconnects += 1

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and self.on_died is not None:
            self.on_died(error)

    def _failed(self, error: Exception) -> None:
        self.error = error if isinstance(error, MirrorError) else MirrorError(str(error), retryable=True)
        self.failures += 1
        self.session = None
        if self.failures & (self.failures - 1) == 0:  # 1, 2, 4, 8...: a node that stays away does not fill the log
            log.warning("node-failed", node=str(self.address), error=str(self.error), failures=self.failures)
        self._owner.on_node_failed(self, self.error)
