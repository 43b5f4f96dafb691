"""The state of a vbucket of the embedded source at any seqno, and changes that clients cannot make."""

from __future__ import annotations

from mirror.sandbox.data.bucket import DEFAULT_COLLECTION, Bucket, vbucket_of
from mirror.sandbox.data.item import ABORT, PREPARE, SYSTEM_EVENT, Item
from mirror.sandbox.data.sandbox_vbucket import Vbucket, system_id
from mirror.wire.constants import SystemEventId
from storage.model import FailoverLog


def state_at(vbucket: Vbucket, seqno: int | None = None, *, tombstones: bool = False) -> dict[bytes, Item]:
    """Return `state_of` the current history at a seqno."""
    seqno = vbucket.high_seqno if seqno is None else seqno
    if not vbucket.forgotten_seqno <= seqno <= vbucket.high_seqno:
        raise LookupError(f"seqno {seqno} is not in {vbucket.forgotten_seqno} to {vbucket.high_seqno}")
    return state_of(vbucket.log, seqno, tombstones=tombstones)


def state_of(log: list[Item], seqno: int, *, tombstones: bool = False) -> dict[bytes, Item]:
    """Return wire key -> version at a seqno of a history. A purge changes nothing here. With `tombstones` deleted keys
    are there, too.
    """
    state: dict[bytes, Item] = {}
    for item in log:
        if item.seqno > seqno:
            break
        if item.kind == SYSTEM_EVENT:
            if item.event in (SystemEventId.COLLECTION_BEGIN, SystemEventId.COLLECTION_END):
                id_ = system_id(item)
                for key in [key for key, old in state.items() if old.collection_id == id_]:
                    del state[key]
        elif item.kind in (PREPARE, ABORT):
            continue
        elif item.deleted and not tombstones:
            state.pop(item.key, None)
        else:
            state[item.key] = item
    return state


def expire(bucket: Bucket, key: str | bytes, *, collection: str = DEFAULT_COLLECTION, vbid: int | None = None) -> Item:
    """Make a living document expire now. Raises DocumentError."""
    wire_key = bucket.wire_key(key, collection)
    if vbid is None:
        vbid = vbucket_of(key.encode() if isinstance(key, str) else key, len(bucket.vbuckets))
    vbucket = bucket.vbuckets[vbid]
    return bucket.documents.expire(vbucket, bucket.documents.get(vbucket, wire_key))


def reset(vbucket: Vbucket) -> None:
    """Delete and recreate a vbucket: it is empty and has another history."""
    vbucket.forgotten_seqno = vbucket._forgotten_purge_seqno = 0
    vbucket._cut(0)
    vbucket.failover_log = FailoverLog.of([(vbucket._new_vbuuid(), 0)])
    vbucket.purge_seqno = 0
    vbucket._notify()
