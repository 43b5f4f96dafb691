from __future__ import annotations

import base64
import json

import pytest

from cli import output
from mirror.serve.objects import change_object, document_object
from storage.model import Branch, Document, Kind, Seqno, Vbuuid
from storage.read.view import Change, Rollback, Token

PLAIN = Document(3, 0, b"key", Seqno(7), 2, 2**63, 1, 0, 1, b'{"a": 1}')
FIELDS = [
    "vbid",
    "collection_id",
    "key",
    "seqno",
    "rev_seqno",
    "cas",
    "flags",
    "expiry",
    "datatype",
    "deleted",
    "value",
]


def test_a_document_has_the_promised_fields_in_order() -> None:
    assert list(document_object(PLAIN)) == FIELDS
    assert document_object(PLAIN)["value"] == {"a": 1}
    assert document_object(PLAIN)["cas"] == 2**63


@pytest.mark.parametrize(
    ("datatype", "value"), [(0, b'{"a": 1}'), (1, b"{no json"), (0, b"\x00\xff")], ids=["raw", "damaged", "binary"]
)
def test_what_is_not_json_comes_as_base64(datatype: int, value: bytes) -> None:
    shown = document_object(PLAIN._replace(datatype=datatype, value=value))
    assert base64.b64decode(shown["value_b64"]) == value
    assert "value" not in shown


def test_a_key_that_is_no_text_comes_as_base64() -> None:
    shown = document_object(PLAIN._replace(key=b"\xff\x00"))
    assert base64.b64decode(shown["key_b64"]) == b"\xff\x00"
    assert "key" not in shown


def test_a_tombstone_says_so() -> None:
    shown = document_object(PLAIN._replace(kind=Kind.DELETION, datatype=0, value=b""))
    assert (shown["deleted"], shown["value"]) == (True, None)


def test_an_event_carries_its_token() -> None:
    change = Change("mutation", Token(3, Branch(1), Seqno(7), 255), PLAIN)
    shown = change_object(change)
    assert (shown["kind"], shown["token"], shown["vbid"]) == ("mutation", "3:1:7:00000000000000ff", 3)
    assert shown["document"]["key"] == "key"
    assert "rollback" not in shown


def test_a_rollback_says_from_where_to_where() -> None:
    rollback = Rollback(3, Branch(1), Seqno(9), Branch(2), Seqno(5), Vbuuid(0xA), Vbuuid(0xB), 77)
    shown = change_object(Change("rollback", Token(3, Branch(2), Seqno(5), 255), rollback=rollback))
    assert shown["rollback"] == {
        "from_branch": 1,
        "from_seqno": 9,
        "to_branch": 2,
        "to_seqno": 5,
        "from_vbuuid": "00000000000a",
        "to_vbuuid": "00000000000b",
        "time_ms": 77,
    }
    assert "document" not in shown


def test_one_value_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"text": "two\nlines", "ß": 1})
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"text": "two\nlines", "ß": 1}


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"plain", "plain"),
        ("ü".encode(), "ü"),
        (b"two\nlines\tand\x1b[31m", "two\\nlines\\tand\\e[31m"),
        (b"\xff\x00", "\\xff."),
        (b"x" * 500, "x" * 200 + "..."),
    ],
)
def test_bytes_for_people_never_reach_the_terminal_as_control(data: bytes, shown: str) -> None:
    assert output.for_people(data) == shown
