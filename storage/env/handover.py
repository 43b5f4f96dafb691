"""Copies the environments of groups, filled by several machines, into the folder that becomes one mirror.

LMDB must not run on a network file system, but the folder may be on one. So `pack` writes each file in one pass, and
neither `pack` nor `describe` opens LMDB in the folder. Invariants: a group's folder gets its final name when it is
complete and synced; `mirror.json` is written last.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid

import lmdb

from storage.env import directory
from storage.env.compaction import Compaction
from storage.env.environment import DATA_FILE, Environment, storage_error
from storage.errors import CorruptedError
from storage.model import Identity


def pack(folder: str, group: int, identity: Identity, target: str) -> int:
    """Copy the group environment in `folder` into the mirror's directory `target`. Return the copy's size in bytes.

    The environment must not be open. An existing copy is kept. Raises StorageError, for example if `target` cannot be
    written.
    """
    finished = directory.group_path(target, group)
    unfinished = f"{finished}.{uuid.uuid4().hex}.new"
    try:
        os.mkdir(unfinished, mode=0o700)
        path = os.path.join(unfinished, DATA_FILE)
        environment = Environment(folder, identity.group_vbids(group), writable=False)
        try:
            with (
                open(path, "xb") as file,
                environment.read() as txn,
                contextlib.closing(Compaction(environment, txn.raw)) as copy,
            ):
                file.writelines(copy.pages())
                file.flush()
                os.fsync(file.fileno())
        finally:
            environment.close()
        size = os.path.getsize(path)
        directory.sync_directory(unfinished)
        with contextlib.suppress(FileExistsError, NotADirectoryError):
            os.rename(unfinished, finished)
            directory.sync_directory(target)
        return size
    except (OSError, lmdb.Error) as error:
        if not os.path.isdir(finished):  # else another attempt made the copy
            raise storage_error(error, target) from error
        return os.path.getsize(os.path.join(finished, DATA_FILE))
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def is_packed(target: str, group: int) -> bool:
    return os.path.isfile(os.path.join(directory.group_path(target, group), DATA_FILE))


def describe(target: str, identity: Identity) -> None:
    """Make a mirror of the packed groups in `target`. Raises CorruptedError if a group is missing."""
    for group in range(identity.group_count):
        if not is_packed(target, group):
            raise CorruptedError("the group is missing", path=directory.group_path(target, group))
    try:
        directory.write_description(target, identity)
    except OSError as error:
        raise storage_error(error, target) from error
