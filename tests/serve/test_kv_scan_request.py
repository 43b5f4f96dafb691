"""A scan's request: each wrong field is refused by name."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from mirror.serve.kv.scan_request import Requirements, ScanBounds, parse
from mirror.server.errors import Refused
from mirror.wire.constants import Status


def b64(key: bytes) -> str:
    return base64.b64encode(key).decode()


def between(**more: Any) -> dict[str, Any]:
    return {"range": {"start": "", "end": ""}, **more}


def as_bytes(body: object) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[" * 5000,
        b"\xff",
        [],
        {},
        {"range": []},
        {"range": None},
        {"range": {"start": "", "end": ""}, "sampling": {"samples": 1}},
        {"range": {"start": ""}},
        {"range": {"start": "", "excl_start": "", "end": ""}},
        {"range": {"start": "!", "end": ""}},
        {"range": {"start": b64(b"x" * 251), "end": ""}},
        between(name="n" * 51),
        between(key_only=1),
        between(key_only=True, include_xattrs=True),
        between(collection="zz"),
        between(collection="100000000"),
        {"sampling": {}},
        {"sampling": {"samples": -1}},
        {"sampling": {"samples": True}},
        {"sampling": {"samples": 2**64}},
        between(snapshot_requirements={"seqno": 1}),
        between(snapshot_requirements={"vb_uuid": 77, "seqno": 1}),
        between(snapshot_requirements={"vb_uuid": "77x", "seqno": 1}),
        between(snapshot_requirements={"vb_uuid": "77"}),
    ],
)
def test_what_makes_no_sense_is_refused(body: object) -> None:
    with pytest.raises(Refused) as caught:
        parse(as_bytes(body), takes_xattrs=True)
    assert caught.value.status == Status.EINVAL
    assert caught.value.context


def test_xattrs_are_for_clients_that_take_them() -> None:
    body = as_bytes(between(include_xattrs=True))
    assert parse(body, takes_xattrs=True).xattrs
    with pytest.raises(Refused) as caught:
        parse(body, takes_xattrs=False)
    assert caught.value.status == Status.NOT_SUPPORTED


def test_a_range_with_everything() -> None:
    body = {
        "collection": "f2",
        "key_only": True,
        "name": "mine",
        "unknown": 1,
        "range": {"excl_start": b64(b"a"), "end": b64(b"b\xff")},
        "snapshot_requirements": {"vb_uuid": "16627788222", "seqno": 1000, "seqno_exists": True, "timeout_ms": 2000},
    }
    required = Requirements(16627788222, 1000, True, 2000)
    expected = ScanBounds(0xF2, True, False, b"a\0", b"b\xff\0", None, 0, required)
    assert parse(as_bytes(body), takes_xattrs=False) == expected


def test_a_sample_and_the_shortest_range() -> None:
    sample = parse(b'{"sampling":{"samples":512,"seed":18111}}', takes_xattrs=False)
    assert sample == ScanBounds(0, False, False, b"", None, 512, 18111, None)
    shortest = parse(b'{"range":{"start":"","excl_end":"YQ=="}}', takes_xattrs=False)
    assert shortest == ScanBounds(0, False, False, b"", b"a", None, 0, None)
