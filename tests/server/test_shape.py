"""Keys, values and tombstones in the form that a client negotiated. Recorded forms: test_dcp_encoder, test_encoder."""

from __future__ import annotations

from typing import Any

import pytest

from mirror.document import values
from mirror.serve.dcp.connection import ABILITIES
from mirror.server.controls import Controls
from mirror.server.shape import DELETION, EXPIRATION, DocumentShape
from mirror.wire import xattr

BLOB = xattr.join({b"_sync": b"1", b"user": b'"u"'}, b"{}")
SYSTEM_ONLY = xattr.join({b"_sync": b"1"}, b"{}")
SEQNOS, TIME = bytes(range(16)), b"time"


def shape(flags: int = 0x1, **features: Any) -> DocumentShape:
    return DocumentShape(Controls(ABILITIES, **features, open_flags=flags))


def test_a_key_keeps_its_collection_for_clients_that_know_them() -> None:
    assert shape(collections=True).key(b"\x08k") == b"\x08k"
    assert shape().key(b"\x08k") == b"k"


@pytest.mark.parametrize(
    ("flags", "tombstone", "value", "datatype"),
    [
        (0x1, False, b"{}", values.JSON),
        (0x5, False, BLOB, values.JSON | values.XATTR),
        (0x105, True, BLOB, values.JSON | values.XATTR),
        (0x9, False, b"", 0),
        (0x41, False, b"", values.JSON | values.XATTR),
    ],
)
def test_a_value_has_what_the_flags_request(flags: int, tombstone: bool, value: bytes, datatype: int) -> None:
    assert shape(flags).value(BLOB, values.JSON | values.XATTR, tombstone=tombstone) == (value, datatype)


def test_a_tombstone_keeps_the_xattrs_of_the_system_alone() -> None:
    kept, datatype = shape(0x5).value(BLOB, values.JSON | values.XATTR, tombstone=True)
    assert values.split(kept, datatype) == ({b"_sync": b"1"}, b"")
    untouched = shape(0x5).value(SYSTEM_ONLY, values.XATTR, tombstone=True)
    assert untouched == (SYSTEM_ONLY, values.XATTR)


def test_compression_is_the_clients_choice() -> None:
    packed, datatype = values.deflate(b"a" * 100, 0)
    assert shape().value(packed, datatype, tombstone=False) == (b"a" * 100, 0)
    assert shape(snappy=True).value(packed, datatype, tombstone=False) == (packed, datatype)
    assert shape(snappy=True, force_compression=True).value(b"a" * 100, 0, tombstone=False) == (packed, datatype)


@pytest.mark.parametrize(
    ("flags", "expiry_opcode", "opcode", "answer"),
    [
        (0x1, True, EXPIRATION, (DELETION, SEQNOS + b"\0\0")),
        (0x21, False, EXPIRATION, (DELETION, SEQNOS + TIME + b"\0")),
        (0x21, True, EXPIRATION, (EXPIRATION, SEQNOS + TIME)),
        (0x21, True, DELETION, (DELETION, SEQNOS + TIME + b"\0")),
    ],
)
def test_deletions_and_expirations_have_one_of_three_forms(
    flags: int, expiry_opcode: bool, opcode: int, answer: tuple[int, bytes]
) -> None:
    assert shape(flags, expiry_opcode=expiry_opcode).tombstone(opcode, SEQNOS, TIME) == answer
