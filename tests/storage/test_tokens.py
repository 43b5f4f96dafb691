"""Tokens as text."""

from __future__ import annotations

import pytest

from storage.model import Branch, Seqno, Vbid
from storage.read.view import Token
from tests.storage.one_vbucket import ID


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
    assert Token.parse(f"7:2:55:{ID}") == Token(Vbid(7), Branch(2), Seqno(55), 255)


def test_a_token_of_an_earlier_version_is_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"of an earlier version.*begin without a token"):
        Token.parse("7:2:55")
