"""Setup before workers start: finds the bucket at the source, and creates or checks the data directory.

A directory with another bucket, selection, vbucket range or number of groups than requested is refused and left as it
is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from mirror.clock import Clock
from mirror.config import Settings, required_source, vbucket_range
from mirror.errors import ClusterError, ConfigError
from mirror.feed.cluster.discovery import Source, find_source
from mirror.feed.connection.bootstrap import Access
from mirror.feed.connection.connection_string import parse
from mirror.ingest.selection import Selection
from mirror.ingest.topology import check_bucket
from mirror.log import get_logger
from mirror.ownership import readers_gid
from mirror.serve.bucket.map import check_nodes, named_nodes
from mirror.server.listener import parse_addresses
from mirror.supervise.context import MapBook, ServiceContext
from mirror.supervise.lock import check_foreign
from storage.env import access, directory
from storage.errors import StorageError
from storage.model import Identity

SOURCE_RETRY_MIN_S = 0.5
SOURCE_RETRY_MAX_S = 10.0

log = get_logger("supervisor")


class LookUp(Protocol):
    def __call__(self, settings: Settings, bucket_uuid: str | None = None) -> Awaitable[Source]:
        """Return the source's bucket, if possible the one with `bucket_uuid`. Raises ClusterError, ConfigError."""
        ...


class Setup:
    def __init__(self, context: ServiceContext, look_up: LookUp, required_groups: int | None) -> None:
        """Raises ConfigError for a wrong setting."""
        self._context = context
        self._look_up = look_up
        self._required_groups = required_groups
        self._selection = Selection.of(context.settings.scope, context.settings.collections)
        readers_gid(context.settings)

    def load(self) -> None:
        identity = checked(self._context.data, self._context.settings, self._required_groups)
        if identity is not None:
            self._open(identity)

    def share(self) -> None:
        settings, data = self._context.settings, str(self._context.data)
        name, gid = settings.readers_group, readers_gid(settings)
        if gid is None:
            return
        try:
            access.share(data, gid)
        except StorageError as error:
            log.error("readers-group-refused", readers_group=name, error=str(error))
        else:
            closed = access.closed_parent(data, gid)
            if closed is not None:
                log.warning(
                    "readers-group-locked-out",
                    readers_group=name,
                    directory=closed,
                    hint=f"chmod o+x {closed}, or make {name} its group",
                )

    async def find_source(self, limit_s: float, unreachable: Callable[[str], None]) -> Source:
        """Ask the source for its bucket until the source answers. Pass each failure to `unreachable`.

        Raises ConfigError. Raises ClusterError at once if it is permanent, such as BucketChanged, else after `limit_s`
        (0: never).
        """
        context = self._context
        began = context.clock.monotonic()
        delay_s = SOURCE_RETRY_MIN_S
        while True:
            try:
                known = context.identity
                source = await self._look_up(context.settings, None if known is None else known.bucket_uuid)
                if known is not None:
                    # First: another bucket has maps of its own, whose revisions say nothing here.
                    check_bucket(known, source.bucket_uuid, source.vbucket_count)
                if context.maps is not None and source.cluster_map is not None:
                    context.maps.check(source.cluster_map)
                return source
            except ClusterError as error:
                if not error.retryable or (limit_s and context.clock.monotonic() - began >= limit_s):
                    raise
                unreachable(str(error))
            await context.clock.sleep(delay_s)
            delay_s = min(SOURCE_RETRY_MAX_S, delay_s * 2)

    def make(self, source: Source) -> None:
        settings = self._context.settings
        identity = source.identity(settings)
        check_kv_nodes(settings, identity)
        directory.create(str(self._context.data), identity)
        log.info(
            "mirror-made",
            data=str(self._context.data),
            bucket=source.bucket_name,
            groups=identity.group_count,
            selection=str(self._selection),
        )
        self._open(identity)

    def _open(self, identity: Identity) -> None:
        context = self._context
        context.identity = identity
        self.share()
        context.maps = MapBook(str(context.data), identity.bucket_uuid)


def checked(data: Path, settings: Settings, required_groups: int | None = None) -> Identity | None:
    """Return the identity of the mirror in a directory, or None if there is no mirror yet.

    Raises ConfigError if the mirror contradicts the settings or has not the `required_groups`, StorageError if another
    mirror's data is there.
    """
    if not directory.exists(str(data)):
        if data.is_dir():
            check_foreign(data)
        directory.check_unused(str(data))
        return None
    identity = directory.load(str(data))
    check(data, settings, identity, required_groups)
    return identity


def check(data: Path, settings: Settings, identity: Identity, required_groups: int | None = None) -> None:
    """Raise ConfigError if a mirror contradicts the settings or has not the `required_groups`."""
    if required_groups is not None and required_groups != identity.group_count:
        raise ConfigError(
            f"{data} was made with {identity.group_count} groups, not {required_groups}",
            hint=f"leave --groups out or give {identity.group_count}; another number needs a new directory",
        )
    stored, requested = Selection.parse(identity.selection), Selection.of(settings.scope, settings.collections)
    if not requested.whole and requested != stored:
        raise ConfigError(
            f"{data} mirrors {stored}, not {requested}",
            hint="leave --collection and --scope out or give the same; another choice needs a new data directory",
        )
    check_kv_nodes(settings, identity)
    vbuckets = settings.vbuckets
    held = (identity.vbids[0], identity.vbids[-1])
    if vbuckets is not None and vbucket_range(vbuckets, "vbuckets") != held:
        raise ConfigError(
            f"{data} was made to hold vbuckets {held[0]}-{held[1]}, not {vbuckets}",
            hint="leave the setting vbuckets out, or as it was; another range needs a new directory",
        )


def check_kv_nodes(settings: Settings, identity: Identity | None) -> None:
    """Raise ConfigError if `kv_nodes` contradicts this mirror."""
    if settings.kv_nodes is not None and identity is not None:
        addresses = parse_addresses(settings.kv, "kv") if settings.kv is not None else []
        ports = {each.port for each in addresses if each.path is None}
        check_nodes(named_nodes(settings.kv_nodes), identity, ports if 0 not in ports else ())


def look_up_with(clock: Clock) -> LookUp:
    async def look_up(settings: Settings, bucket_uuid: str | None = None) -> Source:
        return await find_source(Access.of(parse(required_source(settings)), settings), clock, bucket_uuid)

    return look_up
