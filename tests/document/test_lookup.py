"""Looking into a document: body, xattrs, virtual attributes, and documents that are no JSON or too deep."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from google_crc32c import value as crc32c

from mirror.document import values
from mirror.document.jsonpath import PathError
from mirror.document.lookup import XATTR_PATH, About, Content, first_name
from mirror.wire.constants import Opcode, Status

GET, EXISTS, COUNT = Opcode.SUBDOC_GET, Opcode.SUBDOC_EXISTS, Opcode.SUBDOC_GET_COUNT
ABOUT = About(3_000_000_001, 5, 2, 7, 9, values.JSON | values.XATTR, False, 0xABC)
BODY = b'{"n": 1, "list": [1, [2, 3]], "deep": {"a b": null}}'


def content(body: bytes = BODY) -> Content:
    value, datatype = values.join({b"u": b'{"x":1}', b"_s": b"2"}, body, 0)
    return Content.of(*values.deflate(value, datatype), ABOUT)


@pytest.mark.parametrize(
    ("opcode", "path", "flags", "answer"),
    [
        (GET, "n", 0, b"1"),
        (GET, "list[1][0]", 0, b"2"),
        (GET, "list[-1]", 0, b"[2, 3]"),
        (GET, "deep.`a b`", 0, b"null"),
        (EXISTS, "deep", 0, b""),
        (COUNT, "list", 0, b"2"),
        (COUNT, "", 0, b"3"),
        (Opcode.GET, "", 0, BODY),
        (GET, "u.x", XATTR_PATH, b"1"),
        (GET, "_s", XATTR_PATH, b"2"),
        (GET, "$document.revid", XATTR_PATH, b'"2"'),
        (GET, "$XTOC", XATTR_PATH, b'["u","_s"]'),
        (GET, "$vbucket.HLC.mode", XATTR_PATH, b'"real"'),
    ],
)
def test_a_path_in_the_document_is_found(opcode: int, path: str, flags: int, answer: bytes) -> None:
    assert content().lookup(opcode, path, flags) == answer


@pytest.mark.parametrize(
    ("opcode", "path", "flags", "status"),
    [
        (GET, "m", 0, Status.SUBDOC_PATH_ENOENT),
        (EXISTS, "m", 0, Status.SUBDOC_PATH_ENOENT),
        (GET, "n.x", 0, Status.SUBDOC_PATH_MISMATCH),
        (COUNT, "n", 0, Status.SUBDOC_PATH_MISMATCH),
        (GET, "n..x", 0, Status.SUBDOC_PATH_EINVAL),
        (GET, "n", 0x40, Status.SUBDOC_XATTR_INVALID_FLAG_COMBO),
        (GET, "w", XATTR_PATH, Status.SUBDOC_PATH_ENOENT),
        (GET, "[0]", XATTR_PATH, Status.SUBDOC_PATH_EINVAL),
        (GET, "$nothing", XATTR_PATH, Status.SUBDOC_XATTR_UNKNOWN_VATTR),
        (GET, "x" * 1025, 0, Status.SUBDOC_PATH_E2BIG),
    ],
)
def test_a_path_without_a_value_has_its_status(opcode: int, path: str, flags: int, status: Status) -> None:
    with pytest.raises(PathError) as caught:
        content().lookup(opcode, path, flags)
    assert caught.value.status == status


@pytest.mark.parametrize("body", [b"\0\1\xff", b"{", b"", b"[" * 200_000])
def test_a_body_that_is_not_json_can_only_be_read_whole(body: bytes) -> None:
    found = content(body)
    found.about = replace(ABOUT, datatype=values.XATTR)
    assert found.lookup(Opcode.GET, "", 0) == body
    with pytest.raises(PathError) as caught:
        found.lookup(GET, "n", 0)
    assert caught.value.status == Status.SUBDOC_DOC_NOT_JSON
    assert found.lookup(GET, "u.x", XATTR_PATH) == b"1"


@pytest.mark.parametrize("body", [b"[" * 200_000, b'{"a":"' + b"x" * 200_000, b'{"a":1,' * 40_000, b"\0" * 200_000])
def test_a_large_body_wrongly_marked_as_json_fails_the_path(body: bytes) -> None:
    """The lookup checks only the bytes on its path, because checking a large body takes long."""
    found = Content({}, body, ABOUT)
    for path, opcode in (("b", GET), ("[-1]", GET), ("a.b", GET), ("", COUNT)):
        with pytest.raises(PathError) as caught:
            found.lookup(opcode, path, 0)
        assert caught.value.status in (Status.SUBDOC_DOC_NOT_JSON, Status.SUBDOC_PATH_MISMATCH)


def test_the_virtual_attribute_document_describes_the_version() -> None:
    seen = json.loads(content().lookup(GET, "$document", XATTR_PATH))
    assert seen == {
        "CAS": "0x00000000b2d05e01",
        "datatype": ["json", "xattr"],
        "deleted": False,
        "exptime": 9,
        "flags": 7,
        "last_modified": "3",
        "revid": "2",
        "seqno": "0x0000000000000005",
        "value_bytes": len(BODY),
        "value_crc32c": f"0x{crc32c(BODY):08x}",
        "vbucket_uuid": "0x0000000000000abc",
    }


def test_the_first_name_of_a_path_is_returned_and_an_empty_path_refused() -> None:
    assert first_name("a.b[0]") == "a"
    with pytest.raises(PathError):
        first_name("")
