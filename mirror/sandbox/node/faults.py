"""Faults of connections and streams, for tests.

A fault affects open connections, and with `future` also new connections until `clear`, which does not repair affected
connections. By default a fault affects only DCP connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypedDict, Unpack

from mirror.sandbox.data.streams import StreamFaults
from mirror.sandbox.node.node import NodeConnection, SandboxNode
from mirror.wire.constants import StreamEndReason

Rule = Callable[[NodeConnection], None]


class Where(TypedDict, total=False):
    """Selects connections by node and by a part of their DCP name. `future` adds new connections. A method raises
    ValueError for `future` and a `name` if `dcp_only` is False.
    """

    node: int | None
    name: str | None
    dcp_only: bool
    future: bool


class Faults:
    def __init__(self, nodes: list[SandboxNode], streams: StreamFaults) -> None:
        self._nodes = nodes
        self.streams = streams

    def connections(
        self, *, node: int | None = None, name: str | None = None, dcp_only: bool = True
    ) -> list[NodeConnection]:
        return [
            connection
            for chosen in self._select(node)
            for connection in list(chosen.connections)
            if _matches(connection, name, dcp_only=dcp_only)
        ]

    def cut(self, **where: Unpack[Where]) -> int:
        return self._apply(lambda connection: connection.link.cut(), **where)

    def slow(self, bytes_per_second: float, **where: Unpack[Where]) -> int:
        """Send no faster than this; 0 restores full speed."""
        return self._apply(lambda connection: connection.link.slow(bytes_per_second), **where)

    def garble(self, pieces: int = 1, **where: Unpack[Where]) -> int:
        return self._apply(lambda connection: connection.link.garble(pieces), **where)

    def silence(self, **where: Unpack[Where]) -> int:
        """Neither send nor receive any more, without closing."""
        return self._apply(lambda connection: connection.link.silence(), **where)

    def truncate(self, **where: Unpack[Where]) -> int:
        """Close connections in the middle of the next frame."""
        return self._apply(lambda connection: connection.link.truncate(), **where)

    def stop_mid_snapshot(self, after_pieces: int = 0, **where: Unpack[Where]) -> int:
        """Fall silent inside the next snapshot, without closing."""

        def arm(connection: NodeConnection) -> None:
            connection.stop_after_pieces = after_pieces

        return self._apply(arm, **where)

    def end_streams(
        self, reason: StreamEndReason, vbids: Iterable[int] | None = None, *, node: int | None = None
    ) -> int:
        selected = None if vbids is None else set(vbids)
        count = 0
        for connection in self.connections(node=node):
            producer = connection.producer
            assert producer is not None
            for vbid in sorted({vbid for vbid, _ in producer.streams}):
                if selected is None or vbid in selected:
                    count += producer.end_streams(vbid, reason)
        return count

    def clear(self) -> None:
        self.streams.clear()
        for node in self._nodes:
            node.on_dcp_open.clear()
            node.on_connect.clear()

    def _select(self, number: int | None) -> list[SandboxNode]:
        return self._nodes if number is None else [self._nodes[number]]

    def _apply(
        self,
        rule: Rule,
        *,
        node: int | None = None,
        name: str | None = None,
        dcp_only: bool = True,
        future: bool = False,
    ) -> int:
        if future and name is not None and not dcp_only:
            raise ValueError("a new connection has no name until DCP is opened: leave out name or dcp_only=false")
        found = self.connections(node=node, name=name, dcp_only=dcp_only)
        for connection in found:
            rule(connection)
        if future:
            for chosen in self._select(node):
                later = chosen.on_dcp_open if dcp_only else chosen.on_connect
                later.append(
                    lambda connection: rule(connection) if _matches(connection, name, dcp_only=False) else None
                )
        return len(found)


def _matches(connection: NodeConnection, name: str | None, *, dcp_only: bool) -> bool:
    producer = connection.producer
    if producer is None:
        return not dcp_only and name is None
    return name is None or name in producer.name
