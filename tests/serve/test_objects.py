"""Documents as JSON: the two ways of writing them say the same, and a stored JSON value keeps every digit."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.serve import objects
from storage.model import Branch, Document, Kind, Seqno, Vbuuid
from storage.read.view import Change, Rollback, Token


def document(key: bytes = b"k", value: bytes = b"{}", datatype: int = 1, kind: Kind = Kind.MUTATION) -> Document:
    return Document(1, 0, key, Seqno(2), 1, 3, 4, 0, datatype, value, kind, Branch(1))


def value_json(document: Document) -> bytes:
    return b"".join(objects.value_parts(document))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text("aé\n\"\\"),
    lambda children: st.lists(children) | st.dictionaries(st.text("ab"), children),
    max_leaves=10,
)  # fmt: skip


@given(st.binary(max_size=20), st.one_of(st.binary(max_size=20), JSON.map(lambda v: json.dumps(v, indent=1).encode())))
def test_both_ways_say_the_same(key: bytes, value: bytes) -> None:
    for kind in (Kind.MUTATION, Kind.DELETION, Kind.SYSTEM_EVENT):
        for datatype in (0, 1):
            made = document(key, value, datatype, kind)
            text = objects.document_json(made)
            assert b"\n" not in text
            assert b"\r" not in text
            found, expected = json.loads(text), objects.document_object(made)
            if "value_b64" in found and "value" in expected:  # stricter than json.loads: NaN and the like are no JSON
                expected.pop("value")
                found.pop("value_b64")
            assert found == expected


@pytest.mark.parametrize("value", [b"NaN", b"-Infinity", b"{", b"\xff", b"'a'", b"[" * 100_000])
def test_what_is_no_json_is_given_as_bytes(value: bytes) -> None:
    assert value_json(document(value=value)).startswith(b'"value_b64":"')


@pytest.mark.parametrize("size", [objects.BASE64_BYTES - 1, objects.BASE64_BYTES, 3 * objects.BASE64_BYTES + 1])
def test_a_large_value_is_encoded_in_parts_as_in_one(size: int) -> None:
    value = bytes(range(256)) * (size // 256 + 1)
    made = document(value=value[:size], datatype=0)
    assert max(map(len, objects.document_parts(made))) <= objects.BASE64_BYTES * 4 // 3
    assert json.loads(objects.document_json(made)) == objects.document_object(made)


def test_no_digit_is_lost() -> None:
    assert value_json(document(value=b'{"a": 1.10,\r\n"b": 1e400}')) == b'"value":{"a": 1.10,  "b": 1e400}'


def test_events() -> None:
    token = Token(1, Branch(2), Seqno(3), 4)
    rollback = Rollback(1, Branch(1), Seqno(9), Branch(2), Seqno(3), Vbuuid(10), Vbuuid(11), 5)
    for change in (Change("mutation", token, document()), Change("rollback", token, rollback=rollback)):
        assert json.loads(b"".join(objects.change_parts(change))) == objects.change_object(change)
    assert (
        objects.change_object(Change("rollback", token, rollback=rollback))["rollback"]["to_vbuuid"] == "00000000000b"
    )


def test_a_large_value_is_judged_in_steps_as_a_small_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = (b'{"a":["%b"]%b}' % (b"x" * objects.STEPS_BYTES, end) for end in (b"", b","))
    monkeypatch.setattr("mirror.serve.objects.json.loads", lambda *_, **__: pytest.fail("it was judged in one step"))
    assert value_json(document(value=good)) == b'"value":' + good
    assert value_json(document(value=bad)).startswith(b'"value_b64":"')
