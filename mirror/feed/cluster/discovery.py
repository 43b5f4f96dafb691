"""Finds the first cluster map: the newest map of all nodes that answer.

One node's map is not enough: a node that returns after a failover still has its old map, and may be the first host of
the connection string. So every host of the source, and every node that any map names, is queried in parallel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from mirror.clock import Clock
from mirror.config import Settings, vbucket_range
from mirror.errors import ClusterError, ConfigError, ConnectFailed, HandshakeFailed, NotSupported, TlsFailed
from mirror.feed.connection.bootstrap import Access, enter, fetch_map
from mirror.feed.connection.connection_string import ConnectionString, NodeAddress
from mirror.ingest.selection import Selection
from mirror.ingest.topology import ClusterMap, newest_of
from mirror.log import get_logger
from storage.model import Identity

log = get_logger("feed")

SURVEY_S = 2.0
"""Time for all other nodes to answer, after the first map or refusal."""


@dataclass(frozen=True, slots=True)
class Source:
    """The facts of a bucket that a new mirror needs."""

    cluster_uuid: str
    bucket_name: str
    bucket_uuid: str
    vbucket_count: int
    cluster_map: ClusterMap | None = None

    def identity(self, settings: Settings) -> Identity:
        """Return a new mirror's identity. Raises ConfigError for invalid names, or vbuckets that the bucket lacks."""
        count, held = self.vbucket_count, None
        if settings.vbuckets is not None:
            first, last = vbucket_range(settings.vbuckets, "vbuckets")
            if last >= count:
                raise ConfigError(
                    f"vbuckets {first}-{last} are requested, and the bucket has {count}",
                    hint=f"give a range up to {count - 1}",
                )
            held = None if last - first + 1 == count else (first, last)
        groups = min(settings.groups, held[1] - held[0] + 1 if held else count)
        selected = Selection.of(settings.scope, settings.collections).text
        return Identity(self.cluster_uuid, self.bucket_name, self.bucket_uuid, count, groups, held, selected)


async def find_source(access: Access, clock: Clock, bucket_uuid: str | None = None) -> Source:
    """Return the source's bucket. Raises ClusterError, ConfigError. For `bucket_uuid` see `survey`."""
    found = await discover(access, clock, bucket_uuid=bucket_uuid)
    if not found.bucket_name or not found.bucket_uuid:
        raise NotSupported(
            "the source does not say which bucket it serves",
            hint="only Couchbase buckets can be mirrored, not memcached ones",
        )
    if found.vbucket_count == 0:
        raise HandshakeFailed("the source has no vbuckets yet", hint="the bucket is still being created; retrying")
    return Source(found.cluster_uuid or "", found.bucket_name, found.bucket_uuid, found.vbucket_count, found)


LOOK_UP_TIMEOUT_S = 2.0
"""Timeout of a DNS query. Without an answer in time, the name counts as a host."""


@dataclass(frozen=True, slots=True)
class Survey:
    newest: ClusterMap
    answers: dict[NodeAddress, ClusterMap]


async def discover(
    access: Access, clock: Clock, *, addresses: Iterable[NodeAddress] | None = None, bucket_uuid: str | None = None
) -> ClusterMap:
    return (await survey(access, clock, addresses=addresses, bucket_uuid=bucket_uuid)).newest


async def survey(
    access: Access, clock: Clock, *, addresses: Iterable[NodeAddress] | None = None, bucket_uuid: str | None = None
) -> Survey:
    """Ask all nodes for their cluster maps, beginning with `addresses` (None: those of the connection string).

    With `bucket_uuid`, maps of other buckets count only if no node sends a map of this bucket. If no node sends any
    map, raises a refusal of user or bucket, else a permanent error (such as TlsFailed), else the last error. Also
    raises ConfigError, and the error of `check_ports`.
    """
    if addresses is None:
        addresses = await first_addresses(access.source)
    answers, errors = await _ask_all(access, clock, addresses)
    if not answers:
        raise _weightiest(errors) or ConnectFailed(f"no address in {access.source}")
    newest = newest_of(list(answers.values()), bucket_uuid)
    check_ports(newest, access, next(address for address, each in answers.items() if each is newest))
    return Survey(newest, answers)


def _weightiest(errors: list[ClusterError]) -> ClusterError | None:
    refusals = [error for error in errors if _is_refusal(error)]
    final = [error for error in errors if not error.retryable]
    return next(iter((*refusals, *final, *reversed(errors))), None)


def _is_refusal(error: ClusterError) -> bool:
    """Return True for a refusal that every node would give. A TLS error concerns one node only."""
    return not error.retryable and not isinstance(error, TlsFailed)


async def ask_for_map(access: Access, address: NodeAddress, clock: Clock, network: str | None) -> ClusterMap:
    link, _ = await enter(access, address, clock)
    try:
        return await fetch_map(link, access.settings, network=network)
    finally:
        link.close()


async def _ask_all(
    access: Access, clock: Clock, hosts: Iterable[NodeAddress]
) -> tuple[dict[NodeAddress, ClusterMap], list[ClusterError]]:
    """Return the maps of `hosts`, then of all nodes that any map names, and the errors of the others."""
    answers: dict[NodeAddress, ClusterMap] = {}
    errors: list[ClusterError] = []
    queried: list[NodeAddress] = []
    waiting: dict[asyncio.Task[ClusterMap], NodeAddress] = {}
    network: str | None = None

    def ask(addresses: Iterable[NodeAddress | None]) -> None:
        for address in addresses:
            if address is not None and address not in queried:
                queried.append(address)
                waiting[asyncio.create_task(ask_for_map(access, address, clock, network))] = address

    ask(hosts)
    loop = asyncio.get_running_loop()
    deadline_s = float("inf")
    try:
        while waiting and (left_s := deadline_s - loop.time()) > 0:
            timeout_s = None if left_s == float("inf") else left_s
            done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                address = waiting.pop(task)
                try:
                    found = task.result()
                except ClusterError as error:
                    log.debug("no-map", node=str(address), error=str(error))
                    errors.append(error)
                    if not _is_refusal(error):
                        continue
                else:
                    answers[address] = found
                    network = network or found.network
                    ask(map(access.address_of, found.nodes))
                # The first answer ends the patience: silent nodes must not delay a start.
                deadline_s = min(deadline_s, loop.time() + SURVEY_S)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return {address: answers[address] for address in queried if address in answers}, errors


def check_ports(found: ClusterMap, access: Access, address: NodeAddress) -> None:
    """Raise NotSupported if no node has an address in the requested network, or if none has the needed port."""
    tls = access.source.tls
    if not found.network_offered:
        raise NotSupported(
            f"the cluster of {address} advertises no addresses of the network {found.network}",
            hint="set alternate addresses at its nodes, or use network=default",
        )
    if found.nodes and not any(node.tls_port if tls else node.kv_port for node in found.nodes):
        kind, remedy = ("with TLS", "couchbase://") if tls else ("without TLS", "couchbases://")
        where = "" if found.network == "default" else f" on the network {found.network}"
        raise NotSupported(
            f"no node of the cluster of {address} offers its data service {kind}{where}",
            hint=f"enable it, or use {remedy}" + ("" if not where else ", or another network"),
        )


async def first_addresses(source: ConnectionString) -> tuple[NodeAddress, ...]:
    """Return the string's hosts, or the hosts in the SRV records of its only name."""
    name = source.srv_name
    if name is None:
        return source.addresses
    found = await look_up(f"_couchbase{'s' if source.tls else ''}._tcp.{name}")
    if found:
        log.debug("srv-hosts", name=name, hosts=[str(address) for address in found])
    return found or source.addresses


async def look_up(record: str) -> tuple[NodeAddress, ...]:
    """Return the targets of an SRV record, the most preferred first; empty if there is no record or no answer."""
    import dns.asyncresolver  # imported here: it takes 50 ms, and few sources need it
    import dns.exception
    import dns.rdtypes.IN.SRV

    try:
        answer = await dns.asyncresolver.Resolver().resolve(record, "SRV", lifetime=LOOK_UP_TIMEOUT_S)
    except (dns.exception.DNSException, OSError, ValueError) as error:
        log.debug("srv-no-hosts", record=record, why=str(error))
        return ()
    records = [row for row in answer if isinstance(row, dns.rdtypes.IN.SRV.SRV)]
    records.sort(key=lambda row: (row.priority, -row.weight))
    return tuple(NodeAddress(row.target.to_text(omit_final_dot=True), row.port) for row in records)
