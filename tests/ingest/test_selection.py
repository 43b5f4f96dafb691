"""Names to ids: what people may ask for, what it is in terms of a manifest, and when a stream may go on."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.errors import ConfigError
from mirror.ingest.selection import (
    COLLECTIONS_MAX,
    MANIFEST_BYTES_MAX,
    MalformedManifest,
    Selection,
    SourceManifest,
    StreamFilter,
)

MANIFEST = {
    "uid": "1f",
    "scopes": [
        {"name": "_default", "uid": "0", "collections": [{"name": "_default", "uid": "0"}]},
        {
            "name": "inventory",
            "uid": "8",
            "collections": [{"name": "airline", "uid": "9", "maxTTL": 7}, {"name": "route", "uid": "1a"}],
        },
        {"name": "empty", "uid": "b"},
    ],
}
PARSED = SourceManifest.parse(json.dumps(MANIFEST).encode())


def test_a_manifest_is_parsed() -> None:
    assert PARSED.uid == 0x1F
    assert PARSED.scopes == {"_default": 0, "inventory": 8, "empty": 11}
    assert PARSED.collections[("inventory", "route")] == 0x1A
    assert PARSED.hides_system


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"uid": "x", "scopes": []}',
        b'{"uid": "1", "scopes": [{}]}',
        b'{"uid": 1, "scopes": []}',
        b"\xff",
    ],
)
def test_a_malformed_manifest_is_one_error(body: bytes) -> None:
    with pytest.raises(MalformedManifest):
        SourceManifest.parse(body)


def test_names_become_ids() -> None:
    found = Selection.of(None, ["inventory.route", "inventory.airline", "inventory.route"]).resolve(PARSED)
    assert found.filter == StreamFilter(collection_ids=(9, 0x1A))
    assert found.filter.fields == {"collections": ["9", "1a"]}
    assert found.collection_ids == (9, 0x1A)
    assert found.scope_names[8] == "inventory"
    assert found.streams


def test_a_scope_is_requested_by_its_id_to_include_new_collections() -> None:
    found = Selection.of("inventory", None).resolve(PARSED)
    assert found.filter is not None
    assert found.filter.fields == {"scope": "8"}
    assert found.collection_ids == (9, 0x1A)
    assert found.filter.shows_by_itself(0, 8)
    assert not found.filter.shows_by_itself(0, 0)


def test_a_collection_that_does_not_exist_yet_is_reported_and_not_requested() -> None:
    some = Selection.of(None, ["inventory.airline", "inventory.hotel"]).resolve(PARSED)
    assert (some.missing, some.filter) == (("inventory.hotel",), StreamFilter(collection_ids=(9,)))
    none = Selection.of(None, ["other.hotel"]).resolve(PARSED)
    assert (none.missing, none.filter, none.streams) == (("other.hotel",), None, False)
    scope = Selection.of("other", None).resolve(PARSED)
    assert (scope.missing, scope.filter, scope.streams) == (("other",), None, False)


def test_the_whole_bucket_needs_no_filter() -> None:
    whole = Selection.of(None, None)
    assert whole.whole
    assert (whole.text, str(whole)) == ("", "the whole bucket")
    found = whole.resolve(PARSED)
    assert (found.filter, found.streams, found.collection_ids) == (None, True, (0, 9, 0x1A))


@pytest.mark.parametrize(
    ("scope", "names", "said"),
    [
        ("a", ["b.c"], "both a scope and collections"),
        ("a.b", None, "not the name of a scope"),
        ("", None, "not the name of a scope"),
        (None, ["airline"], "not the name of a collection"),
        (None, ["a.b.c"], "not the name of a collection"),
        (None, ["a."], "not the name of a collection"),
        (None, ["a.b,c"], "not the name of a collection"),
        (None, [f"a.c{number}" for number in range(COLLECTIONS_MAX + 1)], "1001 collections"),
    ],
)
def test_other_names_are_refused_with_a_remedy(scope: str | None, names: list[str] | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        Selection.of(scope, names)
    assert caught.value.hint


NAMES = st.text(string.ascii_letters + string.digits + "_%-", min_size=1, max_size=20)


@given(NAMES, st.lists(st.tuples(NAMES, NAMES).map(".".join), min_size=1))
def test_a_selection_is_read_as_it_was_written(scope: str, names: list[str]) -> None:
    for selection in (Selection.of(scope, None), Selection.of(None, names), Selection()):
        assert Selection.parse(selection.text) == selection


def test_a_selection_of_a_later_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not know"):
        Selection.parse("keys a*")


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, unique=True).map(tuple), st.integers(0, 2**32 - 1))
def test_a_filter_is_read_as_it_was_written(ids: tuple[int, ...], scope_id: int) -> None:
    for each in (StreamFilter(collection_ids=ids), StreamFilter(scope_id)):
        assert StreamFilter.parse(each.text) == each
        assert each.continues(each.text, ())


@pytest.mark.parametrize("text", ["", "scope", "scope x", "collections", "collections 8,", "keys 8"])
def test_an_unknown_filter_text_is_no_filter(text: str) -> None:
    assert StreamFilter.parse(text) is None
    assert not StreamFilter(collection_ids=(8,)).continues(text, ())


def test_a_stream_continues_only_if_no_collection_was_left_out() -> None:
    one, two = StreamFilter(collection_ids=(8,)), StreamFilter(collection_ids=(8, 9))
    assert not one.continues(None, ())
    assert not two.continues(one.text, (8,))
    assert one.continues(two.text, (8,))
    assert not one.continues(two.text, (8, 9)), "no event reported that 9 is gone"
    assert not one.continues(one.text, (0, 8, 9)), "the end of 9 was abandoned, and would not come again"
    assert one.continues(one.text, (0, 8)), "every manifest begins with the default collection"
    assert not one.continues(StreamFilter(8).text, (8,))
    assert not StreamFilter(8).continues(one.text, (8,))
    assert not StreamFilter(9).continues(StreamFilter(8).text, ())


def test_a_manifest_of_a_million_collections_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = b",".join(b'{"name":"c%d","uid":"%x"}' % (each, each) for each in range(150_000))
    body = b'{"uid":"1","scopes":[{"name":"s","uid":"8","collections":[%b]}]}' % entries
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(MalformedManifest, match=f"{len(body)} bytes; {MANIFEST_BYTES_MAX} at most"):
        SourceManifest.parse(body)


def test_a_manifest_with_the_maximum_of_collections_is_accepted() -> None:
    name = "n" * 251
    entries = [{"name": f"{each:04}" + name[4:], "uid": f"{each:x}"} for each in range(1_200)]
    scopes = [{"name": f"{each:04}" + name[4:], "uid": f"{each:x}", "collections": entries[each:each + 1]}
              for each in range(1_200)]  # fmt: skip
    assert len(SourceManifest.parse(json.dumps({"uid": "1", "scopes": scopes}).encode()).collections) == 1_200
