"""The cluster map: parses a node's JSON into the nodes of each vbucket, and decides which of two maps to follow.

Maps are ordered by (rev_epoch, rev), both unbounded ints. A map never replaces a newer one: a node that returns after a
failover or a network partition still has its old map and data, and acts as if it were active. A node is identified by
its host and ports. Most fields may be missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, TypeVar

from mirror.errors import BucketChanged, NotSupported
from storage.model import Identity

NO_NODE = -1
"""In `active`: the map names no active node for the vbucket."""

HOST_PLACEHOLDER = "$HOST"
"""Stands for the host that sent the map."""

VIEWS = "couchapi"
"""The capability of buckets with views. Only persistent buckets have it."""
SYSTEM_CAPABILITIES = frozenset(("querySystemCollection", "mobileSystemCollection"))
"""Capabilities of buckets with a scope `_system`; since 7.6 every bucket has one."""

_T = TypeVar("_T")
_NOUNS: dict[type, str] = {dict: "an object", list: "a list", int: "a whole number", str: "a text"}

VBUCKET_COUNT_MAX = 65_536
"""Limit of the rows of a map, because a vbucket id has 16 bits on the wire."""


Revision = tuple[int, int]
"""(epoch, revision), which orders maps. The epoch is 0 in maps of servers before 7.0.2, which send none."""


class MalformedClusterMap(ValueError):
    """The text is not a cluster map; the error names a wrong field."""


@dataclass(frozen=True, slots=True)
class Node:
    """A data node's KV service. A port (plain or TLS) that the node does not offer is None."""

    host: str
    kv_port: int | None
    tls_port: int | None = None

    @property
    def name(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = self.kv_port if self.kv_port is not None else self.tls_port
        return host if port is None else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class ClusterMap:
    """One revision of the map. A cluster-level map (no bucket selected) has no bucket name and no vbuckets."""

    rev_epoch: int
    rev: int
    bucket_name: str | None
    bucket_uuid: str | None
    nodes: tuple[Node, ...]
    active: tuple[int, ...]
    cluster_uuid: str | None = None
    replicas: tuple[tuple[int, ...], ...] = ()
    """For each vbucket, the nodes of its replicas, as indexes into `nodes`."""
    ephemeral: bool = False
    """True if the source keeps the bucket in memory only."""
    system_collections: bool = False
    """True if the bucket has the server's own collections, which only privileged users see."""
    network: str = "default"
    """The set of advertised addresses ("default", "external") that is used, also for later maps of the source."""
    network_offered: bool = True
    """False if no node has an address in `network`: then `nodes` has the nodes' own addresses."""
    of_mirror: bool = False
    """True if a mirror's DCP port sent the map. The map names only that mirror, and has revisions of its own."""

    @property
    def revision(self) -> Revision:
        return self.rev_epoch, self.rev

    @property
    def vbucket_count(self) -> int:
        """0 in a cluster-level map."""
        return len(self.active)

    def node_of(self, vbid: int) -> Node | None:
        index = self.active[vbid] if 0 <= vbid < len(self.active) else NO_NODE
        return None if index == NO_NODE else self.nodes[index]

    def copies_of(self, vbid: int) -> list[Node]:
        """Return the nodes that hold the vbucket, the active node first; empty if there is no active node."""
        active = self.node_of(vbid)
        if active is None:
            return []
        return [active, *(self.nodes[index] for index in (self.replicas[vbid] if vbid < len(self.replicas) else ()))]

    def vbids_of(self, node: Node) -> list[int]:
        return [vbid for vbid, index in enumerate(self.active) if index != NO_NODE and self.nodes[index] == node]

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_wire(values: Mapping[str, Any]) -> ClusterMap:
        return ClusterMap(
            **{
                **values,
                "nodes": tuple(Node(**node) for node in values["nodes"]),
                "active": tuple(values["active"]),
                "replicas": tuple(map(tuple, values["replicas"])),
            }
        )


class MapVerdict(Enum):
    """The relation of a received map to the newest known one."""

    NEWER = "newer"
    KNOWN = "known"
    OLDER = "older"
    """Older than a map that was followed, perhaps by another process or before a restart."""
    OTHER_BUCKET = "other bucket"
    """A map of another bucket, whose revisions do not compare."""


class NewestMap:
    """The newest map of one bucket. Only a newer map replaces it.

    Maps of the cluster are ordered by revision, even after a restart (`floor`). A mirror as the source has revisions of
    its own. A mirror's map sets no floor, and is accepted only while no map of the cluster is followed.
    """

    def __init__(self, bucket_uuid: str | None = None, floor: Revision | None = None) -> None:
        """`bucket_uuid`: None or empty to accept the first map of any bucket."""
        self.current: ClusterMap | None = None
        self.bucket_uuid = bucket_uuid
        self.floor = floor
        """The newest revision that was ever followed. Revisions of mirrors do not count."""

    def judge(self, found: ClusterMap) -> MapVerdict:
        current = self.current
        if self.bucket_uuid and found.bucket_uuid and found.bucket_uuid != self.bucket_uuid:
            return MapVerdict.OTHER_BUCKET
        if not found.vbucket_count:
            return MapVerdict.KNOWN
        if found.of_mirror:
            replaced = current is None or (current.of_mirror and found.revision > current.revision)
            return MapVerdict.NEWER if replaced else MapVerdict.KNOWN
        if self.floor is not None and found.revision < self.floor:
            return MapVerdict.OLDER
        if current is None or current.of_mirror or found.revision > current.revision:
            return MapVerdict.NEWER
        return MapVerdict.KNOWN

    def take(self, found: ClusterMap) -> bool:
        if self.judge(found) is not MapVerdict.NEWER:
            return False
        self.current = found
        self.bucket_uuid = self.bucket_uuid or found.bucket_uuid
        if not found.of_mirror:
            self.floor = found.revision
        return True


def check_bucket(mirrored: Identity, uuid: str | None, vbucket_count: int) -> None:
    """Raise BucketChanged if the source's bucket has another uuid (None: unknown) or vbucket count than `mirrored`."""
    name = mirrored.bucket_name
    if mirrored.bucket_uuid and uuid and uuid != mirrored.bucket_uuid:
        raise BucketChanged(
            f"bucket {name} was recreated, or is another one: uuid {mirrored.bucket_uuid} is now {uuid}"
        )
    if vbucket_count != mirrored.vbucket_count:
        raise BucketChanged(
            f"bucket {name} at the source has {vbucket_count} vbuckets, the data directory has {mirrored.vbucket_count}"
        )


def check_persists(found: ClusterMap, bucket: str) -> None:
    """For `publish = persisted`: raise NotSupported if the bucket never persists anything."""
    if found.ephemeral:
        raise NotSupported(f"bucket {bucket} is ephemeral: it never persists data", hint="set publish to received")


def newest_of(maps: Sequence[ClusterMap], bucket_uuid: str | None = None) -> ClusterMap:
    """Return the newest map, or the first of several that are equal.

    Maps of another bucket than `bucket_uuid` (None: the first map's bucket) count only if there are no others.
    """
    expected_uuid = bucket_uuid or maps[0].bucket_uuid
    ours = [each for each in maps if each.bucket_uuid == expected_uuid] or maps
    return max(
        ours, key=lambda each: (each.vbucket_count > 0, not each.of_mirror, () if each.of_mirror else each.revision)
    )


def parse_cluster_map(text: bytes | str, host: str, *, network: str = "default") -> ClusterMap:
    """Parse a cluster configuration that `host` sent. Raises MalformedClusterMap.

    `network` names the alternate addresses to use ("external"). A node without that network keeps its own address.
    """
    config = _load(text)
    nodes_ext = [_NodeExt.parse(item, host, network) for item in _checked(config.get("nodesExt", []), list, "nodesExt")]
    server_map = config.get("vBucketServerMap")
    nodes = tuple(ext.node for ext in nodes_ext if ext.serves_kv)
    active: tuple[int, ...] = ()
    replicas: tuple[tuple[int, ...], ...] = ()
    if server_map is not None:
        nodes, active, replicas = _parse_server_map(_checked(server_map, dict, "vBucketServerMap"), nodes_ext, host)
    return ClusterMap(
        rev_epoch=_checked(config.get("revEpoch", 0), int, "revEpoch"),
        rev=_checked(config.get("rev", 0), int, "rev"),
        bucket_name=_text_or_none(config.get("name"), "name"),
        bucket_uuid=_text_or_none(config.get("uuid"), "uuid"),
        nodes=nodes,
        active=active,
        cluster_uuid=_text_or_none(config.get("clusterUUID"), "clusterUUID"),
        replicas=replicas,
        ephemeral=_is_ephemeral(config),
        system_collections=not SYSTEM_CAPABILITIES.isdisjoint(_capabilities(config)),
        network=network,
        network_offered=network == "default" or any(ext.has_network for ext in nodes_ext),
        of_mirror=config.get("mirror") is True,
    )


def _is_ephemeral(config: Mapping[str, object]) -> bool:
    """Return True for an ephemeral bucket.

    Newer maps have `bucketType` (ns_server, bucket_info_cache). In older maps only ephemeral buckets lack `couchapi`;
    in newer maps Magma buckets lack it, too.
    """
    if isinstance(config.get("bucketType"), str):
        return bool(config["bucketType"] == "ephemeral")
    if config.get("nodeLocator") != "vbucket" or "bucketCapabilities" not in config:
        return False
    return VIEWS not in _capabilities(config)


def _capabilities(config: Mapping[str, object]) -> list[str]:
    found = _checked(config.get("bucketCapabilities", []), list, "bucketCapabilities")
    return [_checked(each, str, "bucketCapabilities") for each in found]


def network_of(text: bytes | str, contacted_host: str, contacted_port: int | None = None) -> str:
    """Return the network that has the contacted address, or "default" if none has. SDKs choose likewise.

    A match of host and port is preferred to a match of the host alone, because all nodes of a test cluster may share
    one host.
    """
    config = _load(text)
    found: list[tuple[bool, str]] = []
    for item in _checked(config.get("nodesExt", []), list, "nodesExt"):
        row = _checked(item, dict, "nodesExt")
        services = _checked(row.get("services", {}), dict, "nodesExt.services")
        known: dict[str, dict[str, Any]] = {"default": {"hostname": row.get("hostname"), "ports": services}}
        known |= _checked(row.get("alternateAddresses", {}), dict, "alternateAddresses")
        for network, value in known.items():
            address = _checked(value, dict, f"alternateAddresses.{network}")
            if address.get("hostname") == contacted_host:
                ports = _checked(address.get("ports", services), dict, "ports")
                found.append((contacted_port in (ports.get("kv"), ports.get("kvSSL")), network))
    exact = [network for whole, network in found if whole]
    return next(iter(exact or [network for _, network in found]), "default")


@dataclass(frozen=True, slots=True)
class _NodeExt:
    """One row of nodesExt. `node` has the address to connect to; `own_address` is its address in serverList."""

    node: Node
    own_address: tuple[str, int | None]
    serves_kv: bool
    has_network: bool

    @staticmethod
    def parse(item: Any, contacted_host: str, network: str) -> _NodeExt:
        row = _checked(item, dict, "nodesExt")
        services = _checked(row.get("services", {}), dict, "nodesExt.services")
        own_host = _host(row.get("hostname", contacted_host), contacted_host, "nodesExt.hostname")
        own = _node(own_host, services)
        alternates = _checked(row.get("alternateAddresses", {}), dict, "alternateAddresses")
        node = own
        if network in alternates:
            alternate = _checked(alternates[network], dict, f"alternateAddresses.{network}")
            alternate_host = _host(alternate.get("hostname", own_host), contacted_host, "alternateAddresses.hostname")
            # A network that lists no ports has those of the node's own address.
            ports = _checked(alternate["ports"], dict, "alternateAddresses.ports") if "ports" in alternate else services
            node = _node(alternate_host, ports)
        serves_kv = "kv" in services or "kvSSL" in services
        return _NodeExt(node, (own_host, own.kv_port), serves_kv, network in alternates)


def _parse_server_map(
    server_map: dict[str, Any], nodes_ext: Sequence[_NodeExt], contacted_host: str
) -> tuple[tuple[Node, ...], tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the nodes in serverList's order, and for each vbucket the index of its active node and of its replicas."""
    by_address: dict[tuple[str, int | None], list[Node]] = {}
    for ext in nodes_ext:
        if ext.serves_kv:
            by_address.setdefault(ext.own_address, []).append(ext.node)
    nodes = []
    for server in _checked(server_map.get("serverList"), list, "serverList"):
        host, port = _host_and_port(server, contacted_host)
        found = by_address.get((host, port))
        # If nodes offer TLS only, nodesExt lacks the port that serverList has. Match by host and order then.
        unported = by_address.get((host, None))
        nodes.append(found[0] if found else unported.pop(0) if unported else Node(host, port))
    rows = _checked(server_map.get("vBucketMap"), list, "vBucketMap")
    if len(rows) > VBUCKET_COUNT_MAX:
        raise MalformedClusterMap(f"vBucketMap has {len(rows)} rows")
    active = []
    replicas = []
    for vbid, row in enumerate(rows):
        chain = [_checked(index, int, "vBucketMap") for index in _checked(row, list, "vBucketMap")]
        for index in chain:
            if not NO_NODE <= index < len(nodes):
                raise MalformedClusterMap(f"vBucketMap: vbucket {vbid} is on node {index} of {len(nodes)}")
        active.append(chain[0] if chain else NO_NODE)
        replicas.append(tuple(index for index in chain[1:] if index != NO_NODE))
    return tuple(nodes), tuple(active), tuple(replicas)


def _load(text: bytes | str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedClusterMap(f"the cluster map is not JSON: {error}") from None
    return _checked(parsed, dict, "the cluster map")


def _node(host: str, ports: Mapping[str, object]) -> Node:
    return Node(host, _port(ports, "kv"), _port(ports, "kvSSL"))


def _host(value: Any, contacted_host: str, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise MalformedClusterMap(f"{field} is not a host name: {value!r:.100}")
    return value.replace(HOST_PLACEHOLDER, contacted_host).removeprefix("[").removesuffix("]")


def _host_and_port(value: Any, contacted_host: str) -> tuple[str, int]:
    if not isinstance(value, str):
        raise MalformedClusterMap(f"serverList: {value!r:.100} is not a host and a port")
    host, colon, port = value.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or len(port) > 5 or not 0 < int(port) < 65_536:
        raise MalformedClusterMap(f"serverList: {value!r:.100} is not a host and a port")
    return _host(host, contacted_host, "serverList"), int(port)


def _port(ports: Mapping[str, object], service: str) -> int | None:
    if service not in ports:
        return None
    port = _checked(ports[service], int, f"services.{service}")
    if not 0 < port < 65_536:
        raise MalformedClusterMap(f"services.{service}: {port} is not a port")
    return port


def _checked(value: Any, kind: type[_T], field: str) -> _T:
    if type(value) is not kind:
        raise MalformedClusterMap(f"{field} is not {_NOUNS[kind]}: {value!r:.100}")
    return value


def _text_or_none(value: Any, field: str) -> str | None:
    return None if value is None else _checked(value, str, field)
