"""A client's negotiated state and the parts of an answer, common to the sandbox's and the mirror's servers.

Subclasses decide on features, users and the bucket (the abstract methods). If the client negotiated tracing, each
answer except HELLO's has its request's duration (recorded); if it negotiated XERROR, errors have a context in JSON.
"""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mirror.server.errors import Refused
from mirror.server.producer import Producer
from mirror.wire import codec_kv
from mirror.wire import frame as fr
from mirror.wire.constants import Datatype, Feature, Opcode, Status
from mirror.wire.frame import Frame
from mirror.wire.sasl import HASHES, MECHANISMS, SaslError, ScramServer
from storage.model import FailoverLog

JSON = int(Datatype.JSON)

T = TypeVar("T")

Revision = tuple[int, int]
"""(epoch, revision) of a cluster map."""

READ = "Read"
WRITE = "Upsert"
META_READ = "MetaRead"
DCP_PRODUCER = "DcpProducer"
DCP_STREAM = "DcpStream"
SYSTEM_COLLECTIONS = "SystemCollectionLookup"

ALL_PRIVILEGES = frozenset((READ, WRITE, META_READ, DCP_PRODUCER, DCP_STREAM, SYSTEM_COLLECTIONS))
"""The privileges that requests need, with the names of kv_engine (its docs/rbac.md)."""

_HELLO = int(Opcode.HELLO)
_NEVER_SENT: Revision = (-1, -1)


@dataclass(slots=True)
class Reply:
    status: int = Status.SUCCESS
    extras: bytes = b""
    key: bytes = b""
    value: bytes = b""
    datatype: int = 0
    cas: int = 0
    before: tuple[Reply, ...] = ()
    hang_up: bool = False
    """True to close the connection when everything was sent."""


@dataclass(frozen=True, slots=True)
class Later:
    """The answer to the last message of a login. The client's next requests wait for it."""

    wait: Callable[[], Awaitable[None]]
    answer: Callable[[], Reply]
    """Called once `wait` has returned, or at once if the outcome is known."""


def certified_name(certificate: Mapping[str, Any]) -> str | None:
    """Return the common name of a certificate's subject: usually the user's name."""
    for part in certificate.get("subject", ()):
        for name, value in part:
            if name == "commonName":
                return str(value)
    return None


def checked(check: Callable[[], T | None]) -> T | None:
    """Return the result of a login check; None: refused."""
    try:
        return check()
    except SaslError:
        return None


class LoginAttempt(Generic[T]):
    """An attempt to log in. If the connection closes, `wait` is cancelled."""

    def __init__(self, outcome: Callable[[], Awaitable[T | None]], done: tuple[T | None] | None = None) -> None:
        self.done = done
        """None until the outcome is known, then a tuple of it. The outcome None means refused."""
        self._outcome = outcome

    async def wait(self) -> None:
        if self.done is None:
            self.done = (await self._outcome(),)


@dataclass(frozen=True, slots=True)
class VbucketHistory:
    """The data for answers to OBSERVE_SEQNO and GET_FAILOVER_LOG."""

    failover_log: FailoverLog
    """Never empty."""
    current_seqno: int
    persisted_seqno: int | None


def failover_statistics(vbid: int, failover_log: FailoverLog) -> dict[str, str]:
    found = {f"vb_{vbid}:num_entries": str(len(failover_log))}
    for index, (vbuuid, seqno) in enumerate(failover_log):
        found[f"vb_{vbid}:{index}:id"] = str(vbuuid)
        found[f"vb_{vbid}:{index}:seq"] = str(seqno)
    return found


class Session(ABC):
    grantable: frozenset[int]
    version: bytes
    plain_allowed = True
    needs_bucket = True
    """True if requests for the bucket's data are refused before SELECT_BUCKET."""
    bucket_name: str
    map_needs_bucket = False
    """True if GET_CLUSTER_CONFIG is refused before SELECT_BUCKET (servers before 6.5)."""
    no_collections_status: int | None = None
    """The status with which a server without collections refuses requests for them, else None."""
    open_flags = 0
    granted_bytes = 1 << 63
    """Memory for the present request. A handler that needs more raises NeedsMemory."""
    hangs_up = False
    """True if a DCP request out of place ends the connection (6.0 and older, as recorded)."""

    def __init__(self) -> None:
        self.features: frozenset[int] = frozenset()
        self.agent = ""
        self.bucket_selected = False
        self.scram: tuple[str, ScramServer] | None = None
        self.known_map: Revision = _NEVER_SENT
        """The revision of the newest cluster map that was sent to the client."""
        self.producer: Producer[Any, Any] | None = None
        self.xerror = self.tracing = self.collections = self.snappy = self.json = False

    def grant(self, features: frozenset[int]) -> None:
        self.features = features
        self.xerror = Feature.XERROR in features
        self.tracing = Feature.TRACING in features
        self.collections = Feature.COLLECTIONS in features
        self.snappy = Feature.SNAPPY in features
        self.json = Feature.JSON in features

    # -- answers

    def refuse(
        self, status: int, context: str = "", *, with_reference: bool = False, manifest_uid: int | None = None
    ) -> Reply:
        """Return an error answer, with its context if the client negotiated XERROR."""
        if not self.xerror or not (context or with_reference):
            return Reply(status)
        error = {"context": context} if context else {}
        if with_reference:
            error["ref"] = self.error_reference()
        body: dict[str, object] = {"error": error}
        if manifest_uid is not None:
            body["manifest_uid"] = f"{manifest_uid:x}"
        return Reply(status, value=json.dumps(body, separators=(",", ":")).encode(), datatype=JSON)

    def refused(self, error: Refused) -> Reply:
        if error.bare:
            return Reply(error.status, value=error.value)
        if error.status == Status.NOT_MY_VBUCKET:
            return self.not_my_vbucket()
        return self.refuse(
            error.status, error.context, with_reference=error.with_reference, manifest_uid=error.manifest_uid
        )

    def not_my_vbucket(self) -> Reply:
        """Return NOT_MY_VBUCKET with the map, unless the client has the map and gets each map once (SDK RFC 75)."""
        if self.known_map >= self.map_revision and Feature.DEDUPE_NOT_MY_VBUCKET_CLUSTERMAP in self.features:
            return Reply(Status.NOT_MY_VBUCKET)
        return Reply(Status.NOT_MY_VBUCKET, value=self.send_map(with_bucket=True), datatype=JSON)

    def send_map(self, *, with_bucket: bool) -> bytes:
        """Return the cluster map as JSON, and note that the client has it."""
        self.known_map = self.map_revision
        return self.map_text(with_bucket=with_bucket)

    def map_notification(self) -> Frame | None:
        """Return the message about a new cluster map, or None if this client gets no such message (kv_engine
        docs/BinaryProtocol.md, Clustermap Change Notification; SDK RFC 75).
        """
        if not (self.logged_in and Feature.DUPLEX in self.features):
            return None
        name = self.bucket_name.encode() if self.bucket_selected else b""
        if Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF in self.features:
            return codec_kv.clustermap_notification(*self.map_revision, name)
        if Feature.CLUSTERMAP_CHANGE_NOTIFICATION in self.features:
            config = self.send_map(with_bucket=self.bucket_selected)
            return codec_kv.clustermap_notification(*self.map_revision, name, config)
        return None

    def encode(self, request: Frame, reply: Reply, duration_us: float) -> bytes:
        """Return the bytes of the answers in `before` and of the answer itself."""
        framing = b""
        if self.tracing and request.opcode != _HELLO:
            framing = codec_kv.encode_server_duration(duration_us)
        answer = fr.encode(
            fr.response(
                request,
                reply.status,
                datatype=reply.datatype,
                cas=reply.cas,
                framing=framing,
                extras=reply.extras,
                key=reply.key,
                value=reply.value,
            )
        )
        if not reply.before:
            return answer
        return b"".join([*(self.encode(request, each, duration_us) for each in reply.before), answer])

    def error_reference(self) -> str:
        """Return a new id for an error answer. It is not logged."""
        return str(uuid.uuid4())

    # -- policy: login

    @property
    @abstractmethod
    def logged_in(self) -> bool: ...

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """The SASL mechanisms, the best first."""
        return MECHANISMS if self.plain_allowed else tuple(HASHES)

    @abstractmethod
    def password_attempt(self, username: str, password: str) -> LoginAttempt[Any]: ...

    @abstractmethod
    def scram_server(self, mechanism: str) -> ScramServer: ...

    def login_attempt(self, username: str, check: Callable[[], T | None]) -> LoginAttempt[T]:
        """Begin a login. To refuse, `check` returns None or raises SaslError. The default calls `check` at once."""
        found = checked(check)

        async def outcome() -> T | None:
            return found

        return LoginAttempt(outcome, (found,))

    @abstractmethod
    def log_in(self, username: str) -> None: ...

    @abstractmethod
    def log_out(self) -> None: ...

    def login_failed(self) -> bool:
        """Count a failed login. Return True to hang up."""
        return False

    def may(self, privilege: str) -> bool:
        """Return True if the user has a privilege now. A server without privileges grants all of them."""
        return True

    # -- policy: the bucket

    @property
    @abstractmethod
    def map_revision(self) -> Revision: ...

    @abstractmethod
    def map_text(self, *, with_bucket: bool) -> bytes:
        """Return the newest cluster map as JSON; without `with_bucket`, only its nodes."""

    @property
    @abstractmethod
    def manifest_uid(self) -> int: ...

    @abstractmethod
    def manifest_text(self) -> bytes:
        """Return the newest manifest as GET_COLLECTIONS_MANIFEST answers it."""

    @abstractmethod
    def scope_id(self, name: str) -> int | None:
        """Return the id of a scope that the client may see; None: there is none."""

    @abstractmethod
    def collection_id(self, scope: str, name: str) -> int | None:
        """Return the id of a collection that the client may see; None: there is none."""

    @abstractmethod
    def all_vb_seqnos(self, state: int, collection_id: int | None) -> Reply: ...

    @abstractmethod
    def vbucket_history(self, vbid: int) -> VbucketHistory:
        """Raises Refused for a vbucket that is not served here now."""

    def persistence_unknown(self) -> Refused:
        """Return the refusal for a client that asks which seqnos are persisted (`VbucketHistory.persisted_seqno`)."""
        return Refused(Status.NOT_SUPPORTED, "a mirror with publish=received does not know persisted seqnos")

    @abstractmethod
    def statistics(self, group: str, vbid: int | None) -> dict[str, str]:
        """Return the statistics named `group`, of one vbucket or all. Raises Refused."""

    def open_producer(self, name: str, flags: int) -> None:
        """Set `producer`, and close an older connection of the same name. This implementation refuses."""
        raise Refused(Status.NOT_SUPPORTED)


SessionT_contra = TypeVar("SessionT_contra", bound=Session, contravariant=True)

Answer = Reply | Later | None
"""None: the request gets no answer."""

Handler = Callable[[SessionT_contra, Frame], Answer]


@dataclass(frozen=True, slots=True)
class Operation(Generic[SessionT_contra]):
    handle: Callable[[SessionT_contra, Frame], Answer]
    before_login: bool = False
    without_bucket: bool = False
    privilege: str = ""
    """The privilege that the client needs; empty: none."""
    checked: bool = True
    """True if extras, key and value must have the opcode's shape (`codec_kv.check_request`)."""
