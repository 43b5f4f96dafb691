"""For `publish = persisted`: asks every copy of a vbucket up to which seqno the copy is persisted, by OBSERVE_SEQNO
(docs/protocol.md 3.4; kv_engine docs/BinaryProtocol.md).

A complete snapshot is published once the active copy and all replicas in the cluster map report its end as persisted. A
report counts only for the open stream's history, and only if it arrives after the snapshot is complete. If a copy
reports a failover, only the seqnos that its old and new history share count.

The source may demand a rollback although no persisted row was lost. If a replica takes over with part of a snapshot on
its disk, its new history begins at that snapshot's start (kv_engine docs/dcp/documentation/failure-scenarios.md), which
may be below the published seqno. So the mirror defers the rollback (storage/FORMAT.md): it stages the new history next
to the rows that readers see. Readers change over at the new history's first persisted boundary at or above the seqno
that they see. If two polls after the new stream began find that the new history ends below that seqno, rows are really
lost, and readers change over to the end of the new history.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

from mirror.clock import Clock
from mirror.config import Settings
from mirror.errors import ClusterError, ConfigError, NotSupported
from mirror.feed.cluster.connections import QueriedNode
from mirror.feed.cluster.map_follower import MapFollower
from mirror.feed.connection.bootstrap import Access
from mirror.feed.connection.connection_string import NodeAddress
from mirror.feed.connection.transport import Link
from mirror.feed.follow.mirrored_vbucket import MirroredVbucket
from mirror.log import get_logger
from mirror.wire import codec_kv
from mirror.wire.constants import Status, status_name
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.frame import Frame

log = get_logger("feed")

POLL_INTERVAL_S = 0.1
"""Interval of the requests while snapshots are held."""


def common_persisted(seen: codec_kv.ObservedSeqno, vbuuid: int) -> int:
    """Return the seqno up to which the copy that answered has persisted the history `vbuuid`."""
    if seen.old_vbuuid is None:
        return seen.persisted_seqno if seen.vbuuid == vbuuid else 0
    # The answer tells of the last failover alone, not of histories before it.
    if seen.old_vbuuid != vbuuid:
        return 0
    return min(seen.persisted_seqno, seen.last_seqno_received or 0)


class SlowestCopy:
    """The copy of a vbucket that holds its snapshots up: one that does not answer, or has persisted least."""

    def __init__(self, copies: list[NodeAddress], seqnos: Sequence[int | None]) -> None:
        """`copies`, the active one first, and the persisted seqno of each; None: it does not say."""
        self.copies = copies
        self.seqno: int | None = None
        if not copies:
            self.text = "held: the cluster map has no address of one of its copies"
            return
        at = min(range(len(copies)), key=lambda number: -1 if (seqno := seqnos[number]) is None else seqno)
        self.seqno = seqnos[at]
        copy = f"the {'replica' if at else 'active copy'} at {copies[at]}"
        if self.seqno is None:
            self.text = f"held: {copy} does not report what it has persisted"
        else:
            self.text = f"held: {copy} has persisted no more than seqno {self.seqno:,}"


class PersistencePoller:
    """Asks the copies of each vbucket with a held snapshot, over one connection without DCP to each node."""

    def __init__(self, access: Access, copies: MapFollower, clock: Clock) -> None:
        self._access = access
        self._copies = copies
        self._clock = clock
        self._settings: Settings = access.settings
        self._nodes: dict[NodeAddress, QueriedNode] = {}

    async def run(self, vbuckets: Sequence[MirroredVbucket]) -> None:
        """Ask until cancelled. Raises NotSupported if the source does not report persistence."""
        try:
            while True:
                await self._clock.sleep(POLL_INTERVAL_S)
                held = {vbucket: vbuuid for vbucket in vbuckets if (vbuuid := vbucket.observed_vbuuid) is not None}
                if not held:
                    continue
                found = await self.ask({vbucket.vbid: vbuuid for vbucket, vbuuid in held.items()})
                for vbucket, vbuuid in held.items():
                    slowest = found[vbucket.vbid]
                    # The map may have changed meanwhile: a new replica was not asked.
                    if self._copies.copies_of(vbucket.vbid) == slowest.copies:
                        assert vbucket.gate is not None, "it holds a snapshot"
                        vbucket.gate.wait_for(slowest.text, self._clock.monotonic())
                        if slowest.seqno is not None:
                            vbucket.persisted(vbuuid, slowest.seqno)
        finally:
            for node in self._nodes.values():
                node.close()

    async def ask(self, vbuuids: Mapping[int, int]) -> dict[int, SlowestCopy]:
        """Return by vbid the copy that has persisted least."""
        by_node: dict[NodeAddress, list[int]] = {}
        copies = {vbid: self._copies.copies_of(vbid) for vbid in vbuuids}
        for vbid, addresses in copies.items():
            for address in addresses:
                by_node.setdefault(address, []).append(vbid)
        answers = await asyncio.gather(*(self._ask_node(address, vbids, vbuuids) for address, vbids in by_node.items()))
        seen = dict(zip(by_node, answers, strict=True))
        return {
            vbid: SlowestCopy(addresses, [seen[address].get(vbid) for address in addresses])
            for vbid, addresses in copies.items()
        }

    async def _ask_node(self, address: NodeAddress, vbids: Sequence[int], vbuuids: Mapping[int, int]) -> dict[int, int]:
        """Return the persisted seqnos of one node, by vbid; empty if it cannot be reached."""
        node = self._nodes.setdefault(address, QueriedNode(address, self._access, self._clock))
        if node.pausing:
            return {}
        try:
            frames = await self._observe(await node.open(), vbids, vbuuids)
        except NotSupported:
            raise
        except (ClusterError, ConfigError) as error:
            node.failed(error)
            if node.failures.to_be_logged:
                log.warning("persistence-unknown", node=str(address), error=str(error), failures=node.failures.count)
            return {}
        node.failures.clear()
        found = {}
        for vbid, frame in frames.items():
            if (seqno := self._read(address, vbid, vbuuids[vbid], frame)) is not None:
                found[vbid] = seqno
        return found

    async def _observe(self, link: Link, vbids: Sequence[int], vbuuids: Mapping[int, int]) -> dict[int, Frame]:
        frames: dict[int, Frame] = {}
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle(vbid: int, outcome: Frame | ClusterError) -> None:
            if isinstance(outcome, Frame):
                frames[vbid] = outcome
                if len(frames) == len(vbids) and not done.done():
                    done.set_result(None)
            elif not done.done():
                done.set_exception(outcome)

        for vbid in vbids:
            request = codec_kv.observe_seqno(vbid, vbuuids[vbid], opaque=link.next_opaque())
            link.ask(request, lambda outcome, at=vbid: settle(at, outcome))  # type: ignore[misc]
        # The vbuckets that were answered for can go on.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.request_timeout_s):
                await done
        return dict(frames)

    def _read(self, address: NodeAddress, vbid: int, vbuuid: int, frame: Frame) -> int | None:
        if frame.status == Status.SUCCESS:
            try:
                return common_persisted(codec_kv.decode_observe_seqno(frame.value), vbuuid)
            except RemoteProtocolError as error:
                log.warning("persistence-invalid", node=str(address), error=str(error))
                return None
        if frame.status in (Status.UNKNOWN_COMMAND, Status.NOT_SUPPORTED):
            raise NotSupported(
                f"{address} does not report persisted seqnos: {status_name(frame.status)}",
                hint="set publish to received; persisted needs Couchbase Server 4.0 or newer, or a mirror that has it",
            )
        if frame.status == Status.NOT_MY_VBUCKET:
            self._copies.refresh_map(frame.value, vbid)
        return None  # KEY_ENOENT: a replica that does not know this history yet
