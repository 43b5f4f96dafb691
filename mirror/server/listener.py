"""Listeners' addresses as the operator writes them, and the sockets that several processes share.

An address is `PORT`, `HOST:PORT`, `[IPV6]:PORT` or `unix:PATH`, with `tls://` before it for TLS; commas separate
several. Each process binds a TCP port for itself (SO_REUSEPORT: the kernel distributes new connections, and a dead
process loses only its own connections). The supervisor keeps each TCP port bound, from before the first process to
after the last, and never listens on it. A Unix socket is bound once, and processes inherit its descriptor.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mirror.config import Settings
from mirror.errors import ConfigError

BACKLOG = 1024

HOST_DEFAULT = "127.0.0.1"

_LOCAL_NAMES = {"localhost": "127.0.0.1", "ip6-localhost": "::1"}


@dataclass(frozen=True, slots=True)
class Address:
    host: str = HOST_DEFAULT
    port: int = 0
    path: str | None = None
    tls: bool = False

    def __str__(self) -> str:
        head = "tls://" if self.tls else ""
        if self.path is not None:
            return f"{head}unix:{self.path}"
        return f"{head}{self.authority}"

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def local(self) -> bool:
        """True if only this machine can connect."""
        if self.path is not None:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_addresses(text: str, setting: str) -> list[Address]:
    addresses = [_parse(part.strip(), setting) for part in text.split(",")]
    if len(set(addresses)) != len(addresses):
        raise ConfigError(f"{setting} names an address twice: {text}")
    return addresses


def _parse(text: str, setting: str) -> Address:
    rest = text.removeprefix("tls://")
    tls = rest != text
    if rest.startswith("unix:"):
        path = rest.removeprefix("unix:")
        if not path:
            raise _bad(text, setting, "a path is missing")
        if len(os.fsencode(path)) > 107:
            raise _bad(text, setting, "the path of a Unix socket has 107 bytes at most")
        return Address("", 0, path, tls)
    host, _, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise _bad(text, setting, "write an IPv6 address in brackets")
    if not (port.isascii() and port.isdigit() and int(port) <= 65_535):
        raise _bad(text, setting, "a port is missing")
    return Address(_LOCAL_NAMES.get(host, host) or HOST_DEFAULT, int(port), None, tls)


def _bad(text: str, setting: str, why: str) -> ConfigError:
    return ConfigError(
        f"{setting} {text!r} is not an address: {why}",
        hint="PORT, HOST:PORT, [IPV6]:PORT or unix:PATH, with tls:// before it for TLS",
    )


def check_addresses(addresses: Sequence[Address], settings: Settings, setting: str) -> None:
    """Raise ConfigError if an address lacks the TLS, certificate or users file that it needs."""
    for address in addresses:
        if address.tls and settings.listen_tls_cert_file is None:
            raise ConfigError(
                f"{setting} {address} needs a certificate",
                hint="set listen_tls_cert_file and listen_tls_key_file",
            )
        if address.local:
            continue
        if not address.tls:
            raise ConfigError(
                f"{setting} {address} can be reached from other machines, in the clear",
                hint=f"use a loopback address, a Unix socket, or tls://{address}",
            )
        if settings.users_file is None:
            raise ConfigError(
                f"{setting} {address} can be reached from other machines, and no users are set",
                hint="write a users file with `dcp-mirror user` and set users_file",
            )


@dataclass(slots=True)
class Reserved:
    """A reserved address with its actual port, and the socket bound to it."""

    address: Address
    socket: socket.socket

    @property
    def inherited(self) -> int | None:
        """The descriptor that processes inherit; None for TCP, where each process binds for itself."""
        return self.socket.fileno() if self.address.path is not None else None

    def release(self) -> None:
        self.socket.close()
        if self.address.path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.address.path)


def reserve(address: Address, setting: str) -> Reserved:
    """Reserve an address for the listening processes. Raises ConfigError if it cannot be bound."""
    try:
        if address.path is not None:
            return Reserved(address, _unix_socket(address.path))
        _tcp_socket(address, shared=False).close()  # fails if another service shares the port
        held = _tcp_socket(address)
    except OSError as error:
        raise ConfigError(
            f"{setting}: cannot listen at {address}: {error.strerror or error}",
            hint="another process may have it; choose another address or end that process",
        ) from None
    return Reserved(replace(address, port=held.getsockname()[1]), held)


def listening_socket(address: Address, inherited: int | None = None) -> socket.socket:
    """Return one process's socket at a reserved address. Raises OSError."""
    if address.path is not None:
        assert inherited is not None, "a Unix socket is bound by the supervisor"
        made = socket.socket(fileno=inherited)
    else:
        made = _tcp_socket(address)
        made.listen(BACKLOG)
    made.setblocking(False)
    return made


def _tcp_socket(address: Address, *, shared: bool = True) -> socket.socket:
    family, kind, protocol, _, place = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        made.bind(place)
    except BaseException:
        made.close()
        raise
    return made


def _unix_socket(path: str) -> socket.socket:
    _remove_left_over(path)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(path)
        # Before `listen`: until then no client can connect, whatever the mode.
        os.chmod(path, stat.S_IRUSR | stat.S_IWUSR | stat.S_IRGRP | stat.S_IWGRP)
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def _remove_left_over(path: str) -> None:
    """Remove the socket of a service that has ended. If a service still accepts there, leave it: binding then fails."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
