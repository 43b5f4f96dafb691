"""What one client said about itself, and how its requests are answered: the shape shared by all operations.

Knows features, user, chosen bucket, and the parts of an answer; must never know sockets or what an operation does.
Invariants: an answer goes out in the framing that was negotiated (recordings sdk_72_*: with tracing every answer is
flexible and tells how long it took); error contexts are JSON and only for clients that asked for them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from mirror.feed.sasl import ScramServer
from mirror.sandbox.bucket import Bucket
from mirror.sandbox.dcp import DcpProducer
from mirror.sandbox.users import SYSTEM_COLLECTIONS, User
from mirror.wire import frame as fr
from mirror.wire.constants import Feature, Status
from mirror.wire.frame import Frame

TRACING = b"\x02\x00\x01"
"""Frame info of an answer: it took about a microsecond."""

JSON = 1


@dataclass(slots=True)
class Reply:
    """An answer without its addressing."""

    status: int = Status.SUCCESS
    extras: bytes = b""
    key: bytes = b""
    value: bytes = b""
    datatype: int = 0
    cas: int = 0
    after: bytes = b""
    """Bytes to send behind the answer."""
    then: Callable[[], None] | None = None
    """Called when the answer was sent."""


class SessionPort(Protocol):
    """What an operation may ask of the connection and node that it came by."""

    @property
    def bucket(self) -> Bucket:
        """The bucket."""

    @property
    def node_number(self) -> int:
        """The node's number in the cluster."""

    def send(self, data: bytes) -> None:
        """Send bytes."""

    def close(self) -> None:
        """Hang up when everything was sent."""

    def open_producer(self, name: str, flags: int) -> None:
        """Turn the connection into a DCP producer's: sets the session's `producer`."""


@dataclass(slots=True)
class Session:
    """A client."""

    port: SessionPort
    features: set[int] = field(default_factory=set)
    agent: str = ""
    user: User | None = None
    certified: bool = False
    """The user came with a certificate, not with a password."""
    bucket_selected: bool = False
    map_sent: tuple[int, int] = (-1, -1)
    """The newest (epoch, revision) of the cluster map that this client was sent or told of."""
    scram: ScramServer | None = None
    producer: DcpProducer | None = None

    @property
    def bucket(self) -> Bucket:
        """The bucket, chosen or not."""
        return self.port.bucket

    def has(self, feature: Feature) -> bool:
        """Whether a feature was granted."""
        return feature in self.features

    def may(self, privilege: str) -> bool:
        """Whether the user has a privilege now."""
        return self.user is not None and privilege in self.user.privileges

    @property
    def sees_system(self) -> bool:
        """Whether the system's collections exist for the user."""
        return not self.bucket.profile.system_collections or self.may(SYSTEM_COLLECTIONS)

    def respond(self, to: Frame, reply: Reply) -> None:
        """Send an answer."""
        framing = TRACING if self.has(Feature.TRACING) and to.opcode != 0x1F else b""
        answer = fr.response(
            to,
            reply.status,
            datatype=reply.datatype,
            cas=reply.cas,
            framing=framing,
            extras=reply.extras,
            key=reply.key,
            value=reply.value,
        )
        self.port.send(fr.encode(answer) + reply.after)
        if reply.then is not None:
            reply.then()

    def refuse(self, status: int, context: str = "", *, with_reference: bool = False, manifest: bool = False) -> Reply:
        """An error answer, with its context where the client wants one."""
        if not self.has(Feature.XERROR):
            return Reply(status)
        error: dict[str, str] = {}
        if context:
            error["context"] = context
        if with_reference:
            error["ref"] = str(uuid.UUID(int=self.bucket.rng.getrandbits(128)))
        if not error:
            return Reply(status)
        body: dict[str, object] = {"error": error}
        if manifest:
            body["manifest_uid"] = f"{self.bucket.manifest.uid:x}"
        return Reply(status, value=json.dumps(body, separators=(",", ":")).encode(), datatype=JSON)

    def refuse_privilege(self, what: str, privilege: str) -> Reply:
        """The answer to who may not do this."""
        context = f"Authorization failure: can't execute {what} operation without the {privilege} privilege"
        return self.refuse(Status.EACCESS, context, with_reference=True)

    def refuse_collection(self, status: int = Status.UNKNOWN_COLLECTION) -> Reply:
        """The answer for a collection or scope that the manifest does not have."""
        return self.refuse(status, "Unknown scope or collection in operation", manifest=True)


Handler = Callable[[Session, Frame], Reply | None]


@dataclass(frozen=True, slots=True)
class Operation:
    """A row of the dispatch table."""

    handle: Handler
    before_login: bool = False
    without_bucket: bool = False
    privilege: str = ""
    """Who lacks it is refused."""
