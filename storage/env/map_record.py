"""`map.json`: the newest cluster map that a mirror followed, so that it follows no older one after a restart.

Knows the file, never a map; the service decides what follows from it. Invariants: the file is replaced whole, by fsync
and rename, before the map that it names is followed; a record of another bucket than the mirror's counts as none.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from storage.env import directory
from storage.env.environment import storage_error
from storage.errors import CorruptedError

FILE = "map.json"
HINT = "remove the file: the next start follows the newest map of all nodes that answer"


@dataclass(frozen=True, slots=True)
class MapRecord:
    bucket_uuid: str
    rev_epoch: int
    rev: int

    @property
    def revision(self) -> tuple[int, int]:
        return self.rev_epoch, self.rev


def load(path: str, bucket_uuid: str) -> MapRecord | None:
    """Return the record in the mirror at `path`; None if it has none of this bucket. Raises StorageError."""
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
        directory.replace_file(
            file_path, json.dumps(asdict(record)).encode(), mode=0o666, like=os.path.join(path, directory.FILE)
        )
    except OSError as error:
        raise storage_error(error, file_path) from error
