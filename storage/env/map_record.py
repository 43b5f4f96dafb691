"""`map.json`: the newest cluster map that was followed for a mirror, so that no older one is followed after a restart.

Knows the file, never a map: what follows from it is the service's to say. Invariants: the file is replaced whole, by
fsync and rename, before the map that it names is followed; a record of another bucket than the mirror's counts as none.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, dataclass

from storage.env import directory
from storage.env.directory import sync_directory
from storage.env.environment import storage_error
from storage.errors import CorruptedError

FILE = "map.json"
HINT = "remove the file: the next start follows the newest map of all nodes that answer"


@dataclass(frozen=True, slots=True)
class MapRecord:
    """The newest map that was followed, by the bucket it is of and by its place among that bucket's maps."""

    bucket_uuid: str
    rev_epoch: int
    rev: int

    @property
    def revision(self) -> tuple[int, int]:
        return self.rev_epoch, self.rev


def load(path: str, bucket_uuid: str) -> MapRecord | None:
    """The record in the mirror at `path`; None where there is none of this bucket. Raises StorageError."""
    file_path = os.path.join(path, FILE)
    try:
        with open(file_path, encoding="utf-8") as file:
            data = json.load(file)
        record = MapRecord(data["bucket_uuid"], data["rev_epoch"], data["rev"])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(error, file_path) from error
    except (ValueError, KeyError, TypeError):
        raise CorruptedError("is not a record of a cluster map", path=file_path, hint=HINT) from None
    numbers = (record.rev_epoch, record.rev)
    if not isinstance(record.bucket_uuid, str) or not all(type(number) is int for number in numbers):
        raise CorruptedError("is not a record of a cluster map", path=file_path, hint=HINT)
    return record if record.bucket_uuid == bucket_uuid else None


def save(path: str, record: MapRecord) -> None:
    """Replace the record in the mirror at `path`; it is on the disk when this returns. Raises StorageError."""
    file_path = os.path.join(path, FILE)
    try:
        with open(file_path + ".new", "w", encoding="utf-8") as file:
            json.dump(asdict(record), file)
            file.flush()
            _as_readable_as(os.path.join(path, directory.FILE), file.fileno())
            os.fsync(file.fileno())
        os.rename(file_path + ".new", file_path)
        sync_directory(path)
    except OSError as error:
        raise storage_error(error, file_path) from error


def _as_readable_as(pattern: str, descriptor: int) -> None:
    """Give a file the group and mode of another one."""
    try:
        found = os.stat(pattern)
    except FileNotFoundError:  # a mirror that is being made
        return
    if os.fstat(descriptor).st_gid != found.st_gid:
        os.fchown(descriptor, -1, found.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(found.st_mode))
