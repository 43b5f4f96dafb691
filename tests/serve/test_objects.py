"""Documents and events as JSON: a stored JSON value keeps every digit, everything else comes as base64."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.serve import objects
from mirror.wire import codec_dcp
from mirror.wire import events as ev
from mirror.wire.system_events import encode_system_event
from storage.errors import CorruptedError
from storage.format.records import decode_row
from storage.model import Branch, Document, Kind, Seqno, Vbuuid
from storage.read.view import Change, Rollback, Token


def document(key: bytes = b"k", value: bytes = b"{}", datatype: int = 1, kind: Kind = Kind.MUTATION) -> Document:
    return Document(1, 0, key, Seqno(2), 1, 3, 4, 0, datatype, value, kind, Branch(1))


TEXT = 'aé\n"\\' + "\v\f\x1c\x1d\x1e\x85\u2028\u2029"  # all that `str.splitlines` splits at
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(TEXT),
    lambda children: st.lists(children) | st.dictionaries(st.text(TEXT), children),
    max_leaves=10,
)  # fmt: skip


ODD = st.sampled_from(
    [
        b"NaN",
        b"-Infinity",
        b"{",
        b"\xff",
        b"'a'",
        b"[-Infinity]",
        b"[" * 1500 + b"]" * 1500,
        b'"\\ud800"',
        b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
        b"1e400",
    ]
)


@given(
    st.binary(max_size=20) | st.text(TEXT).map(str.encode),
    st.one_of(
        st.binary(max_size=20), ODD, JSON.map(lambda value: json.dumps(value, indent=1, ensure_ascii=False).encode())
    ),
)
def test_each_key_and_value_is_encoded_as_json_or_base64(key: bytes, value: bytes) -> None:
    for kind in (Kind.MUTATION, Kind.DELETION, Kind.EXPIRATION):
        for datatype in (0, 1):
            text = objects.document_json(document(key, value, datatype, kind))
            assert len(text.decode(errors="surrogatepass").splitlines()) == 1
            found = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
            assert found.get("key", "").encode() or base64.b64decode(found.get("key_b64", "")) == key
            if "value_b64" in found:
                assert base64.b64decode(found["value_b64"]) == value
            elif kind is Kind.MUTATION or value:
                assert datatype == 1
                assert json.loads(value) == found["value"]
            else:
                assert found["value"] is None


FIELDS = [
    "vbid", "collection_id", "key", "seqno", "rev_seqno", "cas", "flags", "expiry", "datatype", "deleted", "value",
]  # fmt: skip


def test_a_document_has_the_promised_fields_in_order() -> None:
    found = json.loads(objects.document_json(document(value=b'{"a": 1}')._replace(cas=2**63)))
    assert list(found) == FIELDS
    assert (found["cas"], found["deleted"], found["value"]) == (2**63, False, {"a": 1})


@pytest.mark.parametrize("size", [objects.BASE64_BYTES - 1, objects.BASE64_BYTES, 3 * objects.BASE64_BYTES + 1])
def test_a_large_value_is_encoded_in_parts(size: int) -> None:
    value = bytes(range(256)) * (size // 256 + 1)
    made = document(value=value[:size], datatype=0)
    assert max(map(len, objects.document_parts(made))) <= objects.BASE64_BYTES * 4 // 3
    assert base64.b64decode(json.loads(objects.document_json(made))["value_b64"]) == made.value


@pytest.mark.parametrize("version", [0, 2])
@pytest.mark.parametrize(
    ("content", "event", "collection_id"),
    [
        (ev.CollectionCreated(1, 8, 9, "orders"), "collection_created", 9),
        (ev.CollectionDropped(1, 8, 9), "collection_dropped", 9),
        (ev.CollectionModified(1, 8, 9, "orders"), "collection_modified", 9),
        (ev.ScopeCreated(1, 8, "shop"), "scope_created", None),
        (ev.ScopeDropped(1, 8), "scope_dropped", None),
    ],
)
def test_a_system_event_names_its_kind_and_collection(
    content: ev.SystemEventContent, event: str, collection_id: int | None, version: int
) -> None:
    if event == "collection_modified":
        version = 2
    frame = codec_dcp.encode(encode_system_event(content, vbid=1, seqno=2, version=version))
    found = json.loads(objects.document_json(decode_row(1, Branch(1), frame)))
    named = {"vbid": 1, "seqno": 2, "kind": "system_event", "key": getattr(content, "name", "")}
    assert found == named | {"event": event, "scope_id": 8, "collection_id": collection_id}


def test_an_unreadable_system_event_is_damage() -> None:
    with pytest.raises(CorruptedError, match="a system event cannot be read"):
        objects.document_json(document(b"name", b"", 0, Kind.SYSTEM_EVENT))


def test_a_rollback_has_its_start_and_its_target() -> None:
    rollback = Rollback(3, Branch(1), Seqno(9), Branch(2), Seqno(5), Vbuuid(0xA), Vbuuid(0xB), 77)
    change = Change("rollback", Token(3, Branch(2), Seqno(5), 255), rollback=rollback)
    shown = json.loads(b"".join(objects.change_parts(change)))
    assert shown["rollback"] == {
        "from_branch": 1, "from_seqno": 9, "to_branch": 2, "to_seqno": 5, "from_vbuuid": "00000000000a",
        "to_vbuuid": "00000000000b", "time_ms": 77,
    }  # fmt: skip
    assert "document" not in shown
