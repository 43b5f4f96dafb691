"""The DCP endpoint of a process: listeners with TLS and users, limits, and what it counts."""

from __future__ import annotations

import ssl
from pathlib import Path

from mirror.serve.access.auth import FileUsers, entry_of
from mirror.serve.listener import Address
from mirror.wire import events as ev
from mirror.wire.constants import Status
from storage.model import Collection, Seqno
from tests.serve.dcp_rig import serving_dcp, system_event, until
from tests.serve.http_site import make_certificate
from tests.serve.kv_rig import DEFAULT, Store, with_users

VBUCKETS = 1


async def test_over_tls_with_a_user_of_the_file_who_may_read_one_collection(store: Store, tmp_path: Path) -> None:
    users_file = with_users(tmp_path / "users.json", {"ann": entry_of("pw", ("shop.carts",))})
    carts = Collection(9, 8, "carts", Seqno(1))
    system_event(store, 1, ev.CollectionCreated(1, 8, 9, "carts"), DEFAULT, carts)
    store.put(b"c", b"cart", 2, cid=9)
    certificate, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    addresses = (Address(tls=True),)
    async with serving_dcp(store.path, readers=FileUsers(users_file), addresses=addresses, tls=context) as endpoint:
        trusting = ssl.create_default_context(cafile=str(certificate))
        trusting.check_hostname = False
        client = await endpoint.connect(ssl=trusting)
        assert (await client.say(ev.DcpOpen(b"x", 1))).status == Status.EACCESS
        assert await client.login("ann", "wrong") == Status.AUTH_ERROR
        assert await client.login("ann", "pw") == 0
        await client.open("orders", login=False)
        assert (await client.stream(0)).status == Status.EACCESS
        assert (await client.stream(0, value=b'{"collections":["9"]}')).status == 0
        assert [each.key for each in await client.until_end(2) if isinstance(each, ev.Mutation)] == [b"\x09c"]


async def test_what_the_users_file_takes_from_a_reader_his_streams_lose(store: Store, users_file: Path) -> None:
    ann, bob = entry_of("pw"), entry_of("pw")

    def allow(*patterns: str) -> None:
        with_users(users_file, {"ann": ann | {"read": patterns}, "bob": bob})

    allow("*")
    carts = Collection(9, 8, "carts", Seqno(1))
    system_event(store, 1, ev.CollectionCreated(1, 8, 9, "carts"), DEFAULT, carts)
    async with serving_dcp(store.path, readers=FileUsers(users_file)) as endpoint:
        clients = []
        for name, value in (("ann", b""), ("ann", b'{"collections":["9"]}'), ("bob", b"")):
            client = await endpoint.connect()
            assert await client.login(name, "pw") == 0
            await client.open("orders", name=f"{name}{len(value)}", login=False)
            assert (await client.stream(0, value=value)).status == 0
            await client.until_end(1)
            clients.append(client)
        allow("shop.carts", "_default.other")
        assert await clients[0].event() == ev.StreamEnd(0, 8, opaque=0x77)
        assert (await clients[0].stream(0)).status == Status.EACCESS
        store.put(b"c", b"cart", 2, cid=9)
        await clients[1].until_end(2)
        await clients[2].until_end(2)
        with_users(users_file, {"bob": bob})
        assert await clients[1].event() == ev.StreamEnd(0, 8, opaque=0x77)
        assert (await clients[1].stream(0)).status == Status.EACCESS
        assert await clients[2].login("bob", "wrong") != 0
        assert await clients[2].event() == ev.StreamEnd(0, 8, opaque=0x77), "who failed to log in again is nobody"
        assert (await clients[2].stream(0)).status == Status.EACCESS


async def test_a_name_belongs_to_the_user_who_opened_a_connection(store: Store, tmp_path: Path) -> None:
    """A user of one collection once cut off another's connection by taking its name."""
    users_file = with_users(tmp_path / "users.json", {"ann": "pw", "bob": "pw"})
    async with serving_dcp(store.path, readers=FileUsers(users_file)) as endpoint:
        clients = []
        for user in ("ann", "bob", "ann"):
            client = await endpoint.connect()
            assert await client.login(user, "pw") == 0
            await client.open("orders", login=False)
            clients.append(client)
        assert await clients[0].receive() is None
        for client in clients[1:]:
            assert await client.alive()
        for client in clients[1:]:
            await client.close()
        await until(lambda: not endpoint.server._names)


async def test_stopping_lets_go_of_everybody(store: Store) -> None:
    async with serving_dcp(store.path) as endpoint:
        client = await endpoint.client()
        assert (await client.stream(0)).status == 0
        await endpoint.server.stop(0.2)
        assert await client.receive() is None
        assert endpoint.server.dcp_counters.streams_closed == 1
