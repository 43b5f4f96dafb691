"""Answers to requests for anything but documents: HELLO, login, map, collections, statistics, seqnos.

The answers are those of kv_engine (its docs/BinaryProtocol.md; our recordings of servers, sdk_72_* and 72_i*). HELLO
grants those requested features that the server has, in ascending order. Before login only HELLO, login and requests
that reveal no data are answered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from mirror.server.errors import Refused, unknown_collection
from mirror.server.session import JSON, META_READ, Handler, Later, LoginAttempt, Operation, Reply, Session
from mirror.wire import codec_dcp, codec_kv
from mirror.wire.constants import Feature, Opcode, Status
from mirror.wire.errormap import error_map
from mirror.wire.frame import Frame
from mirror.wire.sasl import HASHES, SaslError, plain_decode

AGENT_BYTES_MAX = 200
DEFAULT_COLLECTION = 0
DEFAULT_NAME = "_default"
"""The scope or collection that an empty name means."""

_NOTIFICATIONS = frozenset(
    (int(Feature.CLUSTERMAP_CHANGE_NOTIFICATION), int(Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF))
)
_ERROR_MAP_VERSION_MAX = 2
_VBID_DIGITS_MAX = 5

T = TypeVar("T")


def _hello(session: Session, frame: Frame) -> Reply:
    agent, requested = codec_kv.decode_hello(frame)
    session.agent = agent[:AGENT_BYTES_MAX].decode(errors="replace")
    granted = session.grantable.intersection(requested)
    if Feature.DUPLEX not in granted and not _NOTIFICATIONS.isdisjoint(granted):
        raise Refused(Status.EINVAL, "Clustermap change notification needs Duplex")
    session.grant(granted)
    return Reply(value=codec_kv.encode_features(sorted(granted)))


# Login.


def _list_mechanisms(session: Session, _frame: Frame) -> Reply:
    if not session.mechanisms:
        raise Refused(Status.NOT_SUPPORTED)
    return Reply(value=" ".join(session.mechanisms).encode())


def _auth(session: Session, frame: Frame) -> Reply | Later:
    mechanism, data = codec_kv.decode_sasl(frame)
    if not session.mechanisms:
        raise Refused(Status.NOT_SUPPORTED)
    name = mechanism[:40].decode(errors="replace")
    abandoned, session.scram = session.scram, None
    session.log_out()
    if abandoned is not None and session.login_failed():
        reply = session.refuse(Status.AUTH_ERROR, with_reference=True)
        reply.hang_up = True
        return reply
    try:
        if name not in session.mechanisms:
            raise SaslError("no such mechanism")
        if name not in HASHES:
            username, password = plain_decode(data)
            return _later(session, username, session.password_attempt(username, password), lambda _: b"")
        server = session.scram_server(name)
        session.scram = (name, server)
        return Reply(Status.AUTH_CONTINUE, value=server.challenge(data))
    except SaslError:
        return _login_failed(session)


def _step(session: Session, frame: Frame) -> Reply | Later:
    mechanism, data = codec_kv.decode_sasl(frame)
    exchange, session.scram = session.scram, None
    if exchange is None or exchange[0].encode() != mechanism:
        return _login_failed(session)
    username = exchange[1].username
    return _later(session, username, session.login_attempt(username, partial(exchange[1].outcome, data)), bytes)


def _later(session: Session, username: str, attempt: LoginAttempt[T], answered: Callable[[T], bytes]) -> Later:

    def answer() -> Reply:
        assert attempt.done is not None, "it was waited for"
        (found,) = attempt.done
        if found is None:
            return _login_failed(session)
        session.log_in(username)
        return Reply(value=answered(found))

    return Later(attempt.wait, answer)


def _login_failed(session: Session) -> Reply:
    session.scram = None
    session.log_out()
    reply = session.refuse(Status.AUTH_ERROR, with_reference=True)
    reply.hang_up = session.login_failed()
    return reply


# The bucket.


def _error_map(_session: Session, frame: Frame) -> Reply:
    version = codec_kv.decode_error_map_request(frame)
    if version < 1:
        raise Refused(Status.EINVAL, bare=True)
    return Reply(value=error_map(min(version, _ERROR_MAP_VERSION_MAX)), datatype=JSON)


def _select_bucket(session: Session, frame: Frame) -> Reply:
    session.bucket_selected = frame.key == session.bucket_name.encode()
    if not session.bucket_selected:
        raise Refused(Status.EACCESS, with_reference=True)
    return Reply()


def _cluster_config(session: Session, frame: Frame) -> Reply:
    known = codec_kv.decode_cluster_config_request(frame)
    if session.map_needs_bucket and not session.bucket_selected:
        raise Refused(Status.NO_BUCKET, bare=True)
    if known is not None and known >= session.map_revision:
        return Reply()
    return Reply(value=session.send_map(with_bucket=session.bucket_selected), datatype=JSON)


def _check_collections(session: Session) -> None:
    if session.no_collections_status is not None:
        raise Refused(session.no_collections_status)


def _manifest(session: Session, _frame: Frame) -> Reply:
    _check_collections(session)
    return Reply(value=session.manifest_text(), datatype=JSON)


def _collection_id(session: Session, frame: Frame) -> Reply:
    _check_collections(session)
    path = (frame.value or frame.key).decode(errors="replace")
    if path.count(".") != 1:
        raise Refused(Status.EINVAL, "a collection is named scope.collection")
    scope, _, name = path.partition(".")
    if session.scope_id(scope or DEFAULT_NAME) is None:
        raise unknown_collection(session.manifest_uid, Status.UNKNOWN_COLLECTION)
    found = session.collection_id(scope or DEFAULT_NAME, name or DEFAULT_NAME)
    if found is None:
        raise unknown_collection(session.manifest_uid)
    return Reply(extras=codec_kv.encode_collection_id(session.manifest_uid, found))


def _scope_id(session: Session, frame: Frame) -> Reply:
    _check_collections(session)
    name = (frame.value or frame.key).decode(errors="replace").partition(".")[0]
    found = session.scope_id(name or DEFAULT_NAME)
    if found is None:
        raise unknown_collection(session.manifest_uid, Status.UNKNOWN_SCOPE)
    return Reply(extras=codec_kv.encode_collection_id(session.manifest_uid, found))


def _accept(_session: Session, _frame: Frame) -> Reply:
    return Reply()


# Seqnos and histories.


def _all_vb_seqnos(session: Session, frame: Frame) -> Reply:
    state, collection_id = codec_dcp.decode_all_vb_seqnos_request(frame)
    if collection_id is not None and not session.collections:
        raise Refused(Status.EINVAL, "the client names a collection and did not negotiate collections")
    if not session.collections:
        collection_id = DEFAULT_COLLECTION  # the client sees no other (kv_engine, getAllVBucketSequenceNumbers)
    return session.all_vb_seqnos(state, collection_id)


def failover_log(session: Session, frame: Frame) -> Reply:
    return Reply(value=codec_dcp.encode_failover_log(session.vbucket_history(frame.vbucket).failover_log))


def _observe_seqno(session: Session, frame: Frame) -> Reply:
    vbuuid = codec_kv.decode_observe_seqno_request(frame)
    vbid = frame.vbucket
    history = session.vbucket_history(vbid)
    current, persisted = history.current_seqno, history.persisted_seqno
    if persisted is None:
        raise session.persistence_unknown()
    newest, end_seqno = history.failover_log.newest_vbuuid, history.failover_log.end_of(vbuuid, current)
    if end_seqno is None:
        raise Refused(Status.KEY_ENOENT)
    seen = codec_kv.ObservedSeqno(vbid, newest, persisted, current)
    if vbuuid != newest:
        seen = codec_kv.ObservedSeqno(vbid, newest, persisted, current, vbuuid, end_seqno)
    return Reply(value=codec_kv.encode_observe_seqno(seen))


def _stat(session: Session, frame: Frame) -> Reply:
    group, _, rest = frame.key.decode(errors="replace").partition(" ")
    if group == "dcp":
        producer = session.producer
        found = {"ep_dcp_count": str(int(producer is not None))} | (producer.statistics() if producer else {})
    elif rest and not (rest.isascii() and rest.isdigit() and len(rest) <= _VBID_DIGITS_MAX):
        raise Refused(Status.EINVAL, "not the number of a vbucket")
    else:
        found = session.statistics(group, int(rest) if rest else None)
    return Reply(before=tuple(Reply(key=name.encode(), value=text.encode()) for name, text in found.items()))


_EARLY: dict[int, Handler[Session]] = {
    Opcode.HELLO: _hello,
    Opcode.SASL_LIST_MECHS: _list_mechanisms,
    Opcode.SASL_AUTH: _auth,
    Opcode.SASL_STEP: _step,
    Opcode.GET_ERROR_MAP: _error_map,
    Opcode.NOOP: _accept,
    Opcode.VERSION: lambda session, _: Reply(value=session.version),
    Opcode.VERBOSITY: _accept,
    Opcode.QUIT: lambda _, __: Reply(hang_up=True),
}
_WITHOUT_BUCKET: dict[int, Handler[Session]] = {
    Opcode.SELECT_BUCKET: _select_bucket,
    Opcode.GET_CLUSTER_CONFIG: _cluster_config,
}
_WITH_BUCKET: dict[int, Handler[Session]] = {
    Opcode.GET_COLLECTIONS_MANIFEST: _manifest,
    Opcode.GET_COLLECTION_ID: _collection_id,
    Opcode.GET_SCOPE_ID: _scope_id,
    Opcode.GET_ALL_VB_SEQNOS: _all_vb_seqnos,
    Opcode.GET_FAILOVER_LOG: failover_log,
    Opcode.OBSERVE_SEQNO: _observe_seqno,
    Opcode.STAT: _stat,
}
_NEED_META_READ = frozenset((Opcode.GET_ALL_VB_SEQNOS, Opcode.GET_FAILOVER_LOG, Opcode.OBSERVE_SEQNO))

OPERATIONS: dict[int, Operation[Session]] = (
    {int(opcode): Operation(handler, before_login=True, without_bucket=True) for opcode, handler in _EARLY.items()}
    | {int(opcode): Operation(handler, without_bucket=True) for opcode, handler in _WITHOUT_BUCKET.items()}
    | {
        int(opcode): Operation(handler, privilege=META_READ if opcode in _NEED_META_READ else "")
        for opcode, handler in _WITH_BUCKET.items()
    }
)
