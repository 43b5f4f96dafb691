"""Answers to requests that read documents: get and its variants, metadata, and paths inside of documents.

The answers are those of kv_engine (its docs/BinaryProtocol.md and docs/SubDocument.md; our recording sdk_72_conn2). A
value is sent only with datatype bits that the client negotiated, and without xattrs. Quiet requests (GETQ) get no
answer if there is no document. The answer to several paths has one status for all, and each path's status in the body.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Callable
from typing import TypeVar

from mirror.document import values
from mirror.document.jsonpath import PathError
from mirror.document.lookup import LOOKUPS, XATTR_PATH, About, Content
from mirror.server.errors import NeedsMemory, Refused
from mirror.server.session import META_READ, READ, Answer, Handler, Operation, Reply, Session
from mirror.server.turns import LARGE_BYTES
from mirror.wire import codec_kv
from mirror.wire.constants import Opcode, Status
from mirror.wire.frame import Frame
from mirror.wire.keys import KEY_BYTES_MAX, decode_leb128
from storage.model import Document, Kind

SessionT = TypeVar("SessionT", bound=Session)

PATH_COST = 4
"""A byte of a document in which a path is looked up takes as long as this many bytes that are only read."""
LOOKUP_BYTES_MAX = 32 * 1024 * 1024
"""Limit of the values in the answer to one lookup."""
ACCESS_DELETED = 0x04
REPLICA_READ = 0x20

_META_WITH_DATATYPE = b"\x02"
_U32 = struct.Struct(">I")


class DocumentSession(Session):
    lookup_flags = ACCESS_DELETED
    """The flags that a lookup request may have."""

    @abstractmethod
    def find_document(self, frame: Frame, wire_key: bytes, *, deletions: bool = False) -> Document:
        """Return the document that a request names; with `deletions` it may be a tombstone. Raises Refused."""

    @abstractmethod
    def vbuuid_of(self, vbid: int) -> int:
        """Return the vbuuid of a vbucket's newest history."""

    def about(self, document: Document) -> About:
        return About(
            document.cas,
            document.seqno,
            document.rev_seqno,
            document.flags,
            document.expiry,
            document.datatype,
            document.deleted,
            self.vbuuid_of(document.vbid),
        )

    def content(self, document: Document, path_count: int) -> Content:
        """Return a document's content for lookups of some paths. Raises NeedsMemory for a large one, as each path may
        read all of it.
        """
        size = len(document.value)
        if size * path_count * PATH_COST > LARGE_BYTES >= self.granted_bytes:
            raise NeedsMemory(LARGE_BYTES + 2 * size + min(size * path_count, LOOKUP_BYTES_MAX))
        if document.kind is Kind.EXPIRATION:  # perhaps the source has not written the tombstone yet
            value, datatype = values.tombstone_value(document.value, document.datatype)
            document = document._replace(value=value, datatype=datatype)
        return Content.of(document.value, document.datatype, self.about(document))


def wire_key(session: Session, frame: Frame) -> bytes:
    """Return the request's key with a collection id: 0 if the client did not negotiate collections. Raises Refused."""
    start = decode_leb128(frame.key)[1] if session.collections else 0
    if not 0 < len(frame.key) - start <= KEY_BYTES_MAX:
        raise Refused(Status.EINVAL, f"a key has 1 to {KEY_BYTES_MAX} bytes")
    return frame.key if session.collections else b"\0" + frame.key


def outgoing(session: Session, value: bytes, datatype: int) -> tuple[bytes, int]:
    """Return a value's body and datatype in a form for this client. Raises ValueError if the value is invalid."""
    if datatype & values.XATTR:
        value, datatype = values.without_xattrs(value, datatype)
    if datatype & values.SNAPPY and not session.snappy:
        value, datatype = values.inflate(value, datatype)
    return value, datatype if session.json else datatype & ~values.JSON


def _find(session: DocumentSession, frame: Frame, *, deletions: bool = False) -> Document:
    return session.find_document(frame, wire_key(session, frame), deletions=deletions)


def got(session: DocumentSession, frame: Frame, document: Document) -> Reply:
    key = frame.key if frame.opcode in (Opcode.GETK, Opcode.GETKQ) else b""
    value, datatype = outgoing(session, document.value, document.datatype)
    return Reply(extras=_U32.pack(document.flags), key=key, value=value, datatype=datatype, cas=document.cas)


def _get(session: DocumentSession, frame: Frame) -> Reply:
    return got(session, frame, _find(session, frame))


def _get_meta(session: DocumentSession, frame: Frame) -> Reply:
    document = _find(session, frame, deletions=True)
    datatype = document.datatype if frame.extras[:1] == _META_WITH_DATATYPE else None
    meta = codec_kv.Meta(document.deleted, document.flags, document.expiry, document.rev_seqno, datatype)
    return Reply(extras=codec_kv.encode_meta(meta), cas=document.cas)


def _lookup_one(session: DocumentSession, frame: Frame) -> Reply:
    path, rest, path_flags, _, flags = codec_kv.decode_subdoc(frame)
    if rest:
        raise Refused(Status.EINVAL, "a lookup has a path and no value")
    document = _find_for_lookup(session, frame, flags)
    content = session.content(document, 1)
    try:
        value = content.lookup(frame.opcode, path_text(path), path_flags)
    except PathError as error:
        return Reply(error.status, cas=document.cas)
    status = Status.SUBDOC_SUCCESS_DELETED if document.deleted else Status.SUCCESS
    return Reply(status, value=value, cas=document.cas)


def _lookup_many(session: DocumentSession, frame: Frame) -> Reply:
    specs = codec_kv.decode_lookup_specs(frame.value)
    attributes = [bool(spec.flags & XATTR_PATH) for spec in specs]
    if attributes != sorted(attributes, reverse=True):  # a path in the body comes before a path in xattrs
        raise Refused(Status.SUBDOC_INVALID_XATTR_ORDER)
    if any(spec.opcode not in LOOKUPS for spec in specs):
        raise Refused(Status.SUBDOC_INVALID_COMBO)
    document = _find_for_lookup(session, frame, frame.extras[-1] if frame.extras else 0)
    content = session.content(document, len(specs))
    failed = False
    answer: list[bytes] = []
    left_bytes = LOOKUP_BYTES_MAX
    for spec in specs:
        try:
            value = content.lookup(spec.opcode, path_text(spec.path), spec.flags)
            left_bytes -= len(value)
            if left_bytes < 0:
                raise Refused(Status.E2BIG, f"the values have more than {LOOKUP_BYTES_MAX} bytes: look up fewer paths")
            answer += (codec_kv.encode_lookup_head(Status.SUCCESS, len(value)), value)
        except PathError as error:
            failed = True
            answer.append(codec_kv.encode_lookup_head(error.status, 0))
    status = Status.SUBDOC_MULTI_PATH_FAILURE if failed else Status.SUCCESS
    if document.deleted:
        status = Status.SUBDOC_MULTI_PATH_FAILURE_DELETED if failed else Status.SUBDOC_SUCCESS_DELETED
    return Reply(status, value=b"".join(answer), cas=document.cas)


def _find_for_lookup(session: DocumentSession, frame: Frame, flags: int) -> Document:
    if flags & ~session.lookup_flags:
        raise Refused(Status.EINVAL, "flags of a change on a lookup")
    return _find(session, frame, deletions=bool(flags & ACCESS_DELETED))


def path_text(path: bytes) -> str:
    try:
        return path.decode()
    except UnicodeDecodeError:
        raise PathError(Status.SUBDOC_PATH_EINVAL) from None


def quiet_miss(handle: Callable[[SessionT, Frame], Answer]) -> Callable[[SessionT, Frame], Answer]:
    """Return a handler like `handle`, but without an answer if there is no document."""

    def handle_quietly(session: SessionT, frame: Frame) -> Answer:
        try:
            return handle(session, frame)
        except Refused as error:
            if error.status == Status.KEY_ENOENT:
                return None
            raise

    return handle_quietly


_GETTERS: dict[int, Handler[DocumentSession]] = {
    Opcode.GET: _get,
    Opcode.GETQ: quiet_miss(_get),
    Opcode.GETK: _get,
    Opcode.GETKQ: quiet_miss(_get),
    Opcode.GET_REPLICA: _get,
    **dict.fromkeys(LOOKUPS[1:], _lookup_one),
    Opcode.SUBDOC_MULTI_LOOKUP: _lookup_many,
}
_META_GETTERS: dict[int, Handler[DocumentSession]] = {
    Opcode.GET_META: _get_meta,
    Opcode.GETQ_META: quiet_miss(_get_meta),
}

OPERATIONS: dict[int, Operation[DocumentSession]] = {
    int(opcode): Operation(handler, privilege=READ) for opcode, handler in _GETTERS.items()
} | {int(opcode): Operation(handler, privilege=META_READ) for opcode, handler in _META_GETTERS.items()}
