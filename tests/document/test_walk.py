"""Walking through JSON text: the values that `jsonpath` finds in decoded text, and no error but PathError."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.document import jsonpath, walk
from mirror.document.jsonpath import Part, PathError
from mirror.wire.constants import Status

NAMES = ("a", "b", 'q"\\', "é")
TEXT = st.text(alphabet='ab"\\{}[],: é\n', max_size=12)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)
PARTS: st.SearchStrategy[list[Part]] = st.lists(st.sampled_from((*NAMES, 0, 1, 2, -1)), max_size=4)
SIZES = st.sampled_from(((5, 9), (40, 300), (walk.STEP_BYTES, walk.FLAT_BYTES_MAX)))


def outcome(compute: Callable[[], object]) -> object:
    try:
        return compute()
    except PathError as error:
        return error.status


def found(data: bytes, parts: list[Part]) -> bytes:
    start, end = walk.find(data, parts)
    return data[start:end]


def at(value: Any, parts: list[Part]) -> Any:
    part: Any
    for part in parts:
        if not isinstance(value, dict if isinstance(part, str) else list):
            raise PathError(Status.SUBDOC_PATH_MISMATCH)
        try:
            value = value[part]
        except (KeyError, IndexError):
            raise PathError(Status.SUBDOC_PATH_ENOENT) from None
    return value


def members_of(value: Any, parts: list[Part]) -> int:
    container = at(value, parts)
    if not isinstance(container, dict | list):
        raise PathError(Status.SUBDOC_PATH_MISMATCH)
    return len(container)


@given(VALUES, PARTS, SIZES, st.booleans(), st.sampled_from((None, 2)), st.sampled_from(("", " ", "\n \n \t \r ")))
def test_values_are_those_of_the_decoded_document(
    value: object, parts: list[Part], sizes: tuple[int, int], ascii_only: bool, indent: int | None, blanks: str
) -> None:
    text = blanks + json.dumps(value, ensure_ascii=ascii_only, indent=indent) + blanks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "STEP_BYTES", sizes[0])
        patch.setattr(walk, "FLAT_BYTES_MAX", sizes[1])
        data = text.encode()
        assert outcome(lambda: json.loads(found(data, parts))) == outcome(partial(at, value, parts))
        assert outcome(partial(walk.count, data, parts)) == outcome(partial(members_of, value, parts))


@given(
    VALUES, PARTS, st.lists(st.tuples(st.integers(0, 99), st.sampled_from(b'[]{}",:\\ \0\xffa1')), max_size=3), SIZES
)
def test_text_that_is_not_json_is_a_path_error_at_most(
    value: object, parts: list[Part], changes: list[tuple[int, int]], sizes: tuple[int, int]
) -> None:
    data = bytearray(json.dumps(value).encode())
    for at, byte in changes:
        data[at % len(data)] = byte
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "STEP_BYTES", sizes[0])
        patch.setattr(walk, "FLAT_BYTES_MAX", sizes[1])
        for end in (len(data), len(data) // 2, 0):
            outcome(partial(found, bytes(data[:end]), parts))
            outcome(partial(walk.count, bytes(data[:end]), parts))


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        (b'{"a":[' + b",".join([b'"' + b"x" * 1000 + b'"'] * 300) + b"]}", "a[-1]", b'"' + b"x" * 1000 + b'"'),
        (b"[" + b",".join([b'{"x":1,"y":[2,3]}'] * 20_000) + b"]", "[-1].y[1]", b"3"),
        (b'["' + b"x" * 300_000 + b'",1]', "[1]", b"1"),
        (b'["' + b"\\n" * 150_000 + b'",1]', "[1]", b"1"),
        (b"[" + b" " * 300_000 + b"1" + b" " * 300_000 + b",2]", "[1]", b"2"),
        (b"[" + b"1" * 300_000 + b",2]", "[1]", b"2"),
        (b'{"' + b"k" * 300_000 + b'":1,"a":2}', "a", b"2"),
        (b"[" * 100_000 + b"]" * 100_000, "[0]", b"[" * 99_999 + b"]" * 99_999),
        (b" " * 300_000 + b"1" + b" " * 300_000, "", b"1"),
    ],
    ids=["long texts", "many objects", "one text", "escapes", "blanks", "digits", "a name", "depth", "only blanks"],
)
def test_a_value_behind_much_text_is_found(text: bytes, path: str, value: bytes) -> None:
    assert found(text, jsonpath.parse_path(path)) == value


def test_the_longest_name_of_a_path_is_found_with_an_escape_for_each_byte() -> None:
    path = "k" * jsonpath.PATH_BYTES_MAX
    text = b'{"' + b"\\u006b" * len(path) + b'":12}'
    assert found(text, jsonpath.parse_path(path)) == b"12"


@pytest.mark.parametrize(
    "text", [b"", b" ", b"{", b"[1", b'["', b'{"a" 1}', b'{"a":}', b"[1 2]", b"{1:2}", b'{"\\x":1}']
)
def test_text_that_breaks_the_grammar_of_json_is_not_json(text: bytes) -> None:
    for part in ("b", -1):
        status = outcome(partial(found, text, [part]))
        assert status in (Status.SUBDOC_DOC_NOT_JSON, Status.SUBDOC_PATH_MISMATCH), text
