"""DNS SRV: which hosts stand behind one name; whatever DNS does, there is somewhere to begin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mirror.errors import ConfigError
from mirror.feed.cluster import discovery
from mirror.feed.cluster.discovery import first_addresses, server_of
from mirror.feed.connection.connection_string import NodeAddress, parse
from tests.feed.name_server import NameServer

NAME = parse("couchbase://u@db.example/b")


@pytest.fixture
def server() -> Iterator[NameServer]:
    records = {
        "_couchbase._tcp.db.example": ["20 9 11210 c.example.", "10 1 11210 b.example.", "10 5 12000 a.example."],
        "_couchbases._tcp.db.example": ["0 0 11207 a.example."],
    }
    with NameServer(records) as running:
        yield running


async def test_the_hosts_of_a_name_are_ordered_by_priority_and_weight(server: NameServer) -> None:
    found = await first_addresses(NAME, server.address)
    assert found == (NodeAddress("a.example", 12000), NodeAddress("b.example", 11210), NodeAddress("c.example", 11210))
    tls = parse("couchbases://u@db.example/b")
    assert await first_addresses(tls, server.address) == (NodeAddress("a.example", 11207),)


@pytest.mark.parametrize("hosts", ["db.example:11210", "db.example,b.example", "10.0.0.1", "[::1]", "localhost"])
async def test_a_host_address_causes_no_srv_query(server: NameServer, hosts: str) -> None:
    source = parse(f"couchbase://u@{hosts}/b")
    assert await first_addresses(source, server.address) == source.addresses
    assert server.queried == []


async def test_a_name_without_srv_records_is_a_host(server: NameServer) -> None:
    source = parse("couchbase://u@plain.example/b")
    assert await first_addresses(source, server.address) == source.addresses
    assert server.queried == ["_couchbase._tcp.plain.example"]


async def test_a_silent_name_server_is_given_up(server: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LOOK_UP_TIMEOUT_S", 0.1)
    server.silent = True
    assert await first_addresses(NAME, server.address) == NAME.addresses
    assert await first_addresses(NAME, "no address") == NAME.addresses


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("10.0.0.2", ("10.0.0.2", 53)),
        ("10.0.0.2:5353", ("10.0.0.2", 5353)),
        ("::1", ("::1", 53)),
        ("[::1]:5353", ("::1", 5353)),
        ("[::1]", ("::1", 53)),
    ],
)
def test_the_name_server_is_an_address_with_or_without_a_port(text: str, meant: tuple[str, int]) -> None:
    assert server_of(text) == meant


def test_a_name_server_with_an_invalid_port_is_refused() -> None:
    with pytest.raises(ConfigError, match="dns_server"):
        server_of("10.0.0.2:x")
