"""Documents and events as JSON objects, in the shapes that `cli/JSON.md` promises, and bytes on their way out.

Knows the nouns of the store and JSON; never rich, a socket or a file. Invariants: nothing is lost on the way: bytes
that are no UTF-8, or a value that is no JSON, come as base64 under another name; one object is one line.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

from storage.model import Document, Kind
from storage.view import Change, Rollback

DATATYPE_JSON = 1


def print_json(value: Any) -> None:
    """One JSON value on one line of stdout."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")


def key_fields(key: bytes) -> dict[str, Any]:
    """`key`, or `key_b64` where the key is not UTF-8."""
    try:
        return {"key": key.decode()}
    except UnicodeDecodeError:
        return {"key_b64": base64.b64encode(key).decode()}


def value_fields(document: Document) -> dict[str, Any]:
    """`value` where the datatype says JSON and the bytes are, else `value_b64`; a tombstone has a null `value`."""
    if document.deleted and not document.value:
        return {"value": None}
    if document.datatype & DATATYPE_JSON:
        try:
            return {"value": json.loads(document.value)}
        except ValueError:
            pass
    return {"value_b64": base64.b64encode(document.value).decode()}


def document_object(document: Document) -> dict[str, Any]:
    """A document as `scan`, `get --json` and `changes` print it."""
    if document.kind is Kind.SYSTEM_EVENT:
        return {"vbid": document.vbid, "seqno": document.seqno, "kind": "system_event"} | key_fields(document.key)
    return {
        "vbid": document.vbid,
        "collection_id": document.collection_id,
        **key_fields(document.key),
        "seqno": document.seqno,
        "rev_seqno": document.rev_seqno,
        "cas": document.cas,
        "flags": document.flags,
        "expiry": document.expiry,
        "datatype": document.datatype,
        "deleted": document.deleted,
        **value_fields(document),
    }


def rollback_object(rollback: Rollback) -> dict[str, Any]:
    """A rollback as `changes` prints it."""
    return {
        "from_branch": rollback.from_branch,
        "from_seqno": rollback.from_seqno,
        "to_branch": rollback.to_branch,
        "to_seqno": rollback.to_seqno,
        "from_vbuuid": f"{rollback.from_vbuuid:012x}",
        "to_vbuuid": f"{rollback.to_vbuuid:012x}",
        "time_ms": rollback.time_ms,
    }


def change_object(change: Change) -> dict[str, Any]:
    """One event as `changes` prints it."""
    event: dict[str, Any] = {"kind": change.kind, "token": str(change.token), "vbid": change.token.vbid}
    if change.rollback is not None:
        event["rollback"] = rollback_object(change.rollback)
    if change.document is not None:
        event["document"] = document_object(change.document)
    return event


def for_people(data: bytes, limit: int = 200) -> str:
    """Bytes as one readable line: UTF-8 where it is, an excerpt where it is long."""
    text = data[: limit * 4].decode(errors="backslashreplace").translate({10: "\\n", 13: "\\r", 9: "\\t", 27: "\\e"})
    text = "".join(character if character.isprintable() else "." for character in text)
    return text if len(text) <= limit and len(data) <= limit * 4 else text[:limit] + "..."
