"""Requests that change documents: set, add, replace and delete (kv_engine docs/BinaryProtocol.md).

Clients get and write whole documents. Other changes (sub-documents, counters, locks, touch) are unknown commands here.
"""

from __future__ import annotations

from functools import partial

from mirror.document import values
from mirror.sandbox.data.documents import DocumentError, Mode
from mirror.sandbox.data.item import Item
from mirror.sandbox.data.sandbox_vbucket import Vbucket
from mirror.sandbox.kv.sandbox_session import SandboxSession
from mirror.server.document_requests import wire_key
from mirror.server.session import WRITE, Operation, Reply
from mirror.wire import codec_kv
from mirror.wire.constants import Datatype, Feature, FrameInfoId, Opcode, Status
from mirror.wire.frame import Frame, frame_infos

VALUE_BYTES_MAX = 20 * 1024 * 1024


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


def changed(session: SandboxSession, vbucket: Vbucket, item: Item) -> Reply:
    token = b""
    if Feature.MUTATION_SEQNO in session.features:
        token = codec_kv.encode_mutation_token(vbucket.vbuuid, item.seqno)
    return Reply(cas=item.cas, extras=token)


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


OPERATIONS: dict[int, Operation[SandboxSession]] = {
    int(opcode): Operation(handler, privilege=WRITE)
    for opcode, handler in (
        (Opcode.SET, partial(_store, Mode.SET)),
        (Opcode.ADD, partial(_store, Mode.ADD)),
        (Opcode.REPLACE, partial(_store, Mode.REPLACE)),
        (Opcode.DELETE, _delete),
    )
}
