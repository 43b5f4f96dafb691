"""The cluster map of KV clients: this mirror as the only node, or all mirrors of the bucket.

The terse configuration is that of GET_CLUSTER_CONFIG (kv_engine docs/BinaryProtocol.md, recordings sdk_72_*). All
mirrors that hold a vbucket answer for it. The map names one of them as the vbucket's active node, in rotation, and
others as replicas. All KV processes of a service have the same map; its revision rises with each start of the service
and each change of the list of mirrors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from mirror.config import vbucket_range
from mirror.errors import ConfigError
from mirror.health import ranges
from mirror.server.cluster_config import CAPABILITIES, NOWHERE, ConfigBucket, ConfigNode, render
from mirror.server.listener import Address, parse_addresses
from storage.model import Identity

EPOCH = 1
REPLICAS_MAX = 3
"""The maximum of a Couchbase bucket."""

BUCKET_CAPABILITIES = (*CAPABILITIES, "subdoc.ReplicaRead")
"""The recorded server's capabilities, and newer ones for reading. Those for writing stay: a refused write is clearer to
a client than a missing capability."""
KV_CAPABILITIES = (*BUCKET_CAPABILITIES, "rangeScan")


@dataclass(frozen=True, slots=True)
class MapNode(ConfigNode):
    held: tuple[int, int] | None = None
    """First and last vbucket; None: all."""

    def holds(self, vbid: int) -> bool:
        return self.held is None or self.held[0] <= vbid <= self.held[1]


def own_node(addresses: Sequence[Address], held: tuple[int, int] | None = None) -> MapNode:
    """Return this mirror's node, with its first plain and first TLS port. A map cannot name Unix sockets."""
    plain = [each.port for each in addresses if each.path is None and not each.tls]
    tls = [each.port for each in addresses if each.path is None and each.tls]
    return MapNode(None, plain[0] if plain else None, tls[0] if tls else None, held=held)


def named_nodes(text: str) -> list[MapNode]:
    """Return the mirrors of `kv_nodes`: `HOST:PORT` or `HOST:PORT=FIRST-LAST`, with commas. Raises ConfigError."""
    parts = [part.partition("=") for part in text.split(",")]
    addresses = parse_addresses(",".join(where for where, _, _ in parts), "kv_nodes")
    found = []
    for address, (_, separator, held) in zip(addresses, parts, strict=True):
        if not address.port:
            raise _wrong(f"names {address}, which clients cannot reach", "write HOST:PORT")
        range_ = vbucket_range(held.strip(), "kv_nodes") if separator else None
        plain, tls = (None, address.port) if address.tls else (address.port, None)
        found.append(MapNode(address.host, plain, tls, held=range_))
    return found


def check_nodes(nodes: Sequence[MapNode], identity: Identity, own_ports: Collection[int]) -> None:
    """Raise ConfigError for a list of mirrors that contradicts itself, the bucket, or this mirror.

    `own_ports`: the ports of this mirror's KV addresses; empty: unknown.
    """
    count, here = identity.vbucket_count, (identity.vbids[0], identity.vbids[-1])
    held = [node.held or (0, count - 1) for node in nodes]
    for first, last in held:
        if last >= count:
            raise _wrong(f"names vbuckets {first}-{last}, and the bucket has {count}", f"end at {count - 1}")
    for one, other in combinations(sorted(set(held)), 2):
        if one[0] < other[0] <= one[1] < other[1]:
            raise _wrong(f"names vbuckets {one[0]}-{one[1]} and {other[0]}-{other[1]}, which overlap", _OWN_RANGES)
    nowhere = [vbid for vbid in range(count) if not any(first <= vbid <= last for first, last in held)]
    if nowhere:
        raise _wrong(f"names no mirror for vbuckets {', '.join(ranges(nowhere))}", "name one that holds them")
    own = [node for node, (first, last) in zip(nodes, held, strict=True) if here[0] <= first and last <= here[1]]
    if not own:
        raise _wrong(f"names no mirror for vbuckets {here[0]}-{here[1]} alone, which this one holds", _OWN_RANGES)
    if own_ports and not any(node.kv_port in own_ports or node.tls_port in own_ports for node in own):
        raise _wrong(
            f"does not name this mirror: none for vbuckets {here[0]}-{here[1]} has port "
            f"{' or '.join(map(str, sorted(own_ports)))}",
            "name it by the port of its setting kv",
        )


_OWN_RANGES = "write HOST:PORT=FIRST-LAST, with the range of each mirror's setting vbuckets"


def _wrong(what: str, hint: str) -> ConfigError:
    return ConfigError(f"kv_nodes {what}", hint=hint)


class ServedMap:
    def __init__(
        self,
        identity: Identity,
        nodes: Sequence[MapNode],
        rev: int,
        capabilities: Sequence[str] = KV_CAPABILITIES,
    ) -> None:
        """`rev` must rise with each start of the service and each change of `nodes`."""
        self.revision = (EPOCH, rev)
        self._capabilities = capabilities
        self._identity = identity
        self._nodes = list(nodes)
        self.uncovered = sum(
            not any(node.holds(vbid) for node in self._nodes) for vbid in range(identity.vbucket_count)
        )
        self.of_node = self._render(with_bucket=False)
        self.of_bucket = self._render(with_bucket=True)

    def _render(self, *, with_bucket: bool) -> bytes:
        alone = len(self._nodes) == 1
        nodes = [replace(node, answers=alone) for node in self._nodes]
        if not with_bucket:
            return render(self.revision[1], EPOCH, nodes, None)
        chains = [self._chain(vbid) for vbid in range(self._identity.vbucket_count)]
        width = max(1, *map(len, chains))
        bucket = ConfigBucket(
            self._identity.bucket_name,
            self._identity.bucket_uuid,
            [chain + [NOWHERE] * (width - len(chain)) for chain in chains],
            self._capabilities,
            mirror=True,
        )
        return render(self.revision[1], EPOCH, nodes, bucket)

    def _chain(self, vbid: int) -> list[int]:
        holders = [number for number, node in enumerate(self._nodes) if node.holds(vbid)]
        first = vbid % len(holders) if holders else 0
        return (holders[first:] + holders[:first])[: REPLICAS_MAX + 1]
