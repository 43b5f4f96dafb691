"""A bucket that was recreated: its old mirror is set aside by name, never overwritten, and only on request.

Knows the source's identity and the directory's; never a row. Invariants: while a service runs on the directory nothing
is touched; a directory of the same bucket, or an empty one, is left as it is; setting aside is one rename.
"""

from __future__ import annotations

from mirror.config import Settings
from mirror.errors import ConfigError
from mirror.log import get_logger
from mirror.supervise.lock import ServiceLock
from mirror.supervise.setup import LookUp
from storage.env import directory

log = get_logger("supervisor")


async def set_aside_another_bucket(settings: Settings, look_up: LookUp) -> str | None:
    """Rename the data directory when it mirrors another bucket than the source has; returns its new name.

    Raises ClusterError when the source cannot be reached, SupervisionError while a service runs, StorageError.
    """
    if settings.data is None:
        raise ConfigError("no data directory is given", hint="give --data DIR", setting="data")
    data = str(settings.data)
    if not directory.exists(data):
        return None
    lock = ServiceLock(settings.data)
    try:
        identity = directory.load(data)
        source = await look_up(settings)
        if (source.bucket_uuid, source.vbucket_count) == (identity.bucket_uuid, identity.vbucket_count):
            return None
        target = directory.set_aside(data)
        log.warning("old-bucket-set-aside", bucket=source.bucket_name, path=target)
        return target
    finally:
        lock.release()
