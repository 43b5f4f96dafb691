"""Documents and events as JSON, in the shapes that `cli/JSON.md` promises, for the command line and for HTTP.

A key that is not UTF-8, or a value that is not JSON, is base64 in another member. A JSON value keeps its stored bytes,
with every digit, but spaces replace its line ends, and U+0085, U+2028 and U+2029 are escaped: one object is one line
for every client.
"""

from __future__ import annotations

import base64
import json
from operator import attrgetter
from typing import Any

from mirror.document import values
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.events import (
    CollectionCreated,
    CollectionDropped,
    CollectionModified,
    ScopeCreated,
    ScopeDropped,
    SystemEvent,
    SystemEventContent,
)
from mirror.wire.system_events import decode_system_event
from storage.errors import RUN_CHECK, CorruptedError
from storage.format.records import value_problem
from storage.model import JSON_FIELDS, Document, Kind
from storage.read.changes import manifest_at, resolve_range
from storage.read.view import Change, Rollback, View

DATATYPE_JSON = 1
BASE64_BYTES = 192 * 1024
"""Bytes encoded in one call; a multiple of 3, so pieces have no padding."""
_SYSTEM_EVENTS = {
    CollectionCreated: "collection_created",
    CollectionDropped: "collection_dropped",
    CollectionModified: "collection_modified",
    ScopeCreated: "scope_created",
    ScopeDropped: "scope_dropped",
}
_ALL_BITS = 7
"""The bits JSON, Snappy and xattrs. A value is JSON text only if the JSON bit alone is set."""


_UNICODE_LINE_ENDS = [(each.encode(), b"\\u%04x" % ord(each)) for each in "\x85\u2028\u2029"]


def one_line(text: bytes) -> bytes:
    """Return JSON text without line ends. Python's `splitlines` and other clients take U+2028, too, for one."""
    text = text.replace(b"\n", b" ").replace(b"\r", b" ")
    if not text.isascii():
        for found, escaped in _UNICODE_LINE_ENDS:
            text = text.replace(found, escaped)
    return text


def dumps(value: Any) -> bytes:
    return one_line(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass"))


def key_fields(key: bytes) -> dict[str, object]:
    """Return the member `key`, or `key_b64` if the key is not UTF-8."""
    try:
        return {"key": key.decode()}
    except UnicodeDecodeError:
        return {"key_b64": base64.b64encode(key).decode()}


_numbers = attrgetter(*JSON_FIELDS)


def _head(document: Document) -> dict[str, object]:
    if document.kind is Kind.SYSTEM_EVENT:
        named = {"vbid": document.vbid, "seqno": document.seqno, "kind": "system_event"} | key_fields(document.key)
        content = system_content(document)
        return named | {
            "event": _SYSTEM_EVENTS[type(content)],
            "scope_id": content.scope_id,
            "collection_id": collection_of(document),
        }
    named = {"vbid": document.vbid, "collection_id": document.collection_id} | key_fields(document.key)
    return named | dict(zip(JSON_FIELDS, _numbers(document), strict=True)) | {"deleted": document.deleted}


def system_content(document: Document) -> SystemEventContent:
    """Decode a system event. Raises CorruptedError."""
    vbid, seqno, event, version = document.vbid, document.seqno, document.flags, document.rev_seqno
    try:
        return decode_system_event(SystemEvent(vbid, seqno, event, version, document.key, document.value))
    except RemoteProtocolError as error:
        raise CorruptedError(f"a system event cannot be read: {error.detail}", vbid=vbid, hint=RUN_CHECK) from None


def collection_of(event: Document) -> int | None:
    """Return the id of the collection of a document or system event; None for an event of a scope."""
    if event.kind is not Kind.SYSTEM_EVENT:
        return event.collection_id
    return getattr(system_content(event), "collection_id", None)


class CollectionNames:
    """The names of the collections of events, also of collections that do not exist any more or were rolled back."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    def of(self, view: View, event: Document) -> str:
        """Return the name of the event's collection; empty for an event of a scope, and if the purger has removed the
        name. Raises ViewInvalidated.
        """
        collection_id = collection_of(event)
        if collection_id is None:
            return ""
        if event.kind is Kind.SYSTEM_EVENT or collection_id not in self._known:
            self._known[collection_id] = _name_at(view, event, collection_id) or self._known.get(collection_id, "")
        return self._known[collection_id]


def _name_at(view: View, event: Document, collection_id: int) -> str | None:
    """Return a collection's name at an event, or before it: a drop ends the collection."""
    reader = view.reader(event.vbid)
    way = resolve_range(reader, None, None)
    manifests = (manifest_at(reader, way, event.branch, at) for at in (event.seqno, event.seqno - 1))
    return next(filter(None, (each.name_of(collection_id) for each in manifests)), None)


def value_parts(document: Document) -> list[bytes]:
    """Return `"value":...` or `"value_b64":...`. A JSON value keeps its bytes, but for line ends (`one_line`)."""
    value = document.value
    if document.deleted and not value:
        return [b'"value":null']
    if document.datatype & _ALL_BITS == DATATYPE_JSON and values.is_json(value):
        return [b'"value":', one_line(value)]
    problem = value_problem(document)
    named = b"" if problem is None else b',"problem":' + dumps(problem)
    encoded = (base64.b64encode(value[at : at + BASE64_BYTES]) for at in range(0, len(value), BASE64_BYTES))
    return [b'"value_b64":"', *encoded, b'"' + named]


def document_parts(document: Document) -> list[bytes]:
    """Return a document's JSON object in parts. Joining 20 MiB would hold the GIL for milliseconds."""
    head = dumps(_head(document))
    return [head] if document.kind is Kind.SYSTEM_EVENT else [head[:-1], b",", *value_parts(document), b"}"]


def document_json(document: Document) -> bytes:
    return b"".join(document_parts(document))


def rollback_object(rollback: Rollback) -> dict[str, object]:
    return {
        "from_branch": rollback.from_branch,
        "from_seqno": rollback.from_seqno,
        "to_branch": rollback.to_branch,
        "to_seqno": rollback.to_seqno,
        "from_vbuuid": f"{rollback.from_vbuuid:012x}",
        "to_vbuuid": f"{rollback.to_vbuuid:012x}",
        "time_ms": rollback.time_ms,
    }


def _event(change: Change) -> dict[str, Any]:
    event: dict[str, Any] = {"kind": change.kind, "token": str(change.token), "vbid": change.token.vbid}
    return event if change.rollback is None else event | {"rollback": rollback_object(change.rollback)}


def change_parts(change: Change) -> list[bytes]:
    head = dumps(_event(change))
    return [head] if change.document is None else [head[:-1], b',"document":', *document_parts(change.document), b"}"]
