"""Answers to what a client asks before and beside documents: HELLO, login, map, collections, statistics, seqnos.

Knows these operations as kv_engine answers them (docs/BinaryProtocol.md, recordings sdk_72_*); must never know sockets
or documents. Invariants: features are granted only from the list that the recorded server grants, in its order; what a
client who has not logged in gets is HELLO, login, and what says nothing of the data; current and persisted seqno are
both published_seqno: what can be read, and what a crash would not take back further than the sync setting says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mirror.feed.sasl import HASHES, MECHANISMS, SaslError, ScramServer, plain_decode
from mirror.serve.kv_bucket import UNKNOWN_COLLECTION_CONTEXT, KvBucket, Refused
from mirror.serve.kv_session import JSON, Handler, Later, Operation, Reply, Session
from mirror.wire import codec_dcp, codec_kv
from mirror.wire.constants import Feature, Opcode, Status, VbucketState
from mirror.wire.errormap import error_map
from mirror.wire.frame import Frame
from storage.model import VbucketState as Stored

VERSION = b"7.2.0"
"""The server whose answers these are; clients judge by it what they may ask."""

FAILED_LOGINS_MAX = 3
"""Wrong passwords on one connection before it is closed."""

VBUCKETS_PER_STEP = 64
"""Looked at for a collection's seqnos before others have their turn."""

GRANTED = frozenset(
    int(feature)
    for feature in (
        Feature.TCP_NODELAY,
        Feature.MUTATION_SEQNO,
        Feature.XATTR,
        Feature.XERROR,
        Feature.SELECT_BUCKET,
        Feature.SNAPPY,
        Feature.JSON,
        Feature.DUPLEX,
        Feature.CLUSTERMAP_CHANGE_NOTIFICATION,
        Feature.UNORDERED_EXECUTION,
        Feature.TRACING,
        Feature.ALT_REQUEST,
        Feature.SYNC_REPLICATION,
        Feature.COLLECTIONS,
        Feature.PRESERVE_TTL,
        Feature.VATTR,
        Feature.SUBDOC_CREATE_AS_DELETED,
        Feature.SUBDOC_REPLICA_READ,
        Feature.GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION,
        Feature.DEDUPE_NOT_MY_VBUCKET_CLUSTERMAP,
        Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF,
        Feature.RANGE_SCAN_INCLUDE_XATTR,
    )
)
"""What 7.2.0 grants of what clients ask for, and the newer ones for reading and for maps that are not sent twice."""


def _hello(session: Session, frame: Frame) -> Reply:
    agent, asked = codec_kv.decode_hello(frame)
    session.agent = agent[:200].decode(errors="replace")
    granted = GRANTED.intersection(asked)
    session.grant(granted)
    return Reply(value=codec_kv.encode_features(sorted(granted)))


def _list_mechanisms(session: Session, _frame: Frame) -> Reply:
    offered = MECHANISMS if session.plain_allowed else tuple(HASHES)
    return Reply(value=" ".join(offered).encode())


def _auth(session: Session, frame: Frame) -> Reply:
    mechanism, data = codec_kv.decode_sasl(frame)
    name = mechanism[:40].decode(errors="replace")
    session.reader = None
    try:
        if name == "PLAIN" and session.plain_allowed:
            username, password = plain_decode(data)
            session.reader = session.users.check(username, password)
            if session.reader is None:
                raise SaslError("wrong user or password")
            return Reply()
        if name not in HASHES:
            raise SaslError("no such mechanism")
        server = ScramServer(name, verifier_of=session.users.verifiers(name), secret=session.secret)
        session.scram = (name, server)
        return Reply(Status.AUTH_CONTINUE, value=server.challenge(data))
    except SaslError:
        return _login_failed(session)


def _step(session: Session, frame: Frame) -> Reply:
    mechanism, data = codec_kv.decode_sasl(frame)
    exchange, session.scram = session.scram, None
    try:
        if exchange is None or exchange[0].encode() != mechanism:
            raise SaslError("no exchange is under way")
        outcome = exchange[1].outcome(data)
    except SaslError:
        return _login_failed(session)
    session.reader = session.users.reader(exchange[1].username)
    return Reply(value=outcome)


def _login_failed(session: Session) -> Reply:
    session.scram, session.reader = None, None
    session.failed_logins += 1
    reply = session.refuse(Status.AUTH_ERROR, with_reference=True)
    reply.hang_up = session.failed_logins >= FAILED_LOGINS_MAX
    return reply


def _error_map(_session: Session, frame: Frame) -> Reply:
    version = codec_kv.decode_error_map_request(frame)
    if version < 1:
        return Reply(Status.EINVAL)
    return Reply(value=error_map(min(version, 2)), datatype=JSON)


def _select_bucket(session: Session, frame: Frame) -> Reply:
    if frame.key != session.bucket.name.encode():
        session.bucket_selected = False
        return session.refuse(Status.EACCESS, with_reference=True)
    session.bucket_selected = True
    return Reply()


def _list_buckets(session: Session, _frame: Frame) -> Reply:
    return Reply(value=session.bucket.name.encode())


def _cluster_config(session: Session, frame: Frame) -> Reply:
    known = codec_kv.decode_cluster_config_request(frame)
    if known is not None and known >= session.cluster_map.revision:
        return Reply()
    return Reply(value=session.map_now(), datatype=JSON)


def _manifest(session: Session, _frame: Frame) -> Reply:
    return Reply(value=session.bucket.manifest_json(), datatype=JSON)


def _collection_id(session: Session, frame: Frame) -> Reply:
    path = (frame.value or frame.key).decode(errors="replace")
    if path.count(".") != 1:
        raise Refused(Status.EINVAL, "a collection is named scope.collection")
    scope, _, name = path.partition(".")
    manifest = session.bucket.manifest()
    for entry in manifest.collections.values():
        if entry.name == (name or "_default") and manifest.scopes.get(entry.scope_id) == (scope or "_default"):
            return Reply(extras=codec_kv.encode_collection_id(manifest.uid, entry.collection_id))
    raise Refused(Status.UNKNOWN_COLLECTION, UNKNOWN_COLLECTION_CONTEXT, manifest_uid=manifest.uid)


def _scope_id(session: Session, frame: Frame) -> Reply:
    name = (frame.value or frame.key).decode(errors="replace").partition(".")[0]
    manifest = session.bucket.manifest()
    for scope_id, scope in manifest.scopes.items():
        if scope == (name or "_default"):
            return Reply(extras=codec_kv.encode_collection_id(manifest.uid, scope_id))
    raise Refused(Status.UNKNOWN_SCOPE, UNKNOWN_COLLECTION_CONTEXT, manifest_uid=manifest.uid)


def _nothing(_session: Session, _frame: Frame) -> Reply:
    return Reply()


def _quit(_session: Session, _frame: Frame) -> Reply:
    return Reply(hang_up=True)


def _version(_session: Session, _frame: Frame) -> Reply:
    return Reply(value=VERSION)


# Seqnos.


def _all_vb_seqnos(session: Session, frame: Frame) -> Reply | Later:
    wanted, collection_id = codec_dcp.decode_all_vb_seqnos_request(frame)
    if wanted not in (VbucketState.ALIVE, VbucketState.ACTIVE):
        return Reply()
    bucket = session.bucket
    if collection_id is not None:
        assert session.reader is not None, "the dispatch lets nobody else through"
        bucket.check_newest_collection(collection_id, session.reader)
        return Later(_collection_seqnos(bucket, collection_id).__next__)
    seqnos = [(vbid, int(bucket.state(vbid).published_seqno)) for vbid in bucket.view.vbids]
    return Reply(value=codec_dcp.encode_all_vb_seqnos(seqnos))


def _collection_seqnos(bucket: KvBucket, collection_id: int) -> Iterator[Reply | None]:
    """None for each step of bounded work, at last the answer."""
    seqnos = []
    for number, vbid in enumerate(bucket.view.vbids):
        if number % VBUCKETS_PER_STEP == VBUCKETS_PER_STEP - 1:
            yield None
        pin = bucket.pin(vbid)
        newest, below = bucket.newest_of(pin, collection_id, None)
        while below:
            yield None
            newest, below = bucket.newest_of(pin, collection_id, below)
        seqnos.append((vbid, newest))
    yield Reply(value=codec_dcp.encode_all_vb_seqnos(seqnos))


def _failover_log(session: Session, frame: Frame) -> Reply:
    log = session.bucket.served_state(frame.vbucket).failover_log
    return Reply(value=codec_dcp.encode_failover_log([(int(entry.vbuuid), int(entry.seqno)) for entry in log]))


def _observe_seqno(session: Session, frame: Frame) -> Reply:
    asked = codec_kv.decode_observe_seqno_request(frame)
    vbid = frame.vbucket
    state = session.bucket.served_state(vbid)
    published = int(state.published_seqno)
    newest = int(state.failover_log[0].vbuuid)
    if asked == newest:
        return Reply(value=codec_kv.encode_observe_seqno(codec_kv.ObservedSeqno(vbid, newest, published, published)))
    upper = published
    for entry in state.failover_log:
        if entry.vbuuid == asked:
            seen = codec_kv.ObservedSeqno(vbid, newest, published, published, asked, upper)
            return Reply(value=codec_kv.encode_observe_seqno(seen))
        upper = int(entry.seqno)
    raise Refused(Status.KEY_ENOENT)


# Statistics.


def _stat(session: Session, frame: Frame) -> Reply:
    group, _, rest = frame.key.decode(errors="replace").partition(" ")
    bucket = session.bucket
    if not group:
        return _stats({"version": VERSION.decode(), "ep_bucket_type": "persistent", "bucket": bucket.name})
    describe = _STATS.get(group)
    if describe is None:
        raise Refused(Status.KEY_ENOENT)
    if rest and not (rest.isascii() and rest.isdigit() and len(rest) <= 5):
        raise Refused(Status.EINVAL, "not the number of a vbucket")
    vbids = [int(rest)] if rest else bucket.view.vbids
    told: dict[str, str] = {}
    for vbid in vbids:
        told |= describe(vbid, bucket.state(vbid))
    return _stats(told)


def _stats(told: dict[str, str]) -> Reply:
    return Reply(before=tuple(Reply(key=name.encode(), value=text.encode()) for name, text in told.items()))


def _stat_state(vbid: int, _state: Stored) -> dict[str, str]:
    return {f"vb_{vbid}": "active"}


def _stat_seqno(vbid: int, state: Stored) -> dict[str, str]:
    published = str(state.published_seqno)
    names = ("high_seqno", "abs_high_seqno", "last_persisted_seqno", "max_visible_seqno", "last_persisted_snap_end")
    return {f"vb_{vbid}:{name}": published for name in names} | {
        f"vb_{vbid}:purge_seqno": str(state.local_purge_seqno),
        f"vb_{vbid}:uuid": str(state.failover_log[0].vbuuid if state.failover_log else 0),
    }


def _stat_failovers(vbid: int, state: Stored) -> dict[str, str]:
    found = {f"vb_{vbid}:num_entries": str(len(state.failover_log))}
    for index, entry in enumerate(state.failover_log):
        found[f"vb_{vbid}:{index}:id"] = str(entry.vbuuid)
        found[f"vb_{vbid}:{index}:seq"] = str(entry.seqno)
    return found


_STATS: dict[str, Callable[[int, Stored], dict[str, str]]] = {
    "vbucket": _stat_state,
    "vbucket-seqno": _stat_seqno,
    "failovers": _stat_failovers,
}

_EARLY: dict[int, Handler] = {
    Opcode.HELLO: _hello,
    Opcode.SASL_LIST_MECHS: _list_mechanisms,
    Opcode.SASL_AUTH: _auth,
    Opcode.SASL_STEP: _step,
    Opcode.GET_ERROR_MAP: _error_map,
    Opcode.NOOP: _nothing,
    Opcode.VERSION: _version,
    Opcode.VERBOSITY: _nothing,
    Opcode.QUIT: _quit,
}
_LATER: dict[int, Handler] = {
    Opcode.SELECT_BUCKET: _select_bucket,
    Opcode.LIST_BUCKETS: _list_buckets,
    Opcode.GET_CLUSTER_CONFIG: _cluster_config,
    Opcode.GET_COLLECTIONS_MANIFEST: _manifest,
    Opcode.GET_COLLECTION_ID: _collection_id,
    Opcode.GET_SCOPE_ID: _scope_id,
    Opcode.GET_ALL_VB_SEQNOS: _all_vb_seqnos,
    Opcode.GET_FAILOVER_LOG: _failover_log,
    Opcode.OBSERVE_SEQNO: _observe_seqno,
    Opcode.STAT: _stat,
}

OPERATIONS: dict[int, Operation] = {
    int(opcode): Operation(handler, before_login=True) for opcode, handler in _EARLY.items()
} | {int(opcode): Operation(handler) for opcode, handler in _LATER.items()}
