"""Answers to requests for documents: get and its variants, metadata, and paths inside of documents.

Knows the extras and bodies of these requests (kv_engine docs/BinaryProtocol.md, docs/SubDocument.md,
recording sdk_72_conn2); must never know sockets, users or how documents are kept. Invariants: a value leaves with
no datatype bit that the client did not ask for, and never with its xattrs; quiet forms answer hits only; a path that
fails among several is told in the body under one status for the whole.
"""

from __future__ import annotations

import struct

from mirror.document import values
from mirror.document.jsonpath import PathError
from mirror.document.lookup import LOOKUPS, XATTR_PATH, About, Content
from mirror.serve.kv_bucket import KEY_BYTES_MAX, Refused
from mirror.serve.kv_session import READ_ONLY, Handler, Later, Operation, Reply, Session
from mirror.wire import codec_kv, leb128
from mirror.wire.codec_kv import LookupResult
from mirror.wire.constants import Opcode, Status
from mirror.wire.frame import Frame
from storage.model import Document

ACCESS_DELETED = 0x04
REPLICA_READ = 0x20
_DOCUMENT_FLAGS = ACCESS_DELETED | REPLICA_READ
_U32 = struct.Struct(">I")


def wire_key(session: Session, frame: Frame) -> bytes:
    """The request's key with a collection id, which clients without collections leave out."""
    if not session.collections:
        if not 0 < len(frame.key) <= KEY_BYTES_MAX:
            raise Refused(Status.EINVAL, "a key has 1 to 250 bytes")
        return b"\0" + frame.key
    _, start = leb128.decode(frame.key)
    if not 0 < len(frame.key) - start <= KEY_BYTES_MAX:
        raise Refused(Status.EINVAL, "a key has 1 to 250 bytes")
    return frame.key


def find(session: Session, frame: Frame, *, deletions: bool = False) -> Document:
    """The document of a request. Raises Refused."""
    assert session.reader is not None, "the dispatch lets nobody else through"
    vbid = None
    if session.bucket_selected:  # clients without a bucket know no vbuckets either
        vbid = frame.vbucket
        if vbid not in session.bucket.view.vbids:
            raise Refused(Status.NOT_MY_VBUCKET)
    document = session.bucket.find(wire_key(session, frame), vbid, session.reader, deletions=deletions)
    if document is None:
        raise Refused(Status.KEY_ENOENT)
    return document


def outgoing(session: Session, document: Document) -> tuple[bytes, int]:
    """A document's body as this client can take it."""
    value, datatype = document.value, document.datatype
    if datatype & values.XATTR:
        value, datatype = values.without_xattrs(value, datatype)
    if datatype & values.SNAPPY and not session.snappy:
        value, datatype = values.inflate(value, datatype)
    return value, datatype if session.json else datatype & ~values.JSON


def _get(session: Session, frame: Frame) -> Reply:
    document = find(session, frame)
    value, datatype = outgoing(session, document)
    key = frame.key if frame.opcode in (Opcode.GETK, Opcode.GETKQ) else b""
    return Reply(extras=_U32.pack(document.flags), key=key, value=value, datatype=datatype, cas=document.cas)


def _get_meta(session: Session, frame: Frame) -> Reply:
    codec_kv.check_request(frame)
    document = find(session, frame, deletions=True)
    datatype = document.datatype if frame.extras[:1] == b"\x02" else None
    meta = codec_kv.Meta(document.deleted, document.flags, document.expiry, document.rev_seqno, datatype)
    return Reply(extras=codec_kv.encode_meta(meta), cas=document.cas)


def _content(session: Session, document: Document) -> Content:
    vbuuid = 0
    state = session.bucket.state(document.vbid)
    if state.failover_log:
        vbuuid = state.failover_log[0].vbuuid
    about = About(
        document.cas,
        document.seqno,
        document.rev_seqno,
        document.flags,
        document.expiry,
        document.datatype,
        document.deleted,
        vbuuid,
    )
    return Content.of(document.value, document.datatype, about)


def _lookup_one(session: Session, frame: Frame) -> Reply:
    codec_kv.check_request(frame)
    path, rest, path_flags, _, flags = codec_kv.decode_subdoc(frame)
    if rest:
        raise Refused(Status.EINVAL, "a lookup has a path and no value")
    _check_flags(flags)
    document = find(session, frame, deletions=bool(flags & ACCESS_DELETED))
    try:
        value = _content(session, document).lookup(frame.opcode, _text(path), path_flags)
    except PathError as error:
        return Reply(error.status, cas=document.cas)
    status = Status.SUBDOC_SUCCESS_DELETED if document.deleted else Status.SUCCESS
    return Reply(status, value=value, cas=document.cas)


def _lookup_many(session: Session, frame: Frame) -> Reply:
    codec_kv.check_request(frame)
    specs = codec_kv.decode_lookup_specs(frame.value)
    attributes = [bool(spec.flags & XATTR_PATH) for spec in specs]
    if attributes != sorted(attributes, reverse=True):
        raise Refused(Status.SUBDOC_INVALID_XATTR_ORDER)
    if any(spec.opcode not in LOOKUPS for spec in specs):
        raise Refused(Status.SUBDOC_INVALID_COMBO)
    flags = frame.extras[-1] if frame.extras else 0
    _check_flags(flags)
    document = find(session, frame, deletions=bool(flags & ACCESS_DELETED))
    content = _content(session, document)
    results = []
    for spec in specs:
        try:
            results.append(LookupResult(Status.SUCCESS, content.lookup(spec.opcode, _text(spec.path), spec.flags)))
        except PathError as error:
            results.append(LookupResult(error.status))
    failed = any(result.status != Status.SUCCESS for result in results)
    status = Status.SUBDOC_MULTI_PATH_FAILURE if failed else Status.SUCCESS
    if document.deleted:
        status = Status.SUBDOC_MULTI_PATH_FAILURE_DELETED if failed else Status.SUBDOC_SUCCESS_DELETED
    return Reply(status, value=codec_kv.encode_lookup_results(results), cas=document.cas)


def _check_flags(flags: int) -> None:
    if flags & ~_DOCUMENT_FLAGS:
        raise Refused(Status.EINVAL, "flags of a change on a lookup")


def _text(path: bytes) -> str:
    try:
        return path.decode()
    except UnicodeDecodeError:
        raise PathError(Status.SUBDOC_PATH_EINVAL) from None


def _quiet(handle: Handler) -> Handler:
    """Misses are not answered."""

    def handle_quietly(session: Session, frame: Frame) -> Reply | Later | None:
        try:
            return handle(session, frame)
        except Refused as error:
            if error.status == Status.KEY_ENOENT:
                return None
            raise

    return handle_quietly


def _refuse_change(session: Session, _frame: Frame) -> Reply:
    return session.refuse(Status.NOT_SUPPORTED, READ_ONLY)


CHANGES = frozenset(
    int(opcode)
    for opcode in (
        Opcode.SET,
        Opcode.SETQ,
        Opcode.ADD,
        Opcode.ADDQ,
        Opcode.REPLACE,
        Opcode.REPLACEQ,
        Opcode.DELETE,
        Opcode.DELETEQ,
        Opcode.INCREMENT,
        Opcode.INCREMENTQ,
        Opcode.DECREMENT,
        Opcode.DECREMENTQ,
        Opcode.APPEND,
        Opcode.APPENDQ,
        Opcode.PREPEND,
        Opcode.PREPENDQ,
        Opcode.FLUSH,
        Opcode.FLUSHQ,
        Opcode.TOUCH,
        Opcode.GAT,
        Opcode.GATQ,
        Opcode.GET_LOCKED,
        Opcode.UNLOCK_KEY,
        Opcode.SET_WITH_META,
        Opcode.SETQ_WITH_META,
        Opcode.ADD_WITH_META,
        Opcode.ADDQ_WITH_META,
        Opcode.DEL_WITH_META,
        Opcode.DELQ_WITH_META,
        Opcode.MUTATE_WITH_META,
        Opcode.SUBDOC_DICT_ADD,
        Opcode.SUBDOC_DICT_UPSERT,
        Opcode.SUBDOC_DELETE,
        Opcode.SUBDOC_REPLACE,
        Opcode.SUBDOC_ARRAY_PUSH_LAST,
        Opcode.SUBDOC_ARRAY_PUSH_FIRST,
        Opcode.SUBDOC_ARRAY_INSERT,
        Opcode.SUBDOC_ARRAY_ADD_UNIQUE,
        Opcode.SUBDOC_COUNTER,
        Opcode.SUBDOC_MULTI_MUTATION,
        Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR,
    )
)
"""Whatever would change a document, its expiry or its lock."""

_GETTERS: dict[int, Handler] = {
    Opcode.GET: _get,
    Opcode.GETQ: _quiet(_get),
    Opcode.GETK: _get,
    Opcode.GETKQ: _quiet(_get),
    Opcode.GET_REPLICA: _get,
    Opcode.GET_META: _get_meta,
    Opcode.GETQ_META: _quiet(_get_meta),
    **dict.fromkeys(LOOKUPS[1:], _lookup_one),
    Opcode.SUBDOC_MULTI_LOOKUP: _lookup_many,
}

OPERATIONS: dict[int, Operation] = {int(opcode): Operation(handler) for opcode, handler in _GETTERS.items()} | {
    opcode: Operation(_refuse_change) for opcode in CHANGES
}
