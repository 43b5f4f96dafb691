"""TLS on the mirror's KV, DCP and HTTP listeners: clients with certificates, and certificates exchanged meanwhile."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from couchbase.auth import Authenticator, CertificateAuthenticator, PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.options import ClusterOptions

from mirror.config import Settings
from mirror.config_reader import validated
from mirror.errors import ConfigError
from mirror.feed.read.reader import Position, Snapshot, SourceReader
from mirror.serve.access.auth import FileUsers, entry_of
from mirror.serve.access.tls import server_tls
from mirror.server.listener import Address
from mirror.wire import frame as fr
from mirror.wire.constants import Opcode, Status
from tests.feed.authority import Authority
from tests.serve.dcp_rig import serving_dcp
from tests.serve.http_site import make_certificate, serving_http
from tests.serve.kv_rig import WAIT_S, Client, Store, serving, with_users

NAMES = ("localhost", "127.0.0.1")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@dataclass
class Ports:
    """The addresses of the three listeners, all with TLS, none of them treated as local."""

    kv: int
    dcp: int
    http: int
    bucket: str
    clients: list[Client] = field(default_factory=list)

    @property
    def all(self) -> tuple[int, ...]:
        return self.kv, self.dcp, self.http

    async def connect(self, port: int, context: ssl.SSLContext) -> Client:
        self.clients.append(Client(*await asyncio.open_connection("127.0.0.1", port, ssl=context)))
        return self.clients[-1]


@asynccontextmanager
async def listening(tmp_path: Path, authority: Authority, **more: object) -> AsyncIterator[Ports]:
    """The three over one store with a document; the certificate lies in node.pem and node.key."""
    store = Store(tmp_path, vbuckets=4)
    store.put(b"key", b'{"n":1}', 1)
    store.logs()
    cert, key = authority.sign(*NAMES)
    users_file = with_users(tmp_path / "users.json", {"ann": "pw", "bob": entry_of("pw", ("shop.*",))})
    settings = validated(
        {"data": store.path, "users_file": users_file, "listen_tls_cert_file": cert, "listen_tls_key_file": key, **more}
    )
    tls = server_tls(settings)
    addresses = [Address(tls=True)]
    async with AsyncExitStack() as stack:
        users = FileUsers(users_file)
        kv = await stack.enter_async_context(serving(store.path, readers=users, addresses=addresses, tls=tls))
        dcp = await stack.enter_async_context(serving_dcp(store.path, readers=users, addresses=addresses, tls=tls))
        _, address = await stack.enter_async_context(serving_http(settings, addresses[0]))
        ports = Ports(kv.port, dcp.port, address.port, store.identity.bucket_name)
        try:
            yield ports
        finally:
            for client in ports.clients:
                await client.close()
            store.close()


def trusting(authority: Authority, client: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.ca_file))
    if client is not None:
        context.load_cert_chain(*client)
    return context


def read_by_sdk(port: int, bucket: str, login: Authenticator) -> object:
    cluster = Cluster(f"couchbases://127.0.0.1:{port}", ClusterOptions(login, enable_dns_srv=False))
    try:
        cluster.wait_until_ready(timedelta(seconds=30))
        return cluster.bucket(bucket).default_collection().get("key").content_as[dict]
    finally:
        cluster.close()


def read_by_dcp(port: int, bucket: str, user: str, **settings: object) -> list[bytes]:
    with SourceReader(
        f"couchbases://{user}127.0.0.1:{port}/{bucket}", settings=validated(settings), password="pw"
    ) as reader:
        until = reader.high_seqnos()
        items = reader.read(dict.fromkeys(until, Position()), until)
        return [document.key for item in items if isinstance(item, Snapshot) for document in item.documents()]


async def read_by_http(port: int, context: ssl.SSLContext, auth: tuple[str, str] | None = None) -> int:
    async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=context, auth=auth) as client:
        return (await client.get("/v1/collections/_default/documents/key")).status_code


async def test_the_sdk_a_dcp_reader_and_http_read_over_tls_with_a_password(
    tmp_path: Path, authority: Authority
) -> None:
    trusted = str(authority.ca_file)
    async with listening(tmp_path, authority) as ports:
        for port in (ports.kv, ports.dcp):  # the DCP port answers KV requests, too
            login = PasswordAuthenticator("ann", "pw", cert_path=trusted)
            assert await asyncio.to_thread(read_by_sdk, port, ports.bucket, login) == {"n": 1}
        assert await asyncio.to_thread(
            read_by_dcp, ports.dcp, ports.bucket, "ann@", tls_ca_file=authority.ca_file
        ) == [b"key"]  # fmt: skip
        assert await read_by_http(ports.http, trusting(authority), ("ann", "pw")) == 200


async def test_a_client_certificate_is_a_login_on_every_listener(tmp_path: Path, authority: Authority) -> None:
    trusted = str(authority.ca_file)
    cert, key = authority.sign(into="client", common_name="ann")
    async with listening(tmp_path, authority, listen_tls_client_ca_file=authority.ca_file) as ports:
        for port in (ports.kv, ports.dcp):
            login = CertificateAuthenticator(cert_path=str(cert), key_path=str(key), trust_store_path=trusted)
            assert await asyncio.to_thread(read_by_sdk, port, ports.bucket, login) == {"n": 1}
        assert await asyncio.to_thread(
            read_by_dcp, ports.dcp, ports.bucket, "",
            tls_ca_file=authority.ca_file, tls_client_cert_file=cert, tls_client_key_file=key,
        ) == [b"key"]  # fmt: skip
        assert await read_by_http(ports.http, trusting(authority, (cert, key))) == 200


async def test_a_certificate_gives_only_the_rights_of_its_user(tmp_path: Path, authority: Authority) -> None:
    limited = authority.sign(into="limited", common_name="bob")
    unknown = authority.sign(into="unknown", common_name="eve")
    strange = Authority(tmp_path, "strange").sign(into="strange", common_name="ann")
    async with listening(tmp_path, authority, listen_tls_client_ca_file=authority.ca_file) as ports:
        for client, code in ((limited, 403), (unknown, 401), (None, 401)):
            context = trusting(authority, client)
            connection = await ports.connect(ports.kv, context)
            assert (await connection.get(b"key")).status == Status.EACCESS, client
            assert await connection.login("ann", "pw") == 0, "a password is still taken"
            assert (await connection.get(b"key")).status == 0
            assert await read_by_http(ports.http, context) == code, client
            assert await read_by_http(ports.http, context, ("ann", "pw")) == 200
        for port in ports.all:
            with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
                await (await ports.connect(port, trusting(authority, strange))).reader.readexactly(1)


async def test_a_certificate_is_exchanged_while_clients_are_connected(tmp_path: Path, authority: Authority) -> None:
    """New connections see the new one on every listener, whatever the open ones do."""
    (tmp_path / "new").mkdir()
    newer = Authority(tmp_path / "new")
    old, new = trusting(authority), trusting(newer)
    async with listening(tmp_path, authority) as ports:
        before = [await ports.connect(port, old) for port in (ports.kv, ports.dcp)]
        stream = httpx.AsyncClient(base_url=f"https://127.0.0.1:{ports.http}", verify=old, auth=("ann", "pw"))
        assert (await stream.get("/v1/status")).status_code == 200
        cert, key = newer.sign(*NAMES, into="next")
        os.replace(cert.replace(tmp_path / "next.pem"), tmp_path / "node.pem")
        for port in ports.all:  # the key that belongs to it is not there yet
            await ports.connect(port, old)
        os.replace(key, tmp_path / "node.key")
        for port in ports.all:
            await ports.connect(port, new)
            with pytest.raises(ssl.SSLCertVerificationError):
                await ports.connect(port, old)
        for client in before:
            assert await client.login("ann", "pw") == 0
            assert (await client.get(b"key")).status == 0
        assert (await stream.get("/v1/status")).status_code == 200
        await stream.aclose()


async def test_a_new_authority_for_clients_applies_to_new_connections(tmp_path: Path, authority: Authority) -> None:
    (tmp_path / "new").mkdir()
    newer = Authority(tmp_path / "new")
    clients = tmp_path / "clients.pem"
    clients.write_bytes(authority.ca_file.read_bytes())
    first = trusting(authority, authority.sign(into="first", common_name="ann"))
    second = trusting(authority, newer.sign(into="second", common_name="ann"))
    async with listening(tmp_path, authority, listen_tls_client_ca_file=clients) as ports:
        open_before = await ports.connect(ports.kv, first)
        assert (await open_before.get(b"key")).status == 0
        os.replace(newer.ca_file, clients)
        assert (await (await ports.connect(ports.kv, second)).get(b"key")).status == 0
        assert await read_by_http(ports.http, second) == 200
        assert (await open_before.get(b"key")).status == 0


def status_of_get(
    port: int, context: ssl.SSLContext, session: ssl.SSLSession | None
) -> tuple[int | None, ssl.SSLSession | None]:
    """Of a GET on a connection that resumes a session; None where the handshake fails."""
    request = fr.encode(fr.request(Opcode.GET, key=b"key"))
    try:
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as connection,
        ):
            connection.settimeout(WAIT_S)
            connection.sendall(request)
            answer, kept = connection.recv(24), connection.session
            with suppress(OSError):
                connection.unwrap()  # a session is kept where its connection ends in order
            return (int.from_bytes(answer[6:8]) if answer else None), kept
    except OSError:
        return None, None


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_resumed_session_is_not_a_login_after_a_change_of_authority(
    tmp_path: Path, authority: Authority, version: ssl.TLSVersion
) -> None:
    (tmp_path / "new").mkdir()
    clients = tmp_path / "clients.pem"
    clients.write_bytes(authority.ca_file.read_bytes())
    context = trusting(authority, authority.sign(into="first", common_name="ann"))
    context.maximum_version = version
    async with listening(tmp_path, authority, listen_tls_client_ca_file=clients) as ports:
        status, session = await asyncio.to_thread(status_of_get, ports.kv, context, None)
        assert status == 0
        assert (await asyncio.to_thread(status_of_get, ports.kv, context, session))[0] == 0
        os.replace(Authority(tmp_path / "new").ca_file, clients)
        assert (await asyncio.to_thread(status_of_get, ports.kv, context, session))[0] is None


def test_certificates_are_loaded_or_refused(tmp_path: Path) -> None:
    assert server_tls(Settings()) is None
    cert, key = make_certificate(tmp_path)
    context = server_tls(Settings(listen_tls_cert_file=cert, listen_tls_key_file=key))
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    with pytest.raises(ConfigError, match=r"cannot be used"):
        server_tls(Settings(listen_tls_cert_file=key, listen_tls_key_file=cert))
    with pytest.raises(ConfigError, match=r"the authorities .* cannot be used"):
        server_tls(
            Settings(listen_tls_cert_file=cert, listen_tls_key_file=key, listen_tls_client_ca_file=tmp_path / "absent")
        )
    with pytest.raises(ConfigError, match="no certificate of their own"):
        server_tls(Settings(listen_tls_client_ca_file=cert))
