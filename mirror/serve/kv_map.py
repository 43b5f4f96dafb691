"""The cluster map that KV clients get: this mirror as the one node, or all mirrors of the bucket side by side.

Knows the terse configuration that nodes answer to GET_CLUSTER_CONFIG (kv_engine docs/BinaryProtocol.md,
captures/sdk_72_*); must never know connections or documents. Every mirror holds every vbucket, so with several of them
each vbucket names one as its active node, in turn, and the others as replicas, and any of them answers for it.
Invariants: the map says the same in every process of a service; its revision rises with each start of the service.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from mirror.serve.listener import Address
from storage.model import Identity

EPOCH = 1
REPLICAS_MAX = 3
"""As many as a bucket can have."""

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

    def services(self) -> dict[str, int]:
        """Its services and their ports."""
        found = {"mgmt": MGMT_PORT}
        if self.port is not None:
            found["kv"] = self.port
        if self.tls_port is not None:
            found["kvSSL"] = self.tls_port
        return found


def own_node(addresses: Sequence[Address]) -> MapNode:
    """This mirror, by the first of its addresses of either kind. Unix sockets cannot be said in a map."""
    plain = [each.port for each in addresses if each.path is None and not each.tls]
    tls = [each.port for each in addresses if each.path is None and each.tls]
    return MapNode(None, plain[0] if plain else None, tls[0] if tls else None)


def named_nodes(addresses: Sequence[Address]) -> list[MapNode]:
    """All mirrors of the bucket, as `kv_nodes` names them."""
    return [MapNode(each.host, None if each.tls else each.port, each.port if each.tls else None) for each in addresses]


class ClusterMap:
    """The map of one bucket, rendered once."""

    def __init__(self, identity: Identity, nodes: Sequence[MapNode], rev: int) -> None:
        """`rev` rises from start to start."""
        self.revision = (EPOCH, rev)
        self._identity = identity
        self._nodes = list(nodes)
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
        count = len(self._nodes)
        replica_count = min(count - 1, REPLICAS_MAX)
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
                "numReplicas": replica_count,
                "serverList": [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)],
                "vBucketMap": [
                    [(vbid + step) % count for step in range(replica_count + 1)]
                    for vbid in range(self._identity.vbucket_count)
                ],
            },
        }
        return json.dumps(config).encode()


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
