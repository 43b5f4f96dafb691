"""Collections by name, by id, and as they are called."""

from __future__ import annotations

import pytest

from storage.errors import UnknownCollection
from storage.format.tokens import collection_id_of
from storage.model import Collection, Manifest, ManifestUid, Seqno
from tests.storage.one_vbucket import DEFAULT, SCOPES

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
