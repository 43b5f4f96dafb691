"""The nouns, tokens and errors: what they promise by themselves."""

from __future__ import annotations

import pytest

from storage import errors
from storage.errors import UnknownCollection
from storage.format.tokens import collection_of
from storage.model import Branch, Collection, FailoverLog, Manifest, ManifestUid, Seqno, collection_named
from storage.read.view import Token
from tests.storage.model import DEFAULT, ID, SCOPES

# --- failover logs


def log(*entries: tuple[int, int]) -> FailoverLog:
    return FailoverLog.of(entries)


OURS = ((0xC, 20), (0xB, 10), (0xA, 0))


def test_a_boundary_lies_on_the_newest_history_that_had_begun() -> None:
    for seqno, vbuuid in ((0, 0), (1, 0xA), (9, 0xA), (10, 0xB), (19, 0xB), (20, 0xC), (1000, 0xC)):
        assert log(*OURS).vbuuid_at(seqno) == vbuuid
    assert log((0xC, 20)).vbuuid_at(19) == 0
    assert log((0xC, 10), (0xB, 10), (0xA, 0)).vbuuid_at(10) == 0xC


def test_pruning_drops_entries_above_the_boundary_and_keeps_its_vbuuid() -> None:
    assert log(*OURS).pruned(10) == log((0xB, 10), (0xA, 0))
    assert log((0xC, 20)).pruned(15, 0xB) == log((0xB, 15))
    assert log((0xC, 20)).pruned(15) == ()
    assert log((0xC, 20)).pruned(0, 0xB) == ()


@pytest.mark.parametrize(("vbuuid", "end"), [(0xC, 99), (0xB, 20), (0xA, 10), (0xD, None)])
def test_a_history_ends_where_the_next_one_began(vbuuid: int, end: int | None) -> None:
    assert log(*OURS).end_of(vbuuid, 99) == end


# --- tokens, moments and collections as text


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
def test_a_malformed_token_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a token"):
        Token.parse(text)


def test_a_token_is_written_as_three_numbers_and_its_history_id() -> None:
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
    [(None, 0), ("_default", 0), ("_default._default", 0), ("shop.orders", 9), ("orders", 10), (9, 9), ("9", 9)],
)
def test_a_name_or_number_resolves_to_one_collection(name: str | int | None, expected: int) -> None:
    assert collection_of(MANIFEST, name, "/path").collection_id == expected


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(
        UnknownCollection, match=r"no collection 'shop\.x'.*known here: _default\._default, _default\.orders"
    ):
        collection_of(MANIFEST, "shop.x", "/path")
    with pytest.raises(UnknownCollection, match="no collection 77 "):
        collection_of(MANIFEST, 77, "/path")
    with pytest.raises(UnknownCollection, match="known here: none"):
        collection_of(Manifest(ManifestUid(2), {}, {}), "x", "/path")


def test_digits_name_an_id_unless_no_id_has_so_many() -> None:
    assert collection_named("9") == 9
    assert collection_named("9" * 5000) == "_default." + "9" * 5000


def test_the_text_of_an_error_is_one_line_with_place_and_remedy() -> None:
    error = errors.Full("no space left", path="/data/group-0000", vbid=5, hint="free some")
    assert str(error) == "/data/group-0000: vbucket 5: no space left (free some)"
    assert str(errors.Closed("closed")) == "closed"


def test_each_kind_of_error_has_an_exit_code_and_a_retry_policy() -> None:
    for kind in (errors.CorruptedError, errors.WrongBucket, errors.UnknownFormat):
        assert (kind("x").exit_code, kind("x").retryable) == (3, False)
    assert (errors.NotAMirror("x").exit_code, errors.NotAMirror("x").retryable) == (2, False)
    for again in (errors.Full, errors.Locked, errors.ViewInvalidated):
        assert (again("x").exit_code, again("x").retryable) == (1, True)
