"""Read a mirror of a Couchbase bucket, from any process on its machine. The service need not run.

    import mirror

    with mirror.open_view("/var/lib/dcp-mirror/orders") as view:
        document = view.get("order::4711")
        if document is not None:
            print(document.value, document.cas)
        for each in view.scan(prefix="order::47"):
            print(each.key)
        print(view.sql("SELECT city, count(*) FROM documents GROUP BY city"))

A `View` reads: it returns `Document` and `Change`. `Token` is a position in the changes, `Time` a moment for `as_of`,
and `MutationToken` names a write to wait for. A mirror is read only.

Reads raise a `StorageError`, mostly one of those below; SQL and Arrow also raise a `mirror.errors.MirrorError`. An
error's text has the place, the problem and the remedy. If its `retryable` is true, the same call may succeed later:

    StorageError
    |-- NotAMirror         there is no mirror at this path
    |-- ReadOnly           this user lacks a permission; a reader must write LMDB's lock file
    |-- Full               no space left for LMDB's lock file, or no address space for the data (retryable)
    |-- Locked             LMDB's table of readers is full, or a reader in another container has this PID (retryable)
    |-- DeviceFailed       an input/output error (retryable)
    |-- CorruptedError     stored bytes contradict the format: `dcp-mirror check`
    |-- UnknownFormat      written by another version of the format
    |-- WrongBucket        a group's folder belongs to another mirror
    |-- NotHeld            another mirror of the bucket holds the vbucket
    |-- UnknownCollection  no collection of that name or id
    |-- NoSuchBoundary     `as_of` is before the kept history
    |-- SeveralVbuckets    a seqno as `as_of` of several vbuckets
    |-- AnswerTooLarge     the documents are larger than the caller's `bytes_max`
    |-- Unavailable        the vbucket is not filled yet, or is being resynced (retryable)
    |-- ViewInvalidated    a rollback, a resync or the purger removed what was read: start again (retryable)
    |-- NotPublished       the awaited write was not published in time (retryable)
    |-- WriteLost          a failover has undone the awaited write
    `-- Closed             the view was closed, or opened before a fork

The other packages of this distribution are the program `dcp-mirror`; their names are not stable.
"""

from mirror.view import QueryView as View
from mirror.view import open_view
from storage.errors import (
    AnswerTooLarge,
    Closed,
    CorruptedError,
    DeviceFailed,
    Full,
    Locked,
    NoSuchBoundary,
    NotAMirror,
    NotHeld,
    NotPublished,
    ReadOnly,
    SeveralVbuckets,
    StorageError,
    Unavailable,
    UnknownCollection,
    UnknownFormat,
    ViewInvalidated,
    WriteLost,
    WrongBucket,
)
from storage.model import Document, Kind
from storage.read.view import Change, Rollback, Time, Token
from storage.read.wait import MutationToken

__version__ = "0.1.0"

__all__ = [
    "AnswerTooLarge",
    "Change",
    "Closed",
    "CorruptedError",
    "DeviceFailed",
    "Document",
    "Full",
    "Kind",
    "Locked",
    "MutationToken",
    "NoSuchBoundary",
    "NotAMirror",
    "NotHeld",
    "NotPublished",
    "ReadOnly",
    "Rollback",
    "SeveralVbuckets",
    "StorageError",
    "Time",
    "Token",
    "Unavailable",
    "UnknownCollection",
    "UnknownFormat",
    "View",
    "ViewInvalidated",
    "WriteLost",
    "WrongBucket",
    "__version__",
    "open_view",
]
