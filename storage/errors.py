"""Errors of the store. Each says what failed, where (`path`, `vbid`) and what to do (`hint`).

`mirror/__init__.py` lists those that a reader can meet. Exit codes are those of the command line; `retryable` is true
if the same call may succeed later without anybody acting.
"""

from __future__ import annotations

RUN_CHECK = "run `dcp-mirror check`"
VERIFY = "`dcp-mirror verify --repair` fetches the vbucket again"
SET_ASIDE = "set the group's folder aside; the mirror fills that group again from the source"


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

    def __str__(self) -> str:
        path = f"{self.path}: " if self.path else ""
        vbid = f"vbucket {self.vbid}: " if self.vbid is not None else ""
        return f"{path}{vbid}{self.message}" + (f" ({self.hint})" if self.hint else "")


class CorruptedError(StorageError):
    """Stored bytes contradict the format."""

    exit_code = 3


class WrongBucket(StorageError):
    """The directory mirrors another bucket than the one offered."""

    exit_code = 3


class FormatTooNew(StorageError):
    """The directory was written in a format that this program does not know."""

    exit_code = 3


class NotAMirror(StorageError):
    """There is no mirror at this path."""

    exit_code = 2


class Locked(StorageError):
    """Another process owns the group or the directory."""

    retryable = True


class ReadOnly(StorageError):
    """The directory cannot be written, or a reader cannot write the lock file."""

    exit_code = 2


class DeviceFailed(StorageError):
    """An input/output error: rows written since the last sync may never reach the disk."""

    retryable = True


class Full(StorageError):
    """No space left: on the device, in a quota, or below the process's file size limit."""

    retryable = True


class SeqnoOrder(StorageError):
    """Rows do not rise in seqno, or lie below the staged ones: the source broke its rules."""


class NotHeld(StorageError):
    """Another mirror of the bucket holds the vbucket."""


class UnknownCollection(StorageError):
    """The vbucket has no collection of that name at this point of its history."""

    exit_code = 2


class NoSuchBoundary(StorageError):
    """No boundary is kept at or below the requested one; the message names the floor."""


class AnswerTooLarge(StorageError):
    """The requested documents are larger than the caller's own limit."""


class WriteLost(StorageError):
    """A failover of the source undid the write that a reader waits for: it will never come."""


class NotPublished(StorageError):
    """The write that a reader waits for was not published in time."""

    retryable = True


class ViewInvalidated(StorageError):
    """A rollback or the purger passed the reader's position: start again from a fresh view."""

    retryable = True
    rolled_back = False
    """True: another history is served now. False: rows that the read needs are no longer kept."""


class Unavailable(StorageError):
    """The vbucket is being resynced, and the setting `resync_reads` withholds its old copy."""

    retryable = True


class Closed(StorageError):
    """The view or writer was used after close, or in a child process that did not open it."""
