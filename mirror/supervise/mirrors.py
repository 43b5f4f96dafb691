"""Compares `kv_nodes` with the mirrors that it names, over their KV ports.

Logs in to each mirror as the source's user, requests its cluster map, and asks for the seqno of the first and last
vbucket that `kv_nodes` names for it. An unreachable mirror or a refused login is no contradiction.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from mirror.config import PasswordSource
from mirror.errors import AuthRejected, BucketMissing, ClusterError, ConfigError
from mirror.feed.connection.bootstrap import Access, enter, fetch_map
from mirror.feed.connection.connection_string import NodeAddress, parse
from mirror.ingest.topology import NO_NODE
from mirror.serve.bucket.map import MapNode, named_nodes
from mirror.supervise.context import ServiceContext
from mirror.wire.constants import Opcode, Status

INTERVAL_S = 2.0


async def ask_mirrors(context: ServiceContext) -> None:
    """Ask all mirrors at intervals until cancelled; keep contradictions in `mirror_troubles`."""
    listed: str | None = None
    refused: set[MapNode] = set()
    while True:
        if context.settings.kv_nodes != listed:
            listed, refused = context.settings.kv_nodes, set()
        nodes = named_nodes(listed) if listed is not None and context.identity is not None else []
        found = await asyncio.gather(*(_ask(context, node, refused) for node in nodes if node not in refused))
        context.mirror_troubles = tuple(each for each in found if each is not None)
        await context.clock.sleep(INTERVAL_S)


async def _ask(context: ServiceContext, node: MapNode, refused: set[MapNode]) -> str | None:
    """Return the contradiction between a mirror and `kv_nodes`; None if the mirror agrees or does not answer."""
    settings, identity = context.settings, context.identity
    port = node.kv_port or node.tls_port
    assert settings.source is not None
    assert identity is not None
    assert node.host is not None
    assert port is not None
    address = NodeAddress(node.host, port)
    source = replace(parse(settings.source), tls=node.tls_port is not None, addresses=(address,))
    try:
        link, _ = await enter(Access(source, PasswordSource.of(settings), settings), address, context.clock)
    except BucketMissing:
        return f"{address} does not have the bucket {identity.bucket_name}"
    except AuthRejected:
        refused.add(node)  # failed logins would add up
        return None
    except (ClusterError, ConfigError):
        return None
    try:
        theirs = await fetch_map(link, settings)
        if theirs.bucket_uuid != identity.bucket_uuid:
            return f"{address} mirrors another bucket (uuid {theirs.bucket_uuid})"
        if nowhere := theirs.active.count(NO_NODE):
            return f"{address} names no mirror for {nowhere} vbuckets"
        for vbid in node.held or (0, identity.vbucket_count - 1):
            timeout_s = settings.request_timeout_s
            # No history has the vbuuid 0: the answer only tells if the mirror holds the vbucket.
            answer = await link.request(Opcode.OBSERVE_SEQNO, value=bytes(8), vbucket=vbid, timeout_s=timeout_s)
            if answer.status == Status.NOT_MY_VBUCKET:
                return f"{address} does not hold vbucket {vbid}, which kv_nodes names for it"
    except ClusterError:
        return None
    finally:
        link.close()
    return None
