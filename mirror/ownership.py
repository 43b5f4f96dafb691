"""Owners and modes of files: refuse files that other users can change, and create private files.

Invariants: a service trusts no file or directory that another user owns or may write (sshd's rule; root is trusted); a
new file with documents has mode 0600, or the mode of the file that it replaces.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from pathlib import Path
from typing import IO

from mirror.config import PasswordSource, Settings
from mirror.errors import ConfigError
from storage.env import access
from storage.errors import StorageError


def refuse_files_of_others(settings: Settings, config: Path | None) -> None:
    """Raise ConfigError if another user owns or may write the settings file, or a users, password, key or CA file."""
    password = PasswordSource.of(settings)
    secret = None if password.folder is None else password.folder / "password"
    for what, setting, path in (
        ("the settings file", "config", config),
        ("the users file", "users_file", settings.users_file),
        ("the password file", "password_file", password.file),
        ("the password file", "secrets_dir", secret),
        ("the key", "listen_tls_key_file", settings.listen_tls_key_file or settings.listen_tls_cert_file),
        ("the key", "tls_client_key_file", settings.tls_client_key_file or settings.tls_client_cert_file),
        ("the authority's certificate", "tls_ca_file", settings.tls_ca_file),
        ("the authority's certificate", "listen_tls_client_ca_file", settings.listen_tls_client_ca_file),
    ):
        if path is not None:
            refuse_others(path, what, setting)


def refuse_others(path: Path, what: str, setting: str) -> None:
    """Raise ConfigError if another user owns or may write a file or directory. A missing file passes."""
    try:
        found = path.stat()
    except OSError:
        return
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{what} {path} belongs to user {_name(found.st_uid)}, who could change it",
            hint=f"make it root's or this user's: chown {_name(os.geteuid())} {path}",
            setting=setting,
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{what} {path} can be written by other users (mode {stat.S_IMODE(found.st_mode):04o})",
            hint=f"chmod go-w {path}, and check its content",
            setting=setting,
        )


def private_file(path: str | os.PathLike[str], *, replaces: str | os.PathLike[str]) -> IO[bytes]:
    """Create a file for this user alone, or with the mode of `replaces` if that file exists. Raises OSError."""
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")
    with contextlib.suppress(FileNotFoundError):
        os.fchmod(file.fileno(), stat.S_IMODE(os.stat(replaces).st_mode))
    return file


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
        raise ConfigError(error.message, hint=error.hint, setting="readers_group") from None
