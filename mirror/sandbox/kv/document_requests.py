"""Requests that change documents: store, delete, touch, lock, count (kv_engine docs/BinaryProtocol.md; recording
sdk_72_conn2).

Quiet changes are answered only if they fail. Quiet reads are not answered if the document is absent.
"""

from __future__ import annotations

from functools import partial

from mirror.document import values
from mirror.sandbox.data.documents import DocumentError, Mode
from mirror.sandbox.data.item import Item
from mirror.sandbox.data.sandbox_vbucket import Vbucket
from mirror.sandbox.kv.sandbox_session import SandboxHandler, SandboxSession, document_of
from mirror.server.document_requests import got, quiet_miss, wire_key
from mirror.server.session import READ, WRITE, Answer, Operation, Reply
from mirror.wire import codec_kv
from mirror.wire.constants import Datatype, Feature, FrameInfoId, Opcode, Status
from mirror.wire.frame import Frame, frame_infos

VALUE_BYTES_MAX = 20 * 1024 * 1024
NO_CREATE_EXPIRY = 0xFFFF_FFFF
COUNTER_MAX = 2**64


def incoming(session: SandboxSession, frame: Frame) -> tuple[bytes, int]:
    """Return the request's value and datatype. The JSON bit depends on the body, not on the request."""
    if len(frame.value) > VALUE_BYTES_MAX:
        raise DocumentError(Status.E2BIG)
    if frame.datatype & Datatype.SNAPPY and not session.snappy:
        raise DocumentError(Status.EINVAL)
    if frame.datatype & Datatype.XATTR and Feature.XATTR not in session.features:
        raise DocumentError(Status.EINVAL)
    try:
        _, body = values.split(frame.value, frame.datatype)
    except ValueError:
        raise DocumentError(Status.EINVAL) from None
    return frame.value, frame.datatype & ~values.JSON | values.datatype_of(body)


def changed(session: SandboxSession, vbucket: Vbucket, item: Item, value: bytes = b"") -> Reply:
    token = b""
    if Feature.MUTATION_SEQNO in session.features:
        token = codec_kv.encode_mutation_token(vbucket.vbuuid, item.seqno)
    return Reply(cas=item.cas, extras=token, value=value)


def frame_options(frame: Frame) -> tuple[int, bool]:
    """Read the framing extras: return the durability level (0: none), and True to keep the expiry."""
    level, preserve = 0, False
    for info_id, content in frame_infos(frame.framing) if frame.framing else ():
        if info_id == FrameInfoId.DURABILITY and content:
            level = content[0]
            if not 1 <= level <= 3:
                raise DocumentError(Status.DURABILITY_INVALID_LEVEL)
        elif info_id == FrameInfoId.PRESERVE_TTL:
            preserve = True
    return level, preserve


def _got(session: SandboxSession, frame: Frame, vbucket: Vbucket, item: Item, cas: int | None = None) -> Reply:
    if cas is None:
        cas = session.bucket.documents.visible_cas(vbucket, item)
    return got(session, frame, document_of(frame.vbucket, item, cas))


def _touched(session: SandboxSession, frame: Frame) -> tuple[Vbucket, Item]:
    vbucket, key = session.active_vbucket(frame.vbucket), wire_key(session, frame)
    return vbucket, session.bucket.documents.touch(vbucket, key, codec_kv.decode_expiry(frame.extras))


def _get_and_touch(session: SandboxSession, frame: Frame) -> Reply:
    return _got(session, frame, *_touched(session, frame))


def _touch(session: SandboxSession, frame: Frame) -> Reply:
    return Reply(cas=_touched(session, frame)[1].cas)


def _get_locked(session: SandboxSession, frame: Frame) -> Reply:
    vbucket = session.active_vbucket(frame.vbucket)
    seconds = codec_kv.decode_expiry(frame.extras)
    item, cas = session.bucket.documents.lock(vbucket, wire_key(session, frame), seconds)
    return _got(session, frame, vbucket, item, cas)


def _unlock(session: SandboxSession, frame: Frame) -> Reply:
    session.bucket.documents.unlock(session.active_vbucket(frame.vbucket), wire_key(session, frame), frame.cas)
    return Reply()


def _store(mode: Mode, session: SandboxSession, frame: Frame) -> Reply:
    vbucket = session.active_vbucket(frame.vbucket)
    value, datatype = incoming(session, frame)
    level, preserve = frame_options(frame)
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


def _delete(session: SandboxSession, frame: Frame) -> Reply:
    vbucket = session.active_vbucket(frame.vbucket)
    level, _ = frame_options(frame)
    item = session.bucket.documents.remove(vbucket, wire_key(session, frame), cas=frame.cas, durability=level)
    return changed(session, vbucket, item)


def _append(session: SandboxSession, frame: Frame) -> Reply:
    vbucket = session.active_vbucket(frame.vbucket)
    documents = session.bucket.documents
    key = wire_key(session, frame)
    more, _ = values.inflate(*incoming(session, frame))
    old = documents.find(vbucket, key)
    if old is None:
        raise DocumentError(Status.NOT_STORED)
    xattrs, body = values.split(old.value, old.datatype)
    body = more + body if frame.opcode in _PREPENDS else body + more
    if len(body) > VALUE_BYTES_MAX:
        raise DocumentError(Status.E2BIG)
    value, datatype = values.join(xattrs, body, values.datatype_of(body))
    level, _ = frame_options(frame)
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


def _count(session: SandboxSession, frame: Frame) -> Reply:
    vbucket = session.active_vbucket(frame.vbucket)
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
        if not (body.isdigit() and len(body) <= 20 and int(body) < COUNTER_MAX):
            raise DocumentError(Status.DELTA_BADVAL)
        if frame.opcode in _DECREMENTS:
            number = max(int(body) - counter.delta, 0)
        else:
            number = (int(body) + counter.delta) % COUNTER_MAX
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
        durability=frame_options(frame)[0],
    )
    return changed(session, vbucket, item, number.to_bytes(8))


def _quiet(handle: SandboxHandler) -> SandboxHandler:
    def handle_quietly(session: SandboxSession, frame: Frame) -> Answer:
        reply = handle(session, frame)
        return None if isinstance(reply, Reply) and reply.status == Status.SUCCESS else reply

    return handle_quietly


_SET, _ADD, _REPLACE = (partial(_store, mode) for mode in (Mode.SET, Mode.ADD, Mode.REPLACE))
_PREPENDS = (Opcode.PREPEND, Opcode.PREPENDQ)
_DECREMENTS = (Opcode.DECREMENT, Opcode.DECREMENTQ)

_HANDLERS: dict[int, SandboxHandler] = {
    Opcode.GAT: _get_and_touch,
    Opcode.GATQ: quiet_miss(_get_and_touch),
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
    Opcode.APPEND: _append,
    Opcode.APPENDQ: _quiet(_append),
    Opcode.PREPEND: _append,
    Opcode.PREPENDQ: _quiet(_append),
    Opcode.INCREMENT: _count,
    Opcode.INCREMENTQ: _quiet(_count),
    Opcode.DECREMENT: _count,
    Opcode.DECREMENTQ: _quiet(_count),
}

_READS = frozenset((Opcode.GET_LOCKED, Opcode.UNLOCK_KEY))

OPERATIONS: dict[int, Operation[SandboxSession]] = {
    int(opcode): Operation(handler, privilege=READ if opcode in _READS else WRITE)
    for opcode, handler in _HANDLERS.items()
}
