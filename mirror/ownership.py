"""Owners and modes of files: refuse files that other users can change, and create private files.

A service trusts no file or directory that another user owns or may write (sshd's rule; root is trusted). A new file
with documents has mode 0600, or the mode of the file that it replaces.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from mirror.config import PasswordSource, Settings
from mirror.errors import ConfigError
from storage.env import access
from storage.env.directory import replacing
from storage.errors import StorageError

LINKS_MAX = 40
"""Links that lead to each other, as the kernel limits them."""


def refuse_files_of_others(settings: Settings, config: Path | None) -> None:
    """Raise ConfigError if another user owns or may write the settings file, or a users, password, key or CA file."""
    password = PasswordSource.of(settings)
    secret = None if password.folder is None else password.folder / "password"
    for what, path in (
        ("the settings file", config),
        ("the users file", settings.users_file),
        ("the password file", password.file),
        ("the password file", secret),
        ("the key", settings.listen_tls_key_file or settings.listen_tls_cert_file),
        ("the key", settings.tls_client_key_file or settings.tls_client_cert_file),
        ("the authority's certificate", settings.tls_ca_file),
        ("the authority's certificate", settings.listen_tls_client_ca_file),
    ):
        if path is not None:
            refuse_others(path, what)


def refuse_others(path: Path, what: str) -> None:
    """Raise ConfigError if another user owns or may write a file or directory. A missing file passes."""
    try:
        found = path.stat()
    except OSError:
        return
    if _is_foreign(found):
        raise ConfigError(
            f"{what} {path} belongs to user {_name(found.st_uid)}, who could change it",
            hint=f"make it root's or this user's: chown {_name(os.geteuid())} {path}",
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{what} {path} can be written by other users (mode {stat.S_IMODE(found.st_mode):04o})",
            hint=f"chmod go-w {path}, and check its content",
        )


@contextlib.contextmanager
def private_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Yield a new file that replaces `path` once it is whole. It is for this user alone, or has the mode of the
    replaced file if that is this user's. Raises OSError.
    """
    with replacing(path) as file:
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(path)
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                os.fchmod(file.fileno(), stat.S_IMODE(found.st_mode))
        yield file


def behind_links(path: str) -> str:
    """Return the file that a path's links lead to. Raises ConfigError if another user made one of them, who could lead
    this program to a file of its own.
    """
    for _ in range(LINKS_MAX):
        if not os.path.islink(path):
            return path
        if _is_foreign(found := os.lstat(path)):
            raise ConfigError(f"{path} is a link of user {_name(found.st_uid)}", hint="remove it, or name another file")
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    raise ConfigError(f"{path} is a link that leads to itself", hint="remove it, or name another file")


def _is_foreign(found: os.stat_result) -> bool:
    return found.st_uid not in (0, os.geteuid())


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def readers_gid(settings: Settings) -> int | None:
    """Return the id of `readers_group`; None if unset. Raises ConfigError if the group cannot be used."""
    if settings.readers_group is None:
        return None
    try:
        return access.group_id(settings.readers_group)
    except StorageError as error:
        raise ConfigError(error.message, hint=error.hint) from None
