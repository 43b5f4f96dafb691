"""Requests that would change a document: refused, because a mirror is read only. `mirror.server` has the reads.

LIST_BUCKETS is answered here as well: the mirror has exactly one.
"""

from __future__ import annotations

from mirror.serve.kv.session import READ_ONLY, KvSession
from mirror.server.errors import Refused
from mirror.server.session import Operation, Reply
from mirror.wire.constants import SUBDOC_CHANGES, Opcode, Status
from mirror.wire.frame import Frame

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
        *SUBDOC_CHANGES,
        Opcode.SUBDOC_MULTI_MUTATION,
    )
)
"""Requests that would change a document, its expiry or its lock."""


def _refuse_change(_session: KvSession, _frame: Frame) -> Reply:
    raise Refused(Status.NOT_SUPPORTED, READ_ONLY)


def _list_buckets(session: KvSession, _frame: Frame) -> Reply:
    return Reply(value=session.bucket_name.encode())


OPERATIONS: dict[int, Operation[KvSession]] = {
    **{opcode: Operation(_refuse_change, checked=False) for opcode in CHANGES},
    int(Opcode.LIST_BUCKETS): Operation(_list_buckets, checked=False),
}
