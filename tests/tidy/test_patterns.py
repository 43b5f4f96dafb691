"""Regular expressions mean the same in every Python that the project runs on."""

from __future__ import annotations

import re

import pytest

from tests.tidy.test_names import SOURCES, name_of

POSSESSIVE_GROUP = re.compile(r"(?<!\\)\)[*+?]\+")
"""`(...)*+` and the like. Python up to 3.11.4 matches such groups wrongly where a group within them goes back
(cpython issue 106052): write `(?>(...)*)`. Characters and classes, as in `[a-z]*+`, are right everywhere.
"""


def test_no_group_is_possessive() -> None:
    assert [name_of(path) for path in SOURCES if POSSESSIVE_GROUP.search(path.read_text())] == []


@pytest.mark.parametrize("text", [r"(?:a|b)*+", r"(?:a)++", r"(a)?+"])
def test_possessive_groups_are_found(text: str) -> None:
    assert POSSESSIVE_GROUP.search(text)


def test_classes_and_atomic_groups_may_be() -> None:
    assert not POSSESSIVE_GROUP.search(r"(?>(?:[^a]*+|b++)*)\)++")
