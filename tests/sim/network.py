"""A connection between a session of the mirror and a node of the source: two queues of bytes.

Nothing arrives by itself: the simulation says how many bytes of which direction come now, and may break the connection
after any of them. Bytes keep their order within a connection, connections have none among each other.
"""

from __future__ import annotations

import asyncio
from typing import Any


class Wire:
    """Both directions of one connection."""

    def __init__(self) -> None:
        self.up = bytearray()
        self.down = bytearray()
        self.client: Any = None
        self.server: Any = None
        self.open = True
        self.client_end = End(self, "up")
        self.server_end = End(self, "down")

    def join(self, client: Any, server: Any) -> None:
        self.client, self.server = client, server
        server.connection_made(self.server_end)
        client.connection_made(self.client_end)

    def deliver_up(self, count: int) -> None:
        data, self.up = bytes(self.up[:count]), self.up[count:]
        if data:
            self.server.data_received(data)

    def deliver_down(self, count: int) -> None:
        data, self.down = bytes(self.down[:count]), self.down[count:]
        if data:
            self.client.data_received(data)

    def cut(self) -> None:
        """Break the connection: bytes under way are lost, and both ends notice."""
        if not self.open:
            return
        self.open = False
        self.up.clear()
        self.down.clear()
        self.server.connection_lost(None)
        self.client.connection_lost(None)


class End(asyncio.Transport):
    """A transport as one side sees it."""

    def __init__(self, wire: Wire, direction: str) -> None:
        super().__init__()
        self.wire = wire
        self.direction = direction

    def write(self, data: Any) -> None:
        if self.wire.open:
            getattr(self.wire, self.direction).extend(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return not self.wire.open

    def abort(self) -> None:
        self.wire.cut()

    def close(self) -> None:
        self.wire.cut()
