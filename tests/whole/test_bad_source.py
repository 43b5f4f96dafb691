"""A source that misbehaves: each kind of nonsense ends one connection, is said in one line, and harms nothing else.

A mirror follows a live load from two nodes. One of them sends garbage, or takes the password no more. The other node's
vbuckets go on; what was published stays as it was; when the trouble is over everything is level again, key by key. One
service meets all of that in turn. `tests/feed/test_consumer.py` has connections that break.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mirror.sandbox import SandboxCluster, SandboxThread
from mirror.wire import frame as fr
from mirror.wire.constants import Opcode
from tests.cli.conftest import call
from tests.crash.judge import judge, wait_progress
from tests.crash.load import Load
from tests.crash.service import Service, until

VBUCKETS = 8
# Three groups, so that each of the two workers has vbuckets at both nodes.
FLAGS = ("--groups", "3", "--workers", "2", "--set", "noop_interval_s=0.3", "--set", "retry_delay_max_ms=500")


pytestmark = pytest.mark.xdist_group("bad source")  # they share a service


@pytest.fixture(scope="module")
def source() -> Iterator[SandboxThread]:
    cluster = SandboxCluster(nodes=2, vbuckets=VBUCKETS, seed=7)
    load = Load(cluster, 7, rate=150, keys=400)
    with SandboxThread(cluster) as thread:
        thread.call(load.write, 500)
        writing = thread.call(lambda: asyncio.get_running_loop().create_task(load.run()))
        yield thread
        assert not writing.done(), writing
        thread.call(writing.cancel)


@pytest.fixture(scope="module")
def shared_service(source: SandboxThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(source.connection_string, tmp_path_factory.mktemp("bad source") / "data", *FLAGS) as running:
        running.start()
        running.wait_workers(2)
        wait_progress(running.data, range(VBUCKETS), "the mirror to follow")
        yield running
        assert running.terminate() == 0
        judge(source.cluster, running.data, live=False)


@pytest.fixture
def service(source: SandboxThread, shared_service: Service) -> Iterator[Service]:
    """The service, with what it has met before; after each test it is level again, and no worker was restarted."""
    yield shared_service
    source.call(source.cluster.faults.clear)
    wait_progress(shared_service.data, range(VBUCKETS), "every vbucket to go on")
    judge(source.cluster, shared_service.data, live=True)
    workers = shared_service.wait_workers(2)
    assert not any(row["restarts"] for row in workers.values()), "a worker died of it"
    assert not any(row["counters"]["requested_again_bytes"] for row in workers.values())
    assert not shared_service.tracebacks()


def vbids_at(source: SandboxThread, node: int) -> list[int]:
    return [vbid for vbid, owner in enumerate(source.cluster.bucket.map.owners) if owner == node]


def complaints(service: Service) -> list[str]:
    """Lines of the log above information."""
    return [line for line in service.log.read_text().splitlines() if "[error" in line or "[warning" in line]


def header(opcode: int, *, body: int, key: int = 0, extras: int = 0, magic: int = 0x80) -> bytes:
    return fr.HEADER.pack(magic, opcode, key, extras, 0, 0, body, 0, 0)


GARBAGE = {
    "text of another protocol": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" * 3,
    "zeros": bytes(1000),
    "ones": b"\xff" * 1000,
    "a length of four gigabytes": header(int(Opcode.DCP_MUTATION), body=2**32 - 1, key=5, extras=31),
    "a key longer than its body": header(int(Opcode.DCP_MUTATION), body=40, key=500, extras=31) + bytes(40),
    "a mutation with the extras of nothing": header(int(Opcode.DCP_MUTATION), body=40, key=5, extras=3) + bytes(40),
}


CHEAP = ("text of another protocol", "a length of four gigabytes", "a mutation with the extras of nothing")


@pytest.mark.parametrize(
    "garbage", [pytest.param(name, marks=() if name in CHEAP else pytest.mark.ci) for name in GARBAGE]
)
def test_garbage_ends_only_its_own_connection(source: SandboxThread, service: Service, garbage: str) -> None:
    def send_garbage() -> int:
        hit = source.cluster.faults.connections(node=0)
        for connection in hit:
            connection.link.send(GARBAGE[garbage])
        return len(hit)

    until("both workers' connections", lambda: len(source.call(source.cluster.faults.connections, node=0)) == 2)
    before = len(complaints(service))
    assert source.call(send_garbage) == 2
    until("the garbage to be complained of", lambda: len(complaints(service)) > before)
    wait_progress(service.data, vbids_at(source, 1), "the other node's vbuckets to go on")
    node = source.cluster.nodes[0].port
    assert any(str(node) in line for line in complaints(service)[before:]), complaints(service)


def test_a_message_with_an_unknown_opcode_is_ignored(source: SandboxThread, service: Service) -> None:
    """A valid frame with an unknown opcode does no harm, so not even the connection ends."""
    before = source.call(source.cluster.faults.connections, node=0)
    for connection in before:
        source.call(connection.link.send, header(0xEE, body=3) + b"abc")
    wait_progress(service.data, vbids_at(source, 0), "the vbuckets of the node to go on")
    assert source.call(source.cluster.faults.connections, node=0) == before


def test_a_password_changed_at_the_source_is_reported_in_the_status(source: SandboxThread, service: Service) -> None:
    source.call(source.cluster.add_user, "demo", "another")
    source.call(source.cluster.faults.cut, node=0)

    def reported() -> bool:
        status = service.status()
        rows = status["vbuckets"] if status else []
        return any("password" in str(row["last_error"]) for row in rows if row["vbid"] in vbids_at(source, 0))

    until("the status to say that the password is wrong", reported)
    wait_progress(service.data, vbids_at(source, 1), "the other node's vbuckets to go on")
    source.call(source.cluster.add_user, "demo", "demo")


@pytest.fixture
def babbler() -> Iterator[Callable[[bytes], int]]:
    """A server that answers every connection with the same bytes; returns its port."""
    listeners: list[socket.socket] = []

    def start(answer: bytes) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(100)
                    connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        return int(listener.getsockname()[1])

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.mark.parametrize(
    "answer",
    [b"", b"SSH-2.0-OpenSSH_9.2\r\n", pytest.param(b"\x81" + os.urandom(8000), marks=pytest.mark.ci)],
    ids=["nothing", "SSH", "random"],
)
def test_a_server_that_is_not_couchbase_is_reported_by_its_address(
    babbler: Callable[[bytes], int], tmp_path: Path, answer: bytes
) -> None:
    port = babbler(answer)
    url = f"couchbase://demo@127.0.0.1:{port}/demo"
    limit = ("--set", "bootstrap_timeout_s=0.3", "--set", "request_timeout_s=1")
    result = call("run", "--source", url, "--data", tmp_path / "data", "--until-caught-up", *limit)
    assert result.code == 1
    assert str(port) in result.complaint
    assert not (tmp_path / "data" / "mirror.json").exists()
