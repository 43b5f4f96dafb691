"""Paths into JSON text."""

from __future__ import annotations

import pytest

from mirror.document import jsonpath as jp
from mirror.document.jsonpath import PathError
from mirror.wire.constants import Status


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("", []),
        ("a", ["a"]),
        ("a.b[0].c", ["a", "b", 0, "c"]),
        ("[0][-1]", [0, -1]),
        ("a[1]", ["a", 1]),
        ("`a.b`.c", ["a.b", "c"]),
        ("`a``b`[2]", ["a`b", 2]),
        ("[3].x", [3, "x"]),
    ],
)
def test_a_path_is_parsed_to_its_parts(path: str, parts: list[str | int]) -> None:
    assert jp.parse_path(path) == parts


@pytest.mark.parametrize(
    "path", ["a.", ".a", "a..b", "a[x]", "a[", "`a", "a[-2]", "`a`b", "a.[0]", "[0].", "[²]", "a[٣]"]
)
def test_an_invalid_path_is_refused(path: str) -> None:
    with pytest.raises(PathError) as error:
        jp.parse_path(path)
    assert error.value.status == Status.SUBDOC_PATH_EINVAL


def test_a_path_too_long_or_too_deep_is_refused() -> None:
    for path in ("a" * 1025, ".".join("a" * 33)):
        with pytest.raises(PathError) as error:
            jp.parse_path(path)
        assert error.value.status == Status.SUBDOC_PATH_E2BIG
