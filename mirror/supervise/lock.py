"""The lock that allows one service per data directory. The kernel releases it when the service dies.

The lock file is never removed. Its content, the service's process id, is only for messages and `is_served`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

import psutil

from mirror.errors import ConfigError, SupervisionError
from mirror.ownership import refuse_others
from mirror.supervise.events.log import EVENTS_FILE
from storage.env import directory

LOCK_NAME = "service.lock"
HOLDER_LENGTH = 10
_RECORDS = (directory.FILE, directory.MAP_FILE)
_UNFINISHED = tuple(f"{name}." for name in _RECORDS)
OURS = (*_RECORDS, LOCK_NAME, "control.sock", EVENTS_FILE, "lost+found")
"""Files, besides group folders, that may be in a directory in which a service creates a mirror."""


class ServiceLock:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._descriptor = -1
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_others(directory, "the data directory")
            check_foreign(directory)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(directory / LOCK_NAME, flags, 0o600)
        except FileExistsError:
            raise ConfigError(f"{directory} is not a directory", hint="give --data a directory") from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ConfigError(f"{directory / LOCK_NAME} is a symbolic link", hint="remove it") from None
            raise ConfigError(
                f"{directory} cannot be written: {error.strerror}",
                hint="give --data a directory that this user may write to",
            ) from None
        try:
            # Not lockf: that lock ends when the process closes any descriptor of the file (fcntl(2)).
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise SupervisionError(
                f"another dcp-mirror{f' (process {holder})' if holder else ''} serves {directory}",
                hint="one service per data directory: stop that one, or ask it by `dcp-mirror status`",
            ) from None
        self._descriptor = descriptor
        self._place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._write(str(os.getpid()))

    def _write(self, holder: str) -> None:
        """Overwrite the file's content in place: on a full disk a file that was emptied could not be filled again."""
        with contextlib.suppress(OSError):  # the lock is held without it
            os.pwrite(self._descriptor, f"{holder:<{HOLDER_LENGTH}}\n".encode(), 0)

    def check_place(self, *, made: bool) -> None:
        """Raise SupervisionError if the locked directory is no longer at its path or, with `made`, holds no mirror."""
        try:
            there = os.path.samestat(os.stat(self.directory), os.fstat(self._place))
            if made:
                os.stat(self.directory / directory.FILE)
        except (FileNotFoundError, NotADirectoryError):
            there = False
        except OSError:
            return  # an unreadable directory may still be there
        if not there:
            raise SupervisionError(
                f"the data directory {self.directory} was removed or moved while the service ran",
                hint="put it back, or give --data its new place, and start the service again; without it a new mirror "
                "is filled from the source",
            )

    def release(self) -> None:
        if self._descriptor >= 0:
            self._write("")
            os.close(self._descriptor)
            os.close(self._place)
            self._descriptor = -1


def is_served(data: Path) -> bool:
    try:
        holder = (data / LOCK_NAME).read_text().strip()
    except OSError:
        return False
    return holder.isdigit() and psutil.pid_exists(int(holder))


def check_foreign(data: Path) -> None:
    """Raise ConfigError if `data` holds foreign files and no mirror."""
    names = sorted(entry.name for entry in data.iterdir())
    if "mirror.json" in names:
        return
    foreign = [name for name in names if name not in OURS and not name.startswith(("group-", *_UNFINISHED))]
    if foreign:
        raise ConfigError(
            f"{data} holds other files ({foreign[0]}{' and more' if len(foreign) > 1 else ''}) and no mirror",
            hint="give --data an empty or new directory",
        )
