"""Answers to sub-document requests, of one path or of several.

Knows their extras, bodies and document flags (kv_engine docs/SubDocument.md, recording sdk_72_conn2); must never
know sockets or JSON. Invariants: a request of several paths changes all of them or none, in one version; xattr paths
come before the others; a failed path of several is told in the body under one status for the whole.
"""

from __future__ import annotations

from mirror.document.jsonpath import PathError
from mirror.document.lookup import LOOKUPS, XATTR_PATH
from mirror.sandbox.document_requests import active_vbucket, changed, frame_options, wire_key
from mirror.sandbox.documents import DocumentError, Mode
from mirror.sandbox.item import Item
from mirror.sandbox.session import Operation, Reply, Session
from mirror.sandbox.subdoc import Draft
from mirror.sandbox.users import READ, WRITE
from mirror.sandbox.vbucket import Vbucket
from mirror.wire import codec_kv
from mirror.wire.codec_kv import LookupResult, MutationResult, MutationSpec
from mirror.wire.constants import Opcode, Status
from mirror.wire.frame import Frame

MKDOC = 0x01
ADD = 0x02
ACCESS_DELETED = 0x04
CREATE_AS_DELETED = 0x08
_DOCUMENT_FLAGS = MKDOC | ADD | ACCESS_DELETED


def _existing(session: Session, vbucket: Vbucket, key: bytes, flags: int) -> Item:
    documents = session.bucket.documents
    item = documents.find_any(vbucket, key) if flags & ACCESS_DELETED else documents.find(vbucket, key)
    if item is None:
        raise DocumentError(Status.KEY_ENOENT)
    return item


def _lookup_one(session: Session, frame: Frame) -> Reply:
    vbucket = active_vbucket(session, frame)
    path, _, path_flags, _, flags = codec_kv.decode_subdoc(frame)
    item = _existing(session, vbucket, wire_key(session, frame), flags)
    try:
        value = Draft.of_item(item, vbucket.vbuuid).lookup(frame.opcode, _text(path), path_flags)
    except PathError as error:
        return Reply(error.status, cas=item.cas)
    status = Status.SUBDOC_SUCCESS_DELETED if item.deleted else Status.SUCCESS
    return Reply(status, value=value, cas=session.bucket.documents.visible_cas(vbucket, item))


def _lookup_many(session: Session, frame: Frame) -> Reply:
    codec_kv.check_request(frame)
    vbucket = active_vbucket(session, frame)
    specs = codec_kv.decode_lookup_specs(frame.value)
    _check_order([spec.flags for spec in specs])
    if any(spec.opcode not in LOOKUPS for spec in specs):
        raise DocumentError(Status.SUBDOC_INVALID_COMBO)
    item = _existing(session, vbucket, wire_key(session, frame), frame.extras[-1] if frame.extras else 0)
    draft = Draft.of_item(item, vbucket.vbuuid)
    results = []
    for spec in specs:
        try:
            results.append(LookupResult(Status.SUCCESS, draft.lookup(spec.opcode, _text(spec.path), spec.flags)))
        except PathError as error:
            results.append(LookupResult(error.status))
    failed = any(result.status != Status.SUCCESS for result in results)
    status = Status.SUBDOC_MULTI_PATH_FAILURE if failed else Status.SUCCESS
    if item.deleted:
        status = Status.SUBDOC_MULTI_PATH_FAILURE_DELETED if failed else Status.SUBDOC_SUCCESS_DELETED
    cas = session.bucket.documents.visible_cas(vbucket, item)
    return Reply(status, value=codec_kv.encode_lookup_results(results), cas=cas)


def _mutate_one(session: Session, frame: Frame) -> Reply:
    path, value, path_flags, expiry, flags = codec_kv.decode_subdoc(frame)
    spec = MutationSpec(frame.opcode, path, value, path_flags)
    reply, results = _mutate(session, frame, [spec], expiry, flags)
    if results and results[0].status != Status.SUCCESS:
        return Reply(results[0].status)
    return Reply(reply.status, extras=reply.extras, cas=reply.cas, value=results[0].value if results else b"")


def _mutate_many(session: Session, frame: Frame) -> Reply:
    codec_kv.check_request(frame)
    specs = codec_kv.decode_mutation_specs(frame.value)
    _check_order([spec.flags for spec in specs])
    expiry = int.from_bytes(frame.extras[:4]) if len(frame.extras) >= 4 else None
    flags = frame.extras[-1] if len(frame.extras) in (1, 5) else 0
    reply, results = _mutate(session, frame, specs, expiry, flags)
    body = codec_kv.encode_mutation_results(results)
    return Reply(reply.status, extras=reply.extras, cas=reply.cas, value=body)


def _mutate(
    session: Session, frame: Frame, specs: list[MutationSpec], expiry: int | None, flags: int
) -> tuple[Reply, list[MutationResult]]:
    """Change all paths or none. Results: what counters answer, or the one path that failed."""
    if flags & ~_DOCUMENT_FLAGS or (flags & MKDOC and flags & ADD):
        raise DocumentError(Status.NOT_SUPPORTED if flags & CREATE_AS_DELETED else Status.EINVAL)
    vbucket = active_vbucket(session, frame)
    documents = session.bucket.documents
    key = wire_key(session, frame)
    level, preserve = frame_options(session, frame)
    item = documents.find(vbucket, key)
    if item is not None and flags & ADD:
        raise DocumentError(Status.KEY_EEXISTS)
    whole = any(spec.opcode == Opcode.SET and not spec.path for spec in specs)
    if item is None and not (flags & (MKDOC | ADD)) and not whole:
        raise DocumentError(Status.KEY_ENOENT)
    draft = Draft.of_item(item, vbucket.vbuuid, b"[]" if specs[0].path.startswith(b"[") or not specs[0].path else b"{}")
    results = []
    for index, spec in enumerate(specs):
        try:
            answer = draft.change(spec.opcode, _text(spec.path), spec.value, spec.flags)
        except PathError as error:
            return Reply(Status.SUBDOC_MULTI_PATH_FAILURE), [MutationResult(index, error.status)]
        if answer:
            results.append(MutationResult(index, Status.SUCCESS, answer))
    if draft.deleted:
        return changed(session, vbucket, documents.remove(vbucket, key, cas=frame.cas, durability=level)), results
    value, datatype = draft.stored()
    stored = documents.store(
        vbucket,
        key,
        value,
        datatype=datatype,
        flags=item.flags if item is not None else 0,
        expiry=expiry or 0,
        cas=frame.cas,
        mode=Mode.ADD if flags & ADD else Mode.SET,
        preserve_expiry=preserve or expiry is None,
        durability=level,
    )
    return changed(session, vbucket, stored), results


def _check_order(flags: list[int]) -> None:
    attributes = [bool(flag & XATTR_PATH) for flag in flags]
    if attributes != sorted(attributes, reverse=True):
        raise DocumentError(Status.SUBDOC_INVALID_XATTR_ORDER)


def _text(path: bytes) -> str:
    try:
        return path.decode()
    except UnicodeDecodeError:
        raise DocumentError(Status.SUBDOC_PATH_EINVAL) from None


_MUTATIONS = (
    Opcode.SUBDOC_DICT_ADD,
    Opcode.SUBDOC_DICT_UPSERT,
    Opcode.SUBDOC_DELETE,
    Opcode.SUBDOC_REPLACE,
    Opcode.SUBDOC_ARRAY_PUSH_LAST,
    Opcode.SUBDOC_ARRAY_PUSH_FIRST,
    Opcode.SUBDOC_ARRAY_INSERT,
    Opcode.SUBDOC_ARRAY_ADD_UNIQUE,
    Opcode.SUBDOC_COUNTER,
    Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR,
)

OPERATIONS: dict[int, Operation] = (
    {int(opcode): Operation(_lookup_one, privilege=READ) for opcode in LOOKUPS[1:]}
    | {int(opcode): Operation(_mutate_one, privilege=WRITE) for opcode in _MUTATIONS}
    | {
        int(Opcode.SUBDOC_MULTI_LOOKUP): Operation(_lookup_many, privilege=READ),
        int(Opcode.SUBDOC_MULTI_MUTATION): Operation(_mutate_many, privilege=WRITE),
    }
)
