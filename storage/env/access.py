"""File permissions for readers who do not own the mirror: the members of one system group (`readers_group`).

The members may list and enter the directories, read `mirror.json`, `map.json` and the data files, and write the lock
files, because LMDB registers readers there. Other users have no access.
"""

from __future__ import annotations

import grp
import os
import stat

from storage.env import directory
from storage.env.environment import DATA_FILE, LOCK_FILE, storage_error
from storage.errors import StorageError

DIRECTORY_MODE = 0o750
READ_MODE = 0o640
LOCK_MODE = 0o660


def group_id(name: str) -> int:
    """Return the id of a system group, given by name or id. Raises StorageError if the name is unknown, or if this user
    may not give files to the group.
    """
    try:
        found = grp.getgrnam(name).gr_gid
    except KeyError:
        if not name.isdecimal():  # containers often lack the names of groups
            raise StorageError(
                f"there is no group {name!r} on this system",
                hint="name one of `getent group`, or make it with groupadd",
            ) from None
        found = int(name)
    if os.geteuid() != 0 and found not in (os.getegid(), *os.getgroups()):
        raise StorageError(
            f"the user of this process is not a member of the group {name!r}",
            hint=f"make it one (usermod -aG {name} USER) and start again: only members may give files to a group",
        )
    return found


def share(path: str, gid: int) -> None:
    """Let a system group enter the data directory and read `mirror.json` and `map.json`."""
    _give(path, gid, DIRECTORY_MODE)
    for name in (directory.FILE, directory.MAP_FILE):
        _give(os.path.join(path, name), gid, READ_MODE)


def share_group(folder: str, gid: int) -> None:
    _give(folder, gid, DIRECTORY_MODE)
    _give(os.path.join(folder, DATA_FILE), gid, READ_MODE)
    _give(os.path.join(folder, LOCK_FILE), gid, LOCK_MODE)


def _give(path: str, gid: int, mode: int) -> None:
    """Set group and mode by path: closing a descriptor of the lock file would release this process's LMDB locks."""
    try:
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            raise StorageError("is a symbolic link", path=path, hint="remove it")
        if found.st_gid != gid:
            os.chown(path, -1, gid, follow_symlinks=False)
        if stat.S_IMODE(found.st_mode) != mode:
            os.chmod(path, mode)
    except FileNotFoundError:
        return  # the mirror is being made, or has no `map.json` yet
    except OSError as error:
        raise storage_error(error, path) from error


def closed_parent(path: str, gid: int) -> str | None:
    """Return the nearest directory above `path` that members of the system group cannot enter, or None."""
    parent = os.path.dirname(os.path.realpath(path))
    while True:
        try:
            found = os.stat(parent)
        except OSError:
            return parent
        if not found.st_mode & (stat.S_IXGRP if found.st_gid == gid else stat.S_IXOTH):
            return parent
        if parent == os.path.dirname(parent):
            return None
        parent = os.path.dirname(parent)
