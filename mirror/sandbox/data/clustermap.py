"""The cluster map of the sandbox; `mirror.server.cluster_config` makes its JSON. Every change raises the revision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mirror.server.cluster_config import CAPABILITIES, NOWHERE, ConfigBucket, ConfigNode, render


@dataclass(frozen=True, slots=True)
class SandboxAddress:
    number: int
    port: int | None
    """The port without TLS, or None."""
    tls_port: int | None = None


@dataclass(slots=True)
class SandboxMap:
    """`owners` and `replicas` have, for each vbucket, the number of its active node and of its replicas' nodes."""

    bucket: str
    bucket_uuid: str
    owners: list[int]
    replicas: list[list[int]]
    nodes: list[SandboxAddress] = field(default_factory=list)
    rev: int = 1
    epoch: int = 1
    sends_epoch: bool = True
    """False for old servers, whose maps are ordered by revision alone."""
    capabilities: Sequence[str] = CAPABILITIES
    ephemeral: bool = False
    """True if the map describes an ephemeral bucket."""
    host: str | None = None
    """The nodes' host in the map; None: clients take the host to which they connected."""
    external_host: str | None = None
    """The nodes' host in the alternate addresses `external`."""
    _cache: dict[tuple[int, bool], bytes] = field(default_factory=dict)

    def bump(self) -> None:
        self.rev += 1
        self._cache.clear()

    def to_json(self, this_node: int, *, with_bucket: bool) -> bytes:
        """Return the map that `this_node` sends: that of the bucket, or the global one without vbuckets."""
        cached = self._cache.get((this_node, with_bucket))
        if cached is None:
            cached = self._cache[this_node, with_bucket] = self._render(this_node, with_bucket=with_bucket)
        return cached

    def _render(self, this_node: int, *, with_bucket: bool) -> bytes:
        nodes = [
            ConfigNode(self.host, node.port, node.tls_port, self.external_host, node.number == this_node)
            for node in self.nodes
        ]
        epoch = self.epoch if self.sends_epoch else None
        if not with_bucket:
            return render(self.rev, epoch, nodes, None)
        index = {node.number: position for position, node in enumerate(self.nodes)}
        chains = [
            [index.get(number, NOWHERE) for number in (owner, *replicas)]
            for owner, replicas in zip(self.owners, self.replicas, strict=True)
        ]
        bucket = ConfigBucket(self.bucket, self.bucket_uuid, chains, self.capabilities, self.ephemeral)
        return render(self.rev, epoch, nodes, bucket)
