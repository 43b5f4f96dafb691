"""What can go wrong in the store, and what the operator can do about it.

    StorageError
    |-- CorruptedError   the bytes on disk contradict FORMAT.md (exit code 3)
    |-- WrongBucket      the data belongs to another bucket (exit code 3)
    |-- FormatTooNew     written by another version of the format (exit code 3)
    |-- NotAMirror       the path holds no mirror (exit code 2)
    |-- Locked           another process owns the group or the directory
    |-- ReadOnly         the directory or its lock file cannot be written
    |-- DeviceFailed     the device gave an input/output error
    |-- Full             no space left on the device, or a file size limit
    |-- SeqnoOrder       rows were offered out of order (the source broke its rules)
    |-- UnknownCollection, NoSuchBoundary   what a reader requested is not there
    |-- AnswerTooLarge   a reader requested more bytes at once than its own limit
    |-- WriteLost        a write that a reader waits for was rolled back
    |-- NotPublished     a write that a reader waits for is not here yet
    |-- ViewInvalidated  a rollback or the purger passed a reader's position
    |-- Unavailable      the vbucket is resynced, and readers are to wait until it is whole again
    `-- Closed           used after close, or in a forked child

Every error says what (`message`), where (`path` and `vbid` where they apply) and how to fix it (`hint`). Exit codes
are those of the command line; `retryable` is true when the same call may succeed later without anybody acting.
"""

from __future__ import annotations


class StorageError(Exception):
    """Base of all errors of the store."""

    exit_code = 1
    retryable = False

    def __init__(self, message: str, *, path: str | None = None, vbid: int | None = None, hint: str = "") -> None:
        """`message` names the thing; `hint` is one sentence for the operator."""
        self.message = message
        self.path = path
        self.vbid = vbid
        self.hint = hint
        super().__init__(message)

    def __str__(self) -> str:
        """One line: where, what, and the remedy."""
        where = "".join(
            part
            for part in (
                f"{self.path}: " if self.path else "",
                f"vbucket {self.vbid}: " if self.vbid is not None else "",
            )
        )
        return f"{where}{self.message}" + (f" ({self.hint})" if self.hint else "")


class CorruptedError(StorageError):
    """Stored bytes contradict the format."""

    exit_code = 3


class WrongBucket(StorageError):
    """The directory mirrors another bucket than the one offered."""

    exit_code = 3


class FormatTooNew(StorageError):
    """The directory was written by a format this program does not know."""

    exit_code = 3


class NotAMirror(StorageError):
    """There is no mirror at this path."""

    exit_code = 2


class Locked(StorageError):
    """Another process holds the lock."""

    retryable = True


class ReadOnly(StorageError):
    """The directory cannot be written, or a reader cannot write the lock file."""

    exit_code = 2


class DeviceFailed(StorageError):
    """An input/output error: what was written since the last sync may never reach the disk."""

    retryable = True


class Full(StorageError):
    """No space left: on the device, in a quota, or below the process's file size limit."""

    retryable = True


class SeqnoOrder(StorageError):
    """Rows do not rise in seqno, or lie below what is already staged."""


class NotHeld(StorageError):
    """The vbucket is one that this mirror does not hold: another one of the bucket's mirrors does."""


class UnknownCollection(StorageError):
    """No collection of that name at this point of the vbucket's history."""

    exit_code = 2


class NoSuchBoundary(StorageError):
    """No kept boundary at or below the requested one; the message names the floor."""


class AnswerTooLarge(StorageError):
    """The requested documents are larger than the caller's own limit."""


class WriteLost(StorageError):
    """The write that a reader waits for was undone by a failover of the source: it will never come."""


class NotPublished(StorageError):
    """The write that a reader waits for was not published in time."""

    retryable = True


class ViewInvalidated(StorageError):
    """A rollback or the purger passed the reader's position: start again from a fresh view."""

    retryable = True


class Unavailable(StorageError):
    """The vbucket is being resynced, and the setting `resync_reads` withholds its old copy."""

    retryable = True


class Closed(StorageError):
    """Used after close, or in a child process that did not open it."""
