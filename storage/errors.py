"""Errors of the store. Each says what failed, where (`path`, `vbid`) and what to do (`hint`).

`mirror/__init__.py` lists the errors that readers can get. `exit_code` is the exit code of a command that fails with
the error. `retryable` is true if the same call may succeed later without intervention.
"""

from __future__ import annotations

RUN_CHECK = "run `dcp-mirror check`"
VERIFY = "`dcp-mirror verify --repair` fetches the vbucket again"
SET_ASIDE = "stop the service, move this group's folder away and start again: the source fills the group anew"


class StorageError(Exception):
    """Base of all errors of the store."""

    exit_code = 1
    retryable = False

    def __init__(self, message: str, *, path: str | None = None, vbid: int | None = None, hint: str = "") -> None:
        self.message = message
        self.path = path
        self.vbid = vbid
        self.hint = hint
        super().__init__(message)

    @property
    def what(self) -> str:
        """The error without its hint."""
        path = f"{self.path}: " if self.path else ""
        vbid = f"vbucket {self.vbid}: " if self.vbid is not None else ""
        return f"{path}{vbid}{self.message}"

    def __str__(self) -> str:
        return self.what + (f" ({self.hint})" if self.hint else "")


class CorruptedError(StorageError):
    """Stored bytes contradict the format, or are missing."""

    exit_code = 3


class WrongBucket(StorageError):
    """The group folder belongs to another mirror or group."""

    exit_code = 3


class UnknownFormat(StorageError):
    """The directory or backup has a format that this program does not read."""

    exit_code = 3


class NotAMirror(StorageError):
    """There is no mirror at this path."""

    exit_code = 2


class Locked(StorageError):
    """Another process writes the group, took LMDB's last reader slot, or has the same PID in another container."""

    retryable = True


class ReadOnly(StorageError):
    """A permission is missing, for example on the lock file, which readers must write."""

    exit_code = 2


class DeviceFailed(StorageError):
    """An input/output error: rows written since the last sync may never reach the disk."""

    retryable = True


class Full(StorageError):
    """The device or a quota is full, or the process reached its limit of file size or address space."""

    retryable = True


class SeqnoOrder(StorageError):
    """New rows do not rise in seqno, or not above the staged rows: the source broke the protocol."""


class NotHeld(StorageError):
    """Another mirror of the bucket holds the vbucket."""


class UnknownCollection(StorageError):
    """No collection of that name or id exists at the requested position."""

    exit_code = 2


class NoSuchBoundary(StorageError):
    """The history that the requested position needs is not kept; the message names the floor."""


class SeveralVbuckets(StorageError):
    """A seqno was given as `as_of` of several vbuckets."""

    exit_code = 2


class AnswerTooLarge(StorageError):
    """The requested documents are larger than the caller's `bytes_max`."""

    byte_count = 0
    """The memory that a single document takes; 0 for several documents."""


class WriteLost(StorageError):
    """A failover of the source undid the write that a reader waits for."""


class NotPublished(StorageError):
    """The write that a reader waits for was not published before the reader's timeout."""

    retryable = True


class ViewInvalidated(StorageError):
    """The data at the reader's position is gone: a rollback, a resync, the purger or a replaced file removed it."""

    retryable = True
    rolled_back = False
    """True if a rollback or resync passed the position of a running read."""


class Unavailable(StorageError):
    """The vbucket has no copy for readers: it is not filled yet, or `resync_reads = unavailable` withholds the old copy
    during a resync. Or the service grants no lease for a long read.
    """

    retryable = True


class Closed(StorageError):
    """The view or writer was used after `close`, or after fork in the child."""
