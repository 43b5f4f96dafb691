"""DNS SRV: which hosts stand behind one name; whatever DNS does, there is somewhere to begin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mirror.feed.cluster import discovery
from mirror.feed.cluster.discovery import first_addresses
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
    found = await first_addresses(NAME)
    assert found == (NodeAddress("a.example", 12000), NodeAddress("b.example", 11210), NodeAddress("c.example", 11210))
    tls = parse("couchbases://u@db.example/b")
    assert await first_addresses(tls) == (NodeAddress("a.example", 11207),)


@pytest.mark.parametrize("hosts", ["db.example:11210", "db.example,b.example", "10.0.0.1", "[::1]", "localhost"])
async def test_a_host_address_causes_no_srv_query(server: NameServer, hosts: str) -> None:
    source = parse(f"couchbase://u@{hosts}/b")
    assert await first_addresses(source) == source.addresses
    assert server.queried == []


async def test_a_name_without_srv_records_is_a_host(server: NameServer) -> None:
    source = parse("couchbase://u@plain.example/b")
    assert await first_addresses(source) == source.addresses
    assert server.queried == ["_couchbase._tcp.plain.example"]


async def test_a_silent_name_server_is_given_up(server: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LOOK_UP_TIMEOUT_S", 0.1)
    server.silent = True
    assert await first_addresses(NAME) == NAME.addresses
