"""Certificates made for one test: an authority of its own, and what it signs."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
import threading
from pathlib import Path
from types import TracebackType

import trustme


class Authority:
    """Signs; every file lies in one folder. `ca_file` is what clients trust."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._ca = trustme.CA()
        self.ca_file = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.ca_file))

    def sign(
        self, *names: str, into: str = "node", common_name: str | None = None, days: float | None = None
    ) -> tuple[Path, Path]:
        """A certificate with these names and its key: `into`.pem and `into`.key, replaced when they are there.

        `days`: valid for so long from now; below zero it has expired. None: for as long as it can be.
        """
        since = until = None
        if days is not None:
            now = datetime.datetime.now(tz=datetime.UTC)
            since, until = now - datetime.timedelta(days=abs(days) + 1), now + datetime.timedelta(days=days)
        made = self._ca.issue_cert(*names, common_name=common_name, not_before=since, not_after=until)
        cert, key = self._folder / f"{into}.pem", self._folder / f"{into}.key"
        chain = b"".join(pem.bytes() for pem in made.cert_chain_pems)
        cert.write_bytes(chain)
        key.write_bytes(made.private_key_pem.bytes())
        return cert, key

    def node_context(self, *names: str, demand: bool = False, days: float | None = None) -> ssl.SSLContext:
        """The context of a node with a certificate for these names; `demand`: clients need one of ours, too."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.sign(*names, days=days))
        if demand:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.ca_file)
        return context


class Gatekeeper:
    """A server that speaks TLS as OpenSSL does it: what it holds against a client is said in an alert.

    (asyncio's own servers hang up without a word.) Anyone who gets in has its one request answered with success.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)

    async def __aenter__(self) -> Gatekeeper:
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        await asyncio.to_thread(self._thread.join)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.settimeout(30)
            secured = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            try:
                secured.do_handshake()
                secured.sendall(b"\x81" + secured.recv(4096)[1:])
            except OSError:
                pass
            # Read on until the client is gone: closing with unread bytes would take the alert back.
            with socket.socket(fileno=secured.detach()) as rest:
                rest.settimeout(30)
                while _received(rest):
                    pass


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(4096)
    except OSError:
        return b""
