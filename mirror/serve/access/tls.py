"""TLS of the listeners: a certificate that can be replaced while they run, and users by client certificate.

If the new files are unusable, the old ones stay in force. A client certificate from a replaced authority gives no user,
even in a resumed session.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from pathlib import Path

from mirror.config import Settings
from mirror.errors import ConfigError
from mirror.log import get_logger
from mirror.serve.access.auth import Reader, Users, file_stamp
from mirror.server.session import certified_name

READ_BYTES = 16 * 1024
"""Bytes read from a connection in one step. asyncio's own 256 KiB take 7 to 25 ms if TLS records have one byte."""

log = get_logger("tls")

_Stamp = tuple[tuple[int, int, int] | None, ...]


class ListenerTls:
    def __init__(self, cert_file: Path, key_file: Path | None, client_ca_file: Path | None) -> None:
        self._cert_file = cert_file
        self._key_file = key_file
        self._client_ca_file = client_ca_file
        self._stamp = self._stamp_now()
        self._first_authorities = self._stamp[-1]
        SSLProtocol.max_size = READ_BYTES
        self.context = self._load()

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._cert_file, self._key_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"the certificate {self._cert_file} or its key cannot be used: {error}",
                hint="both must be PEM, belong together, and the key must have no passphrase",
            ) from None
        if self._client_ca_file is not None:
            try:
                context.load_verify_locations(self._client_ca_file)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(
                    f"the authorities {self._client_ca_file} cannot be used: {error}",
                    hint="give the PEM file of the authorities that sign client certificates",
                ) from None
            context.verify_mode = ssl.CERT_OPTIONAL
            context.num_tickets = 0  # a resumed session would keep the client's earlier certificate
            context.options |= ssl.OP_NO_TICKET
        context.sni_callback = self._hello  # OpenSSL calls this in each handshake, with or without SNI
        return context

    def _hello(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> int | None:
        """Use the present files for this handshake. Return an alert to end it, else None."""
        stamp = self._stamp_now()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self.context = self._load()
            except ConfigError as error:
                log.error("certificate-not-reloaded", error=str(error))
            else:
                log.info("certificate-reloaded", path=str(self._cert_file))
        connection.context = self.context
        if connection.session_reused and stamp[-1] != self._first_authorities:  # TLS 1.2 can resume by session id
            return ssl.ALERT_DESCRIPTION_CERTIFICATE_UNKNOWN
        return None

    def _stamp_now(self) -> _Stamp:
        return tuple(
            None if path is None else file_stamp(path)
            for path in (self._cert_file, self._key_file, self._client_ca_file)
        )


def server_tls(settings: Settings) -> ssl.SSLContext | None:
    """Return the TLS context of the listeners; None without a certificate. Raises ConfigError."""
    if settings.listen_tls_cert_file is None:
        if settings.listen_tls_client_ca_file is not None:
            raise ConfigError(
                "listen_tls_client_ca_file is set, and the listeners have no certificate of their own",
                hint="set listen_tls_cert_file, or leave it out",
            )
        return None
    key_file, ca_file = settings.listen_tls_key_file, settings.listen_tls_client_ca_file
    return ListenerTls(settings.listen_tls_cert_file, key_file, ca_file).context


def certified_reader(users: Users, transport: asyncio.BaseTransport) -> Reader | None:
    """Return the user whom a client's certificate names; None without a certificate or a known name."""
    certificate = transport.get_extra_info("peercert")
    name = certified_name(certificate) if certificate else None
    return users.reader(name) if name else None
