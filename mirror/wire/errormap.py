"""The error map: tells clients the meaning of each status and the possible reactions (kv_engine docs/ErrorMap.md).

The map has every status of this program's answers, except the statuses of range scans.
"""

from __future__ import annotations

import json
from functools import cache

from mirror.wire.constants import Status

_ITEM = "item-only"
_INPUT = "invalid-input"
_STATE = "conn-state-invalidated"
_RETRY_NOW = ("temp", "retry-now")
_RETRY_LATER = ("temp", "retry-later")
_SUBDOC = ("subdoc", _ITEM)
_SUBDOC_INPUT = ("subdoc", _INPUT)

_ENTRIES: dict[int, tuple[str, tuple[str, ...]]] = {
    Status.SUCCESS: ("Done", ("success",)),
    Status.KEY_ENOENT: ("No such document", (_ITEM,)),
    Status.KEY_EEXISTS: ("The document exists, or its CAS is another", (_ITEM,)),
    Status.E2BIG: ("The value is too large", (_ITEM, _INPUT)),
    Status.EINVAL: ("The request is invalid", ("internal", _INPUT)),
    Status.NOT_STORED: ("Nothing was stored", ("internal", _ITEM)),
    Status.DELTA_BADVAL: ("The document is not a number", (_ITEM, _INPUT)),
    Status.NOT_MY_VBUCKET: ("The vbucket is elsewhere", ("fetch-config", _INPUT)),
    Status.NO_BUCKET: ("No bucket was selected", (_STATE,)),
    Status.LOCKED: ("The document is locked", ("item-locked", _ITEM, "retry-now")),
    Status.DCP_STREAM_NOT_FOUND: ("No such stream", (_STATE,)),
    Status.OPAQUE_NO_MATCH: ("The opaque belongs to nothing", (_STATE,)),
    Status.AUTH_STALE: ("Authenticate again", (_STATE, "auth")),
    Status.AUTH_ERROR: ("Authentication failed", (_STATE, "auth")),
    Status.AUTH_CONTINUE: ("Authentication goes on", ("special-handling",)),
    Status.ERANGE: ("Out of range", (_INPUT,)),
    Status.ROLLBACK: ("Roll back", ("dcp", "special-handling")),
    Status.EACCESS: ("Not allowed", ("support",)),
    Status.NOT_INITIALIZED: ("The node is not ready", (_STATE,)),
    Status.UNKNOWN_FRAME_INFO: ("Unknown frame info", ("support",)),
    Status.UNKNOWN_COMMAND: ("Unknown command", ("support",)),
    Status.ENOMEM: ("No memory left for the document", _RETRY_LATER),
    Status.NOT_SUPPORTED: ("Not supported here", ("support",)),
    Status.EINTERNAL: ("Internal error", ("internal", _STATE)),
    Status.EBUSY: ("Busy", _RETRY_NOW),
    Status.ETMPFAIL: ("Temporary failure", _RETRY_NOW),
    Status.XATTR_EINVAL: ("The extended attributes are invalid", (_INPUT,)),
    Status.UNKNOWN_COLLECTION: ("No such collection", (_INPUT,)),
    Status.CANNOT_APPLY_COLLECTIONS_MANIFEST: ("The manifest cannot be applied", (_INPUT,)),
    Status.UNKNOWN_SCOPE: ("No such scope", (_INPUT,)),
    Status.DCP_STREAM_ID_INVALID: ("Stream ids are used wrongly", (_INPUT,)),
    Status.DURABILITY_INVALID_LEVEL: ("No such durability level", (_INPUT,)),
    Status.DURABILITY_IMPOSSIBLE: ("Too few nodes for this durability", (_ITEM, _INPUT)),
    Status.SYNC_WRITE_IN_PROGRESS: ("A durable write of the document is under way", (_ITEM, "retry-later")),
    Status.SYNC_WRITE_AMBIGUOUS: ("The durable write may have happened or not", (_ITEM,)),
    Status.SYNC_WRITE_RE_COMMIT_IN_PROGRESS: ("The document is being committed again", (_ITEM, "retry-later")),
    Status.SUBDOC_PATH_ENOENT: ("No such path", _SUBDOC),
    Status.SUBDOC_PATH_MISMATCH: ("Path and document differ in structure", _SUBDOC),
    Status.SUBDOC_PATH_EINVAL: ("The path is invalid", _SUBDOC_INPUT),
    Status.SUBDOC_PATH_E2BIG: ("The path is too long", _SUBDOC_INPUT),
    Status.SUBDOC_DOC_E2DEEP: ("The document is too deep", _SUBDOC_INPUT),
    Status.SUBDOC_VALUE_CANTINSERT: ("The value cannot stand there", _SUBDOC_INPUT),
    Status.SUBDOC_DOC_NOT_JSON: ("The document is not JSON", _SUBDOC),
    Status.SUBDOC_NUM_ERANGE: ("The number is out of range", _SUBDOC),
    Status.SUBDOC_DELTA_EINVAL: ("The delta is not a number in range", _SUBDOC),
    Status.SUBDOC_PATH_EEXISTS: ("The path exists", _SUBDOC),
    Status.SUBDOC_VALUE_ETOODEEP: ("The value is too deep", ("subdoc", _INPUT, _ITEM)),
    Status.SUBDOC_INVALID_COMBO: ("These commands cannot stand together", _SUBDOC_INPUT),
    Status.SUBDOC_MULTI_PATH_FAILURE: ("Some paths failed", ("subdoc", "special-handling")),
    Status.SUBDOC_SUCCESS_DELETED: ("Done, on a deleted document", ("success", "item-deleted", "subdoc")),
    Status.SUBDOC_XATTR_INVALID_FLAG_COMBO: ("These flags cannot stand together", _SUBDOC_INPUT),
    Status.SUBDOC_XATTR_INVALID_KEY_COMBO: ("Only one extended attribute at a time", _SUBDOC_INPUT),
    Status.SUBDOC_XATTR_UNKNOWN_MACRO: ("No such macro", _SUBDOC_INPUT),
    Status.SUBDOC_XATTR_UNKNOWN_VATTR: ("No such virtual attribute", _SUBDOC_INPUT),
    Status.SUBDOC_XATTR_CANT_MODIFY_VATTR: ("Virtual attributes cannot be changed", _SUBDOC_INPUT),
    Status.SUBDOC_MULTI_PATH_FAILURE_DELETED: (
        "Some paths failed, on a deleted document",
        ("item-deleted", "special-handling", "subdoc"),
    ),
    Status.SUBDOC_INVALID_XATTR_ORDER: ("Extended attributes come first", _SUBDOC_INPUT),
}


@cache
def error_map(version: int) -> bytes:
    errors = {
        f"{int(status):x}": {"name": Status(status).name, "desc": description, "attrs": list(attributes)}
        for status, (description, attributes) in _ENTRIES.items()
    }
    return json.dumps({"version": version, "revision": 1, "errors": errors}, separators=(",", ":")).encode()
