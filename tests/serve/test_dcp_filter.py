"""Filters of streams: what passes, what is refused, and who may ask for it."""

from __future__ import annotations

from contextlib import suppress

import pytest

from mirror.serve.access.auth import Reader
from mirror.serve.dcp.filter import ServedFilter, check_selected, parse
from mirror.server.errors import Refused
from mirror.wire.constants import Status
from mirror.wire.events import CollectionCreated, CollectionDropped, CollectionModified, ScopeCreated, ScopeDropped
from storage.model import Collection, Manifest, ManifestUid, Seqno

EVERYTHING = Reader("everything")


def collection(number: int, scope: int, begin: int = 0) -> Collection:
    return Collection(number, scope, f"c{number}", Seqno(begin))


MANIFEST = Manifest(
    ManifestUid(7),
    {0: "_default", 8: "shop"},
    {0: Collection(0, 0, "_default", Seqno(0)), 9: collection(9, 8, 20), 10: collection(10, 8)},
)


def made(value: bytes, *, collections: bool = True, sids: bool = False, reader: Reader = EVERYTHING) -> ServedFilter:
    return parse(value, MANIFEST, reader, has_collections=collections, has_stream_ids=sids)


@pytest.mark.parametrize(
    ("value", "begins"),
    [
        (b"", None),
        (b'{"uid":"7"}', None),
        (b'{"collections":["9"]}', {9: 20}),
        (b'{"collections":["0","a"]}', {0: 0, 10: 0}),
        (b'{"scope":"8"}', {9: 20, 10: 0}),
    ],
)
def test_a_filter_selects_collections_with_their_first_seqno(value: bytes, begins: dict[int, int] | None) -> None:
    assert made(value).begins(MANIFEST) == begins


def test_a_client_without_collections_sees_only_the_default_one() -> None:
    found = made(b"", collections=False)
    assert found.legacy
    assert found.begins(MANIFEST) == {0: 0}
    assert not found.shows(CollectionCreated(8, 8, 11, "new"))
    with pytest.raises(Refused):
        made(b'{"uid":"7"}', collections=False)


def test_a_filter_by_collections_shows_their_events_and_is_empty_when_all_have_ended() -> None:
    found = made(b'{"collections":["9","a"]}')
    assert found.shows(CollectionCreated(8, 8, 9, "c9"))
    assert not found.shows(CollectionCreated(8, 8, 11, "new"))
    assert not found.shows(ScopeCreated(8, 9, "other"))
    assert found.shows(CollectionModified(8, 8, 9, "c9"))
    assert found.shows(CollectionDropped(9, 8, 9))
    assert not found.empty
    assert found.shows(CollectionDropped(9, 8, 10))
    assert found.empty


def test_a_filter_by_scope_takes_its_new_collections_and_is_empty_when_it_ends() -> None:
    found = made(b'{"scope":"8"}')
    assert found.shows(CollectionCreated(8, 8, 11, "new"))
    assert not found.shows(CollectionCreated(8, 0, 12, "elsewhere"))
    assert not found.shows(ScopeDropped(9, 5))
    assert not found.empty
    assert found.shows(ScopeDropped(9, 8))
    assert found.empty


@pytest.mark.parametrize(
    ("patterns", "value", "status"),
    [
        (("*",), b"", None),
        (("shop.*",), b"", Status.EACCESS),
        (("shop.*",), b'{"scope":"8"}', None),
        (("shop.c9",), b'{"scope":"8"}', Status.EACCESS),
        (("shop.c9",), b'{"collections":["9"]}', None),
        (("shop.c9",), b'{"collections":["9","a"]}', Status.UNKNOWN_COLLECTION),
        (("_default._default",), b'{"scope":"8"}', Status.UNKNOWN_SCOPE),
        (("_default._default",), b'{"collections":["0"]}', None),
    ],
)
def test_a_filter_beyond_the_rights_of_the_reader_is_refused(
    patterns: tuple[str, ...], value: bytes, status: Status | None
) -> None:
    reader = Reader("r", frozenset(patterns))
    if status is None:
        made(value, reader=reader)
        return
    with pytest.raises(Refused) as caught:
        made(value, reader=reader)
    assert caught.value.status == status


def test_a_client_without_collections_needs_the_right_to_the_default_one() -> None:
    made(b"", collections=False, reader=Reader("r", frozenset({"_default.*"})))
    with pytest.raises(Refused):
        made(b"", collections=False, reader=Reader("r", frozenset({"shop.*"})))


@pytest.mark.parametrize(
    ("selected", "allowed"),
    [
        ("collections 9", {b'{"collections":["9"]}'}),
        ("collections 9,a", {b'{"collections":["9"]}', b'{"collections":["9","a"]}'}),
        ("collections 0", {b"legacy"}),
        ("scope 8", {b'{"scope":"8"}', b'{"collections":["9"]}', b'{"collections":["9","a"]}'}),
        ("scope 0", {b'{"scope":"0"}', b"legacy"}),
        ("", set()),
    ],
)
def test_a_mirror_of_a_part_refuses_streams_that_ask_for_more(selected: str, allowed: set[bytes]) -> None:
    requests = [
        b"",
        b"legacy",
        b'{"scope":"0"}',
        b'{"scope":"8"}',
        b'{"collections":["9"]}',
        b'{"collections":["9","a"]}',
    ]

    def accepted(value: bytes) -> bool:
        found = made(b"", collections=False) if value == b"legacy" else made(value)
        with suppress(Refused):
            check_selected(found, selected, MANIFEST)
            return True
        return False

    assert set(filter(accepted, requests)) == allowed
