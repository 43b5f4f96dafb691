"""Sub-document requests that change a document (kv_engine docs/SubDocument.md; recording sdk_72_conn2).

A request with several paths changes all paths in one version, or none if one fails; the answer's body names the failed
path.
"""

from __future__ import annotations

from mirror.document.jsonpath import PathError
from mirror.sandbox.data.documents import DocumentError, Mode
from mirror.sandbox.kv.document_requests import changed, frame_options
from mirror.sandbox.kv.sandbox_session import SandboxSession
from mirror.sandbox.kv.subdoc import Draft
from mirror.server.document_requests import ACCESS_DELETED, check_path_order, path_text, wire_key
from mirror.server.session import WRITE, Operation, Reply
from mirror.wire import codec_kv
from mirror.wire.codec_kv import MutationResult, MutationSpec
from mirror.wire.constants import SUBDOC_CHANGES, Opcode, Status
from mirror.wire.frame import Frame

MKDOC = 0x01
ADD = 0x02
CREATE_AS_DELETED = 0x08
_DOCUMENT_FLAGS = MKDOC | ADD | ACCESS_DELETED


def _mutate_one(session: SandboxSession, frame: Frame) -> Reply:
    path, value, path_flags, expiry, flags = codec_kv.decode_subdoc(frame)
    spec = MutationSpec(frame.opcode, path, value, path_flags)
    reply, results = _mutate(session, frame, [spec], expiry, flags)
    if results and results[0].status != Status.SUCCESS:
        return Reply(results[0].status)
    return Reply(reply.status, extras=reply.extras, cas=reply.cas, value=results[0].value if results else b"")


def _mutate_many(session: SandboxSession, frame: Frame) -> Reply:
    specs = codec_kv.decode_mutation_specs(frame.value)
    check_path_order([spec.flags for spec in specs])
    expiry = int.from_bytes(frame.extras[:4]) if len(frame.extras) >= 4 else None
    flags = frame.extras[-1] if len(frame.extras) in (1, 5) else 0
    reply, results = _mutate(session, frame, specs, expiry, flags)
    body = codec_kv.encode_mutation_results(results)
    return Reply(reply.status, extras=reply.extras, cas=reply.cas, value=body)


def _mutate(
    session: SandboxSession, frame: Frame, specs: list[MutationSpec], expiry: int | None, flags: int
) -> tuple[Reply, list[MutationResult]]:
    if flags & ~_DOCUMENT_FLAGS or (flags & MKDOC and flags & ADD):
        raise DocumentError(Status.NOT_SUPPORTED if flags & CREATE_AS_DELETED else Status.EINVAL)
    vbucket = session.active_vbucket(frame.vbucket)
    documents = session.bucket.documents
    key = wire_key(session, frame)
    level, preserve = frame_options(frame)
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
            answer = draft.change(spec.opcode, path_text(spec.path), spec.value, spec.flags)
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


OPERATIONS: dict[int, Operation[SandboxSession]] = {
    **{int(opcode): Operation(_mutate_one, privilege=WRITE) for opcode in SUBDOC_CHANGES},
    int(Opcode.SUBDOC_MULTI_MUTATION): Operation(_mutate_many, privilege=WRITE),
}
