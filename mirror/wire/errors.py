"""Errors between two peers, by the side that made them.

    ProtocolError
    |-- LocalProtocolError    we were about to break the rules: nothing was sent, the peer need not know
    `-- RemoteProtocolError   the peer broke them: what it sends from here on cannot be trusted, close the connection

Knows the names of opcodes; must never know a connection or a buffer. Invariant: every error says what is wrong in
`detail` and, where they are known, at which opcode and vbucket. Decoding bytes of a peer raises RemoteProtocolError
and nothing else; any other exception out of this package is a defect of it.
"""

from __future__ import annotations

from typing import ClassVar

from mirror.wire.constants import Status, opcode_name


class ProtocolError(Exception):
    """A rule of the protocol was broken. Abstract: raised as one of its two children."""

    retryable: ClassVar[bool] = False
    hint: ClassVar[str] = ""

    def __init__(
        self, detail: str, *, op: int | None = None, vbid: int | None = None, status: int = Status.EINVAL
    ) -> None:
        self.detail = detail
        self.op = op
        self.vbid = vbid
        self.status = int(status)
        """A server's answer, if the message can be answered at all."""
        self.opaque: int | None = None
        """Opaque of the request at fault, if there is one to answer."""
        super().__init__(detail)

    def __str__(self) -> str:
        where = []
        if self.op is not None:
            where.append(opcode_name(self.op))
        if self.vbid is not None:
            where.append(f"vb {self.vbid}")
        return f"{' '.join(where)}: {self.detail}" if where else self.detail


class LocalProtocolError(ProtocolError):
    """The protocol does not allow our message or action now; the connection is as it was."""

    hint: ClassVar[str] = "A defect of this program: report it with the lines before it in the log."


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol; close the connection and start again."""

    retryable: ClassVar[bool] = True
    hint: ClassVar[str] = "Is a Couchbase data service listening there, on the data port (11210, or 11207 for TLS)?"
