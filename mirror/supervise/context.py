"""Values that the parts of one service share: settings, data directory, the mirror's identity, cluster maps, leases.

Each value has one writer: the setup writes `identity` and `maps`, the supervisor `leases` and `stopping`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mirror.clock import Clock
from mirror.config import Settings
from mirror.errors import OlderMap
from mirror.ingest.topology import ClusterMap, MapVerdict, NewestMap, Revision
from mirror.log import get_logger
from mirror.supervise.leases import LeaseBook
from storage.env import directory
from storage.env.directory import MapRecord
from storage.errors import StorageError
from storage.model import Identity


@dataclass(slots=True)
class ServiceContext:
    settings: Settings
    data: Path
    clock: Clock
    identity: Identity | None = None
    """None until the data directory is known."""
    maps: MapBook | None = None
    leases: LeaseBook | None = None
    """None until the service has workers."""
    stopping: bool = False

    def now_ms(self) -> int:
        return int(self.clock.monotonic() * 1000)

    @property
    def vbucket_count(self) -> int | None:
        return None if self.identity is None else len(self.identity.vbids)


log = get_logger("supervisor")


class MapBook:
    def __init__(self, data: str, bucket_uuid: str) -> None:
        """Read the recorded revision. Raises StorageError for a damaged record."""
        self._data = data
        self._bucket_uuid = bucket_uuid
        record = directory.load_map(data, bucket_uuid)
        self._maps = NewestMap(bucket_uuid, None if record is None else record.revision)
        self._unsaved = False

    @property
    def current(self) -> ClusterMap | None:
        return self._maps.current

    @property
    def floor(self) -> Revision | None:
        return self._maps.floor

    def check(self, found: ClusterMap) -> None:
        """Raise OlderMap if the map is older than the record."""
        if self._maps.judge(found) is MapVerdict.OLDER and self._maps.floor is not None:
            raise OlderMap.of(found.revision, self._maps.floor)

    def take(self, found: ClusterMap) -> bool:
        before = self._maps.floor
        known = hosts_of(self._maps.current)
        if not self._maps.take(found):
            return False
        if new := sorted(hosts_of(found) - known):
            log.info("source-hosts-changed", hosts=", ".join(new), rev_epoch=found.rev_epoch, rev=found.rev)
        if self._maps.floor != before:
            self._unsaved = True
            self.retry()
        return True

    def retry(self) -> None:
        if not self._unsaved or self._maps.floor is None:
            return
        try:
            # Before workers follow it: after a crash the mirror must not go back to an older map.
            directory.save_map(self._data, MapRecord(self._bucket_uuid, *self._maps.floor))
        except StorageError as error:
            log.error("map-revision-not-recorded", error=str(error))
        else:
            self._unsaved = False


def hosts_of(cluster_map: ClusterMap | None) -> set[str]:
    return set() if cluster_map is None else {node.host for node in cluster_map.nodes}
