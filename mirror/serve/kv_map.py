"""The cluster map that KV clients get: this mirror as the one node, or all mirrors of the bucket side by side.

Knows the terse configuration that nodes answer to GET_CLUSTER_CONFIG (kv_engine docs/BinaryProtocol.md,
recordings sdk_72_*); must never know connections or documents. Of the mirrors that hold a vbucket the map names one as
its active node, in turn, and the others as replicas, and any of them answers for it; a vbucket that nobody holds has no
node. Invariants: the map says the same in every process of a service; its revision rises with each start of the
service and each change of the list of mirrors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from mirror.config import vbucket_range
from mirror.serve.listener import Address, parse_addresses
from storage.model import Identity

EPOCH = 1
REPLICAS_MAX = 3
"""As many as a bucket can have."""

NOBODY = -1
"""In the place of a node that there is not."""

MGMT_PORT = 8091
"""Said in the map because clients look for it; nobody listens there."""

CAPABILITIES = (
    "xattr",
    "dcp",
    "cbhello",
    "touch",
    "couchapi",
    "cccp",
    "nodesExt",
    "collections",
    "durableWrite",
    "tombstonedUserXAttrs",
    "subdoc.ReplaceBodyWithXattr",
    "subdoc.DocumentMacroSupport",
    "preserveExpiry",
    "rangeScan",
    "subdoc.ReplicaRead",
)
"""What the recorded server says, and what newer ones offer for reading. Clients that write get the refusal of a
read-only node, which is clearer to them than a bucket that could do nothing."""


@dataclass(frozen=True, slots=True)
class MapNode:
    """A node as the map names it. No host: the one that the client came by."""

    host: str | None
    port: int | None
    tls_port: int | None
    held: tuple[int, int] | None = None
    """The first and the last vbucket that it holds; None: all."""

    def holds(self, vbid: int) -> bool:
        """Whether it answers for a vbucket."""
        return self.held is None or self.held[0] <= vbid <= self.held[1]

    def services(self) -> dict[str, int]:
        """Its services and their ports."""
        found = {"mgmt": MGMT_PORT}
        if self.port is not None:
            found["kv"] = self.port
        if self.tls_port is not None:
            found["kvSSL"] = self.tls_port
        return found


def own_node(addresses: Sequence[Address], held: tuple[int, int] | None = None) -> MapNode:
    """This mirror, by the first of its addresses of either kind. Unix sockets cannot be said in a map."""
    plain = [each.port for each in addresses if each.path is None and not each.tls]
    tls = [each.port for each in addresses if each.path is None and each.tls]
    return MapNode(None, plain[0] if plain else None, tls[0] if tls else None, held)


def named_nodes(text: str) -> list[MapNode]:
    """All mirrors of the bucket, as the setting `kv_nodes` names them: `HOST:PORT` or `HOST:PORT=FIRST-LAST`, several
    parted by commas. Raises ConfigError.
    """
    parts = [part.partition("=") for part in text.split(",")]
    addresses = parse_addresses(",".join(where for where, _, _ in parts), "kv_nodes")
    found = []
    for address, (_, told, held) in zip(addresses, parts, strict=True):
        range_ = vbucket_range(held.strip(), "kv_nodes") if told else None
        plain, tls = (None, address.port) if address.tls else (address.port, None)
        found.append(MapNode(address.host, plain, tls, range_))
    return found


class ClusterMap:
    """The map of one bucket, rendered once."""

    def __init__(self, identity: Identity, nodes: Sequence[MapNode], rev: int) -> None:
        """`rev` rises from start to start."""
        self.revision = (EPOCH, rev)
        self._identity = identity
        self._nodes = list(nodes)
        self.uncovered = sum(
            not any(node.holds(vbid) for node in self._nodes) for vbid in range(identity.vbucket_count)
        )
        """How many vbuckets no mirror holds."""
        self.of_node = self._render(with_bucket=False)
        """Before a bucket was chosen."""
        self.of_bucket = self._render(with_bucket=True)

    def _render(self, *, with_bucket: bool) -> bytes:
        config: dict[str, object] = {"rev": self.revision[1], "revEpoch": EPOCH}
        nodes_ext: list[dict[str, object]] = []
        for node in self._nodes:
            entry: dict[str, object] = {"services": node.services()}
            if node.host is not None:
                entry["hostname"] = node.host
            if len(self._nodes) == 1:
                entry["thisNode"] = True
            nodes_ext.append(entry)
        capabilities: dict[str, object] = {"clusterCapabilitiesVer": [1, 0], "clusterCapabilities": {}}
        if not with_bucket:
            return json.dumps(config | {"nodesExt": nodes_ext} | capabilities).encode()
        chains = [self._chain(vbid) for vbid in range(self._identity.vbucket_count)]
        width = max(1, *map(len, chains))
        hosts = ["$HOST" if node.host is None else _in_url(node.host) for node in self._nodes]
        ports = [node.port if node.port is not None else node.tls_port for node in self._nodes]
        config |= {
            "bucketType": "membase",
            "name": self._identity.bucket_name,
            "nodeLocator": "vbucket",
            "uuid": self._identity.bucket_uuid,
            "bucketCapabilities": list(CAPABILITIES),
            **capabilities,
            "nodes": [
                {"hostname": f"{host}:{MGMT_PORT}", "ports": {"direct": port}}
                for host, port in zip(hosts, ports, strict=True)
            ],
            "nodesExt": nodes_ext,
            "vBucketServerMap": {
                "hashAlgorithm": "CRC",
                "numReplicas": width - 1,
                "serverList": [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)],
                "vBucketMap": [chain + [NOBODY] * (width - len(chain)) for chain in chains],
            },
        }
        return json.dumps(config).encode()

    def _chain(self, vbid: int) -> list[int]:
        """The nodes of a vbucket, its active one first."""
        holders = [number for number, node in enumerate(self._nodes) if node.holds(vbid)]
        first = vbid % len(holders) if holders else 0
        return (holders[first:] + holders[:first])[: REPLICAS_MAX + 1]


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
