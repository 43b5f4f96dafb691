"""Admission of connections to one listening process, by peer (`peer_of`) and login; the same for every port.

A connection counts once it is accepted, before a TLS handshake costs memory.
- At most `reader_connections_max` connections are open; at most `pending_max` of them are pending (without a login). A
  further connection replaces a pending one: the oldest of the peer with most pending connections, preferably one whose
  login is not being checked. So clients without a login never keep others out, and never replace a client with a login.
- A TLS handshake begins after the client's first bytes, in a turn of the event loop (`turns`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import resource
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mirror.config import Settings
from mirror.errors import ConfigError
from mirror.log import get_logger
from mirror.server.turns import Turns

LOGIN_TIMEOUT_S = 10.0
"""Time for a login, TLS handshake included."""
IDLE_TIMEOUT_S = 600.0
"""A client that sends nothing for this long is disconnected."""
SEND_TIMEOUT_S = 30.0
"""A client that takes nothing of its answer for this long is disconnected."""
ACCEPTS_PER_TURN = 4
RETRY_S = 1.0
LOG_INTERVAL_S = 60.0
PENDING_SHARE = 4
"""One in this many of a process's connections may be pending."""
PENDING_MIN = 16
"""Pending connections that are always allowed, if `reader_connections_max` allows as many."""
DESCRIPTORS_RESERVED = 128
"""Open files besides those of clients and groups: the log, the connection to the supervisor."""
DESCRIPTORS_PER_GROUP = 3

LOCAL = "local"
"""The peer of every loopback client, and of the service's own user on a Unix socket."""

_CREDENTIALS = struct.Struct("3i")

log = get_logger("serve")


def peer_of(connected: socket.socket, address: Any) -> str:
    """Return LOCAL, an IPv4 address, an IPv6 network of 64 bits, or a user of this machine."""
    if connected.family == socket.AF_UNIX:
        _, uid, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return LOCAL if uid == os.geteuid() else f"uid {uid}"
    host = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if isinstance(host, ipaddress.IPv6Address):
        if host.ipv4_mapped is None:
            return LOCAL if host.is_loopback else str(ipaddress.IPv6Network((int(host) >> 64 << 64, 64)))
        host = host.ipv4_mapped
    return LOCAL if host.is_loopback else str(host)


class Periodic:
    """Logs a frequent event: the first at once, then one line a minute with the count."""

    def __init__(self, level: str, event: str) -> None:
        self._level, self._event = level, event
        self._next_s = float("-inf")
        self._count = 0

    def note(self, now_s: float, **fields: Any) -> None:
        self._count += 1
        if now_s >= self._next_s:
            self._next_s = now_s + LOG_INTERVAL_S
            getattr(log, self._level)(self._event, count=self._count, **fields)
            self._count = 0


@dataclass(slots=True, eq=False)
class Slot:
    _admission: Admission
    peer: str
    pending: bool = True
    """True before a login."""
    logging_in: bool = False
    """True while a login is being checked. Pending connections without a check are closed first."""
    in_line: asyncio.Task[Any] | None = None
    """The task of a waiting request, cancelled if the client hangs up."""
    deadline: asyncio.TimerHandle | None = None
    abort: Callable[[], object] = bool

    def establish(self) -> None:
        if self.pending:
            self.pending = False
            self._cancel()
            self._admission.established(self)

    def release(self) -> None:
        self._cancel()
        self.abort = bool  # break the reference cycle: a handshake's buffers would stay until garbage collection
        self._admission.released(self)

    def _cancel(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


class Admission:
    def __init__(self, settings: Settings, turns: Turns) -> None:
        self.settings = settings
        self.turns = turns
        self.accepted_count = 0
        self.rejected_count = 0
        """Connections refused on accept because there were too many."""
        self.evicted_count = 0
        """Pending connections closed for newer ones or by timeout."""
        self._open: set[Slot] = set()
        self._by_peer: Counter[str] = Counter()
        self._pending: dict[str, dict[Slot, None]] = {}
        """Connections without a login, by peer, oldest first."""
        self.pending_count = 0
        self._evictions = Periodic("warning", "connections without a login were closed")
        self._rejections = Periodic("warning", "connections were refused: there are too many")
        self._failures = Periodic("error", "connections cannot be accepted")

    @property
    def pending_max(self) -> int:
        """The limit of pending connections; other connections are reserved for clients with a login."""
        connections_max = self.settings.reader_connections_max
        return max(connections_max // PENDING_SHARE, min(connections_max, PENDING_MIN))

    def admit(self, peer: str) -> Slot | None:
        """Return the connection's slot; None: close it."""
        settings = self.settings
        if peer != LOCAL and self._by_peer[peer] >= settings.reader_connections_per_peer_max:
            admitted = self._evict(peer)
        elif len(self._open) >= settings.reader_connections_max or self.pending_count >= self.pending_max:
            admitted = self._evict(max(self._pending, key=lambda each: len(self._pending[each]), default=None))
        else:
            admitted = True
        if not admitted:
            self.rejected_count += 1
            self._rejections.note(asyncio.get_running_loop().time(), peer=peer, open=len(self._open))
            return None
        slot = Slot(self, peer)
        self.accepted_count += 1
        self._open.add(slot)
        self._by_peer[peer] += 1
        self._pending.setdefault(peer, {})[slot] = None
        self.pending_count += 1
        loop = asyncio.get_running_loop()
        slot.deadline = loop.call_later(LOGIN_TIMEOUT_S, self.drop, slot, "it did not log in in time")
        return slot

    def _evict(self, peer: str | None) -> bool:
        """Close the peer's oldest pending connection, preferably one without a running login check. False: none."""
        slots = self._pending.get(peer or "", {})
        oldest = next((slot for slot in slots if not slot.logging_in), next(iter(slots), None))
        if oldest is None:
            return False
        self.drop(oldest, "others connected")
        return True

    def drop(self, slot: Slot, why: str) -> None:
        self.evicted_count += 1
        self._evictions.note(asyncio.get_running_loop().time(), why=why, peer=slot.peer)
        abort = slot.abort
        slot.release()
        abort()

    def established(self, slot: Slot) -> None:
        slots = self._pending.get(slot.peer, {})
        if slot in slots:
            del slots[slot]
            self.pending_count -= 1
            if not slots:
                del self._pending[slot.peer]

    def released(self, slot: Slot) -> None:
        if slot in self._open:
            self.established(slot)
            self._open.remove(slot)
            self._by_peer[slot.peer] -= 1
            if not self._by_peer[slot.peer]:
                del self._by_peer[slot.peer]

    def failed(self, error: OSError) -> None:
        self._failures.note(asyncio.get_running_loop().time(), error=error.strerror or str(error))


Factory = Callable[[Slot], asyncio.BaseProtocol]
"""Makes a connection's protocol, which releases the slot at its end."""


class Acceptor:
    def __init__(
        self,
        admission: Admission,
        listening: socket.socket,
        factory: Factory,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Begin to accept, in the running loop."""
        self._admission = admission
        self._listening = listening
        self._factory = factory
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._go_on()

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listening.fileno())
        self._listening.close()
        for task in self._connecting:
            task.cancel()

    def _go_on(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listening.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connected, address = self._listening.accept()
            # No client is left: the processes of a Unix socket all wake up for one.
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # the client has hung up
                continue
            except OSError as error:
                self._admission.failed(error)
                # The client stays in the queue: the loop would call here again at once, with the same result.
                self._loop.remove_reader(self._listening.fileno())
                self._retry = self._loop.call_later(RETRY_S, self._go_on)
                return
            self._take(connected, address)

    def _take(self, connected: socket.socket, address: Any) -> None:
        try:
            slot = self._admission.admit(peer_of(connected, address))
            if slot is None:
                connected.close()
                return
            connected.setblocking(False)
        except OSError as error:  # the client has hung up
            connected.close()
            self._admission.failed(error)
            return
        task = self._loop.create_task(self._connect(connected, slot))
        # Until there is a connection, a slot that is dropped ends the handshake.
        slot.abort = task.cancel
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, connected: socket.socket, slot: Slot) -> None:
        try:
            if self._tls is not None:
                spoken = asyncio.Event()
                self._loop.add_reader(connected.fileno(), spoken.set)
                try:
                    await spoken.wait()
                finally:
                    self._loop.remove_reader(connected.fileno())
                await self._admission.turns.turn()
            await self._loop.connect_accepted_socket(
                lambda: self._factory(slot),
                connected,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else LOGIN_TIMEOUT_S,
            )
        except (asyncio.CancelledError, OSError) as error:
            slot.release()
            connected.close()
            if not isinstance(error, OSError):
                raise
            log.debug("client-not-connected", peer=slot.peer, error=str(error))


def raise_descriptor_limit(settings: Settings, group_count: int) -> None:
    """Raise the limit of open files to the settings' needs, for this process and its children. Raises ConfigError."""
    reserved = DESCRIPTORS_RESERVED + DESCRIPTORS_PER_GROUP * group_count
    needed = settings.reader_connections_max + reserved
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        most = hard - reserved
        lower = f", or set reader_connections_max to {most} at most" if most > 0 else ""
        raise ConfigError(
            f"reader_connections_max {settings.reader_connections_max} needs {needed} open files; "
            f"a process may have {hard} here",
            hint=f"raise the hard limit (ulimit -Hn, LimitNOFILE){lower}",
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        log.info("open-files-limit-raised", soft_limit=needed, before=soft)
