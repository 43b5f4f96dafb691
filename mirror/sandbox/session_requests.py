"""Answers to what a client asks before and beside documents: HELLO, login, map, collections, statistics, seqnos.

Knows these operations as kv_engine answers them (docs/BinaryProtocol.md, recordings sdk_72_*, 72_i*); must never know
sockets or documents. Invariants: features are granted only as the profile has them, in ascending order;
nothing but HELLO and login is answered before login.
"""

from __future__ import annotations

import struct

from mirror.feed.sasl import HASHES, MECHANISMS, SaslError, ScramServer, plain_decode
from mirror.sandbox.session import JSON, Handler, Operation, Reply, Session
from mirror.sandbox.users import META_READ
from mirror.wire import codec_dcp, codec_kv
from mirror.wire.constants import Feature, Opcode, Status, VbucketState
from mirror.wire.errormap import error_map
from mirror.wire.frame import Frame

_ID = struct.Struct(">QI")
_U64 = struct.Struct(">Q")
_NOTICES = {Feature.CLUSTERMAP_CHANGE_NOTIFICATION, Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF}


def _hello(session: Session, frame: Frame) -> Reply:
    agent, asked = codec_kv.decode_hello(frame)
    session.agent = agent.decode(errors="replace")
    granted = sorted(session.bucket.profile.features.intersection(asked))
    if Feature.DUPLEX not in granted and not _NOTICES.isdisjoint(granted):
        return session.refuse(Status.EINVAL, "Clustermap change notification needs Duplex")
    session.features = set(granted)
    return Reply(value=codec_kv.encode_features(granted))


def _list_mechanisms(session: Session, _frame: Frame) -> Reply:
    if session.certified:  # who came with a certificate is who it says (kv_engine: no SASL on such a connection)
        return session.refuse(Status.NOT_SUPPORTED)
    return Reply(value=" ".join(MECHANISMS).encode())


def _auth(session: Session, frame: Frame) -> Reply:
    mechanism, data = codec_kv.decode_sasl(frame)
    if session.certified:
        return session.refuse(Status.NOT_SUPPORTED)
    users = session.bucket.users
    name = mechanism.decode(errors="replace")
    session.user = None
    try:
        if name == "PLAIN":
            username, password = plain_decode(data)
            if users.password_of(username) != password:
                raise SaslError("wrong user or password")
            session.user = users.by_name[username]
            return Reply()
        if name not in HASHES:
            raise SaslError("no such mechanism")
        session.scram = ScramServer(name, users.password_of)
        return Reply(Status.AUTH_CONTINUE, value=session.scram.challenge(data))
    except SaslError:
        session.scram = None
        return session.refuse(Status.AUTH_ERROR, with_reference=True)


def _step(session: Session, frame: Frame) -> Reply:
    _, data = codec_kv.decode_sasl(frame)
    scram, session.scram = session.scram, None
    try:
        if scram is None:
            raise SaslError("no exchange is under way")
        outcome = scram.outcome(data)
    except SaslError:
        return session.refuse(Status.AUTH_ERROR, with_reference=True)
    session.user = session.bucket.users.by_name[scram.username]
    return Reply(value=outcome)


def _error_map(_session: Session, frame: Frame) -> Reply:
    version = codec_kv.decode_error_map_request(frame)
    if version < 1:
        return Reply(Status.EINVAL)
    return Reply(value=error_map(min(version, 2)), datatype=JSON)


def _select_bucket(session: Session, frame: Frame) -> Reply:
    if frame.key.decode(errors="replace") != session.bucket.name:
        return session.refuse(Status.EACCESS, with_reference=True)
    session.bucket_selected = True
    return Reply()


def _cluster_config(session: Session, frame: Frame) -> Reply:
    known = codec_kv.decode_cluster_config_request(frame)
    cluster_map = session.bucket.map
    if not session.bucket_selected and not session.bucket.profile.map_without_bucket:
        return Reply(Status.NO_BUCKET)
    if known is not None and known >= (cluster_map.epoch, cluster_map.rev):
        return Reply()
    session.map_sent = cluster_map.epoch, cluster_map.rev
    config = cluster_map.to_json(session.port.node_number, with_bucket=session.bucket_selected)
    return Reply(value=config, datatype=JSON)


def _no_collections(session: Session) -> Reply:
    """The answer of servers that have none: those of 6.5 and 6.6 know the request at least."""
    return session.refuse(Status.NOT_SUPPORTED if session.bucket.profile.since(6, 5) else Status.UNKNOWN_COMMAND)


def _manifest(session: Session, _frame: Frame) -> Reply:
    if not session.bucket.profile.collections:
        return _no_collections(session)
    return Reply(value=session.bucket.manifest.to_json(with_system=session.sees_system), datatype=JSON)


def _collection_id(session: Session, frame: Frame) -> Reply:
    if not session.bucket.profile.collections:
        return _no_collections(session)
    path = (frame.value or frame.key).decode(errors="replace")
    manifest = session.bucket.manifest
    scope, _, _ = path.rpartition(".")
    if path.count(".") != 1:
        return session.refuse(Status.EINVAL)
    if manifest.scope_id(scope) is None:
        return session.refuse_collection(Status.UNKNOWN_COLLECTION if scope else Status.UNKNOWN_SCOPE)
    entry = manifest.collection(path)
    if entry is None or (entry.collection_id in manifest.system_collections and not session.sees_system):
        return session.refuse_collection()
    return Reply(extras=_ID.pack(manifest.uid, entry.collection_id))


def _scope_id(session: Session, frame: Frame) -> Reply:
    if not session.bucket.profile.collections:
        return _no_collections(session)
    name = (frame.value or frame.key).decode(errors="replace").split(".")[0]
    manifest = session.bucket.manifest
    scope_id = manifest.scope_id(name)
    if scope_id is None or (scope_id in manifest.system_scopes and not session.sees_system):
        return session.refuse_collection(Status.UNKNOWN_SCOPE)
    return Reply(extras=_ID.pack(manifest.uid, scope_id))


def _nothing(_session: Session, _frame: Frame) -> Reply:
    return Reply()


def _quit(session: Session, _frame: Frame) -> Reply:
    return Reply(then=session.port.close)


def _quit_quietly(session: Session, _frame: Frame) -> None:
    session.port.close()


def _version(session: Session, _frame: Frame) -> Reply:
    return Reply(value=session.bucket.profile.version)


def _all_vb_seqnos(session: Session, frame: Frame) -> Reply:
    wanted, collection_id = codec_dcp.decode_all_vb_seqnos_request(frame)
    bucket = session.bucket
    if collection_id is not None and not session.has(Feature.COLLECTIONS):
        return session.refuse(Status.EINVAL)
    if collection_id is None and not session.has(Feature.COLLECTIONS):
        collection_id = 0
    if collection_id is not None and collection_id not in bucket.manifest.collections:
        return session.refuse_collection()
    states = {VbucketState.ACTIVE, VbucketState.REPLICA, VbucketState.PENDING}
    if wanted != VbucketState.ALIVE:
        states = {VbucketState(wanted)}
    seqnos = []
    for vbid, vbucket in enumerate(bucket.vbuckets):
        if bucket.state_on(vbid, session.port.node_number) in states:
            high = vbucket.high_seqno
            if not session.has(Feature.SYNC_REPLICATION):
                high = vbucket.max_visible_seqno()
            if collection_id is not None:
                high = vbucket.collection_high_seqno.get(collection_id, 0)
            seqnos.append((vbid, high))
    return Reply(value=codec_dcp.encode_all_vb_seqnos(seqnos))


def failover_log(session: Session, frame: Frame) -> Reply:
    """The failover log of a vbucket, as DCP_GET_FAILOVER_LOG and its older form answer it."""
    bucket = session.bucket
    if bucket.state_on(frame.vbucket, session.port.node_number) == VbucketState.DEAD:
        return not_my_vbucket(session)
    log = bucket.vbuckets[frame.vbucket].failover_log
    return Reply(value=codec_dcp.encode_failover_log([(int(entry.vbuuid), int(entry.seqno)) for entry in log]))


def not_my_vbucket(session: Session) -> Reply:
    """The refusal that tells where the vbucket is; not twice where the client wants no map twice (SDK RFC 75)."""
    cluster_map = session.bucket.map
    revision = cluster_map.epoch, cluster_map.rev
    if session.has(Feature.DEDUPE_NOT_MY_VBUCKET_CLUSTERMAP) and session.map_sent >= revision:
        return Reply(Status.NOT_MY_VBUCKET)
    session.map_sent = revision
    config = cluster_map.to_json(session.port.node_number, with_bucket=True)
    return Reply(Status.NOT_MY_VBUCKET, value=config, datatype=JSON)


def _observe_seqno(session: Session, frame: Frame) -> Reply:
    asked = codec_kv.decode_observe_seqno_request(frame)
    bucket, vbid = session.bucket, frame.vbucket
    if bucket.state_on(vbid, session.port.node_number) not in (VbucketState.ACTIVE, VbucketState.REPLICA):
        return not_my_vbucket(session)
    vbucket = bucket.vbuckets[vbid]
    high = vbucket.high_seqno
    persisted = bucket.persisted_seqno(vbid, session.port.node_number)
    if asked == vbucket.vbuuid:
        seen = codec_kv.ObservedSeqno(vbid, asked, persisted, high)
        return Reply(value=codec_kv.encode_observe_seqno(seen))
    upper = high
    for entry in vbucket.failover_log:
        if entry.vbuuid == asked:
            seen = codec_kv.ObservedSeqno(vbid, vbucket.vbuuid, persisted, high, asked, upper)
            return Reply(value=codec_kv.encode_observe_seqno(seen))
        upper = entry.seqno
    return session.refuse(Status.KEY_ENOENT)


def _stat(session: Session, frame: Frame) -> Reply:
    group, _, rest = frame.key.decode(errors="replace").partition(" ")
    if group not in _STATS:
        return session.refuse(Status.KEY_ENOENT)
    found: dict[str, str] = {}
    bucket = session.bucket
    vbids = [int(rest)] if rest.isdigit() else range(len(bucket.vbuckets))
    for vbid in vbids:
        state = bucket.state_on(vbid, session.port.node_number)
        if state == VbucketState.DEAD:
            if rest:
                return not_my_vbucket(session)
            continue
        found |= _STATS[group](session, vbid, state)
    for key, value in found.items():
        session.respond(frame, Reply(key=key.encode(), value=value.encode()))
    return Reply()


def _stat_general(session: Session, _vbid: int, _state: VbucketState) -> dict[str, str]:
    return {
        "curr_items": str(session.bucket.document_count),
        "version": session.bucket.profile.version.decode(),
        "ep_bucket_type": "ephemeral",
    }


def _stat_state(_session: Session, vbid: int, state: VbucketState) -> dict[str, str]:
    return {f"vb_{vbid}": state.name.lower()}


def _stat_seqno(session: Session, vbid: int, _state: VbucketState) -> dict[str, str]:
    vbucket = session.bucket.vbuckets[vbid]
    high = str(vbucket.high_seqno)
    names = ("high_seqno", "abs_high_seqno", "last_persisted_seqno")
    return {f"vb_{vbid}:{name}": high for name in names} | {
        f"vb_{vbid}:max_visible_seqno": str(vbucket.max_visible_seqno()),
        f"vb_{vbid}:purge_seqno": str(vbucket.purge_seqno),
        f"vb_{vbid}:uuid": str(vbucket.vbuuid),
    }


def _stat_failovers(session: Session, vbid: int, _state: VbucketState) -> dict[str, str]:
    found = {f"vb_{vbid}:num_entries": str(len(session.bucket.vbuckets[vbid].failover_log))}
    for index, entry in enumerate(session.bucket.vbuckets[vbid].failover_log):
        found[f"vb_{vbid}:{index}:id"] = str(entry.vbuuid)
        found[f"vb_{vbid}:{index}:seq"] = str(entry.seqno)
    return found


_STATS = {
    "": _stat_general,
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
    Opcode.QUIT: _quit,
    Opcode.QUITQ: _quit_quietly,
}
_WITHOUT_BUCKET: dict[int, Handler] = {
    Opcode.SELECT_BUCKET: _select_bucket,
    Opcode.GET_CLUSTER_CONFIG: _cluster_config,
}
_WITH_BUCKET: dict[int, Handler] = {
    Opcode.GET_COLLECTIONS_MANIFEST: _manifest,
    Opcode.GET_COLLECTION_ID: _collection_id,
    Opcode.GET_SCOPE_ID: _scope_id,
    Opcode.GET_ALL_VB_SEQNOS: _all_vb_seqnos,
    Opcode.GET_FAILOVER_LOG: failover_log,
    Opcode.OBSERVE_SEQNO: _observe_seqno,
    Opcode.STAT: _stat,
}

_METAS = frozenset((Opcode.GET_ALL_VB_SEQNOS, Opcode.GET_FAILOVER_LOG, Opcode.OBSERVE_SEQNO))

OPERATIONS: dict[int, Operation] = (
    {opcode: Operation(handler, before_login=True, without_bucket=True) for opcode, handler in _EARLY.items()}
    | {opcode: Operation(handler, without_bucket=True) for opcode, handler in _WITHOUT_BUCKET.items()}
    | {
        opcode: Operation(handler, privilege=META_READ if opcode in _METAS else "")
        for opcode, handler in _WITH_BUCKET.items()
    }
)
