"""The JSON value of a DCP stream request: the requested collections, stream id and purge seqno.

Ids are hexadecimal strings, a purge seqno is a decimal string; a value has a stream id if and only if the connection
uses stream ids. Sources: docs/protocol.md 2.4; kv_engine docs/dcp/documentation/commands/stream-request.md.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from mirror.wire.constants import Opcode, Status
from mirror.wire.errors import RemoteProtocolError

KEYS = frozenset(("uid", "collections", "scope", "sid", "purge_seqno"))

_HEX = re.compile(r"[0-9a-fA-F]{1,16}")
_DECIMAL = re.compile(r"[0-9]{1,20}")
_STREAM_ID_MAX = 0xFFFF


@dataclass(frozen=True, slots=True)
class FilterRequest:
    scope_id: int | None = None
    collections: frozenset[int] | None = None
    stream_id: int | None = None
    purge_seqno: int | None = None


def parse_filter(
    value: bytes, *, has_stream_ids: bool, known: frozenset[str] = KEYS, may_be_empty: bool = False
) -> FilterRequest:
    """Parse the value of a request on a connection with collections; ignore keys that are not in `known`.

    With `may_be_empty`, the list of collections may be empty.
    """
    fields = {key: content for key, content in _object(value).items() if key in known} if value else {}
    if value and not fields:
        raise _wrong("The value of the request has no known key")
    stream_id = fields.get("sid")
    if stream_id is None and has_stream_ids:
        raise _wrong("The connection has turned on stream ids: the request needs a `sid`", Status.DCP_STREAM_ID_INVALID)
    if stream_id is not None and not has_stream_ids:
        raise _wrong("`sid` is for a connection that has turned on stream ids", Status.DCP_STREAM_ID_INVALID)
    if stream_id is not None and not (type(stream_id) is int and 0 < stream_id <= _STREAM_ID_MAX):
        raise _wrong("`sid` is a number of 16 bits, and not 0", Status.DCP_STREAM_ID_INVALID)
    if "uid" in fields:
        _hex(fields["uid"])
    purge_seqno = fields.get("purge_seqno")
    if purge_seqno is not None and not (isinstance(purge_seqno, str) and _DECIMAL.fullmatch(purge_seqno)):
        raise _wrong("`purge_seqno` is a decimal string")
    if "scope" in fields and "collections" in fields:
        raise _wrong("A scope and collections cannot both be requested")
    scope_id = collections = None
    if "scope" in fields:
        scope_id = _hex(fields["scope"])
    elif "collections" in fields:
        names = fields["collections"]
        if not isinstance(names, list) or not (names or may_be_empty):
            raise _wrong("`collections` must be a list of ids")
        collections = frozenset(_hex(name) for name in names)
    return FilterRequest(scope_id, collections, stream_id, None if purge_seqno is None else int(purge_seqno))


def _object(value: bytes) -> dict[str, object]:
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise _wrong("The value of the request must be a JSON object")
    return fields


def _hex(text: object) -> int:
    if not isinstance(text, str) or not _HEX.fullmatch(text):
        raise _wrong("Ids are hexadecimal strings")
    return int(text, 16)


def _wrong(detail: str, status: Status = Status.EINVAL) -> RemoteProtocolError:
    return RemoteProtocolError(detail, op=Opcode.DCP_STREAM_REQ, status=status)
