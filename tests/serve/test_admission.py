"""Connections without a login: their number, how long they last, and what they cost the others."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from mirror.config import Settings
from mirror.errors import ConfigError
from mirror.serve.access.tls import server_tls
from mirror.server.admission import (
    LOCAL,
    Acceptor,
    Admission,
    Slot,
    peer_of,
    raise_descriptor_limit,
)
from mirror.server.listener import Address
from mirror.server.turns import Turns
from tests.oracle import kv_client
from tests.serve.dcp_rig import until
from tests.serve.http_site import make_certificate
from tests.serve.kv_rig import WAIT_S, Client, Endpoint, NoStrangers, Store, serving

Contexts = tuple[ssl.SSLContext, ssl.SSLContext]
BEGUN = b"\x16\x03\x01\x02\x00"
"""The first bytes of a TLS handshake."""


@pytest.fixture
def store(store: Store) -> Store:
    store.put(b"a", b"value", 1)
    return store


@pytest.fixture
def certificate(tmp_path: Path) -> Contexts:
    """Contexts of the server and of a client that trusts it."""
    cert, key = make_certificate(tmp_path)
    context = server_tls(Settings(listen_tls_cert_file=cert, listen_tls_key_file=key))
    assert context is not None
    return context, ssl.create_default_context(cafile=cert)


async def silent(endpoint: Endpoint, count: int) -> list[Client]:
    return [await endpoint.connect() for _ in range(count)]


async def accepted(endpoint: Endpoint, count: int) -> None:
    await until(lambda: endpoint.server.admission.accepted_count >= count)


async def test_clients_that_do_not_log_in_do_not_displace_others(store: Store) -> None:
    async with serving(store.path, readers=NoStrangers(), reader_connections_max=40) as endpoint:
        first = await endpoint.sdk()
        others = await silent(endpoint, 100)
        await accepted(endpoint, 101)
        admission = endpoint.server.admission
        assert admission.pending_count == admission.pending_max == 16
        assert len(admission._open) == 17
        newest = await endpoint.sdk()
        for client in (first, newest):
            assert (await client.get(b"\0a", vbid=endpoint.bucket.view.vbid_of(b"a"))).value == b"value"
        assert await others[0].receive() is None, "the oldest ones were closed"
        assert await others[-1].alive()
        assert endpoint.server.status()["kv_dropped"] == admission.evicted_count == 85


async def test_connections_of_logged_in_clients_are_not_closed_for_others(store: Store) -> None:
    async with serving(store.path, reader_connections_max=3) as endpoint:
        inside = [await endpoint.connect() for _ in range(3)]
        for client in inside:
            assert await client.alive()
        for _ in range(3):
            assert await (await endpoint.connect()).receive() is None
        assert endpoint.server.admission.rejected_count == 3
        for client in inside:
            assert await client.alive()


async def test_a_client_that_does_not_log_in_is_disconnected_even_if_it_sends(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(store.path, readers=NoStrangers()) as endpoint:
        inside = await endpoint.sdk()
        monkeypatch.setattr("mirror.server.admission.LOGIN_TIMEOUT_S", 0.1)
        outside = await endpoint.connect()
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionError):
                while await outside.alive():
                    pass
        assert endpoint.server.admission.evicted_count == 1
        assert len(endpoint.server.admission._open) == 1
        assert await inside.alive()


async def test_a_first_request_counts_as_a_login_if_none_is_needed(endpoint: Endpoint) -> None:
    asking = await endpoint.connect()
    await accepted(endpoint, 1)
    (slot,) = endpoint.server.admission._open
    assert (slot.pending, slot.deadline is None) == (True, False)
    assert await asking.alive()
    assert (slot.pending, slot.deadline is None) == (False, True)


async def test_connections_are_counted_before_their_tls_handshake(
    store: Store, certificate: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handshake's buffers are 300 KiB: 20,000 silent connections once took 6.2 GB."""
    monkeypatch.setattr("mirror.server.admission.LOGIN_TIMEOUT_S", 600)
    tls, trusting = certificate
    async with serving(store.path, addresses=(Address(tls=True),), tls=tls, reader_connections_max=40) as endpoint:
        await silent(endpoint, 100)
        await accepted(endpoint, 100)
        admission = endpoint.server.admission
        assert len(admission._open) == admission.pending_count == 16
        assert not endpoint.server.connections
        newest = await endpoint.connect(ssl=trusting, server_hostname="localhost")
        assert await newest.alive()


async def test_an_interrupted_handshake_frees_its_memory(store: Store, certificate: Contexts) -> None:
    """Without garbage collection, which comes too late: half a gigabyte of buffers was waiting for it."""
    tls, _ = certificate
    async with serving(store.path, addresses=(Address(tls=True),), tls=tls, reader_connections_max=40) as endpoint:
        gc.collect()
        gc.disable()
        try:
            for client in await silent(endpoint, 100):
                client.writer.write(BEGUN)
            await accepted(endpoint, 100)
            await until(lambda: any(isinstance(each, SSLProtocol) for each in gc.get_objects()))
            await silent(endpoint, 16)
            await until(lambda: sum(isinstance(each, SSLProtocol) for each in gc.get_objects()) == 0)
            assert not gc.isenabled(), "nothing else freed them"
        finally:
            gc.enable()


async def test_a_silent_client_gets_no_handshake(store: Store, certificate: Contexts) -> None:
    context, trusting = certificate
    wrap = context.wrap_bio
    begun: list[None] = []

    def wrapped(*args: Any, **more: Any) -> ssl.SSLObject:
        begun.append(None)
        return wrap(*args, **more)

    context.wrap_bio = wrapped  # type: ignore[method-assign]
    async with serving(store.path, addresses=(Address(tls=True),), tls=context) as endpoint:
        admission = endpoint.server.admission
        silent = [socket.create_connection(("127.0.0.1", endpoint.port)) for _ in range(10)]
        await until(lambda: admission.accepted_count == 10)
        assert not begun
        client = await endpoint.connect(ssl=trusting, server_hostname="localhost")
        assert await client.login() == 0
        assert len(begun) == 1
        for line in silent:
            line.close()


async def test_another_machine_gets_only_its_share() -> None:
    admission = Admission(Settings(reader_connections_max=100, reader_connections_per_peer_max=3), Turns())
    closed: list[str] = []

    def admit(peer: str) -> Slot | None:
        slot = admission.admit(peer)
        if slot is not None:
            slot.abort = lambda: closed.append(peer)
        return slot

    slots = [slot for _ in range(3) if (slot := admit("10.0.0.1"))]
    slots[1].establish()
    for _ in range(5):
        assert admit("10.0.0.1"), "for its own oldest one without a login"
    assert closed == ["10.0.0.1"] * 5
    for slot in list(admission._pending["10.0.0.1"]):
        slot.establish()
    with capture_logs() as logged:
        assert [admit("10.0.0.1") for _ in range(50)] == [None] * 50
    assert len(logged) == 1, "one line a minute"
    assert admit("10.0.0.2")
    assert all(admit(LOCAL) for _ in range(20)), "clients of this machine are not distinguished"
    slots[1].release()
    slots[1].release()
    assert admit("10.0.0.1")
    assert len(admission._open) == 3 + 1 + 20
    while admission._open:
        next(iter(admission._open)).release()
    assert not admission._by_peer
    assert not admission._pending


async def test_a_new_connection_displaces_one_of_the_largest_peer() -> None:
    admission = Admission(Settings(reader_connections_max=16), Turns())
    closed: list[str] = []
    for peer in ("10.0.0.1", *["10.0.0.2"] * 15, *["10.0.0.3"] * 3):
        slot = admission.admit(peer)
        assert slot is not None
        slot.abort = lambda peer=peer: closed.append(peer)  # type: ignore[misc]
    assert closed == ["10.0.0.2"] * 3
    for slot in list(admission._open):
        slot.release()


def test_a_quarter_of_the_connections_or_sixteen_may_be_without_a_login() -> None:
    found = [Admission(Settings(reader_connections_max=count), Turns()).pending_max for count in (1, 16, 40, 1024)]
    assert found == [1, 16, 16, 256]


def test_a_peer_is_a_machine_a_network_or_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inet, inet6 = (socket.socket(family) for family in (socket.AF_INET, socket.AF_INET6))
    one, other = socket.socketpair(socket.AF_UNIX)
    with inet, inet6, one, other:
        assert peer_of(inet, ("127.0.0.9", 1)) == peer_of(inet6, ("::1", 1, 0, 0)) == LOCAL
        assert peer_of(inet, ("10.1.2.3", 1)) == peer_of(inet6, ("::ffff:10.1.2.3", 1, 0, 0)) == "10.1.2.3"
        assert peer_of(inet6, ("::ffff:127.0.0.1", 1, 0, 0)) == LOCAL
        assert peer_of(inet6, ("2001:db8::1%eth0", 1, 0, 0)) == peer_of(inet6, ("2001:db8::f:2", 1, 0, 0))
        assert peer_of(inet6, ("2001:db8::1", 1, 0, 0)) != peer_of(inet6, ("2001:db8:0:1::1", 1, 0, 0))
        assert peer_of(one, "") == LOCAL
        monkeypatch.setattr(os, "geteuid", lambda: -1)
        assert peer_of(one, "") == f"uid {os.getuid()}"


class Exhausted:
    """A listening socket of a process without free descriptors, for some time."""

    def __init__(self, listening: socket.socket, failures: int) -> None:
        self._listening = listening
        self.failures = failures

    def accept(self) -> Any:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._listening.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listening, name)


class Greeting(asyncio.Protocol):
    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"hello")
        transport.close()

    def connection_lost(self, _error: Exception | None) -> None:
        self._slot.release()


async def test_a_failure_to_accept_is_one_line_of_log_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirror.server.admission.RETRY_S", 0.001)
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    exhausted = Exhausted(listening, 20)
    admission = Admission(Settings(), Turns())
    with capture_logs() as logged:
        acceptor = Acceptor(admission, exhausted, Greeting)  # type: ignore[arg-type]
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == b"hello"
        writer.close()
        acceptor.close()
    assert exhausted.failures == 0
    assert [(each["event"], each["error"]) for each in logged] == [
        ("connections cannot be accepted", os.strerror(errno.EMFILE))
    ]
    assert len(admission._open) == 0


def test_the_limit_of_open_files_is_raised_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (256, 4096)

    def set_limits(_which: int, new: tuple[int, int]) -> None:
        nonlocal limits
        limits = new

    monkeypatch.setattr(resource, "getrlimit", lambda _which: limits)
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    raise_descriptor_limit(Settings(), 8)
    assert limits == (1024 + 128 + 24, 4096)
    raise_descriptor_limit(Settings(reader_connections_max=10), 8)
    assert limits == (1024 + 128 + 24, 4096), "it is never lowered"
    limits = (1024, 1024)
    with pytest.raises(ConfigError, match="needs 1176 open files; a process may have 1024 here") as caught:
        raise_descriptor_limit(Settings(), 8)
    assert "reader_connections_max to 872" in caught.value.hint
    raise_descriptor_limit(Settings(reader_connections_max=872), 8)
    limits = (1024, resource.RLIM_INFINITY)
    raise_descriptor_limit(Settings(), 8)
    assert limits == (1176, resource.RLIM_INFINITY)


async def test_a_client_that_is_gone_before_it_is_accepted_does_not_affect_others(store: Store) -> None:
    async with serving(store.path) as endpoint:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", endpoint.port)) as line:
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client = await endpoint.connect()
        assert (await client.ask(kv_client.noop())).status == 0
        await accepted(endpoint, 1)
        await until(lambda: len(endpoint.server.admission._open) == 1)
