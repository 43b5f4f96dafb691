"""Asking the source who it is, in the supervisor's words.

Knows the way in (`feed.bootstrap`) and what of the cluster map identifies a bucket; never streams. Invariant: a map
without a bucket uuid or without vbuckets is an error by name, since no directory may be made or compared by it.
"""

from __future__ import annotations

from mirror.clock import Clock
from mirror.config import Settings
from mirror.errors import ConfigError, HandshakeFailed, NotSupported
from mirror.feed.cluster.discovery import discover
from mirror.feed.connection.bootstrap import Access
from mirror.feed.connection.connection_string import parse
from mirror.supervise.setup import LookUp, Source


def look_up_with(clock: Clock) -> LookUp:
    """Return the function that asks the source which `Settings` name."""

    async def look_up(settings: Settings, bucket_uuid: str | None = None) -> Source:
        if settings.source is None:
            raise ConfigError("no source is given", hint="give --source couchbase://user@host/bucket", setting="source")
        access = Access.of(parse(settings.source), settings)
        cluster_map = await discover(access, clock, bucket_uuid=bucket_uuid)
        if not cluster_map.bucket_name or not cluster_map.bucket_uuid:
            raise NotSupported(
                "the source does not say which bucket it serves",
                hint="only Couchbase buckets can be mirrored, not memcached ones",
            )
        if cluster_map.vbucket_count == 0:
            raise HandshakeFailed("the source has no vbuckets yet", hint="the bucket is still being made; trying on")
        return Source(
            cluster_map.cluster_uuid or "",
            cluster_map.bucket_name,
            cluster_map.bucket_uuid,
            cluster_map.vbucket_count,
            cluster_map,
        )

    return look_up
