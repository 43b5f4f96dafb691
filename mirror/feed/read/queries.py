"""The queries of a `SourceReader`: high seqnos, failover logs, collections.

A query is repeated with growing pauses until the answer is complete, the timeout expires or an error is permanent.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from mirror.errors import ClusterError, ConfigError, MirrorError, NotSupported, SourceTimeout
from mirror.feed.cluster.connections import Connections
from mirror.feed.cluster.map_follower import MapFollower
from mirror.feed.connection.bootstrap import fetch_high_seqnos, fetch_manifest
from mirror.feed.connection.node_session import NodeSession
from mirror.ingest.selection import FilterFields
from mirror.wire.codec_dcp import decode_failover_log
from mirror.wire.constants import Opcode, status_name
from mirror.wire.constants import Status as WireStatus
from mirror.wire.errors import RemoteProtocolError
from storage.model import DEFAULT_COLLECTION, FailoverLog

POLL_S = 0.02
POLL_MAX_S = 1.0
"""The first and the longest pause before a query is repeated."""


T = TypeVar("T")


class SourceQueries:
    def __init__(self, maps: MapFollower, connections: Connections, timeout_s: float) -> None:
        """`timeout_s` limits each query including repetitions."""
        self.refusal: MirrorError | None = None
        """The permanent refusal of the source, which every later query raises."""
        self.stream_filter: FilterFields = {}
        """The JSON value of every stream request, set by `resolve`."""
        self.maps = maps
        self.connections = connections
        self.clock = connections.clock
        self._settings = connections.access.settings
        self._timeout_s = timeout_s
        self._collection_ids: list[int] = []

    async def high_seqnos(self) -> dict[int, int]:
        """Query all nodes, until their answers include every vbucket."""

        async def attempt() -> dict[int, int]:
            found: dict[int, int] = {}
            for session in self.connections.ready_sessions():
                seqnos = await fetch_high_seqnos(session.link, self._settings, self._collection_ids or None)
                for vbid, seqno in seqnos.items():
                    found[vbid] = max(seqno, found.get(vbid, 0))
            vbids = range(self.maps.vbucket_count)
            if absent := [vbid for vbid in vbids if vbid not in found]:
                raise ClusterError(f"no node knows the high seqno of vb {absent[0]} ({len(absent)} such vbuckets)")
            return {vbid: found[vbid] for vbid in vbids}

        return await self._until(
            attempt,
            "check the nodes; a vbucket has no node during a failover or rebalance, and none at a mirror until its "
            "first fill is complete",
        )

    async def failover_log(self, vbid: int) -> FailoverLog:
        if not 0 <= vbid < self.maps.vbucket_count:
            raise ConfigError(f"there is no vb {vbid}", hint=f"the bucket has {self.maps.vbucket_count}")

        async def attempt() -> FailoverLog:
            session = self.connections.session_at(self.maps.address_of(vbid))
            if session is None:
                raise ClusterError(f"no node serves vb {vbid}")
            answer = await session.link.request(
                Opcode.DCP_GET_FAILOVER_LOG, vbucket=vbid, timeout_s=self._settings.request_timeout_s
            )
            if answer.status != WireStatus.SUCCESS:
                raise ClusterError(f"{session.address} has no failover log of vb {vbid}: {status_name(answer.status)}")
            return FailoverLog.of(decode_failover_log(answer.value))

        return await self._until(attempt)

    async def collection_names(self) -> dict[int, str]:

        async def attempt() -> dict[int, str]:
            session = self._any_session()
            if not session.handshake.collections:
                return {DEFAULT_COLLECTION: "_default._default"}
            manifest = await fetch_manifest(session.link, self._settings)
            return {found: ".".join(name) for name, found in manifest.collections.items()}

        return await self._until(attempt)

    async def resolve(self, names: Sequence[str | int]) -> None:
        """Look up the ids of collections, or of one scope. Later streams request these ids."""

        async def attempt() -> None:
            session = self._any_session()
            if not session.handshake.collections:
                raise NotSupported(f"{session.address} does not support collections", hint="read the bucket as a whole")
            manifest = await fetch_manifest(session.link, self._settings)
            if len(names) == 1 and isinstance(names[0], str) and "." not in names[0]:
                self.stream_filter = {"scope": f"{_id_of(manifest.scopes, 'scope', names[0]):x}"}
                return
            known = {".".join(path): found for path, found in manifest.collections.items()}
            ids = [name if isinstance(name, int) else _id_of(known, "collection", name) for name in names]
            self._collection_ids = ids
            self.stream_filter = {"collections": [f"{collection_id:x}" for collection_id in ids]}

        await self._until(attempt)

    def _any_session(self) -> NodeSession:
        session = next(iter(self.connections.ready_sessions()), None)
        if session is None:
            raise ClusterError("no node can be reached")
        return session

    async def _until(self, attempt: Callable[[], Coroutine[Any, Any, T]], hint: str | None = None) -> T:
        """Repeat an attempt after retryable errors; after `timeout_s` raise SourceTimeout with the last error text."""
        deadline = self.clock.monotonic() + self._timeout_s
        pause_s = POLL_S
        while True:
            if self.refusal is not None:
                raise self.refusal
            try:
                return await attempt()
            except ClusterError as error:
                if not error.retryable:
                    raise
                complaint = error.what
                self.maps.queries.wake()  # the vbucket may have moved
            except RemoteProtocolError as error:
                complaint = f"the source broke the protocol: {error}"
            if self.clock.monotonic() >= deadline:
                raise SourceTimeout(f"{complaint}, for {self._timeout_s:g} s{self.connections.errors()}", hint=hint)
            await self.clock.sleep(min(pause_s, deadline - self.clock.monotonic()))
            pause_s = min(pause_s * 2, POLL_MAX_S)


def _id_of(known: Mapping[str, int], what: str, name: str) -> int:
    if name not in known:
        raise ConfigError(
            f"the bucket has no {what} {name!r}",
            hint="write scope.collection as the cluster knows it, or the name of one scope",
        )
    return known[name]
