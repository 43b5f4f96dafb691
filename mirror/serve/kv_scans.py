"""Range scans and samples of one vbucket, as SDKs ask for them: made, continued, cancelled.

Knows these three requests (kv_engine docs/range_scans/*; couchbase-cxx-client core/crud_component.cxx for what is
sent); must never know sockets or how documents are kept. Invariants: all answers to one scan are of one moment of its
vbucket, and when that moment is gone (a rollback, a refill) the scan is cancelled, never continued on another; a scan
is a few numbers and keys, never documents, and holds nothing in the store; it belongs to its connection and to the
user who made it, ends with either, and lives for `LIFETIME_S` at most; one answer is one page of bounded size.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

from mirror.document import values
from mirror.serve.auth import Reader
from mirror.serve.kv_bucket import Refused
from mirror.serve.kv_documents import KEY_BYTES_MAX, outgoing
from mirror.serve.kv_session import JSON, Later, Operation, Reply, Session
from mirror.wire import codec_kv
from mirror.wire.codec_kv import ScanItem
from mirror.wire.constants import Feature, Opcode, Status
from mirror.wire.frame import Frame
from storage.model import Document
from storage.view import Pin

SCANS_MAX = 64
"""Open scans of one connection; the next one is told `busy`, at which SDKs wait for one of theirs to end. Each is a
kilobyte at most."""
LIFETIME_S = 180.0
"""As long as the engine lets a scan live (`range_scan_max_lifetime`)."""
PAGE_ITEMS = 1000
PAGE_BYTES = 256 * 1024
"""One answer, unless its first document is larger. SDKs ask for less."""
COUNT_ITEMS = 2000
"""Documents counted for a sample before others have their turn."""
PEEKS = (1, 16, 256)
"""How far to look for a range's first document before it is called not empty: tombstones may lie before it."""
POLL_S = 0.005
"""How often a scan that waits for a seqno looks whether it is published."""
NAME_BYTES_MAX = 50
T = TypeVar("T")

_U64_MAX = 2**64 - 1
_KEYS, _DOCUMENTS = (0).to_bytes(4), (1).to_bytes(4)


@dataclass(frozen=True, slots=True)
class Requirements:
    """What must be published before a scan begins."""

    vbuuid: int
    seqno: int
    seqno_exists: bool
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request for a scan."""

    collection_id: int
    keys_only: bool
    xattrs: bool
    start: bytes
    end: bytes | None
    """The first key that is not wanted any more."""
    samples: int | None
    seed: int
    requirements: Requirements | None


@dataclass(slots=True)
class Scan:
    """An open scan."""

    wanted: Wanted
    pin: Pin
    reader: Reader
    ends_s: float
    position: bytes
    chosen: Callable[[bytes], bool] | None = None
    """Whether a key is of the sample."""
    continuing: bool = False


def _field(found: dict[str, Any], name: str, kind: type[T]) -> T | None:
    """A field of a JSON object; None where it is missing. Raises Refused."""
    value = found.get(name)
    if name not in found:
        return None
    if type(value) is not kind or (isinstance(value, int) and not 0 <= value <= _U64_MAX):
        raise Refused(Status.EINVAL, f"{name} is not what it should be")
    return value


def _number(found: dict[str, Any], name: str) -> int:
    value = _field(found, name, int)
    if value is None:
        raise Refused(Status.EINVAL, f"{name} is missing")
    return value


def _bound(range_: dict[str, Any], name: str) -> tuple[bytes, bool]:
    """A bound's key, and whether it is exclusive."""
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


def _requirements(found: dict[str, Any]) -> Requirements:
    text = _field(found, "vb_uuid", str) or ""
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise Refused(Status.EINVAL, "vb_uuid is not a number in a string")
    exists, timeout_ms = _field(found, "seqno_exists", bool), _field(found, "timeout_ms", int)
    return Requirements(int(text), _number(found, "seqno"), bool(exists), timeout_ms or 0)


def parse(session: Session, value: bytes) -> Wanted:
    """What a RANGE_SCAN_CREATE asks for. Raises Refused."""
    try:
        asked = json.loads(value)
    except (ValueError, RecursionError):
        raise Refused(Status.EINVAL, "not JSON") from None
    if not isinstance(asked, dict):
        raise Refused(Status.EINVAL, "not a JSON object")
    collection = _field(asked, "collection", str)
    if collection is not None and not re.fullmatch(r"(0x)?[0-9a-fA-F]{1,8}", collection):
        raise Refused(Status.EINVAL, "collection is no id")
    if len((_field(asked, "name", str) or "").encode(errors="replace")) > NAME_BYTES_MAX:
        raise Refused(Status.EINVAL, f"name exceeds {NAME_BYTES_MAX} bytes")
    keys_only, xattrs = (bool(_field(asked, flag, bool)) for flag in ("key_only", "include_xattrs"))
    if xattrs and Feature.XATTR not in session.features:
        raise Refused(Status.NOT_SUPPORTED, "the client does not take xattrs")
    if xattrs and keys_only:
        raise Refused(Status.EINVAL, "key_only and include_xattrs exclude each other")
    range_, sampling = _field(asked, "range", dict), _field(asked, "sampling", dict)
    if (range_ is None) == (sampling is None):
        raise Refused(Status.EINVAL, "either range or sampling must be there")
    start, end, samples, seed = b"", None, None, 0
    if range_ is not None:
        start, start_excluded = _bound(range_, "start")
        last, end_excluded = _bound(range_, "end")
        start = start + b"\0" if start_excluded else start
        end = last if end_excluded else last + b"\0"
    elif sampling is not None:
        samples, seed = _number(sampling, "samples"), _field(sampling, "seed", int) or 0
    required = _field(asked, "snapshot_requirements", dict)
    return Wanted(
        int(collection or "0", 16),
        keys_only,
        xattrs,
        start,
        end,
        samples,
        seed,
        None if required is None else _requirements(required),
    )


class _Creating:
    """A scan that is being made: it may have to wait for a seqno, and a sample for the number of documents."""

    def __init__(self, session: Session, vbid: int, wanted: Wanted) -> None:
        assert session.reader is not None, "the dispatch lets nobody else through"
        self._session = session
        self._vbid = vbid
        self._wanted = wanted
        self._reader = session.reader
        self._begun_s = session.bucket.clock.monotonic()
        self._scan: Scan | None = None
        self._counted = 0

    def step(self) -> Reply | None:
        if self._scan is None:
            self._scan = self._begin()
            if self._scan is None:
                return None
        if self._wanted.samples is not None:
            return self._count(self._scan, self._wanted.samples)
        self._peek(self._scan)
        return self._made(self._scan)

    def _begin(self) -> Scan | None:
        """The scan at a moment that is as required; None: not yet."""
        bucket, wanted = self._session.bucket, self._wanted
        bucket.check_collection(self._vbid, wanted.collection_id, self._reader)
        pin = bucket.pin(self._vbid)
        state = bucket.served_state(self._vbid)
        if not bucket.ready(self._vbid):
            raise Refused(Status.ETMPFAIL, "nothing of the vbucket is published yet")
        if state.branch != pin.branch:
            return None  # a rollback came in between
        now_s = bucket.clock.monotonic()
        required = wanted.requirements
        if required is not None:
            if required.vbuuid != state.failover_log[0].vbuuid:
                raise Refused(Status.VB_UUID_NOT_EQUAL, "the vbucket has another history")
            if required.seqno > pin.seqno:
                if (now_s - self._begun_s) * 1000 >= required.timeout_ms:
                    raise Refused(Status.ETMPFAIL, "the seqno is not published yet")
                return None
            if required.seqno_exists and not bucket.holds_seqno(self._vbid, required.seqno):
                raise Refused(Status.NOT_STORED, "nothing has that seqno any more")
        return Scan(wanted, pin, self._reader, now_s + LIFETIME_S, wanted.start)

    def _peek(self, scan: Scan) -> None:
        """Refuse an empty range."""
        position = scan.position
        for limit in PEEKS:
            found, position = self._session.bucket.page(
                scan.pin, scan.wanted.collection_id, position, scan.wanted.end, limit, PAGE_BYTES
            )
            if found:
                return
            if not position:
                raise Refused(Status.KEY_ENOENT)

    def _count(self, scan: Scan, samples: int) -> Reply | None:
        found, scan.position = self._session.bucket.page(
            scan.pin, scan.wanted.collection_id, scan.position, None, COUNT_ITEMS, None
        )
        self._counted += len(found)
        if scan.position:
            return None
        if not self._counted:
            raise Refused(Status.KEY_ENOENT)
        if self._counted > samples:
            scan.chosen = sampler(scan.wanted.seed, samples / self._counted)
        return self._made(scan)

    def _made(self, scan: Scan) -> Reply:
        scans = self._session.scans
        now_s = self._session.bucket.clock.monotonic()
        for old in [name for name, each in scans.items() if each.ends_s <= now_s]:
            del scans[old]
        if len(scans) >= SCANS_MAX:
            raise Refused(Status.EBUSY, "too many scans are open on this connection")
        name = secrets.token_bytes(16)
        scans[name] = scan
        return Reply(value=name)


def sampler(seed: int, share: float) -> Callable[[bytes], bool]:
    """Whether a key is of a sample: the same keys for the same seed. (Not by CRC: a vbucket's keys share theirs.)"""
    secret, limit = seed.to_bytes(8), int(share * 2**64)
    return lambda key: int.from_bytes(blake2b(key, digest_size=8, key=secret).digest()) < limit


def _create(session: Session, frame: Frame) -> Later:
    codec_kv.check_request(frame)
    if frame.datatype != JSON:
        raise Refused(Status.EINVAL, "the datatype of a scan request is JSON")
    wanted = parse(session, frame.value)
    return Later(_Creating(session, frame.vbucket, wanted).step, POLL_S if wanted.requirements else 0)


def _continue(session: Session, frame: Frame) -> Later:
    codec_kv.check_request(frame)
    limits = codec_kv.decode_scan_continue(frame.extras)
    scan = _open_scan(session, limits.uuid, frame.vbucket)
    if scan.continuing:
        raise Refused(Status.EBUSY, "the scan is being continued")
    scan.continuing = True
    items_max = min(limits.item_limit or PAGE_ITEMS, PAGE_ITEMS)
    bytes_max = min(limits.byte_limit or PAGE_BYTES, PAGE_BYTES)

    def step() -> Reply | None:
        if session.scans.get(limits.uuid) is not scan:
            raise Refused(Status.RANGE_SCAN_CANCELLED)
        try:
            reply = _page(session, scan, items_max, bytes_max)
        except Refused:
            del session.scans[limits.uuid]
            raise
        if reply is not None:
            scan.continuing = False
            if reply.status == Status.RANGE_SCAN_COMPLETE:
                del session.scans[limits.uuid]
        return reply

    return Later(step)


def _open_scan(session: Session, name: bytes, vbid: int) -> Scan:
    scan = session.scans.get(name)
    if scan is None or scan.pin.vbid != vbid or scan.ends_s <= session.bucket.clock.monotonic():
        session.scans.pop(name, None)
        raise Refused(Status.KEY_ENOENT)
    if scan.reader is not session.reader:
        raise Refused(Status.EACCESS, "the scan is another user's")
    return scan


def _page(session: Session, scan: Scan, items_max: int, bytes_max: int) -> Reply | None:
    """The next page; None: nothing of what was looked at is wanted."""
    wanted = scan.wanted
    session.bucket.check_fresh(scan.pin.vbid)
    documents, scan.position = session.bucket.page(
        scan.pin, wanted.collection_id, scan.position, wanted.end, items_max, bytes_max
    )
    if scan.chosen is not None:
        documents = [each for each in documents if scan.chosen(each.key)]
    if scan.position and not documents:
        return None
    items = [ScanItem(each.key) if wanted.keys_only else _item(session, wanted, each) for each in documents]
    return Reply(
        Status.RANGE_SCAN_MORE if scan.position else Status.RANGE_SCAN_COMPLETE,
        extras=_KEYS if wanted.keys_only else _DOCUMENTS,
        value=codec_kv.encode_scan_items(items),
    )


def _item(session: Session, wanted: Wanted, document: Document) -> ScanItem:
    if wanted.xattrs:
        value, datatype = document.value, document.datatype
        if not session.snappy:
            value, datatype = values.inflate(value, datatype)
    else:
        value, datatype = outgoing(session, document)
    return ScanItem(
        document.key, value, document.flags, document.expiry, document.seqno, document.cas, datatype
    )  # fmt: skip


def _cancel(session: Session, frame: Frame) -> Reply:
    codec_kv.check_request(frame)
    _open_scan(session, frame.extras, frame.vbucket)
    del session.scans[frame.extras]
    return Reply()


OPERATIONS: dict[int, Operation] = {
    int(Opcode.RANGE_SCAN_CREATE): Operation(_create),
    int(Opcode.RANGE_SCAN_CONTINUE): Operation(_continue),
    int(Opcode.RANGE_SCAN_CANCEL): Operation(_cancel),
}
