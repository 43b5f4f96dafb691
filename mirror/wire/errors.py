"""Protocol errors, by the side that broke the rules.

    ProtocolError
    |-- LocalProtocolError    our message or action would break the rules; it was not sent
    `-- RemoteProtocolError   the peer broke the rules; close the connection

Decoding a peer's bytes raises only RemoteProtocolError (SaslError in `sasl`); any other exception is a defect of this
package.
"""

from __future__ import annotations

from typing import ClassVar

from mirror.wire.constants import Status, opcode_name


class ProtocolError(Exception):
    """A rule of the protocol was broken. Only the two subclasses are raised."""

    retryable: ClassVar[bool] = False
    hint: ClassVar[str] = ""

    def __init__(
        self, detail: str, *, op: int | None = None, vbid: int | None = None, status: int = Status.EINVAL
    ) -> None:
        self.detail = detail
        self.op = op
        self.vbid = vbid
        self.status = int(status)
        """The status of a server's answer, if the faulty message is a request."""
        super().__init__(detail)

    def __str__(self) -> str:
        where = []
        if self.op is not None:
            where.append(opcode_name(self.op))
        if self.vbid is not None:
            where.append(f"vb {self.vbid}")
        return f"{' '.join(where)}: {self.detail}" if where else self.detail


class LocalProtocolError(ProtocolError):
    hint: ClassVar[str] = "A defect of this program: report it with the lines before it in the log."


class RemoteProtocolError(ProtocolError):
    retryable: ClassVar[bool] = True
    hint: ClassVar[str] = "Is a Couchbase data service listening there, on the data port (11210, or 11207 for TLS)?"
