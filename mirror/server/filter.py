"""The filter of a stream request, checked against a manifest.

`mirror.wire.stream_filter` parses the JSON value. A client without collections gets the default collection and cannot
send a value (docs/protocol.md 2.4).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import asdict, dataclass
from typing import TypeVar

from mirror.server.errors import Refused, unknown_collection
from mirror.wire.constants import Status
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.stream_filter import KEYS, FilterRequest, parse_filter


@dataclass(kw_only=True)
class ProducerFilter:
    """The filter of one stream. With neither `collections` nor `scope_id` everything passes."""

    collections: frozenset[int] | None = None
    scope_id: int | None = None
    stream_id: int | None = None
    purge_seqno: int | None = None
    legacy: bool = False
    """The client knows no collections: it gets the default collection, and no system events."""


FilterT = TypeVar("FilterT", bound=ProducerFilter)


def requested_filter(
    kind: type[FilterT],
    value: bytes,
    *,
    has_collections: bool,
    has_stream_ids: bool,
    scopes: Container[int],
    collections: Container[int],
    manifest_uid: int,
    known_keys: frozenset[str] = KEYS,
) -> FilterT:
    """Parse a filter; `scopes` and `collections` are the ids that exist for the client. Raises Refused, without a
    context if `value` is not a filter, as recorded.
    """
    if not has_collections:
        if value:
            raise Refused(Status.EINVAL)
        return kind(collections=frozenset({0}), legacy=True)
    try:
        found: FilterRequest = parse_filter(value, has_stream_ids=has_stream_ids, known=known_keys)
    except RemoteProtocolError as error:
        raise Refused(error.status) from None
    if found.scope_id is not None and found.scope_id not in scopes:
        raise unknown_collection(manifest_uid, Status.UNKNOWN_SCOPE)
    if not all(number in collections for number in found.collections or ()):
        raise unknown_collection(manifest_uid)
    return kind(**asdict(found))
