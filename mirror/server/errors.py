"""Exceptions with which the operations of KV and DCP servers refuse requests."""

from __future__ import annotations

from mirror.wire import codec_dcp
from mirror.wire.constants import Status

UNKNOWN_COLLECTION_CONTEXT = "Unknown scope or collection in operation"
RIGHTS_CHANGED = "the rights of this user were changed"
"""The text that refuses a request if its reader's rights changed after the request began."""


class Refused(Exception):
    def __init__(
        self,
        status: int,
        context: str = "",
        *,
        manifest_uid: int | None = None,
        value: bytes = b"",
        with_reference: bool = False,
        bare: bool = False,
    ) -> None:
        """`context` is sent to clients that negotiated XERROR. `bare`: the answer is the status and `value` alone."""
        super().__init__(context)
        self.status = status
        self.context = context
        self.manifest_uid = manifest_uid
        self.value = value
        self.with_reference = with_reference
        self.bare = bare or bool(value)


class OutOfPlace(Exception):
    """The request is not possible now; the server hangs up without an answer."""


def unknown_collection(manifest_uid: int, status: int = Status.UNKNOWN_COLLECTION) -> Refused:
    return Refused(status, UNKNOWN_COLLECTION_CONTEXT, manifest_uid=manifest_uid)


def rolled_back(seqno: int) -> Refused:
    """Return the refusal of a stream request whose client must go back to `seqno` or below."""
    return Refused(Status.ROLLBACK, value=codec_dcp.encode_rollback_seqno(seqno))


class NeedsMemory(Exception):
    """A request needs more than `Session.granted_bytes`. Its handler has had no effect, and can run again."""

    def __init__(self, byte_count: int) -> None:
        super().__init__(byte_count)
        self.byte_count = byte_count
