"""The cluster map: which node has which vbucket, as the JSON that clients get.

Knows the terse configuration that nodes answer to GET_CLUSTER_CONFIG (recordings sdk_72_*; kv_engine
docs/BinaryProtocol.md). Must never know listeners or data. Invariants: every change has a higher revision within one
epoch; a vbucket without a node is -1; `thisNode` is true for the node that answers, and for no other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

BUCKET_CAPABILITIES = [
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
]
MGMT_PORT = 8091
"""Said in the map because clients look for it; nobody listens there."""

KV_PORT = 11210
"""Said in the list of servers where nobody listens without TLS, as clusters do."""

NOWHERE = -1


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """A node as the map names it."""

    number: int
    port: int | None
    """Without TLS; None: not offered."""
    tls_port: int | None = None

    @property
    def services(self) -> dict[str, int]:
        """Its ports by service."""
        ports = {"mgmt": MGMT_PORT}
        if self.port is not None:
            ports["kv"] = self.port
        if self.tls_port is not None:
            ports["kvSSL"] = self.tls_port
        return ports


@dataclass(slots=True)
class ClusterMap:
    """Nodes by their number in the cluster, and per vbucket the numbers of its active node and replicas."""

    bucket: str
    bucket_uuid: str
    owners: list[int]
    replicas: list[list[int]]
    nodes: list[NodeAddress] = field(default_factory=list)
    rev: int = 1
    epoch: int = 1
    tells_epoch: bool = True
    """Old servers order their maps by revision alone."""
    replica_count: int = 0
    capabilities: Sequence[str] = tuple(BUCKET_CAPABILITIES)
    """What the bucket is said to be able to do."""
    ephemeral: bool = False
    """The bucket is said to live in memory alone: it has no views."""
    host: str | None = None
    """What the nodes call themselves; None: whatever a client called them."""
    external_host: str | None = None
    """What they are called from outside: their alternate address `external`."""
    _cache: dict[tuple[int, bool], bytes] = field(default_factory=dict)

    def bump(self) -> None:
        """Something changed."""
        self.rev += 1
        self._cache.clear()

    def to_json(self, this_node: int, *, with_bucket: bool) -> bytes:
        """The configuration as `this_node` answers it: the bucket's, or the global one."""
        cached = self._cache.get((this_node, with_bucket))
        if cached is None:
            cached = self._cache[this_node, with_bucket] = self._render(this_node, with_bucket=with_bucket)
        return cached

    def _render(self, this_node: int, *, with_bucket: bool) -> bytes:
        index = {node.number: position for position, node in enumerate(self.nodes)}
        config: dict[str, object] = {"rev": self.rev}
        if self.tells_epoch:
            config["revEpoch"] = self.epoch
        nodes_ext: list[dict[str, object]] = []
        host = "$HOST" if self.host is None else f"[{self.host}]" if ":" in self.host else self.host
        for node in self.nodes:
            entry: dict[str, object] = {"services": node.services}
            if self.host is not None:
                entry["hostname"] = self.host
            if self.external_host is not None:
                outside = {"hostname": self.external_host, "ports": node.services}
                entry["alternateAddresses"] = {"external": outside}
            if node.number == this_node:
                entry["thisNode"] = True
            nodes_ext.append(entry)
        capabilities: dict[str, object] = {"clusterCapabilitiesVer": [1, 0], "clusterCapabilities": {}}
        if not with_bucket:
            return json.dumps(config | {"nodesExt": nodes_ext} | capabilities).encode()
        vbuckets = [
            [index.get(owner, NOWHERE), *(index.get(replica, NOWHERE) for replica in replicas)]
            for owner, replicas in zip(self.owners, self.replicas, strict=True)
        ]
        config |= {
            "bucketType": "ephemeral" if self.ephemeral else "membase",
            "name": self.bucket,
            "nodeLocator": "vbucket",
            "uuid": self.bucket_uuid,
            "bucketCapabilities": [name for name in self.capabilities if name != "couchapi" or not self.ephemeral],
            **capabilities,
            "nodes": [
                {"hostname": f"{host}:{MGMT_PORT}", "ports": {"direct": node.port or KV_PORT}} for node in self.nodes
            ],
            "nodesExt": nodes_ext,
            "vBucketServerMap": {
                "hashAlgorithm": "CRC",
                "numReplicas": self.replica_count,
                "serverList": [f"{host}:{node.port or KV_PORT}" for node in self.nodes],
                "vBucketMap": vbuckets,
            },
        }
        return json.dumps(config).encode()
