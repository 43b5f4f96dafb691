"""The connections to the source: one session for each node that is needed, and whether the source may go on sending.

Knows which nodes are needed, their keepers, and the opaques that all sessions share; must never know vbuckets or what
streams bring. Invariants: at most one keeper for each address; what is no longer needed is closed; opaques are unique
over all sessions; while acknowledgements are held, they are on every session, also on one that opens meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Protocol

from mirror.clock import Clock
from mirror.errors import MirrorError
from mirror.feed.cluster.nodes import NodeKeeper
from mirror.feed.connection.bootstrap import Access
from mirror.feed.connection.connection_string import NodeAddress
from mirror.feed.connection.session import MapWatch, NodeSession, SessionOwner
from mirror.feed.connection.transport import Opaques


class ConnectionsOwner(SessionOwner, Protocol):
    """The user of the sessions."""

    def on_node_ready(self, keeper: NodeKeeper) -> None: ...

    def on_node_failed(self, keeper: NodeKeeper, error: MirrorError) -> None: ...


class Connections:
    """The sessions of one consumer or reader."""

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
        """`NodeSession.with_history` of new sessions."""
        self._access = access
        self._clock = clock
        self._owner = owner
        self._map_watch = map_watch
        self._name = name
        self._on_defect = on_defect
        self._stopping: set[asyncio.Task[None]] = set()

    # -- which nodes ----------------------------------------------------------------------------------------------

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

    # -- which of them can be queried -----------------------------------------------------------------------------

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

    # -- what the keepers call ------------------------------------------------------------------------------------

    def on_node_ready(self, keeper: NodeKeeper) -> None:
        assert keeper.session is not None
        keeper.session.acks_held = self.acks_held
        self._owner.on_node_ready(keeper)

    def on_node_failed(self, keeper: NodeKeeper, error: MirrorError) -> None:
        self._owner.on_node_failed(keeper, error)
