"""`is_json` agrees with `json.loads`, and reads no more than a step at a time."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.document import judge
from mirror.document.judge import DEPTH_MAX, NUMBER_BYTES_MAX, STEP_BYTES, is_json


def no_number(_: str) -> NoReturn:
    raise ValueError("not JSON")


def loads(data: bytes) -> bool:
    try:
        json.loads(data.decode(), parse_constant=no_number)
    except ValueError:
        return False
    return True


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)
TOKENS = st.sampled_from(
    [b"[", b"]", b"{", b"}", b",", b":", b'"', b'"a"', b" ", b"\n", b"1", b"-", b"0", b".5", b"e3", b"true", b"nul",
     b"l", b"\\", b"\\u00e9", b"\xc3\xa9", b"\xff", b"\t", b"NaN"]
)  # fmt: skip


@given(value=JSON, indent=st.sampled_from([None, 1]), is_ascii=st.booleans(), step=st.sampled_from([7, STEP_BYTES]))
def test_valid_json_is_recognised(value: Any, indent: int | None, is_ascii: bool, step: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "STEP_BYTES", step)
        data = json.dumps(value, indent=indent, ensure_ascii=is_ascii).encode(errors="surrogatepass")
        assert is_json(data) is loads(data)


@given(parts=st.lists(TOKENS, max_size=12), step=st.sampled_from([7, STEP_BYTES]))
def test_any_text_is_judged_as_json_loads_judges_it(parts: list[bytes], step: int) -> None:
    data = b"".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "STEP_BYTES", step)
        try:
            expected = loads(data)
        except UnicodeDecodeError:
            expected = False
        assert is_json(data) is expected


@pytest.mark.parametrize(
    "data",
    [
        b'"' + b"x" * 5 * STEP_BYTES + b'"',
        b'"' + b"\\u00e9" * STEP_BYTES + b'"',
        b"[" + b"1," * 3 * STEP_BYTES + b"1]",
        b"[" + b"[[]]," * STEP_BYTES + b"1]",
        b"{" + b'"a": {"b": [1, 2]},' * STEP_BYTES + b'"a":1}',
        b"[" + b" " * 5 * STEP_BYTES + b"]",
        b"[" * DEPTH_MAX + b"]" * DEPTH_MAX,
    ],
    ids=["string", "escapes", "numbers", "containers", "objects", "blanks", "depth"],
)
def test_values_longer_than_a_step_are_judged(data: bytes) -> None:
    assert is_json(data)
    assert not is_json(data[:-1])
    assert not is_json(data + b"]")


def test_text_nested_too_deep_and_numbers_too_long_are_not_json() -> None:
    assert not is_json(b"[" * (DEPTH_MAX + 1) + b"]" * (DEPTH_MAX + 1))
    assert not is_json(b"1" * NUMBER_BYTES_MAX)
    assert is_json(b"1" * (NUMBER_BYTES_MAX - 1))


@pytest.mark.parametrize("number", [b"1" * NUMBER_BYTES_MAX, b"1." + b"0" * NUMBER_BYTES_MAX], ids=["integer", "zeros"])
@pytest.mark.parametrize(
    "shape", [b"[%b]", b"[%b,1]", b"[1,%b,1]", b'{"a":%b,"b":1}', b'[{"a":[%b,1]},1]', b"-%b", b"[-%b,1]"]
)
def test_a_number_is_refused_for_its_length_wherever_it_stands(number: bytes, shape: bytes) -> None:
    """A number with a comma behind it once matched the pattern of whole items, which had no limit."""
    assert not is_json(shape % number)
    assert is_json(shape % number[: NUMBER_BYTES_MAX - 2])
