"""The answers to GET_CLUSTER_CONFIG (the terse configuration) and GET_COLLECTIONS_MANIFEST, as JSON.

The form is as recorded (sdk_72_*) and as in kv_engine's docs/BinaryProtocol.md; each official client accepts it
(docs/protocol.md 2.12). Clients look for a node without a host at the address they connected to, which is right only
for a single node. A node's management ports are its key-value ports, which answer HTTP (`management`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mirror.wire.events import CollectionSettings
from storage.model import Collection

KV_PORT = 11210
"""The plain port in the map for a node that listens only with TLS, as in clusters' maps."""

NOWHERE = -1
"""Stands for a node in `ConfigBucket.chains` if no node has the copy."""

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
)

_VIEWS = "couchapi"


@dataclass(frozen=True, slots=True)
class ConfigNode:
    host: str | None
    """None: the address that the client connected to."""
    kv_port: int | None
    """The port without TLS; None: not offered."""
    tls_port: int | None = None
    external_host: str | None = None
    """The alternate address `external`."""
    answers: bool = False
    """True to mark this node as the one that sends the answer."""


@dataclass(frozen=True, slots=True)
class ConfigBucket:
    name: str
    uuid: str
    chains: Sequence[Sequence[int]]
    """For each vbucket, the indexes of its active node and its replicas in the list of nodes, or NOWHERE."""
    capabilities: Sequence[str] = CAPABILITIES
    ephemeral: bool = False
    """True for a bucket in memory only, without views."""
    mirror: bool = False
    """True for a mirror, whose map revisions are not comparable with the cluster's."""


def render(rev: int, epoch: int | None, nodes: Sequence[ConfigNode], bucket: ConfigBucket | None) -> bytes:
    """Return the bucket's configuration; only its nodes if `bucket` is None. `epoch` None: a server without epochs."""
    config: dict[str, object] = {"rev": rev} if epoch is None else {"rev": rev, "revEpoch": epoch}
    nodes_ext = [_node(node) for node in nodes]
    capabilities: dict[str, object] = {"clusterCapabilitiesVer": [1, 0], "clusterCapabilities": {}}
    if bucket is None:
        return json.dumps(config | {"nodesExt": nodes_ext} | capabilities).encode()
    hosts = ["$HOST" if node.host is None else f"[{node.host}]" if ":" in node.host else node.host for node in nodes]
    config |= {
        "bucketType": "ephemeral" if bucket.ephemeral else "membase",
        "name": bucket.name,
        "nodeLocator": "vbucket",
        "uuid": bucket.uuid,
        "bucketCapabilities": [name for name in bucket.capabilities if name != _VIEWS or not bucket.ephemeral],
        **capabilities,
        **({"mirror": True} if bucket.mirror else {}),
        "nodes": [
            {"hostname": f"{host}:{node.kv_port or node.tls_port}", "ports": {"direct": node.kv_port or KV_PORT}}
            for host, node in zip(hosts, nodes, strict=True)
        ],
        "nodesExt": nodes_ext,
        "vBucketServerMap": {
            "hashAlgorithm": "CRC",
            "numReplicas": max((len(chain) - 1 for chain in bucket.chains), default=0),
            "serverList": [f"{host}:{node.kv_port or KV_PORT}" for host, node in zip(hosts, nodes, strict=True)],
            "vBucketMap": [list(chain) for chain in bucket.chains],
        },
    }
    return json.dumps(config).encode()


def render_manifest(
    uid: int, scopes: Mapping[int, str], collections: Iterable[Collection | CollectionSettings]
) -> bytes:
    """Return a manifest as GET_COLLECTIONS_MANIFEST answers it (kv_engine docs/Collections.md)."""
    inside: dict[int, list[dict[str, object]]] = {scope_id: [] for scope_id in sorted(scopes)}
    for entry in sorted(collections, key=lambda entry: entry.collection_id):
        described: dict[str, object] = {"name": entry.name, "uid": f"{entry.collection_id:x}"}
        if entry.max_ttl is not None:
            described["maxTTL"] = entry.max_ttl
        if isinstance(entry, CollectionSettings) and entry.history:
            described["history"] = True
        if entry.scope_id in inside:
            inside[entry.scope_id].append(described)
    found = [
        {"name": scopes[scope_id], "uid": f"{scope_id:x}", "collections": each} for scope_id, each in inside.items()
    ]
    return json.dumps({"uid": f"{uid:x}", "scopes": found}, separators=(",", ":")).encode()


def _node(node: ConfigNode) -> dict[str, object]:
    services: dict[str, int] = {}
    if node.kv_port is not None:
        services |= {"mgmt": node.kv_port, "kv": node.kv_port}
    if node.tls_port is not None:
        services |= {"mgmtSSL": node.tls_port, "kvSSL": node.tls_port}
    entry: dict[str, object] = {"services": services}
    if node.host is not None:
        entry["hostname"] = node.host
    if node.external_host is not None:
        entry["alternateAddresses"] = {"external": {"hostname": node.external_host, "ports": services}}
    if node.answers:
        entry["thisNode"] = True
    return entry
