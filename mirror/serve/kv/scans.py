"""Range scans and samples of one vbucket: create, continue and cancel.

Knows these requests as kv_engine describes them (docs/range_scans/*) and SDKs send them (couchbase-cxx-client
core/crud_component.cxx); must never know sockets or the storage of documents. Invariants:
- all answers to a scan show one moment of its vbucket. If that moment is gone, as after a rollback or resync, the scan
  is cancelled;
- a scan keeps a few numbers and keys, but no documents, and no lease of history;
- only the user who made a scan can continue it, on the same connection, for `LIFETIME_S` at most;
- one answer is one page of bounded size.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from hashlib import blake2b

from mirror.document import values
from mirror.serve.kv.bucket import KvBucket
from mirror.serve.kv.scan_request import Scan, ScanBounds, parse
from mirror.serve.kv.session import KvSession
from mirror.serve.large import Pieces
from mirror.server.document_requests import outgoing
from mirror.server.errors import Refused
from mirror.server.session import JSON, Later, Operation, Reply
from mirror.wire import codec_kv
from mirror.wire.codec_kv import ScanItem
from mirror.wire.constants import Feature, Opcode, Status
from mirror.wire.frame import Frame
from storage.model import Document
from storage.read.large import LargeDocument

SCANS_MAX = 64
"""Limit of open scans of one connection, a kilobyte each. More are answered `busy`; SDKs then wait."""
LIFETIME_S = 180.0
"""kv_engine's own limit (`range_scan_max_lifetime`)."""
PAGE_ITEMS = 1000
PAGE_BYTES = 256 * 1024
"""Limit of one answer, unless its first document is larger. SDKs request less."""
STEP_ITEMS = 128
STEP_BYTES = 64 * 1024
"""Bytes of a page read in one turn."""
COUNT_ITEMS = 2000
"""Keys counted for a sample in one turn: 1 ms."""
PEEKS = (1, 16, 256)
"""Sizes of the pages in which a new scan looks for its first document. Tombstones may precede the document."""
POLL_S = 0.005
"""Interval at which a waiting scan looks for its seqno."""
_KEYS, _DOCUMENTS = (0).to_bytes(4), (1).to_bytes(4)


def _creation(session: KvSession, vbid: int, bounds: ScanBounds) -> Iterator[Reply | None]:
    """Yield None while the scan waits for a seqno, or counts the documents of a sample; then yield the answer."""
    bucket = session.bucket
    begun_s = bucket.clock.monotonic()
    while (scan := _begun(session, vbid, bounds, begun_s)) is None:
        yield None
    if bounds.samples is None:
        _peek(bucket, scan)
    else:
        counted, scan.position = bucket.count_keys(scan.pin, bounds.collection_id, scan.position, COUNT_ITEMS)
        while scan.position:
            yield None
            more, scan.position = bucket.count_keys(scan.pin, bounds.collection_id, scan.position, COUNT_ITEMS)
            counted += more
        if not counted:
            raise Refused(Status.KEY_ENOENT)
        if counted > bounds.samples:
            scan.chosen = sampler(bounds.seed, bounds.samples / counted)
    scans, now_s = session.scans, bucket.clock.monotonic()
    for old in [name for name, each in scans.items() if each.ends_s <= now_s]:
        del scans[old]
    if len(scans) >= SCANS_MAX:
        raise Refused(Status.EBUSY, "too many scans are open on this connection")
    name = secrets.token_bytes(16)
    scans[name] = scan
    yield Reply(value=name)


def _begun(session: KvSession, vbid: int, bounds: ScanBounds, begun_s: float) -> Scan | None:
    """Return the scan at the vbucket's present moment. None: the moment does not meet the requirements; try again."""
    bucket, reader = session.bucket, session.known_reader
    bucket.check_collection(vbid, bounds.collection_id, reader)
    pin = bucket.pin(vbid)
    state = bucket.state(vbid)
    if state.branch != pin.branch:
        return None  # a rollback came between the two reads
    now_s = bucket.clock.monotonic()
    required = bounds.requirements
    if required is not None:
        if required.vbuuid != state.failover_log.newest_vbuuid:
            raise Refused(Status.VB_UUID_NOT_EQUAL, "the vbucket has another history")
        if required.seqno > pin.seqno:
            if (now_s - begun_s) * 1000 >= required.timeout_ms:
                raise Refused(Status.ETMPFAIL, "the seqno is not published yet")
            return None
        if required.seqno_exists and not bucket.holds_seqno(vbid, required.seqno):
            raise Refused(Status.NOT_STORED, "no document has that seqno any more")
    return Scan(bounds, pin, reader, now_s + LIFETIME_S, bounds.start)


def _peek(bucket: KvBucket, scan: Scan) -> None:
    """Raise Refused if the range ends within `PEEKS` without a document."""
    position, bounds = scan.position, scan.bounds
    for limit in PEEKS:
        found, large, position = bucket.page(scan.pin, bounds.collection_id, position, bounds.end, limit, PAGE_BYTES)
        if found or large:
            return
        if not position:
            raise Refused(Status.KEY_ENOENT)


def sampler(seed: int, share: float) -> Callable[[bytes], bool]:
    """Return a function that selects a sample's keys. A seed always selects the same keys. The hash is not a CRC,
    because the CRCs of a vbucket's keys share bits.
    """
    secret, limit = seed.to_bytes(8), int(share * 2**64)
    return lambda key: int.from_bytes(blake2b(key, digest_size=8, key=secret).digest()) < limit


def _create(session: KvSession, frame: Frame) -> Later:
    if frame.datatype != JSON:
        raise Refused(Status.EINVAL, "the datatype of a scan request is JSON")
    bounds = parse(frame.value, takes_xattrs=Feature.XATTR in session.features)
    return Later(_creation(session, frame.vbucket, bounds).__next__, POLL_S if bounds.requirements else 0)


def _continue(session: KvSession, frame: Frame) -> Later:
    limits = codec_kv.decode_scan_continue(frame.extras)
    scan = _open_scan(session, limits.uuid, frame.vbucket)
    page = _page(
        session,
        scan,
        min(limits.item_limit or PAGE_ITEMS, PAGE_ITEMS),
        min(limits.byte_limit or PAGE_BYTES, PAGE_BYTES),
    )

    def step() -> Reply | Later | None:
        if session.scans.get(limits.uuid) is not scan:
            raise Refused(Status.RANGE_SCAN_CANCELLED)
        if scan.page not in (None, page):
            raise Refused(Status.EBUSY, "the scan is being continued")
        scan.page = page
        try:
            reply = next(page)
        except Exception:
            del session.scans[limits.uuid]
            raise
        if reply is not None:
            scan.page = None
            if not scan.position:
                del session.scans[limits.uuid]
        return reply

    return Later(step)


def _open_scan(session: KvSession, name: bytes, vbid: int) -> Scan:
    scan = session.scans.get(name)
    if scan is None or scan.pin.vbid != vbid or scan.ends_s <= session.bucket.clock.monotonic():
        session.scans.pop(name, None)
        raise Refused(Status.KEY_ENOENT)
    if scan.reader != session.reader:
        raise Refused(Status.EACCESS, "the scan is another user's")
    return scan


def _page(session: KvSession, scan: Scan, items_max: int, bytes_max: int) -> Iterator[Reply | Later | None]:
    """Yield None after each step of reading; then yield the page, which is full or ends the scan."""
    bounds = scan.bounds
    items: list[ScanItem] = []
    byte_count = 0
    while True:
        session.bucket.check_readable(scan.pin.vbid, Status.RANGE_SCAN_CANCELLED)
        documents, large, following = session.bucket.page(
            scan.pin,
            bounds.collection_id,
            scan.position,
            bounds.end,
            min(items_max - len(items), STEP_ITEMS),
            min(bytes_max - byte_count, STEP_BYTES),
        )
        if scan.chosen is not None:
            documents = [each for each in documents if scan.chosen(each.key)]
            large = large if large is not None and scan.chosen(large.document.key) else None
        if large is not None and not bounds.keys_only:
            if items:
                break  # the large document begins the next page
            scan.position = following
            yield _large_item(session, bounds, large, has_more=bool(following))
            return
        if large is not None:
            documents.append(large.document)
        total = byte_count + sum(len(each.value) for each in documents)
        if items and total > bytes_max:
            break  # these documents begin the next page
        scan.position, byte_count = following, total
        items += [ScanItem(each.key) if bounds.keys_only else _item(session, bounds, each) for each in documents]
        if len(items) >= items_max or byte_count >= bytes_max or not following:
            break
        yield None
    yield Reply(
        Status.RANGE_SCAN_MORE if scan.position else Status.RANGE_SCAN_COMPLETE,
        extras=_KEYS if bounds.keys_only else _DOCUMENTS,
        value=codec_kv.encode_scan_items(items),
    )


def _large_item(session: KvSession, bounds: ScanBounds, large: LargeDocument, *, has_more: bool) -> Later:
    def reply_with(body: Pieces, datatype: int) -> Reply:
        found = large.document
        item = ScanItem(found.key, b"", found.flags, found.expiry, found.seqno, found.cas, datatype)
        return Reply(
            Status.RANGE_SCAN_MORE if has_more else Status.RANGE_SCAN_COMPLETE,
            extras=_DOCUMENTS,
            value=codec_kv.encode_scan_head(item, sum(map(len, body))),
            pieces=body,
        )

    return session.large_body(large, reply_with, with_xattrs=bounds.xattrs)


def _item(session: KvSession, bounds: ScanBounds, document: Document) -> ScanItem:
    if bounds.xattrs:
        value, datatype = document.value, document.datatype
        if not session.snappy:
            value, datatype = values.inflate(value, datatype)
    else:
        value, datatype = outgoing(session, document.value, document.datatype)
    return ScanItem(
        document.key, value, document.flags, document.expiry, document.seqno, document.cas, datatype
    )  # fmt: skip


def _cancel(session: KvSession, frame: Frame) -> Reply:
    _open_scan(session, frame.extras, frame.vbucket)
    del session.scans[frame.extras]
    return Reply()


OPERATIONS: dict[int, Operation[KvSession]] = {
    int(Opcode.RANGE_SCAN_CREATE): Operation(_create),
    int(Opcode.RANGE_SCAN_CONTINUE): Operation(_continue),
    int(Opcode.RANGE_SCAN_CANCEL): Operation(_cancel),
}
