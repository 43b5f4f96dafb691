"""Dispatch of a request: check login, bucket, privilege and shape, then call the operation.

If the operation refuses the request, or cannot decode it, the client gets a status and the connection stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from mirror.server.errors import Refused
from mirror.server.session import Later, Operation, Reply, Session
from mirror.wire import codec_kv
from mirror.wire.constants import Status, opcode_name
from mirror.wire.errors import ProtocolError
from mirror.wire.frame import Frame

SessionT = TypeVar("SessionT", bound=Session)
T = TypeVar("T")


def answer(session: SessionT, operations: Mapping[int, Operation[SessionT]], frame: Frame) -> Reply | Later | None:
    """Return the answer, or None if the request gets none. Raises OutOfPlace if the server must hang up."""
    operation = operations.get(frame.opcode)
    if not session.logged_in and not (operation and operation.before_login):
        return Reply(Status.EACCESS)
    if operation is None:
        return session.refuse(Status.UNKNOWN_COMMAND)
    if session.needs_bucket and not (session.bucket_selected or operation.without_bucket):
        return Reply(Status.NO_BUCKET)
    if operation.privilege and not session.may(operation.privilege):
        context = (
            f"Authorization failure: can't execute {opcode_name(frame.opcode)} operation"
            f" without the {operation.privilege} privilege"
        )
        return session.refuse(Status.EACCESS, context, with_reference=True)
    return guarded(session, partial(_checked, operation, session, frame))


def answer_at_once(session: SessionT, operations: Mapping[int, Operation[SessionT]], frame: Frame) -> Reply | None:
    """Return the answer. Only the sandbox calls this, where the outcome of a login is known at once."""
    found = answer(session, operations, frame)
    return found.answer() if isinstance(found, Later) else found


def _checked(operation: Operation[SessionT], session: SessionT, frame: Frame) -> Reply | Later | None:
    if operation.checked:
        codec_kv.check_request(frame)
    return operation.handle(session, frame)


def guarded(session: Session, compute: Callable[[], T]) -> T | Reply:
    """Return the result of `compute`, or an error answer if `compute` raises Refused or ProtocolError."""
    try:
        return compute()
    except Refused as error:
        return session.refused(error)
    except ProtocolError as error:
        return session.refuse(error.status, error.detail)
