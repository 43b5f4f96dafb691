"""The connections to the source: one session for each node that is needed, and whether the source may go on sending.

Knows which nodes are needed, their failures and pauses, and the opaques that all sessions share; must never know
vbuckets or what streams bring. Invariants: at most one keeper for each address; what is no longer needed is closed;
opaques are unique over all sessions; while acknowledgements are held, they are on every session, also on one that opens
meanwhile; the pause after a failure doubles up to its cap and starts again once a session was ready; status shows a
failure until the next success; an ended keeper leaves nothing open.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from typing import Protocol

from mirror.clock import Clock
from mirror.config import Settings
from mirror.errors import MirrorError
from mirror.feed.connection.bootstrap import Access
from mirror.feed.connection.connection_string import NodeAddress
from mirror.feed.connection.session import MapWatch, NodeSession, SessionOwner
from mirror.feed.connection.transport import Opaques
from mirror.ingest.instructions import RetryReason
from mirror.ingest.reactions import delay_s
from mirror.log import get_logger
from mirror.wire.errors import ProtocolError

log = get_logger("feed")


class ConnectionsOwner(SessionOwner, Protocol):
    def on_node_ready(self, keeper: NodeKeeper) -> None: ...

    def on_node_failed(self, keeper: NodeKeeper, error: MirrorError) -> None: ...


class Connections:
    def __init__(
        self,
        access: Access,
        clock: Clock,
        owner: ConnectionsOwner,
        map_watch: MapWatch,
        *,
        name: str,
        on_defect: Callable[[BaseException], None],
    ) -> None:
        """`name` is the DCP name. `on_defect` is called when a defect ends a keeper: its node would stay away."""
        self.keepers: dict[NodeAddress, NodeKeeper] = {}
        self.opaques = Opaques()
        self.acks_held = False
        self.with_history = False
        self._access = access
        self._clock = clock
        self._owner = owner
        self._map_watch = map_watch
        self._name = name
        self._on_defect = on_defect
        self._stopping: set[asyncio.Task[None]] = set()

    # -- nodes ----------------------------------------------------------------------------------------------------

    def keep(self, address: NodeAddress) -> NodeKeeper:
        """Return the keeper of a node, begun if there was none."""
        keeper = self.keepers.get(address)
        if keeper is None:
            keeper = NodeKeeper(address, self._make_session, self, self._access.settings, self._clock)
            keeper.on_died = self._on_defect
            self.keepers[address] = keeper
            keeper.start()
        return keeper

    def retain(self, needed: Collection[NodeAddress | None]) -> None:
        """Close the sessions of all other nodes."""
        for address in [address for address in self.keepers if address not in needed]:
            task = asyncio.get_running_loop().create_task(self.keepers.pop(address).stop())
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    async def close(self) -> None:
        await asyncio.gather(*(keeper.stop() for keeper in self.keepers.values()), *self._stopping)
        self.keepers.clear()

    def _make_session(self, address: NodeAddress) -> NodeSession:
        session = NodeSession(self._access, address, self._owner, self._clock, name=self._name, opaques=self.opaques)
        session.map_watch = self._map_watch
        session.with_history = self.with_history
        return session

    # -- ready sessions -------------------------------------------------------------------------------------------

    def session_at(self, address: NodeAddress | None) -> NodeSession | None:
        keeper = None if address is None else self.keepers.get(address)
        return keeper.session if keeper is not None and keeper.ready else None

    def ready_sessions(self) -> list[NodeSession]:
        return [keeper.session for keeper in self.keepers.values() if keeper.session is not None and keeper.ready]

    def errors(self) -> str:
        """Return the nodes' errors, to be appended to a message; empty if there are none."""
        found = {keeper.error.what for keeper in self.keepers.values() if keeper.error is not None}
        return "; " + "; ".join(sorted(found)) if found else ""

    # -- backpressure ---------------------------------------------------------------------------------------------

    def hold_acks(self) -> None:
        """Have the source wait once the flow-control windows are full."""
        self.acks_held = True
        for session in self._open_sessions():
            session.acks_held = True

    def release_acks(self) -> None:
        self.acks_held = False
        for session in self._open_sessions():
            session.release_acks()

    def _open_sessions(self) -> list[NodeSession]:
        return [keeper.session for keeper in self.keepers.values() if keeper.session is not None]

    # -- calls of the keepers -------------------------------------------------------------------------------------

    def on_node_ready(self, keeper: NodeKeeper) -> None:
        assert keeper.session is not None
        keeper.session.acks_held = self.acks_held
        self._owner.on_node_ready(keeper)

    def on_node_failed(self, keeper: NodeKeeper, error: MirrorError) -> None:
        self._owner.on_node_failed(keeper, error)


def pause_s(attempt: int, settings: Settings, jitter: float, error: MirrorError | None = None) -> float:
    """Return the pause before try number `attempt` (0 is the first after a failure); after a refusal up to a minute."""
    if error is not None and not error.retryable:
        return delay_s(RetryReason.REFUSED_FOR_NOW, attempt, jitter)
    full_ms = min(settings.retry_delay_min_ms << min(max(attempt, 0), 20), settings.retry_delay_max_ms)
    return full_ms * (0.5 + 0.5 * jitter) / 1000


class NodeKeeper:
    def __init__(
        self,
        address: NodeAddress,
        make: Callable[[NodeAddress], NodeSession],
        owner: Connections,
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
        """Called when a defect of this program ended the keeper: it would not connect again."""
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
