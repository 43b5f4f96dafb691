"""The way in: the first node that answers, HELLO, authentication, the bucket, its cluster map.

Knows the order of the handshake and what each refusal means to the operator; must never know streams or the store.
Invariants: features are only used where HELLO granted them; the password is read afresh for each handshake and goes
over the wire in the clear only where TLS or a setting allows it; every refusal is one typed error with a remedy.
Sources: protocol facts 2.2; kv_engine docs/BinaryProtocol.md (HELLO, SASL), docs/sasl.md.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from mirror.clock import Clock
from mirror.config import PasswordSource, Settings
from mirror.errors import (
    AuthRejected,
    BucketMissing,
    ClusterError,
    ConfigError,
    ConnectFailed,
    HandshakeFailed,
    NotSupported,
    PrivilegeMissing,
)
from mirror.feed.connection_string import Address, ConnectionString
from mirror.feed.sasl import ScramClient, choose_mechanism, plain_encode
from mirror.feed.transport import Link, Opaques, open_link, tls_context
from mirror.ingest.topology import ClusterMap, MalformedClusterMap, network_of, parse_cluster_map
from mirror.wire.codec_dcp import decode_all_vb_seqnos
from mirror.wire.constants import Feature, Opcode, Status, VbucketState, status_name
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.frame import Frame

FEATURES = (
    Feature.XATTR,
    Feature.XERROR,
    Feature.SELECT_BUCKET,
    Feature.SNAPPY,
    Feature.JSON,
    Feature.COLLECTIONS,
    Feature.TCP_NODELAY,
)
"""What we ask for. Of these only SELECT_BUCKET is indispensable."""

PROPOSED_NAME = "dcp-mirror"
SASL_ROUNDS_MAX = 4
"""SCRAM needs two; more is a server that plays for time."""


@dataclass(frozen=True, slots=True)
class Access:
    """How to get into a source: who we are, over what, and how long we wait."""

    source: ConnectionString
    password: PasswordSource
    settings: Settings

    @staticmethod
    def of(source: ConnectionString, settings: Settings) -> Access:
        """The access that the settings describe."""
        return Access(source, PasswordSource.of(settings), settings)


@dataclass(frozen=True, slots=True)
class Handshake:
    """What a node granted."""

    features: frozenset[int]

    @property
    def collections(self) -> bool:
        """Keys carry their collection id."""
        return Feature.COLLECTIONS in self.features


async def enter(
    access: Access, address: Address, clock: Clock, *, name: str = "", opaques: Opaques | None = None
) -> tuple[Link, Handshake]:
    """Connect to a node, log in and select the bucket. Raises ClusterError or ConfigError; then nothing stays open."""
    settings = access.settings
    tls = None
    if access.source.tls:
        tls = tls_context(
            _text(settings.tls_ca_file),
            _text(settings.tls_client_cert_file),
            _text(settings.tls_client_key_file),
            settings.tls_minimum_version,
        )
    link = await open_link(address, tls=tls, timeout_s=settings.connect_timeout_s, clock=clock, opaques=opaques)
    try:
        features = await _hello(link, settings, name or clock.unique())
        await _authenticate(link, access)
        await _select_bucket(link, access)
    except BaseException:
        link.close()
        raise
    return link, Handshake(features)


async def fetch_map(link: Link, settings: Settings, *, timeout_s: float | None = None) -> ClusterMap:
    """Ask a node for the bucket's cluster map. Raises ClusterError."""
    answer = await link.request(Opcode.GET_CLUSTER_CONFIG, timeout_s=timeout_s or settings.request_timeout_s)
    if answer.status != Status.SUCCESS:
        raise HandshakeFailed(
            f"{link.address} gives no cluster map: {status_name(answer.status)}",
            hint="the node is not ready yet, or not part of the cluster any more",
            node=str(link.address),
        )
    return read_map(answer.value, link.address, settings)


def read_map(config: bytes, address: Address, settings: Settings) -> ClusterMap:
    """Parse a cluster map that the node at `address` sent. Raises HandshakeFailed."""
    try:
        network = network_of(config, address.host) if settings.network == "auto" else settings.network
        return parse_cluster_map(config, address.host, network=network)
    except MalformedClusterMap as error:
        raise HandshakeFailed(f"{address} sent a cluster map that makes no sense: {error}", node=str(address)) from None


async def fetch_high_seqnos(link: Link, settings: Settings) -> dict[int, int]:
    """Ask a node for the high seqnos of its active vbuckets: {vbid: seqno}. Raises ClusterError."""
    answer = await link.request(
        Opcode.GET_ALL_VB_SEQNOS,
        extras=struct.pack(">I", VbucketState.ACTIVE),
        timeout_s=settings.request_timeout_s,
    )
    if answer.status != Status.SUCCESS:
        raise HandshakeFailed(
            f"{link.address} gives no high seqnos: {status_name(answer.status)}", node=str(link.address)
        )
    try:
        return dict(decode_all_vb_seqnos(answer.value))
    except RemoteProtocolError as error:
        raise HandshakeFailed(f"{link.address} broke the protocol: {error}", node=str(link.address)) from None


async def discover(access: Access, clock: Clock, *, addresses: Iterable[Address] | None = None) -> ClusterMap:
    """Ask the first node that answers for the cluster map.

    Raises what the nodes said: a refusal (of user, bucket, TLS) at once, else the last node's error.
    """
    last: ClusterError = ConnectFailed(f"no address in {access.source}")
    for address in addresses if addresses is not None else access.source.addresses:
        try:
            link, _ = await enter(access, address, clock)
            try:
                return await fetch_map(link, access.settings)
            finally:
                link.close()
        except ClusterError as error:
            if not error.retryable:
                raise
            last = error
    raise last


# -- the steps ----------------------------------------------------------------------------------------------------


async def _hello(link: Link, settings: Settings, name: str) -> frozenset[int]:
    agent = json.dumps({"a": PROPOSED_NAME, "i": f"{name[:33]}/{name[:33]}"}, separators=(",", ":"))
    answer = await link.request(
        Opcode.HELLO,
        key=agent.encode(),
        value=b"".join(struct.pack(">H", feature) for feature in FEATURES),
        timeout_s=settings.connect_timeout_s,
    )
    if answer.status != Status.SUCCESS or len(answer.value) % 2:
        raise HandshakeFailed(
            f"{link.address} does not take HELLO: {status_name(answer.status)}", node=str(link.address)
        )
    features = frozenset(code for (code,) in struct.iter_unpack(">H", answer.value))
    if Feature.SELECT_BUCKET not in features:
        raise NotSupported(
            f"{link.address} knows no SELECT_BUCKET",
            hint="Couchbase Server 5.0 or newer is needed",
            node=str(link.address),
        )
    return features & frozenset(FEATURES)


async def _authenticate(link: Link, access: Access) -> None:
    settings = access.settings
    user = access.source.user
    if user is None:
        if settings.tls_client_cert_file is not None and link.secure:
            return  # the certificate says who we are
        raise ConfigError(
            "the connection string names no user",
            hint="write couchbase://user@host/bucket, or use couchbases:// with tls_client_cert_file",
            setting="source",
        )
    password = access.password.read()
    if password is None:
        raise ConfigError(
            f"no password is set for user {user}",
            hint="set DCP_MIRROR_PASSWORD, DCP_MIRROR_PASSWORD_FILE, or a file `password` in the secrets folder",
            setting="password",
        )
    answer = await link.request(Opcode.SASL_LIST_MECHS, timeout_s=settings.connect_timeout_s)
    if answer.status != Status.SUCCESS:
        _refuse_login(link, user, answer)
    offered = answer.value.decode("ascii", "replace").split()
    plain_allowed = link.secure or settings.plain_allowed
    mechanism = choose_mechanism(offered, plain_allowed=plain_allowed)
    if mechanism != "PLAIN":
        try:
            await _scram(link, settings, mechanism, user, password)
            return
        except AuthRejected:
            # Users kept in a directory service have no SCRAM keys at the server: inside TLS, PLAIN is the way.
            if not (link.secure and "PLAIN" in offered):
                raise
    answer = await link.request(
        Opcode.SASL_AUTH, key=b"PLAIN", value=plain_encode(user, password), timeout_s=settings.connect_timeout_s
    )
    if answer.status != Status.SUCCESS:
        _refuse_login(link, user, answer)


async def _scram(link: Link, settings: Settings, mechanism: str, user: str, password: str) -> None:
    client = ScramClient(mechanism, user, password)
    name = mechanism.encode()
    answer = await link.request(Opcode.SASL_AUTH, key=name, value=client.first(), timeout_s=settings.connect_timeout_s)
    if answer.status != Status.AUTH_CONTINUE:
        _refuse_login(link, user, answer)
    answer = await link.request(
        Opcode.SASL_STEP, key=name, value=client.final(answer.value), timeout_s=settings.connect_timeout_s
    )
    if answer.status != Status.SUCCESS:
        _refuse_login(link, user, answer)
    client.verify(answer.value)


def _refuse_login(link: Link, user: str, answer: Frame) -> NoReturn:
    if answer.status in (Status.AUTH_ERROR, Status.AUTH_STALE, Status.KEY_ENOENT, Status.EACCESS):
        raise AuthRejected(f"{link.address} refused user {user}: wrong user or password", node=str(link.address))
    raise HandshakeFailed(
        f"{link.address} cannot authenticate now: {status_name(answer.status)}", node=str(link.address)
    )


async def _select_bucket(link: Link, access: Access) -> None:
    bucket = access.source.bucket
    answer = await link.request(Opcode.SELECT_BUCKET, key=bucket.encode(), timeout_s=access.settings.connect_timeout_s)
    if answer.status == Status.SUCCESS:
        return
    if answer.status in (Status.KEY_ENOENT, Status.NO_BUCKET):
        raise BucketMissing(f"{link.address} has no bucket {bucket}", node=str(link.address))
    if answer.status == Status.EACCESS:
        raise BucketMissing(
            f"{link.address} has no bucket {bucket} that user {access.source.user} may use", node=str(link.address)
        )
    raise HandshakeFailed(
        f"{link.address} does not select bucket {bucket}: {status_name(answer.status)}", node=str(link.address)
    )


def privilege_missing(link: Link, what: str, bucket: str) -> PrivilegeMissing:
    """The error for an EACCESS on DCP."""
    return PrivilegeMissing(f"{link.address} does not let this user {what} on bucket {bucket}", node=str(link.address))


def _text(path: object) -> str | None:
    return None if path is None else str(path)
