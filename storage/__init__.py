"""The store: LMDB environments per vbucket group, and the views that read them. See FORMAT.md for every byte.

This door opens on nouns, errors and reading; the writer's rooms are imported by name by the process that owns a group.
"""

from storage.errors import (
    Closed,
    CorruptedError,
    FormatTooNew,
    Full,
    Locked,
    ReadOnly,
    SeqnoOrder,
    StorageError,
    ViewInvalidated,
    WrongBucket,
)
from storage.model import (
    DEFAULT_COLLECTION,
    Boundary,
    Branch,
    BranchReason,
    Collection,
    Document,
    FailoverEntry,
    Identity,
    Kind,
    Manifest,
    ManifestUid,
    Seqno,
    SnapshotRange,
    Vbid,
    VbucketState,
    Vbuuid,
)

__all__ = [
    "DEFAULT_COLLECTION",
    "Boundary",
    "Branch",
    "BranchReason",
    "Closed",
    "Collection",
    "CorruptedError",
    "Document",
    "FailoverEntry",
    "FormatTooNew",
    "Full",
    "Identity",
    "Kind",
    "Locked",
    "Manifest",
    "ManifestUid",
    "ReadOnly",
    "Seqno",
    "SeqnoOrder",
    "SnapshotRange",
    "StorageError",
    "Vbid",
    "VbucketState",
    "Vbuuid",
    "ViewInvalidated",
    "WrongBucket",
]
