"""A server process: opens the mirror for reading, listens, and answers the supervisor.

It opens its own TCP sockets, but inherits Unix sockets.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import socket
import sys
import threading
import time

from mirror.clock import SystemClock
from mirror.config import Settings, from_wire, required_data
from mirror.errors import ConfigError
from mirror.log import get_logger, set_up_logs
from mirror.messages import NoteContact, ProcessCommand, ProcessReport, Reply, StartMessage, StartServer
from mirror.serve.access.auth import users_of
from mirror.serve.access.tls import server_tls
from mirror.serve.bucket.bucket import ServedBucket
from mirror.serve.bucket.map import BUCKET_CAPABILITIES, KV_CAPABILITIES, ServedMap, named_nodes, own_node
from mirror.serve.dcp.dcp_session import DcpServer, SourceContact
from mirror.serve.kv.server import KvServer
from mirror.server.listener import Address, listening_socket, parse_addresses
from mirror.supervise.listeners.addresses import SLOTS_PER_KIND
from mirror.supervise.processes.life import Send, Work, main

SWITCH_INTERVAL_S = 0.0005
"""Time after which the thread for large work lets the event loop run. Python's default is 5 ms."""
TRIM_S = 10.0

log = get_logger("kv")

Sockets = list[tuple[Address, socket.socket]]


class KvServing:
    server_type: type[KvServer | DcpServer] = KvServer
    capabilities: tuple[str, ...] = KV_CAPABILITIES

    def __init__(self, settings: Settings, sockets: Sockets, revision: int, login_secret: bytes) -> None:
        """Open the mirror. Raises StorageError, ConfigError."""
        clock = SystemClock()
        self._tls = server_tls(settings)
        self._users = users_of(settings, login_secret)
        self._bucket = ServedBucket(
            str(required_data(settings)),
            clock,
            verify_reads=settings.verify_reads,
            publishes_persisted=settings.publish == "persisted",
        )
        kv_nodes = settings.kv_nodes if self.server_type is KvServer else None  # it has addresses of KV only
        identity = self._bucket.identity
        own = own_node([address for address, _ in sockets], identity.held)
        nodes = [own] if kv_nodes is None else named_nodes(kv_nodes)
        served = ServedMap(identity, nodes, revision, self.capabilities)
        if served.uncovered:
            log.warning("vbuckets-without-mirror", vbuckets=served.uncovered)
        self._server = self.server_type(self._bucket, self._users, served, clock, settings)
        self._sockets = sockets
        self._ended = asyncio.Event()

    async def start(self) -> None:
        await self._server.start(self._sockets, self._tls)

    async def run(self) -> None:
        try:
            await self._ended.wait()
        finally:
            await self._server.stop()
            self._bucket.close()

    async def stop(self) -> None:
        self._ended.set()

    def status(self) -> ProcessReport:
        latencies = self._server.counters.latencies.figures()
        return {"vbuckets": [], "counters": self._server.status(), "request_seconds": latencies}

    async def request(self, command: ProcessCommand) -> Reply:
        raise ConfigError(f"a KV process knows no command {command.op!r}")


class DcpServing(KvServing):
    server_type = DcpServer
    capabilities = BUCKET_CAPABILITIES

    def __init__(self, settings: Settings, sockets: Sockets, revision: int, login_secret: bytes) -> None:
        super().__init__(settings, sockets, revision, login_secret)
        assert isinstance(self._server, DcpServer)
        self._contact = self._server.producers.contact = SourceContact(self._bucket.view.vbids, SystemClock())
        self._warnings = self._server.producers.warnings

    def status(self) -> ProcessReport:
        return {**super().status(), "warnings": self._warnings}

    async def request(self, command: ProcessCommand) -> Reply:
        if not isinstance(command, NoteContact):
            return await super().request(command)
        self._contact.note({each[0]: each[1] for each in command.lost})
        return {}


def give_back_freed_memory() -> None:
    """Give freed memory back to the system, in a thread: glibc gives back the end of its heap only, and after a flood
    of large requests a process kept a gigabyte. A lower threshold for blocks outside of the heap, M_MMAP_THRESHOLD,
    would halve the rate of small reads: asyncio receives into blocks of 256 KiB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    while trim is not None:
        time.sleep(TRIM_S)
        trim(0)


async def open_server(start: StartMessage, _send: Send) -> Work:
    """Open the mirror and listen as the first message says. Raises ConfigError, StorageError."""
    assert isinstance(start, StartServer), "a worker is another program"
    settings = from_wire(start.settings)
    kind, number = start.kind, start.slot % SLOTS_PER_KIND
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    threading.Thread(target=give_back_freed_memory, daemon=True).start()
    set_up_logs(settings.log_level, json=settings.log_json, process=f"{kind} {number}")
    sockets: Sockets = []
    for text, inherited in start.listeners:
        address = parse_addresses(text, kind)[0]
        try:
            sockets.append((address, listening_socket(address, inherited)))
        except OSError as error:
            raise ConfigError(f"{kind}: cannot listen at {address}: {error.strerror or error}") from error
    if kind == "http":
        # imported here, because the HTTP stack would cost KV and DCP processes memory
        from mirror.serve.http.server import HttpServer
        from mirror.supervise.status import stored_status

        http = HttpServer(settings, sockets, stored_status, SystemClock())
        await http.start()
        work: Work = http
    else:
        serving = (DcpServing if kind == "dcp" else KvServing)(
            settings, sockets, start.revision, bytes.fromhex(start.login_secret)
        )
        await serving.start()
        work = serving
    gc.collect()
    gc.freeze()  # else each full collection takes 10 to 40 ms for the imported modules
    return work


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], open_server))
