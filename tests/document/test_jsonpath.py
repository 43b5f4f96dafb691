"""Paths into JSON text: what is not touched keeps its spelling."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_a_change_leaves_the_rest_of_the_text_alone() -> None:
    assert jp.replace('{"a" : 1 , "b":2}', ["a"], "[ ]") == '{"a" : [ ] , "b":2}'
    assert jp.remove('{"a": 1, "b": 2, "c": 3}', ["b"]) == '{"a": 1, "c": 3}'
    assert jp.remove('{"a": 1, "b": 2}', ["b"]) == '{"a": 1}'
    assert jp.remove('{"a": 1}', ["a"]) == "{}"
    assert jp.remove("[1, 2]", [-1]) == "[1]"
    put = jp.insert_member
    assert put("{}", ["k"], '"v"', make_parents=False, add_only=False) == '{"k":"v"}'
    assert put('{"a": 1 }', ["k"], "2", make_parents=False, add_only=False) == '{"a": 1,"k":2 }'
    assert put('{"a": 1}', ["a"], "2", make_parents=False, add_only=False) == '{"a": 2}'
    assert put("{}", ["a", "b", "c"], "1", make_parents=True, add_only=False) == '{"a":{"b":{"c":1}}}'
    assert jp.push("[ ]", [], "1,2", first=False, make_parents=False) == "[1,2 ]"
    assert jp.push('{"a":[3]}', ["a"], "1,2", first=True, make_parents=False) == '{"a":[1,2,3]}'
    assert jp.push("{}", ["a"], "1", first=False, make_parents=True) == '{"a":[1]}'
    assert jp.insert_element("[1,3]", [1], "2") == "[1,2,3]"
    assert jp.insert_element("[1]", [1], "2") == "[1,2]"
    assert jp.add_unique("[1]", [], '"1"', make_parents=False) == '[1,"1"]'
    assert jp.add_number('{"n":1}', ["n"], -3, make_parents=False) == ('{"n":-2}', -2)
    assert jp.add_number("{}", ["a", "n"], 4, make_parents=True) == ('{"a":{"n":4}}', 4)


def test_an_impossible_change_is_refused_with_the_status_of_a_real_server() -> None:
    def status(change: object) -> Status:
        with pytest.raises(PathError) as error:
            change()  # type: ignore[operator]
        return error.value.status

    put = jp.insert_member
    assert status(lambda: put("{}", ["a", "b"], "1", make_parents=False, add_only=False)) == Status.SUBDOC_PATH_ENOENT
    assert status(lambda: put('{"a":1}', ["a"], "1", make_parents=False, add_only=True)) == Status.SUBDOC_PATH_EEXISTS
    assert status(lambda: put("[]", [0], "1", make_parents=False, add_only=True)) == Status.SUBDOC_PATH_EINVAL
    assert status(lambda: put("{}", ["a", 0, "b"], "1", make_parents=True, add_only=True)) == Status.SUBDOC_PATH_ENOENT
    assert status(lambda: jp.remove("{}", [])) == Status.SUBDOC_PATH_EINVAL
    assert status(lambda: jp.remove("{}", ["a"])) == Status.SUBDOC_PATH_ENOENT
    assert status(lambda: jp.push("{}", [], "1", first=True, make_parents=False)) == Status.SUBDOC_PATH_MISMATCH
    assert status(lambda: jp.push("{}", ["a"], "1", first=True, make_parents=False)) == Status.SUBDOC_PATH_ENOENT
    assert status(lambda: jp.insert_element("[]", [-1], "1")) == Status.SUBDOC_PATH_EINVAL
    assert status(lambda: jp.insert_element("[]", [5], "1")) == Status.SUBDOC_PATH_ENOENT
    assert status(lambda: jp.add_unique("[1]", [], "1", make_parents=False)) == Status.SUBDOC_PATH_EEXISTS
    assert status(lambda: jp.add_unique("[[]]", [], "1", make_parents=False)) == Status.SUBDOC_PATH_MISMATCH
    assert status(lambda: jp.add_unique("[]", [], "{}", make_parents=False)) == Status.SUBDOC_VALUE_CANTINSERT
    assert status(lambda: jp.add_number('{"n":"x"}', ["n"], 1, make_parents=False)) == Status.SUBDOC_PATH_MISMATCH
    assert status(lambda: jp.add_number("{}", ["n"], 0, make_parents=False)) == Status.SUBDOC_DELTA_EINVAL
    big = '{"n":%d}'
    assert status(lambda: jp.add_number(big % 2**63, ["n"], 1, make_parents=False)) == Status.SUBDOC_NUM_ERANGE
    full = big % (2**63 - 1)
    assert status(lambda: jp.add_number(full, ["n"], 1, make_parents=False)) == Status.SUBDOC_VALUE_CANTINSERT


keys = st.text(max_size=4)
documents = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
).filter(lambda value: isinstance(value, dict))


@settings(max_examples=80, deadline=None)
@given(documents, st.text(min_size=1, max_size=3), st.sampled_from([None, 2, ", "]))
def test_a_change_of_the_text_equals_the_change_of_the_document(
    document: dict[str, object], name: str, spacing: object
) -> None:
    indent = spacing if isinstance(spacing, int) else None
    text = json.dumps(document, indent=indent)
    changed = jp.insert_member(text, [name], '{"new": true}', make_parents=False, add_only=False)
    assert json.loads(changed) == {**document, name: {"new": True}}
    assert json.loads(jp.remove(changed, [name])) == {key: value for key, value in document.items() if key != name}
    start, end = jp.find(changed, [name])
    assert changed[start:end] == '{"new": true}'
