"""Walking through JSON text: the values that `jsonpath` finds in decoded text, in steps, and no error but PathError."""

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
from mirror.document.walk import Buffer, Steps
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


def run(steps: Steps[Any]) -> tuple[Any, int]:
    count = 0
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value, count
        count += 1


def outcome(compute: Callable[[], object]) -> object:
    try:
        return compute()
    except PathError as error:
        return error.status


def found(data: Buffer, parts: list[Part]) -> bytes:
    (start, end), _ = run(walk.find(data, parts))
    return bytes(data[start:end])


def members_of(text: str, parts: list[Part]) -> int:
    start, _ = jsonpath.find(text, parts)
    if text[start] not in "{[":
        raise PathError(Status.SUBDOC_PATH_MISMATCH)
    return sum(1 for _ in jsonpath.members(text, start))


def counted_of(data: Buffer, parts: list[Part]) -> int:
    return int(run(walk.count(data, parts))[0])


@given(VALUES, PARTS, SIZES, st.booleans(), st.sampled_from((None, 2)), st.sampled_from(("", " ", "\n \n \t \r ")))
def test_values_are_those_that_jsonpath_finds(
    value: object, parts: list[Part], sizes: tuple[int, int], ascii_only: bool, indent: int | None, blanks: str
) -> None:
    text = blanks + json.dumps(value, ensure_ascii=ascii_only, indent=indent) + blanks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "STEP_BYTES", sizes[0])
        patch.setattr(walk, "FLAT_BYTES_MAX", sizes[1])

        def known() -> bytes:
            start, end = jsonpath.find(text, parts)
            return text[start:end].encode()

        for data in (text.encode(), bytearray(text.encode())):
            assert outcome(partial(found, data, parts)) == outcome(known)
            counted = outcome(partial(counted_of, data, parts))
            assert counted == outcome(lambda: members_of(text, parts))


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
            outcome(partial(found, data[:end], parts))
            outcome(partial(counted_of, bytes(data[:end]), parts))


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (b'{"a":[' + b",".join([b'"' + b"x" * 1000 + b'"'] * 300) + b"]}", "a[-1]"),
        (b"[" + b",".join([b'{"x":1,"y":[2,3]}'] * 20_000) + b"]", "[-1].y[1]"),
        (b'["' + b"x" * 300_000 + b'",1]', "[1]"),
        (b'["' + b"\\n" * 150_000 + b'",1]', "[1]"),
        (b"[" + b" " * 300_000 + b"1" + b" " * 300_000 + b",2]", "[1]"),
        (b"[" + b"1" * 300_000 + b",2]", "[1]"),
        (b'{"' + b"k" * 300_000 + b'":1,"a":2}', "a"),
        (b"[" * 100_000 + b"]" * 100_000, "[0]"),
        (b" " * 300_000 + b"1" + b" " * 300_000, ""),
    ],
    ids=["long texts", "many objects", "one text", "escapes", "blanks", "digits", "a name", "depth", "only blanks"],
)
def test_each_step_is_bounded(text: bytes, path: str) -> None:
    parts = jsonpath.parse_path(path)
    _, count = run(walk.find(text, parts))
    assert count >= len(text) // walk.STEP_BYTES - 2


def test_the_longest_name_of_a_path_is_found_with_an_escape_for_each_byte() -> None:
    path = "k" * jsonpath.PATH_BYTES_MAX
    text = b'{"' + b"\\u006b" * len(path) + b'":12}'
    assert found(text, jsonpath.parse_path(path)) == b"12"


def test_a_bracket_costs_more_than_its_byte() -> None:
    """Of a value that is passed over: 80,000 brackets are 100 kB, and more work than three steps."""
    text = b"[[" + b"[[]]," * 20_000 + b"0],1]"
    _, count = run(walk.find(text, jsonpath.parse_path("[1]")))
    assert count >= 80_000 * walk.TOKEN_COST_BYTES // walk.STEP_BYTES - 2


@pytest.mark.parametrize(
    "text", [b"", b" ", b"{", b"[1", b'["', b'{"a" 1}', b'{"a":}', b"[1 2]", b"{1:2}", b'{"\\x":1}']
)
def test_text_that_breaks_the_grammar_of_json_is_not_json(text: bytes) -> None:
    for part in ("b", -1):
        status = outcome(partial(found, text, [part]))
        assert status in (Status.SUBDOC_DOC_NOT_JSON, Status.SUBDOC_PATH_MISMATCH), text
