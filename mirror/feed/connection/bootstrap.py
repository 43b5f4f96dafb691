"""The login to one node: HELLO (the features to use), authentication, the bucket, the cluster map.

The password itself (PLAIN) is sent only inside TLS, or if a setting allows that. It is never sent to a server that
failed to prove that it knows the password.

Sources: docs/protocol.md 2.2; kv_engine docs/BinaryProtocol.md (HELLO, SASL); SDK RFC 36 (a server that
knows us by certificate answers SASL with NOT_SUPPORTED), RFC 75 (maps).
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NoReturn

from mirror.clock import Clock
from mirror.config import PasswordSource, Settings
from mirror.errors import (
    AuthRejected,
    BucketMissing,
    ConfigError,
    ConnectFailed,
    HandshakeFailed,
    NotSupported,
    SourceTimeout,
)
from mirror.feed.connection.connection_string import ConnectionString, NodeAddress
from mirror.feed.connection.tls import Tls, hung_up
from mirror.feed.connection.transport import READ_BYTES_MAX, Link, Opaques, open_link
from mirror.ingest.selection import MalformedManifest, SourceManifest
from mirror.ingest.topology import ClusterMap, MalformedClusterMap, Node, network_of, parse_cluster_map
from mirror.wire.codec_dcp import decode_all_vb_seqnos, encode_all_vb_seqnos_request
from mirror.wire.codec_kv import get_cluster_config
from mirror.wire.constants import CONTACT_STATISTIC, Feature, Opcode, Status, VbucketRole, status_name
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.frame import Frame
from mirror.wire.sasl import SaslError, ScramClient, choose_mechanism, plain_encode

FEATURES = (
    Feature.XATTR,
    Feature.XERROR,
    Feature.SELECT_BUCKET,
    Feature.SNAPPY,
    Feature.JSON,
    Feature.COLLECTIONS,
    Feature.TCP_NODELAY,
    Feature.GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION,
    Feature.DEDUPE_NOT_MY_VBUCKET_CLUSTERMAP,
    Feature.MIRROR,
)
"""The requested features. Only SELECT_BUCKET must be granted."""

CONNECT_TIMEOUT_S = 10.0
"""Limit for the connection, and for each answer until the bucket is selected."""
PROPOSED_NAME = "dcp-mirror"
REVISION_MAX = 2**63 - 1
"""The largest revision that a request can name (signed). Requests leave out a larger known revision."""
NO_MAP_HINT = "the node is not ready yet, or not part of the cluster any more"
PERHAPS_TLS = "if this is a port for TLS, write couchbases://, or use the port without TLS (usually 11210)"
CERTIFICATE_HINT = (
    "have client certificates enabled at the cluster, check how it finds the user's name in them, that this user "
    "exists and that it may read the bucket; or name a user and a password"
)


@dataclass(frozen=True, slots=True)
class Access:
    source: ConnectionString
    password: PasswordSource
    settings: Settings

    @staticmethod
    def of(source: ConnectionString, settings: Settings) -> Access:
        """Return the access that the settings describe. A network in the connection string overrides the setting.
        Raises ConfigError if the settings name certificates, but the connection string does not use TLS.
        """
        for setting in ("tls_ca_file", "tls_client_cert_file"):
            if not source.tls and getattr(settings, setting) is not None:
                raise ConfigError(
                    f"{setting} is set, and the connection string says couchbase://, which is not encrypted",
                    hint=f"write couchbases://, or take {setting} out",
                )
        if source.network is not None:
            settings = replace(settings, network=source.network)
        return Access(source, PasswordSource.of(settings), settings)

    def address_of(self, node: Node) -> NodeAddress | None:
        """Return the node's address with its TLS or plain port, as the source requires; None without such a port."""
        port = node.tls_port if self.source.tls else node.kv_port
        return None if port is None else NodeAddress(node.host, port)


class Handshake:
    def __init__(self, features: frozenset[int]) -> None:
        self.features = features
        self.collections = Feature.COLLECTIONS in features
        """True if keys carry a collection id."""
        self.by_mirror = Feature.MIRROR in features
        """True if the node is a mirror's DCP port (docs/protocol.md 4.7)."""


async def enter(
    access: Access, address: NodeAddress, clock: Clock, *, name: str = "", opaques: Opaques | None = None
) -> tuple[Link, Handshake]:
    """Connect to a node, log in and select the bucket. Raises ClusterError or ConfigError, and leaves nothing open."""
    settings = access.settings
    tls = Tls.of(settings) if access.source.tls else None
    link = await open_link(address, tls=tls, timeout_s=CONNECT_TIMEOUT_S, clock=clock, opaques=opaques)
    # A read may exceed the budget of uncommitted rows by its own size.
    link.read_bytes_max = min(READ_BYTES_MAX, settings.batch_bytes_max // 2)
    try:
        features = await _greet(link, access, name or clock.unique())
        await _authenticate(link, access)
        await _select_bucket(link, access)
    except BaseException:
        link.close()
        raise
    return link, Handshake(features)


async def fetch_map(link: Link, settings: Settings, *, network: str | None = None) -> ClusterMap:
    config = await _ask(link, Opcode.GET_CLUSTER_CONFIG, "cluster map", settings.request_timeout_s, NO_MAP_HINT)
    return read_map(config, link.address, settings, network=network)


async def fetch_newer_config(link: Link, handshake: Handshake, known: ClusterMap | None, *, timeout_s: float) -> bytes:
    """Return a node's cluster map as JSON; empty if it is not newer than `known`. Raises ClusterError.

    Servers before 7.6 do not compare, and always send their map.
    """
    extras = b""
    compares = Feature.GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION in handshake.features
    if compares and known is not None and all(0 <= part <= REVISION_MAX for part in known.revision):
        extras = get_cluster_config(known.revision).extras
    return await _ask(link, Opcode.GET_CLUSTER_CONFIG, "cluster map", timeout_s, NO_MAP_HINT, extras)


async def _ask(link: Link, opcode: int, what: str, timeout_s: float, hint: str, extras: bytes = b"") -> bytes:
    """Return the value of the answer. Raises ClusterError."""
    answer = await link.request(opcode, extras=extras, timeout_s=timeout_s)
    if answer.status != Status.SUCCESS:
        raise HandshakeFailed(f"{link.address} sent no {what}: {status_name(answer.status)}", hint=hint)
    return answer.value


def read_map(config: bytes, address: NodeAddress, settings: Settings, *, network: str | None = None) -> ClusterMap:
    """Parse a cluster map that the node at `address` sent. Raises HandshakeFailed.

    `network` is the network of the source's first map. None: the setting decides.
    """
    try:
        chosen = network or settings.network
        if chosen == "auto":
            chosen = network_of(config, address.host, address.port)
        found = parse_cluster_map(config, address.host, network=chosen)
    except MalformedClusterMap as error:
        raise HandshakeFailed(f"invalid cluster map from {address}: {error}") from None
    if settings.source_hosts is not None:
        for node in found.nodes:
            if node.host != address.host and not host_allowed(node.host, settings.source_hosts):
                raise HandshakeFailed(
                    f"the cluster map of {address} names the host {node.host}, which source_hosts does not allow",
                    hint="add it to source_hosts if it is a node of the cluster",
                )
    return found


def host_allowed(host: str, allowed: Sequence[str]) -> bool:
    """Return True if a host matches a name, `*.example.com`, an address or a network in `allowed`."""
    name = host.lower().rstrip(".")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return any(fnmatchcase(name, each.lower()) for each in allowed)
    for each in allowed:
        try:
            if address in ipaddress.ip_network(each):
                return True
        except ValueError:  # a name
            continue
    return False


async def fetch_high_seqnos(
    link: Link, settings: Settings, collection_ids: Sequence[int] | None = None
) -> dict[int, int]:
    """Return the high seqnos of a node's active vbuckets, by vbid; with `collection_ids`, the highest seqno of these
    collections.

    A collection that the node does not know (yet, or any more) is left out. Raises ClusterError.
    """
    queried_ids: Sequence[int | None] = [None] if collection_ids is None else collection_ids
    queries = [
        link.request(
            Opcode.GET_ALL_VB_SEQNOS,
            extras=encode_all_vb_seqnos_request(VbucketRole.ACTIVE, collection_id),
            timeout_s=settings.request_timeout_s,
        )
        for collection_id in queried_ids
    ]
    highest: dict[int, int] = {}
    for answer in await asyncio.gather(*queries):
        if answer.status == Status.UNKNOWN_COLLECTION and collection_ids is not None:
            continue
        if answer.status != Status.SUCCESS:
            raise HandshakeFailed(f"{link.address} sent no high seqnos: {status_name(answer.status)}")
        try:
            for vbid, seqno in decode_all_vb_seqnos(answer.value):
                # One answer for each collection: the newest of them is what a filtered stream can reach.
                highest[vbid] = max(seqno, highest.get(vbid, 0))
        except RemoteProtocolError as error:
            raise HandshakeFailed(f"{link.address} broke the protocol: {error}") from None
    return highest


async def fetch_lost_contact(link: Link, settings: Settings) -> dict[int, int]:
    """Return the vbuckets for which a mirror has lost contact with its source: {vbid: milliseconds since}. Raises
    ClusterError.
    """
    answer = await link.request(Opcode.STAT, key=CONTACT_STATISTIC, timeout_s=settings.request_timeout_s)
    if answer.status == Status.KEY_ENOENT:  # a mirror without a supervisor lacks this statistic
        return {}
    try:
        if answer.status != Status.SUCCESS:
            raise ValueError(status_name(answer.status))
        return {int(vbid): int(silent_ms) for vbid, silent_ms in json.loads(answer.value).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise HandshakeFailed(f"{link.address} does not report its contact with its source: {error}") from None


async def fetch_manifest(link: Link, settings: Settings) -> SourceManifest:
    hint = "the bucket may still be warming up"
    text = await _ask(link, Opcode.GET_COLLECTIONS_MANIFEST, "collections", settings.request_timeout_s, hint)
    try:
        return SourceManifest.parse(text)
    except MalformedManifest as error:
        raise HandshakeFailed(f"invalid collections from {link.address}: {error}") from None


# -- the steps ----------------------------------------------------------------------------------------------------


async def _greet(link: Link, access: Access, name: str) -> frozenset[int]:
    """Send HELLO. If the node does not answer it, name the likely reason."""
    secure = link.secure
    try:
        return await _hello(link, name)
    except ConnectFailed:
        if secure:  # in TLS 1.3 the node may refuse our certificate this late
            raise hung_up("right after", str(link.address), access.settings) from None
        raise ConnectFailed(f"{link.address} closed the connection at the first request", hint=PERHAPS_TLS) from None
    except (HandshakeFailed, SourceTimeout) as error:
        if not secure:
            error.hint = PERHAPS_TLS
        raise


async def _hello(link: Link, name: str) -> frozenset[int]:
    agent = json.dumps({"a": PROPOSED_NAME, "i": f"{name[:33]}/{name[:33]}"}, separators=(",", ":"))
    answer = await link.request(
        Opcode.HELLO,
        key=agent.encode(),
        value=b"".join(struct.pack(">H", feature) for feature in FEATURES),
        timeout_s=CONNECT_TIMEOUT_S,
    )
    if answer.status != Status.SUCCESS or len(answer.value) % 2:
        raise HandshakeFailed(f"{link.address} refused HELLO: {status_name(answer.status)}")
    features = frozenset(code for (code,) in struct.iter_unpack(">H", answer.value))
    if Feature.SELECT_BUCKET not in features:
        raise NotSupported(
            f"{link.address} does not support SELECT_BUCKET", hint="Couchbase Server 5.0 or newer is needed"
        )
    return features & frozenset(FEATURES)


async def _authenticate(link: Link, access: Access) -> None:
    settings = access.settings
    user = access.source.user
    certified = settings.tls_client_cert_file is not None and link.secure
    if user is None:
        if certified:
            return await _by_certificate(link)
        raise ConfigError(
            "the connection string names no user",
            hint="write couchbase://user@host/bucket, or use couchbases:// with tls_client_cert_file",
        )
    password = access.password.read()
    if password is None:
        raise ConfigError(
            f"no password is set for user {user}",
            hint="set DCP_MIRROR_PASSWORD, DCP_MIRROR_PASSWORD_FILE, or a file `password` in the secrets folder",
        )
    answer = await link.request(Opcode.SASL_LIST_MECHS, timeout_s=CONNECT_TIMEOUT_S)
    if answer.status == Status.NOT_SUPPORTED and certified:
        raise AuthRejected(
            f"{link.address} knows us by our client certificate, and accepts only the certificate's user",
            hint=f"take {user}@ out of the connection string, or tls_client_cert_file out of the settings",
        )
    if answer.status != Status.SUCCESS:
        _refuse_login(link, user, answer)
    offered = answer.value.decode("ascii", "replace").split()
    plain_allowed = link.secure or settings.plain_allowed
    mechanism = choose_mechanism(offered, plain_allowed=plain_allowed)
    if mechanism != "PLAIN":
        try:
            return await _scram(link, mechanism, user, password)
        except SaslError:  # the server did not prove that it knows the password, so PLAIN must not send the password
            raise
        except AuthRejected:
            # For users of a directory service the server has no SCRAM keys: they need PLAIN, inside TLS.
            if not (link.secure and "PLAIN" in offered):
                raise
    answer = await link.request(
        Opcode.SASL_AUTH, key=b"PLAIN", value=plain_encode(user, password), timeout_s=CONNECT_TIMEOUT_S
    )
    if answer.status != Status.SUCCESS:
        _refuse_login(link, user, answer)
    return None


async def _by_certificate(link: Link) -> None:
    """Authenticate by the certificate of the TLS handshake, with EXTERNAL if the server offers it."""
    answer = await link.request(Opcode.SASL_LIST_MECHS, timeout_s=CONNECT_TIMEOUT_S)
    if answer.status != Status.SUCCESS or b"EXTERNAL" not in answer.value.split():
        return  # NOT_SUPPORTED: the certificate was enough
    answer = await link.request(Opcode.SASL_AUTH, key=b"EXTERNAL", timeout_s=CONNECT_TIMEOUT_S)
    if answer.status != Status.SUCCESS:
        raise AuthRejected(
            f"{link.address} does not know the user of our client certificate: {status_name(answer.status)}",
            hint=CERTIFICATE_HINT,
        )


async def _scram(link: Link, mechanism: str, user: str, password: str) -> None:
    client = ScramClient(mechanism, user, password)
    name = mechanism.encode()
    answer = await link.request(Opcode.SASL_AUTH, key=name, value=client.first(), timeout_s=CONNECT_TIMEOUT_S)
    if answer.status != Status.AUTH_CONTINUE:
        _refuse_login(link, user, answer)
    final = await asyncio.to_thread(client.final, answer.value)  # slow: the server chose the number of iterations
    answer = await link.request(Opcode.SASL_STEP, key=name, value=final, timeout_s=CONNECT_TIMEOUT_S)
    if answer.status != Status.SUCCESS:
        _refuse_login(link, user, answer)
    client.verify(answer.value)


def _refuse_login(link: Link, user: str, answer: Frame) -> NoReturn:
    if answer.status in (Status.AUTH_ERROR, Status.AUTH_STALE, Status.KEY_ENOENT, Status.EACCESS):
        raise AuthRejected(f"{link.address} refused user {user}: wrong user or password")
    raise HandshakeFailed(f"{link.address} cannot authenticate now: {status_name(answer.status)}")


async def _select_bucket(link: Link, access: Access) -> None:
    bucket = access.source.bucket
    answer = await link.request(Opcode.SELECT_BUCKET, key=bucket.encode(), timeout_s=CONNECT_TIMEOUT_S)
    if answer.status == Status.SUCCESS:
        return
    if access.source.user is None and answer.status in (Status.EACCESS, Status.AUTH_ERROR):
        raise AuthRejected(
            f"{link.address} has no user for our client certificate with access to bucket {bucket}",
            hint=CERTIFICATE_HINT,
        )
    if answer.status in (Status.KEY_ENOENT, Status.NO_BUCKET):
        raise BucketMissing(f"{link.address} has no bucket {bucket}")
    if answer.status == Status.EACCESS:
        raise BucketMissing(f"{link.address} has no bucket {bucket} that user {access.source.user} may use")
    raise HandshakeFailed(f"{link.address} could not select bucket {bucket}: {status_name(answer.status)}")
