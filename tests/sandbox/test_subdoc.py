"""Sub-document operations on a draft: body, xattrs, virtual attributes."""

from __future__ import annotations

import json

import pytest

from mirror.document import values
from mirror.document.jsonpath import PathError
from mirror.document.lookup import XATTR_PATH
from mirror.sandbox.data.item import Item, mutation_frame
from mirror.sandbox.kv.subdoc import Draft
from mirror.wire.constants import Opcode, Status

GET = Opcode.SUBDOC_GET


def draft(xattrs: values.Xattrs | None = None, body: bytes = b'{"n": 1}') -> Draft:
    value, datatype = values.join(xattrs or {}, body, values.datatype_of(body))
    frame = mutation_frame(0, b"\0k", 5, 2, 3_000_000_001, value, datatype=datatype, flags=7, expiry=9)
    return Draft.of_item(Item(5, b"\0k", frame), 0xABC)


def test_xattrs_are_looked_up_and_changed_next_to_the_body() -> None:
    made = draft({b"_sync": b'{"rev":"1"}'})
    assert made.lookup(GET, "_sync.rev", XATTR_PATH) == b'"1"'
    made.change(Opcode.SUBDOC_DICT_UPSERT, "meta.k", b'"v"', XATTR_PATH)
    made.change(Opcode.SUBDOC_DELETE, "_sync", b"", XATTR_PATH)
    assert made.xattrs == {b"meta": b'{"k":"v"}'}
    assert made.body == b'{"n": 1}'
    with pytest.raises(PathError) as error:
        made.change(Opcode.SUBDOC_DICT_UPSERT, "$document.x", b"1", XATTR_PATH)
    assert error.value.status == Status.SUBDOC_XATTR_CANT_MODIFY_VATTR
    made.change(Opcode.SUBDOC_DICT_UPSERT, "new", b'{"whole":1}', XATTR_PATH)
    made.change(Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR, "new", b"", 0)
    assert made.body == b'{"whole":1}'


def test_the_whole_body_is_read_replaced_and_deleted() -> None:
    binary = draft(body=b"\xff")
    assert binary.lookup(Opcode.GET, "", 0) == b"\xff"
    with pytest.raises(PathError) as error:
        binary.lookup(GET, "n", 0)
    assert error.value.status == Status.SUBDOC_DOC_NOT_JSON
    binary.change(Opcode.SET, "", b"{}", 0)
    assert binary.stored() == (b"{}", values.JSON)
    binary.change(Opcode.DELETE, "", b"", 0)
    assert binary.deleted


@pytest.mark.parametrize(
    ("opcode", "path", "value", "body", "answer"),
    [
        (Opcode.SUBDOC_DICT_ADD, "m", b"2", b'{"n": 1,"m":2}', b""),
        (Opcode.SUBDOC_REPLACE, "n", b"2", b'{"n": 2}', b""),
        (Opcode.SUBDOC_COUNTER, "n", b"41", b'{"n": 42}', b"42"),
        (Opcode.SUBDOC_DELETE, "n", b"", b"{}", b""),
    ],
)
def test_a_change_gives_the_new_body_and_its_answer(
    opcode: Opcode, path: str, value: bytes, body: bytes, answer: bytes
) -> None:
    made = draft()
    assert made.change(opcode, path, value, 0) == answer
    assert made.body == body


@pytest.mark.parametrize(
    ("opcode", "path", "value", "flags", "status"),
    [
        (Opcode.SUBDOC_DICT_UPSERT, "m", b"{oops", 0, Status.SUBDOC_VALUE_CANTINSERT),
        (Opcode.SUBDOC_ARRAY_PUSH_LAST, "m", b" ", 0, Status.SUBDOC_VALUE_CANTINSERT),
        (Opcode.SUBDOC_COUNTER, "n", b"x", 0, Status.SUBDOC_DELTA_EINVAL),
        (Opcode.GET, "n", b"1", 0, Status.SUBDOC_INVALID_COMBO),
        (Opcode.SUBDOC_DICT_UPSERT, "m", b"1", 0x80, Status.SUBDOC_XATTR_INVALID_FLAG_COMBO),
        (Opcode.SUBDOC_DICT_UPSERT, "m", b'"${Mutation.CAS}"', 0x14, Status.SUBDOC_XATTR_UNKNOWN_MACRO),
        (Opcode.SUBDOC_DICT_UPSERT, "[0]", b"1", 0x04, Status.SUBDOC_PATH_EINVAL),
    ],
)
def test_an_impossible_change_has_its_status(
    opcode: Opcode, path: str, value: bytes, flags: int, status: Status
) -> None:
    with pytest.raises(PathError) as error:
        draft().change(opcode, path, value, flags)
    assert error.value.status == status


def test_arrays_grow_at_both_ends_and_inside() -> None:
    made = draft(body=b"[]")
    made.change(Opcode.SUBDOC_ARRAY_PUSH_LAST, "", b"2,3", 0)
    made.change(Opcode.SUBDOC_ARRAY_PUSH_FIRST, "", b"0", 0)
    made.change(Opcode.SUBDOC_ARRAY_INSERT, "[1]", b"1", 0)
    made.change(Opcode.SUBDOC_ARRAY_ADD_UNIQUE, "", b"4", 0)
    assert json.loads(bytes(made.body)) == [0, 1, 2, 3, 4]
    assert made.lookup(Opcode.SUBDOC_GET_COUNT, "", 0) == b"5"
    assert made.lookup(Opcode.SUBDOC_EXISTS, "[4]", 0) == b""
