"""TLS: what is wrong with a certificate, a version, a port or a file of ours is one clear error with its remedy."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.config_reader import validated
from mirror.errors import ConfigError, ExitCode, TlsFailed
from mirror.feed.connection.connection_string import NodeAddress
from mirror.feed.connection.tls import Tls
from mirror.feed.connection.transport import Link, open_link
from mirror.wire import frame as fr
from mirror.wire.constants import Opcode, Status
from tests.feed.authority import Authority, Gatekeeper
from tests.feed.scripted_node import ScriptedNode


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def settings_for(authority: Authority, **more: object) -> Settings:
    return validated({"tls_ca_file": authority.ca_file, **more})


async def connect(node: ScriptedNode | Gatekeeper, settings: Settings, host: str = "localhost") -> Link:
    return await open_link(NodeAddress(host, node.port), tls=Tls.of(settings), timeout_s=10, clock=SystemClock())


async def refusal(node: ScriptedNode | Gatekeeper, settings: Settings, host: str = "localhost") -> TlsFailed:
    """Connect, ask, and return the error. With TLS 1.3 the node judges our certificate after the handshake."""
    with pytest.raises(TlsFailed) as caught:
        await (await connect(node, settings, host)).request(Opcode.NOOP, timeout_s=10)
    return caught.value


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_a_certificate_of_a_known_authority_and_name_is_accepted(authority: Authority, host: str) -> None:
    async with ScriptedNode(ssl=authority.node_context("localhost", "127.0.0.1")) as node:
        link = await connect(node, settings_for(authority), host)
        assert link.secure
        assert (await link.request(Opcode.NOOP, timeout_s=10)).status == Status.SUCCESS
        link.close()


async def test_a_closed_connection_sends_close_notify(authority: Authority) -> None:
    """Servers log its absence as an error."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> bytes:
            plain, _ = listening.accept()
            context = authority.node_context("127.0.0.1")
            with context.wrap_socket(plain, server_side=True, suppress_ragged_eofs=False) as secure:
                secure.settimeout(30)
                return secure.recv(1)

        serving = asyncio.create_task(asyncio.to_thread(serve))
        address = NodeAddress("127.0.0.1", listening.getsockname()[1])
        tls = Tls.of(settings_for(authority))
        (await open_link(address, tls=tls, timeout_s=10, clock=SystemClock())).close()
        assert await serving == b""


async def test_an_unknown_authority_is_refused_with_its_setting(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    async with ScriptedNode(ssl=authority.node_context("localhost")) as node:
        for settings, where in ((Settings(), "of this machine"), (settings_for(other), "other.pem")):
            error = await refusal(node, settings)
            assert where in error.what
            assert "tls_ca_file" in error.hint


async def test_a_certificate_for_another_name_is_refused(authority: Authority) -> None:
    async with ScriptedNode(ssl=authority.node_context("db.example")) as node:
        for host in ("localhost", "127.0.0.1"):
            error = await refusal(node, settings_for(authority), host)
            assert f"not for the name {host}" in error.what
            assert "name of the certificate" in error.hint


async def test_an_expired_certificate_is_refused(authority: Authority) -> None:
    async with ScriptedNode(ssl=authority.node_context("localhost", days=-1)) as node:
        error = await refusal(node, settings_for(authority))
    assert "expired" in error.what


async def test_a_tls_version_that_is_too_old_is_refused(authority: Authority) -> None:
    context = authority.node_context("localhost")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with Gatekeeper(context) as node:
        error = await refusal(node, settings_for(authority, tls_minimum_version="1.3"))
        assert "no allowed TLS version (at least 1.3)" in error.what
        (await connect(node, settings_for(authority))).close()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_missing_or_refused_client_certificate_is_one_error(
    authority: Authority, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    context = authority.node_context("localhost", demand=True)
    context.minimum_version = context.maximum_version = version
    async with Gatekeeper(context) as node:
        error = await refusal(node, settings_for(authority))
        assert "client certificate" in error.what
        assert "tls_client_cert_file" in error.hint
        stranger, key = Authority(tmp_path, "strangers").sign(into="stranger", common_name="demo")
        ours = settings_for(authority, tls_client_cert_file=stranger, tls_client_key_file=key)
        error = await refusal(node, ours)
        assert "authority of our client certificate" in error.what
        assert "stranger.pem" in error.hint
        cert, key = authority.sign(into="client", common_name="demo")
        link = await connect(node, settings_for(authority, tls_client_cert_file=cert, tls_client_key_file=key))
        assert (await link.request(Opcode.NOOP, timeout_s=10)).status == Status.SUCCESS
        link.close()


async def test_an_expired_client_certificate_is_reported(authority: Authority) -> None:
    cert, key = authority.sign(into="client", common_name="demo", days=-1)
    async with Gatekeeper(authority.node_context("localhost", demand=True)) as node:
        error = await refusal(node, settings_for(authority, tls_client_cert_file=cert, tls_client_key_file=key))
    assert "our client certificate has expired" in error.what


async def test_a_node_that_closes_the_connection_is_retried(authority: Authority) -> None:
    """The node may be starting, so the mirror retries; the hint names the other causes."""
    context = authority.node_context("localhost")
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with ScriptedNode(ssl=context) as node:
        error = await refusal(node, settings_for(authority, tls_minimum_version="1.3"))
    assert error.retryable
    assert "hung up during the TLS handshake" in error.what
    assert "at least 1.3" in error.hint
    assert "client certificate" in error.hint


async def test_a_port_without_tls_is_an_error_with_the_tls_port(authority: Authority) -> None:
    async with ScriptedNode() as node:
        error = await refusal(node, settings_for(authority))
        assert "hung up during the TLS handshake" in error.what
        assert "11207" in error.hint
        node.greeting = b"SSH-2.0-OpenSSH_9.2\r\n"
        assert "does not speak TLS" in (await refusal(node, settings_for(authority))).what


def test_a_tls_failure_is_retried_only_if_the_node_closed_the_connection() -> None:
    gone = Tls.of(Settings()).failure(ssl.SSLEOFError(8, "EOF occurred in violation of protocol"), "h:1")
    assert gone.retryable
    strange = Tls.of(Settings()).failure(ssl.SSLError(1, "something new"), "h:1")
    assert "something new" in strange.what
    assert not strange.retryable
    assert strange.exit_code == ExitCode.REFUSED


def test_unusable_files_are_named_with_their_setting(authority: Authority, tmp_path: Path) -> None:
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("hello\n")
    cert, key = authority.sign("localhost")
    other_cert, _ = authority.sign("localhost", into="other")
    encrypted = tmp_path / "encrypted.key"
    loaded = load_pem_private_key(key.read_bytes(), None)
    encrypted.write_bytes(
        loaded.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"passphrase"))
    )
    cases: list[tuple[dict[str, Path], str, str]] = [
        ({"tls_ca_file": tmp_path / "absent.pem"}, "tls_ca_file", "No such file"),
        ({"tls_ca_file": tmp_path}, "tls_ca_file", ""),
        ({"tls_ca_file": nonsense}, "tls_ca_file", "no certificate"),
        ({"tls_client_cert_file": tmp_path / "absent.pem"}, "tls_client_cert_file", "No such file"),
        ({"tls_client_cert_file": nonsense}, "tls_client_cert_file", "no"),
        (
            {"tls_client_cert_file": cert, "tls_client_key_file": tmp_path / "absent.key"},
            "tls_client_key_file",
            "No such file",
        ),
        ({"tls_client_cert_file": other_cert, "tls_client_key_file": key}, "tls_client_key_file", "does not belong"),
        ({"tls_client_cert_file": cert, "tls_client_key_file": encrypted}, "tls_client_key_file", "encrypted"),
    ]
    for files, setting, why in cases:
        with pytest.raises(ConfigError) as caught:
            Tls.of(validated(files))
        assert setting in caught.value.what
        assert why in caught.value.what
        assert str(files[setting]) in caught.value.what
        assert caught.value.exit_code == ExitCode.USAGE


async def test_replaced_files_are_used_from_the_next_connection_on(authority: Authority, tmp_path: Path) -> None:
    settings = settings_for(authority)
    (tmp_path / "second").mkdir()
    second = Authority(tmp_path / "second")
    async with ScriptedNode(ssl=second.node_context("localhost")) as node:
        await refusal(node, settings)
        authority.ca_file.write_bytes(second.ca_file.read_bytes())
        (await connect(node, settings)).close()


async def test_a_connection_that_requires_tls_sends_only_a_noop_in_plain_text(authority: Authority) -> None:
    """To a port that speaks none, or breaks the handshake off, as a machine in the middle may do: a NOOP on another
    connection finds out what it speaks, and names no user.
    """
    probe = fr.encode(fr.request(Opcode.NOOP, opaque=1))
    for greeting in (b"", fr.encode(fr.response(fr.request(Opcode.HELLO))), b"\x15\x03\x01\x00\x02\x02\x46"):
        received: list[bytes] = []

        async def listen(
            reader: asyncio.StreamReader,
            writer: asyncio.StreamWriter,
            received: list[bytes] = received,
            greeting: bytes = greeting,
        ) -> None:
            received.append(await reader.read(65536))
            writer.write(greeting)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            writer.close()

        server = await asyncio.start_server(listen, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(TlsFailed):
                await open_link(
                    NodeAddress("localhost", port),
                    tls=Tls.of(settings_for(authority)),
                    timeout_s=10,
                    clock=SystemClock(),
                )
        assert received[0][:2] == b"\x16\x03", "a handshake"
        assert all(data == probe for data in received[1:]), received
