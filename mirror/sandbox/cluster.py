"""A cluster of n nodes in memory, for DCP clients and Couchbase SDKs.

The cluster answers as real servers did in tests/recordings. The same seed and calls give the same ids, histories and
snapshots. After `split_off` a node has its own data and map.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from random import Random

from mirror.clock import Clock, SystemClock
from mirror.sandbox.data.bucket import Bucket, fork
from mirror.sandbox.data.profile import DEFAULT_PROFILE, profile_named
from mirror.sandbox.data.sandbox_vbucket import CHECKPOINT_ITEMS_MAX, CHECKPOINTS_KEPT, Vbucket
from mirror.sandbox.data.streams import Sent
from mirror.sandbox.node.faults import Faults
from mirror.sandbox.node.node import NodeTls, SandboxNode
from mirror.server.cluster_config import NOWHERE

EXPIRY_PAGER_SECONDS = 60.0

_WILDCARDS = ("0.0.0.0", "::", "")
"""Addresses at which a server can listen, but to which no client can connect."""


class SandboxCluster:
    """`async with SandboxCluster(...) as cluster:` starts and stops the cluster."""

    def __init__(
        self,
        nodes: int = 1,
        vbuckets: int = 64,
        bucket: str = "demo",
        user: str = "demo",
        password: str = "demo",
        *,
        seed: int = 0,
        host: str = "127.0.0.1",
        port: int = 0,
        replicas: int = 0,
        clock: Clock | None = None,
        tls: NodeTls | None = None,
        tls_only: bool = False,
        checkpoint_items_max: int = CHECKPOINT_ITEMS_MAX,
        checkpoints_kept: int = CHECKPOINTS_KEPT,
        profile: str = DEFAULT_PROFILE,
        keeps_history: bool = False,
        bounded: bool = False,
    ) -> None:
        """`start` opens the ports. `port` is for the first node; other nodes, and TLS, take free ports.

        With `tls` the nodes listen with and without TLS; with `tls` and `tls_only` only with TLS.

        `profile` names a server release (`PROFILES`); an unknown name raises ConfigError. With `keeps_history` the
        bucket keeps and streams superseded versions, as with the storage engine Magma.
        """
        assert nodes > 0
        assert 0 < vbuckets <= 1024
        self.bucket = Bucket(
            bucket,
            vbuckets=vbuckets,
            clock=clock or SystemClock(),
            rng=Random(seed),
            replicas=min(replicas, nodes - 1),
            checkpoint_items_max=checkpoint_items_max,
            checkpoints_kept=checkpoints_kept,
            profile=profile_named(profile),
            keeps_history=keeps_history,
            bounded=bounded,
        )
        self.vbuckets = self.bucket.vbuckets
        self.set, self.delete, self.multi_write = self.bucket.set, self.bucket.delete, self.bucket.multi_write
        self.add_user = self.bucket.users.add
        self.user = self.bucket.users.add(user, password)
        self.host = host
        self.nodes: list[SandboxNode] = []
        self.faults = Faults(self.nodes, self.bucket.stream_faults)
        self.tls = tls
        self._tls_only = tls_only and tls is not None
        self._first_port = port
        several_on_this_host = nodes > 1 and host not in _WILDCARDS
        self.bucket.map.host = host if several_on_this_host else None
        self._tasks: list[asyncio.Task[None]] = []
        for _ in range(nodes):
            self._make_node()
        self.bucket.on_map_change.append(self._announce)
        self.bucket.on_state_change.append(self._end_streams)

    # --- start and stop

    async def start(self) -> None:
        for node in self.nodes:
            await self._listen(node, self._first_port if node.number == 0 else 0, 0)
        self._place(range(len(self.nodes)))
        self._tasks.append(asyncio.create_task(self._page_expired()))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        for node in self.nodes:
            await node.close()
        await asyncio.sleep(0)

    async def __aenter__(self) -> SandboxCluster:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def connection_string(self) -> str:
        if self.tls is None:
            return self.plain_connection_string
        return self._string("couchbases", [node.tls_port for node in self.bucket.map.nodes])

    @property
    def plain_connection_string(self) -> str:
        return self._string("couchbase", [node.port for node in self.bucket.map.nodes])

    def vbucket(self, vbid: int) -> Vbucket:
        return self.bucket.vbuckets[vbid]

    def sent(self, vbid: int) -> Sent:
        return self.bucket.sent[vbid]

    # --- topology

    async def kill_node(self, number: int) -> None:
        """Close a node's ports and connections, as if its process had died. The map does not change."""
        await self.nodes[number].stop()

    async def restart_node(self, number: int, *, lose: int | None = None) -> None:
        """Start a node again on its ports. None of its data is in memory, so streams begin with a backfill.

        If `lose` is given, each active vbucket of the node begins a new history without its last `lose` changes, as
        after a crash.
        """
        node = self.nodes[number]
        await node.stop()
        for vbid, owner in enumerate(node.bucket.map.owners):
            if owner == number:
                if lose is None:
                    node.bucket.vbuckets[vbid].to_disk()
                else:
                    node.bucket.failover(vbid, lose)
        await self._listen(node, node.port or 0, node.tls_port or 0)

    def failover(self, vbid: int, *, lose: int = 0) -> int:
        """Give a vbucket a new history without its last `lose` changes. Move it to another live node, if there is one.

        Return the seqno at which the new history begins.
        """
        base = self.bucket.failover(vbid, lose)
        owner = self.bucket.map.owners[vbid]
        others = [node.number for node in self._members() if node.alive and node.number != owner]
        if others:
            self.bucket.map.owners[vbid] = others[vbid % len(others)]
        self._drop_replica(vbid)
        self.bucket.map_changed(vbid)
        return base

    async def failover_node(self, number: int, *, lose: int = 0) -> None:
        """Remove a node from the map. Its vbuckets fail over to other live nodes, without their last `lose` changes.

        The node stops, unless it was split off before.
        """
        if self._belongs(self.nodes[number]):
            await self.nodes[number].stop()
        self.bucket.map.nodes = [node for node in self.bucket.map.nodes if node.number != number]
        members = [node.number for node in self._members() if node.alive]
        moved = []
        for vbid, owner in enumerate(self.bucket.map.owners):
            if owner == number:
                self.bucket.failover(vbid, lose)
                self.bucket.map.owners[vbid] = members[vbid % len(members)] if members else NOWHERE
                moved.append(vbid)
            self._drop_replica(vbid)
        self.bucket.map_changed(*moved)

    def split_off(self, number: int) -> Bucket:
        """Separate a node from the cluster, as a network partition does, and break its connections.

        The node continues with a copy of the bucket, map included. Return the copy.
        """
        node = self.nodes[number]
        node.bucket = fork(self.bucket)
        node.bucket.on_map_change.append(node.announce_map)
        node.bucket.on_state_change.append(node.end_streams)
        for connection in list(node.connections):
            connection.link.cut()
        return node.bucket

    def move(self, vbid: int, number: int) -> None:
        self.bucket.failover(vbid)
        self.bucket.map.owners[vbid] = number
        self._drop_replica(vbid)
        self.bucket.map_changed(vbid)

    async def add_node(self) -> int:
        """Add a node to the map; return its number. The node has no vbuckets until a rebalance."""
        node = self._make_node()
        await self._listen(node, 0, 0)
        self.bucket.map.nodes.append(node.address)
        self.bucket.map_changed()
        return node.number

    async def rebalance(self, numbers: Iterable[int] | None = None, *, pause_seconds: float = 0.0) -> int:
        targets = list(numbers) if numbers is not None else [node.number for node in self._members() if node.alive]
        if not targets:
            raise ValueError("no node is left that could have a vbucket")
        members = {node.number for node in self.bucket.map.nodes}
        self.bucket.map.nodes += [self.nodes[number].address for number in targets if number not in members]
        moved = 0
        for vbid, owner in enumerate(list(self.bucket.map.owners)):
            target = targets[vbid % len(targets)]
            if owner != target:
                self.move(vbid, target)
                moved += 1
                await asyncio.sleep(pause_seconds)
        gone = {node.number for node in self.bucket.map.nodes} - set(targets)
        if gone:
            self.bucket.map.nodes = [node for node in self.bucket.map.nodes if node.number in targets]
            self.bucket.map_changed()
        return moved

    async def recreate_bucket(self) -> None:
        for node in self.nodes:
            for connection in list(node.connections):
                connection.link.cut()
        self.bucket.recreate()
        await asyncio.sleep(0)

    # --- inside

    async def _listen(self, node: SandboxNode, port: int, tls_port: int) -> None:
        context = None if self.tls is None else self.tls.context
        node.certificates_needed = self.tls is not None and self.tls.clients_need_certificate
        await node.start(
            self.host, None if self._tls_only else port, tls_port=None if context is None else tls_port, tls=context
        )

    def _string(self, scheme: str, ports: list[int | None]) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        addresses = ",".join(f"{host}:{port}" for port in ports)
        return f"{scheme}://{self.user.name}@{addresses}/{self.bucket.name}"

    def _make_node(self) -> SandboxNode:
        node = SandboxNode(len(self.nodes), self.bucket)
        self.nodes.append(node)
        return node

    def _members(self) -> list[SandboxNode]:
        return [self.nodes[address.number] for address in self.bucket.map.nodes]

    def _place(self, numbers: Iterable[int]) -> None:
        members = list(numbers)
        self.bucket.map.nodes = [self.nodes[number].address for number in members]
        for vbid in range(len(self.vbuckets)):
            self.bucket.map.owners[vbid] = members[vbid % len(members)]
            replicas = self.bucket.map.replicas[vbid]
            replicas[:] = [members[(vbid + 1 + index) % len(members)] for index in range(len(replicas))]
        self.bucket.map.bump()

    def _drop_replica(self, vbid: int) -> None:
        present = {node.number for node in self.bucket.map.nodes} - {self.bucket.map.owners[vbid]}
        replicas = self.bucket.map.replicas[vbid]
        replicas[:] = [replica if replica in present else NOWHERE for replica in replicas]

    def _belongs(self, node: SandboxNode) -> bool:
        return node.bucket is self.bucket

    def _announce(self) -> None:
        for node in filter(self._belongs, self.nodes):
            node.announce_map()

    def _end_streams(self, vbid: int) -> None:
        for node in filter(self._belongs, self.nodes):
            node.end_streams(vbid)

    async def _page_expired(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(EXPIRY_PAGER_SECONDS)
                for vbucket in self.vbuckets:
                    self.bucket.documents.expire_all(vbucket)
                    await asyncio.sleep(0)
