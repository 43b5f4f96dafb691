"""Range scans and samples of one vbucket: create, continue and cancel.

The requests are those that kv_engine describes (docs/range_scans/*) and SDKs send (couchbase-cxx-client
core/crud_component.cxx). All answers to a scan show one moment of its vbucket. If that moment is gone, as after a
rollback or resync, the scan is cancelled: a scan has no lease of history.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from hashlib import blake2b
from time import perf_counter
from typing import Any

from mirror.document import values
from mirror.serve.bucket.mirror_session import MirrorClients, MirrorSession
from mirror.serve.kv.scan_request import Scan, ScanBounds, parse
from mirror.server.document_requests import outgoing
from mirror.server.errors import NeedsMemory, Refused
from mirror.server.listener import Address
from mirror.server.session import JSON, Operation, Reply
from mirror.wire import codec_kv
from mirror.wire.codec_kv import ScanItem
from mirror.wire.constants import Feature, Opcode, Status
from mirror.wire.frame import Frame
from storage.model import Document

SCANS_MAX = 64
"""Limit of open scans of one connection, a kilobyte each. More are answered `busy`; SDKs then wait."""
LIFETIME_S = 180.0
"""kv_engine's own limit (`range_scan_max_lifetime`)."""
PAGE_ITEMS = 1000
PAGE_BYTES = 256 * 1024
"""Limit of one answer, unless its first document is larger. SDKs request less."""
PAGE_S = 0.05
"""If an answer is still empty after this time, it waits for the worker's next turn. Tombstones may come first."""
_KEYS, _DOCUMENTS = (0).to_bytes(4), (1).to_bytes(4)


class ScanSession(MirrorSession):
    def __init__(self, clients: MirrorClients, address: Address, peer: str) -> None:
        super().__init__(clients, address, peer)
        self.scans: dict[bytes, Scan] = {}


def _begun(session: ScanSession, vbid: int, bounds: ScanBounds) -> Scan:
    """Return the scan at the vbucket's present moment. Raises Refused if the moment does not meet the requirements."""
    bucket, reader = session.bucket, session.known_reader
    bucket.check_collection(vbid, bounds.collection_id, reader)
    pin = bucket.pin(vbid)
    required = bounds.requirements
    if required is not None:
        state = bucket.history_state(vbid)
        if state.branch != pin.branch:
            raise Refused(Status.ETMPFAIL, "a rollback came meanwhile")
        if required.vbuuid != state.failover_log.newest_vbuuid:
            raise Refused(Status.VB_UUID_NOT_EQUAL, "the vbucket has another history")
        if required.seqno > pin.seqno:
            raise Refused(Status.ETMPFAIL, "the seqno is not published yet")
        if required.seqno_exists and not bucket.holds_seqno(vbid, required.seqno):
            raise Refused(Status.NOT_STORED, "no document has that seqno any more")
    return Scan(bounds, pin, reader, bucket.clock.monotonic() + LIFETIME_S, bounds.start)


def sampler(seed: int, share: float) -> Callable[[bytes], bool]:
    """Return a function that selects a sample's keys. A seed always selects the same keys. The hash is not a CRC,
    because the CRCs of a vbucket's keys share bits.
    """
    secret, limit = seed.to_bytes(8), int(share * 2**64)
    return lambda key: int.from_bytes(blake2b(key, digest_size=8, key=secret).digest()) < limit


def _create(session: ScanSession, frame: Frame) -> Reply:
    if frame.datatype != JSON:
        raise Refused(Status.EINVAL, "the datatype of a scan request is JSON")
    bounds = parse(frame.value, takes_xattrs=Feature.XATTR in session.features)
    scan = _begun(session, frame.vbucket, bounds)
    if bounds.samples is not None:
        session.need_worker()  # reads all keys
        counted = session.bucket.count_keys(scan.pin, bounds.collection_id)
        if not counted:
            raise Refused(Status.KEY_ENOENT)
        if counted > bounds.samples:
            scan.chosen = sampler(bounds.seed, bounds.samples / counted)
    scans, now_s = session.scans, session.bucket.clock.monotonic()
    for old in [name for name, each in scans.items() if each.ends_s <= now_s]:
        del scans[old]
    if len(scans) >= SCANS_MAX:
        raise Refused(Status.EBUSY, "too many scans are open on this connection")
    name = secrets.token_bytes(16)
    scans[name] = scan
    return Reply(value=name)


def _continue(session: ScanSession, frame: Frame) -> Reply:
    limits = codec_kv.decode_scan_continue(frame.extras)
    scan = _open_scan(session, limits.uuid, frame.vbucket)
    session.need_worker(PAGE_BYTES)
    items_max = min(limits.item_limit or PAGE_ITEMS, PAGE_ITEMS)
    bytes_max = min(limits.byte_limit or PAGE_BYTES, PAGE_BYTES)
    try:
        session.bucket.check_readable(scan.pin.vbid, Status.RANGE_SCAN_CANCELLED)
        reply = _page(session, scan, items_max, bytes_max)
    except NeedsMemory:
        raise
    except Exception:
        session.scans.pop(limits.uuid, None)
        raise
    if not scan.position:
        session.scans.pop(limits.uuid, None)
    return reply


def _open_scan(session: ScanSession, name: bytes, vbid: int) -> Scan:
    scan = session.scans.get(name)
    if scan is None or scan.pin.vbid != vbid or scan.ends_s <= session.bucket.clock.monotonic():
        session.scans.pop(name, None)
        raise Refused(Status.KEY_ENOENT)
    if scan.reader != session.reader:
        raise Refused(Status.EACCESS, "the scan is another user's")
    return scan


def _page(session: ScanSession, scan: Scan, items_max: int, bytes_max: int) -> Reply:
    """Return the next page of results. Invariant: `position` is the first key of the range that is not in the reply."""
    bounds, position = scan.bounds, scan.position
    items: list[ScanItem] = []
    byte_count = 0
    ends_s = perf_counter() + PAGE_S
    while True:
        left = items_max - len(items), bytes_max - byte_count
        try:
            documents, following = session.bucket.page(
                scan.pin, bounds.collection_id, position, bounds.end, *left, session.granted_bytes
            )
        except NeedsMemory:
            if not items:
                raise
            break  # the large document begins the next page
        if scan.chosen is not None:
            documents = [each for each in documents if scan.chosen(each.key)]
        byte_count += sum(len(each.value) for each in documents)
        if items and byte_count > bytes_max:
            break  # these documents begin the next page
        items += [ScanItem(each.key) if bounds.keys_only else _item(session, bounds, each) for each in documents]
        position = following
        if not position or len(items) >= items_max or byte_count >= bytes_max:
            break
        if perf_counter() > ends_s:
            if items:
                break
            scan.position = position
            raise NeedsMemory(session.granted_bytes)
    scan.position = position
    return Reply(
        Status.RANGE_SCAN_MORE if position else Status.RANGE_SCAN_COMPLETE,
        extras=_KEYS if bounds.keys_only else _DOCUMENTS,
        value=codec_kv.encode_scan_items(items),
    )


def _item(session: ScanSession, bounds: ScanBounds, document: Document) -> ScanItem:
    if bounds.xattrs:
        value, datatype = document.value, document.datatype
        if not session.snappy:
            value, datatype = values.inflate(value, datatype)
    else:
        value, datatype = outgoing(session, document.value, document.datatype)
    return ScanItem(
        document.key, value, document.flags, document.expiry, document.seqno, document.cas, datatype
    )  # fmt: skip


def _cancel(session: ScanSession, frame: Frame) -> Reply:
    _open_scan(session, frame.extras, frame.vbucket)
    del session.scans[frame.extras]
    return Reply()


OPERATIONS: dict[int, Operation[Any]] = {
    int(Opcode.RANGE_SCAN_CREATE): Operation(_create),
    int(Opcode.RANGE_SCAN_CONTINUE): Operation(_continue),
    int(Opcode.RANGE_SCAN_CANCEL): Operation(_cancel),
}
