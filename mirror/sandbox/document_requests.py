"""Answers to requests for documents: get and its variants, store, delete, touch, lock, count, metadata.

Knows the extras of these requests and answers (kv_engine docs/BinaryProtocol.md, recording sdk_72_conn2); must
never know sockets or how documents are kept. Invariants: a vbucket that is not active here is refused with the map; a
change is answered with its mutation token where that was negotiated; a value leaves with no datatype bit that the
client did not ask for; quiet forms answer failures only (getters: hits only).
"""

from __future__ import annotations

import struct

from mirror.document import values
from mirror.sandbox.documents import DocumentError, Mode
from mirror.sandbox.item import Item
from mirror.sandbox.session import Handler, Operation, Reply, Session
from mirror.sandbox.users import META_READ, READ, WRITE
from mirror.sandbox.vbucket import Vbucket
from mirror.wire import codec_kv
from mirror.wire.constants import Datatype, Feature, FrameInfoId, Opcode, Status, VbucketState
from mirror.wire.frame import Frame, frame_infos

VALUE_BYTES_MAX = 20 * 1024 * 1024
KEY_BYTES_MAX = 250
NO_CREATE_EXPIRY = 0xFFFF_FFFF
COUNTER_MAX = 2**64

_U32 = struct.Struct(">I")


def active_vbucket(session: Session, frame: Frame) -> Vbucket:
    """The vbucket of a request, if it is active on this node."""
    bucket = session.bucket
    if bucket.state_on(frame.vbucket, session.port.node_number) != VbucketState.ACTIVE:
        raise DocumentError(Status.NOT_MY_VBUCKET)
    return bucket.vbuckets[frame.vbucket]


def wire_key(session: Session, frame: Frame) -> bytes:
    """The request's key with a collection id, which clients without collections leave out."""
    if not frame.key:
        raise DocumentError(Status.EINVAL)
    if session.has(Feature.COLLECTIONS):
        if len(frame.key) > KEY_BYTES_MAX + 5:
            raise DocumentError(Status.EINVAL)
        return frame.key
    if len(frame.key) > KEY_BYTES_MAX:
        raise DocumentError(Status.EINVAL)
    return b"\0" + frame.key


def incoming(session: Session, frame: Frame) -> tuple[bytes, int]:
    """The request's value and its true datatype: what a client says about JSON is not believed."""
    if len(frame.value) > VALUE_BYTES_MAX:
        raise DocumentError(Status.E2BIG)
    if frame.datatype & Datatype.SNAPPY and not session.has(Feature.SNAPPY):
        raise DocumentError(Status.EINVAL)
    if frame.datatype & Datatype.XATTR and not session.has(Feature.XATTR):
        raise DocumentError(Status.EINVAL)
    try:
        _, body = values.split(frame.value, frame.datatype)
    except ValueError:
        raise DocumentError(Status.EINVAL) from None
    return frame.value, frame.datatype & ~values.JSON | values.datatype_of(body)


def outgoing(session: Session, item: Item) -> tuple[bytes, int]:
    """A document's body as this client can take it."""
    value, datatype = values.without_xattrs(item.value, item.datatype)
    if not session.has(Feature.SNAPPY):
        value, datatype = values.inflate(value, datatype)
    if not session.has(Feature.JSON):
        datatype &= ~values.JSON
    return value, datatype


def changed(session: Session, vbucket: Vbucket, item: Item, value: bytes = b"") -> Reply:
    """The answer to a change."""
    token = b""
    if session.has(Feature.MUTATION_SEQNO):
        token = codec_kv.encode_mutation_token(vbucket.vbuuid, item.seqno)
    return Reply(cas=item.cas, extras=token, value=value)


def frame_options(session: Session, frame: Frame) -> tuple[int, bool]:
    """Durability level, and whether the expiry is to be kept, from the framing extras."""
    level, preserve = 0, False
    for info_id, content in frame_infos(frame.framing) if frame.framing else ():
        if info_id == FrameInfoId.DURABILITY and content:
            level = content[0]
            if not 1 <= level <= 3:
                raise DocumentError(Status.DURABILITY_INVALID_LEVEL)
        elif info_id == FrameInfoId.PRESERVE_TTL:
            preserve = True
    return level, preserve


def _got(session: Session, vbucket: Vbucket, item: Item, key: bytes = b"", cas: int | None = None) -> Reply:
    value, datatype = outgoing(session, item)
    if cas is None:
        cas = session.bucket.documents.visible_cas(vbucket, item)
    return Reply(extras=_U32.pack(item.flags), key=key, value=value, datatype=datatype, cas=cas)


def _get(session: Session, frame: Frame) -> Reply:
    vbucket = active_vbucket(session, frame)
    item = session.bucket.documents.get(vbucket, wire_key(session, frame))
    with_key = frame.opcode in (Opcode.GETK, Opcode.GETKQ)
    return _got(session, vbucket, item, frame.key if with_key else b"")


def _get_replica(session: Session, frame: Frame) -> Reply:
    bucket = session.bucket
    if bucket.state_on(frame.vbucket, session.port.node_number) != VbucketState.REPLICA:
        raise DocumentError(Status.NOT_MY_VBUCKET)
    vbucket = bucket.vbuckets[frame.vbucket]
    return _got(session, vbucket, bucket.documents.get(vbucket, wire_key(session, frame)))


def _get_and_touch(session: Session, frame: Frame) -> Reply:
    codec_kv.check_request(frame)
    vbucket = active_vbucket(session, frame)
    key = wire_key(session, frame)
    item = session.bucket.documents.touch(vbucket, key, codec_kv.decode_expiry(frame.extras))
    return _got(session, vbucket, item)


def _touch(session: Session, frame: Frame) -> Reply:
    codec_kv.check_request(frame)
    vbucket = active_vbucket(session, frame)
    key = wire_key(session, frame)
    item = session.bucket.documents.touch(vbucket, key, codec_kv.decode_expiry(frame.extras))
    return Reply(cas=item.cas)


def _get_locked(session: Session, frame: Frame) -> Reply:
    codec_kv.check_request(frame)
    vbucket = active_vbucket(session, frame)
    seconds = codec_kv.decode_expiry(frame.extras) if frame.extras else 0
    item, cas = session.bucket.documents.lock(vbucket, wire_key(session, frame), seconds)
    return _got(session, vbucket, item, cas=cas)


def _unlock(session: Session, frame: Frame) -> Reply:
    session.bucket.documents.unlock(active_vbucket(session, frame), wire_key(session, frame), frame.cas)
    return Reply()


def _store(mode: Mode) -> Handler:
    def handle(session: Session, frame: Frame) -> Reply:
        codec_kv.check_request(frame)
        vbucket = active_vbucket(session, frame)
        value, datatype = incoming(session, frame)
        level, preserve = frame_options(session, frame)
        store = codec_kv.decode_store(frame.extras)
        item = session.bucket.documents.store(
            vbucket,
            wire_key(session, frame),
            value,
            datatype=datatype,
            flags=store.flags,
            expiry=store.expiry,
            cas=frame.cas,
            mode=mode,
            preserve_expiry=preserve,
            durability=level,
        )
        return changed(session, vbucket, item)

    return handle


def _delete(session: Session, frame: Frame) -> Reply:
    vbucket = active_vbucket(session, frame)
    level, _ = frame_options(session, frame)
    item = session.bucket.documents.remove(vbucket, wire_key(session, frame), cas=frame.cas, durability=level)
    return changed(session, vbucket, item)


def _extend(*, behind: bool) -> Handler:
    def handle(session: Session, frame: Frame) -> Reply:
        vbucket = active_vbucket(session, frame)
        documents = session.bucket.documents
        key = wire_key(session, frame)
        more, _ = values.inflate(*incoming(session, frame))
        old = documents.find(vbucket, key)
        if old is None:
            raise DocumentError(Status.NOT_STORED)
        xattrs, body = values.split(old.value, old.datatype)
        body = body + more if behind else more + body
        if len(body) > VALUE_BYTES_MAX:
            raise DocumentError(Status.E2BIG)
        value, datatype = values.join(xattrs, body, values.datatype_of(body))
        level, _ = frame_options(session, frame)
        item = documents.store(
            vbucket,
            key,
            value,
            datatype=datatype,
            flags=old.flags,
            cas=frame.cas,
            preserve_expiry=True,
            durability=level,
        )
        return changed(session, vbucket, item)

    return handle


def _count(sign: int) -> Handler:
    def handle(session: Session, frame: Frame) -> Reply:
        codec_kv.check_request(frame)
        vbucket = active_vbucket(session, frame)
        documents = session.bucket.documents
        key = wire_key(session, frame)
        counter = codec_kv.decode_counter(frame.extras)
        old = documents.find(vbucket, key)
        xattrs: values.Xattrs = {}
        if old is None:
            if counter.expiry == NO_CREATE_EXPIRY:
                raise DocumentError(Status.KEY_ENOENT)
            number, flags, expiry, mode = counter.initial, 0, counter.expiry, Mode.ADD
        else:
            xattrs, body = values.split(old.value, old.datatype)
            if not (body.isdigit() and len(body) <= 20):
                raise DocumentError(Status.DELTA_BADVAL)
            number = int(body) + sign * counter.delta
            number = number % COUNTER_MAX if sign > 0 else max(number, 0)
            flags, expiry, mode = old.flags, old.expiry, Mode.REPLACE
        value, datatype = values.join(xattrs, str(number).encode(), values.JSON)
        item = documents.store(
            vbucket,
            key,
            value,
            datatype=datatype,
            flags=flags,
            expiry=expiry,
            cas=frame.cas,
            mode=mode,
            preserve_expiry=old is not None,
            durability=frame_options(session, frame)[0],
        )
        return changed(session, vbucket, item, number.to_bytes(8))

    return handle


def _get_meta(session: Session, frame: Frame) -> Reply:
    codec_kv.check_request(frame)
    vbucket = active_vbucket(session, frame)
    item = session.bucket.documents.find_any(vbucket, wire_key(session, frame))
    if item is None:
        raise DocumentError(Status.KEY_ENOENT)
    version = frame.extras[0] if frame.extras else 0
    datatype = item.datatype if version == 2 else None
    meta = codec_kv.Meta(item.deleted, item.flags, item.expiry, item.rev_seqno, datatype)
    return Reply(extras=codec_kv.encode_meta(meta), cas=session.bucket.documents.visible_cas(vbucket, item))


def _quiet_hit(handle: Handler) -> Handler:
    """Getters: misses are not answered."""

    def handle_quietly(session: Session, frame: Frame) -> Reply | None:
        try:
            return handle(session, frame)
        except DocumentError as error:
            if error.status == Status.KEY_ENOENT:
                return None
            raise

    return handle_quietly


def _quiet(handle: Handler) -> Handler:
    """Changes: success is not answered."""

    def handle_quietly(session: Session, frame: Frame) -> Reply | None:
        reply = handle(session, frame)
        return None if reply is not None and reply.status == Status.SUCCESS else reply

    return handle_quietly


_SET, _ADD, _REPLACE = _store(Mode.SET), _store(Mode.ADD), _store(Mode.REPLACE)
_APPEND, _PREPEND = _extend(behind=True), _extend(behind=False)
_INCREMENT, _DECREMENT = _count(1), _count(-1)

_HANDLERS: dict[int, Handler] = {
    Opcode.GET: _get,
    Opcode.GETQ: _quiet_hit(_get),
    Opcode.GETK: _get,
    Opcode.GETKQ: _quiet_hit(_get),
    Opcode.GET_REPLICA: _get_replica,
    Opcode.GAT: _get_and_touch,
    Opcode.GATQ: _quiet_hit(_get_and_touch),
    Opcode.TOUCH: _touch,
    Opcode.GET_LOCKED: _get_locked,
    Opcode.UNLOCK_KEY: _unlock,
    Opcode.SET: _SET,
    Opcode.SETQ: _quiet(_SET),
    Opcode.ADD: _ADD,
    Opcode.ADDQ: _quiet(_ADD),
    Opcode.REPLACE: _REPLACE,
    Opcode.REPLACEQ: _quiet(_REPLACE),
    Opcode.DELETE: _delete,
    Opcode.DELETEQ: _quiet(_delete),
    Opcode.APPEND: _APPEND,
    Opcode.APPENDQ: _quiet(_APPEND),
    Opcode.PREPEND: _PREPEND,
    Opcode.PREPENDQ: _quiet(_PREPEND),
    Opcode.INCREMENT: _INCREMENT,
    Opcode.INCREMENTQ: _quiet(_INCREMENT),
    Opcode.DECREMENT: _DECREMENT,
    Opcode.DECREMENTQ: _quiet(_DECREMENT),
    Opcode.GET_META: _get_meta,
    Opcode.GETQ_META: _quiet_hit(_get_meta),
}

_READS = frozenset(
    (Opcode.GET, Opcode.GETQ, Opcode.GETK, Opcode.GETKQ, Opcode.GET_REPLICA, Opcode.GET_LOCKED, Opcode.UNLOCK_KEY)
)
_METAS = frozenset((Opcode.GET_META, Opcode.GETQ_META))

OPERATIONS: dict[int, Operation] = {
    opcode: Operation(handler, privilege=READ if opcode in _READS else META_READ if opcode in _METAS else WRITE)
    for opcode, handler in _HANDLERS.items()
}
