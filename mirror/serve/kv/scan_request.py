"""A client's range scan or sample: its request (kv_engine docs/range_scans/range_scan_create.md), and its state between
requests: a few numbers and keys, never documents.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from mirror.serve.access.auth import Reader
from mirror.server.errors import Refused
from mirror.wire.constants import Status
from mirror.wire.keys import KEY_BYTES_MAX
from storage.read.view import Pin

NAME_BYTES_MAX = 50

T = TypeVar("T")

_U64_MAX = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Requirements:
    vbuuid: int
    seqno: int
    seqno_exists: bool


@dataclass(frozen=True, slots=True)
class ScanBounds:
    collection_id: int
    keys_only: bool
    xattrs: bool
    start: bytes
    end: bytes | None
    """The first key beyond the range; None: no end."""
    samples: int | None
    seed: int
    requirements: Requirements | None


@dataclass(slots=True)
class Scan:
    bounds: ScanBounds
    pin: Pin
    reader: Reader
    ends_s: float
    position: bytes
    chosen: Callable[[bytes], bool] | None = None
    """Selects the keys of a sample; None: all."""


def _field(found: Mapping[str, object], name: str, kind: type[T]) -> T | None:
    """Return a field of a JSON object; None if it is missing. Raises Refused."""
    value = found.get(name)
    if name not in found:
        return None
    if type(value) is not kind or (isinstance(value, int) and not 0 <= value <= _U64_MAX):
        raise Refused(Status.EINVAL, f"{name} has the wrong type")
    return value


def _number(found: Mapping[str, object], name: str) -> int:
    value = _field(found, name, int)
    if value is None:
        raise Refused(Status.EINVAL, f"{name} is missing")
    return value


def _bound(range_: Mapping[str, object], name: str) -> tuple[bytes, bool]:
    """Return a bound's key, and True if it is exclusive."""
    inclusive, exclusive = _field(range_, name, str), _field(range_, f"excl_{name}", str)
    if (inclusive is None) == (exclusive is None):
        raise Refused(Status.EINVAL, f"range needs either {name} or excl_{name}")
    try:
        key = base64.b64decode(inclusive or exclusive or "", validate=True)
    except ValueError:
        raise Refused(Status.EINVAL, f"{name} is not base64") from None
    if len(key) > KEY_BYTES_MAX:
        raise Refused(Status.EINVAL, f"{name} is longer than a key can be")
    return key, inclusive is None


def _requirements(found: Mapping[str, object]) -> Requirements:
    text = _field(found, "vb_uuid", str) or ""
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise Refused(Status.EINVAL, "vb_uuid is not a number in a string")
    return Requirements(int(text), _number(found, "seqno"), bool(_field(found, "seqno_exists", bool)))


def parse(value: bytes, *, takes_xattrs: bool) -> ScanBounds:
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError):
        raise Refused(Status.EINVAL, "not JSON") from None
    if not isinstance(fields, dict):
        raise Refused(Status.EINVAL, "not a JSON object")
    collection = _field(fields, "collection", str)
    if collection is not None and not re.fullmatch(r"(0x)?[0-9a-fA-F]{1,8}", collection):
        raise Refused(Status.EINVAL, "collection is no id")
    if len((_field(fields, "name", str) or "").encode(errors="replace")) > NAME_BYTES_MAX:
        raise Refused(Status.EINVAL, f"name exceeds {NAME_BYTES_MAX} bytes")
    keys_only, xattrs = (bool(_field(fields, flag, bool)) for flag in ("key_only", "include_xattrs"))
    if xattrs and not takes_xattrs:
        raise Refused(Status.NOT_SUPPORTED, "the client does not take xattrs")
    if xattrs and keys_only:
        raise Refused(Status.EINVAL, "key_only and include_xattrs exclude each other")
    range_, sampling = _field(fields, "range", dict), _field(fields, "sampling", dict)
    if (range_ is None) == (sampling is None):
        raise Refused(Status.EINVAL, "give range or sampling, and only one of them")
    start, end, samples, seed = b"", None, None, 0
    if range_ is not None:
        start, start_excluded = _bound(range_, "start")
        last, end_excluded = _bound(range_, "end")
        start = start + b"\0" if start_excluded else start
        end = last if end_excluded else last + b"\0"
    elif sampling is not None:
        samples, seed = _number(sampling, "samples"), _field(sampling, "seed", int) or 0
    required = _field(fields, "snapshot_requirements", dict)
    return ScanBounds(
        int(collection or "0", 16),
        keys_only,
        xattrs,
        start,
        end,
        samples,
        seed,
        None if required is None else _requirements(required),
    )
