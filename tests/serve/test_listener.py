"""Addresses, shared ports and Unix sockets."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from mirror.config import Settings
from mirror.errors import ConfigError
from mirror.server.listener import Address, check_addresses, listening_socket, parse_addresses, reserve


@pytest.mark.parametrize(
    ("text", "address", "local"),
    [
        ("11210", Address("127.0.0.1", 11210), True),
        ("localhost:0", Address("127.0.0.1", 0), True),
        ("10.0.0.1:5", Address("10.0.0.1", 5), False),
        ("0.0.0.0:5", Address("0.0.0.0", 5), False),
        ("[::1]:5", Address("::1", 5), True),
        ("tls://[::]:5", Address("::", 5, None, True), False),
        ("tls://mirror.example:5", Address("mirror.example", 5, None, True), False),
        ("unix:/run/kv.sock", Address("", 0, "/run/kv.sock"), True),
    ],
)
def test_an_address_is_parsed_to_its_parts(text: str, address: Address, local: bool) -> None:
    assert parse_addresses(text, "kv") == [address]
    assert address.local is local
    assert parse_addresses(str(address), "kv") == [address]


def test_several_addresses_are_separated_by_commas() -> None:
    found = parse_addresses("11210, tls://0.0.0.0:11207", "kv")
    assert [str(address) for address in found] == ["127.0.0.1:11210", "tls://0.0.0.0:11207"]


@pytest.mark.parametrize(
    "text", ["", "host", "host:", "host:x", "host:70000", "::1:5", "unix:", "unix:/" + "x" * 107, "5,5"]
)
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^kv "):
        parse_addresses(text, "kv")


def test_an_address_for_other_machines_needs_tls_and_users(tmp_path: Path) -> None:
    open_door, secure = parse_addresses("0.0.0.0:1", "kv"), parse_addresses("tls://0.0.0.0:1", "kv")
    pem, users = tmp_path / "pem", tmp_path / "users"
    check_addresses(parse_addresses("1,unix:/x", "kv"), Settings(), "kv")
    with pytest.raises(ConfigError, match="certificate"):
        check_addresses(secure, Settings(), "kv")
    with pytest.raises(ConfigError, match="no users"):
        check_addresses(secure, Settings(listen_tls_cert_file=pem), "kv")
    with pytest.raises(ConfigError, match="in the clear"):
        check_addresses(open_door, Settings(users_file=users), "kv")
    check_addresses(secure, Settings(listen_tls_cert_file=pem, users_file=users), "kv")


def test_several_processes_share_a_port_that_others_cannot_take() -> None:
    held = reserve(Address(), "kv")
    assert held.address.port > 0
    assert held.inherited is None
    with pytest.raises(ConnectionRefusedError):  # the one that holds it does not listen
        socket.create_connection((held.address.host, held.address.port))
    first, second = listening_socket(held.address), listening_socket(held.address)
    with pytest.raises(ConfigError, match="cannot listen"):
        reserve(held.address, "kv")
    first.close()
    with socket.create_connection((held.address.host, held.address.port)):
        second.setblocking(True)
        second.accept()[0].close()
    second.close()
    held.release()


def test_a_unix_socket_is_bound_once_and_inherited(tmp_path: Path) -> None:
    path = str(tmp_path / "kv.sock")
    held = reserve(Address("", 0, path), "kv")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
    with pytest.raises(ConfigError, match="cannot listen"):
        reserve(held.address, "kv")
    inherited = os.dup(held.inherited or -1)
    server = listening_socket(held.address, inherited)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        server.setblocking(True)
        server.accept()[0].close()
    server.close()
    held.release()
    assert not os.path.exists(path)


def test_a_stale_socket_is_replaced_and_other_files_are_not(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    reserve(Address("", 0, str(path)), "kv").release()
    path.write_text("precious")
    with pytest.raises(ConfigError):
        reserve(Address("", 0, str(path)), "kv")
    assert path.read_text() == "precious"
