"""Filters of stream requests against the collections and scopes that exist for a client."""

from __future__ import annotations

import pytest

from mirror.server.errors import Refused
from mirror.server.filter import DEFAULT_COLLECTION_ONLY, requested_filter
from mirror.wire.constants import Status
from mirror.wire.stream_filter import FilterRequest


def requested(value: bytes, *, collections: bool = True, stream_ids: bool = False) -> FilterRequest:
    return requested_filter(
        value,
        has_collections=collections,
        has_stream_ids=stream_ids,
        scopes={0, 8},
        collections={0, 9},
        manifest_uid=5,
    )


def test_what_exists_is_accepted() -> None:
    assert requested(b"") == FilterRequest()
    assert requested(b'{"collections":["9","0"]}').collections == frozenset({0, 9})
    assert requested(b'{"scope":"8"}').scope_id == 8
    assert requested(b"", collections=False) is DEFAULT_COLLECTION_ONLY


@pytest.mark.parametrize(
    ("value", "collections", "status", "manifest_uid"),
    [
        (b'{"collections":["9","a"]}', True, Status.UNKNOWN_COLLECTION, 5),
        (b'{"scope":"9"}', True, Status.UNKNOWN_SCOPE, 5),
        (b'{"sid":3}', True, Status.DCP_STREAM_ID_INVALID, None),
        (b"nonsense", True, Status.EINVAL, None),
        (b'{"uid":"0"}', False, Status.EINVAL, None),
    ],
)
def test_what_does_not_is_refused(value: bytes, collections: bool, status: int, manifest_uid: int | None) -> None:
    with pytest.raises(Refused) as error:
        requested(value, collections=collections)
    assert (error.value.status, error.value.manifest_uid) == (status, manifest_uid)
