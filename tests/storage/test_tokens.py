"""Tokens, moments and collections as text."""

from __future__ import annotations

import pytest

from storage.errors import UnknownCollection
from storage.format.tokens import collection_id_of
from storage.model import Branch, Collection, Manifest, ManifestUid, Seqno
from storage.read.view import Token
from tests.storage.one_vbucket import DEFAULT, ID, SCOPES


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1:2",
        "1:2:3:4",
        "1:2:3:000000000000000G",
        "1:2:3:000000000000000a:1",
        f"a:b:c:{ID}",
        f"1:2:-3:{ID}",
        f"70000:1:1:{ID}",
        f"1:4294967296:1:{ID}",
        f"1:1:1.5:{ID}",
        f"1:1:{'9' * 5000}:{ID}",
    ],
)
def test_a_token_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a token"):
        Token.parse(text)


def test_a_token_is_its_three_numbers_and_its_history() -> None:
    assert str(Token.parse(f"7:2:55:{ID}")) == f"7:2:55:{ID}"
    assert Token.parse(f"7:2:55:{ID}") == Token(7, Branch(2), Seqno(55), 255)


def test_a_token_of_an_earlier_version_is_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"of an earlier version.*begin without a token"):
        Token.parse("7:2:55")


MANIFEST = Manifest(
    ManifestUid(1),
    SCOPES,
    {0: DEFAULT, 9: Collection(9, 8, "orders", Seqno(2)), 10: Collection(10, 0, "orders", Seqno(3))},
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [(None, 0), ("_default", 0), ("_default._default", 0), ("shop.orders", 9), ("orders", 10), (77, 77)],
)
def test_a_name_is_one_collection(name: str | int | None, expected: int) -> None:
    assert collection_id_of(MANIFEST, name, "/path") == expected


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(
        UnknownCollection, match=r"no collection 'shop\.x'.*known here: _default\._default, _default\.orders"
    ):
        collection_id_of(MANIFEST, "shop.x", "/path")
    with pytest.raises(UnknownCollection, match="known here: none"):
        collection_id_of(Manifest(ManifestUid(2), {}, {}), "x", "/path")


def test_a_collection_is_called_by_its_scope_and_name() -> None:
    assert MANIFEST.names() == {0: "_default._default", 9: "shop.orders", 10: "_default.orders"}
