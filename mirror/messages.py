"""The messages of one service: a class for each command of the control socket and each message between processes.

A message travels as an object with `op` and a key for each field: a line of JSON on the control socket, msgpack on a
pipe. Unknown keys are ignored, because client and service may have different versions. Values inside a report are not
checked, because both ends of a pipe run the same program.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, TypedDict, cast, get_args, get_origin, get_type_hints

from mirror.config import Values
from mirror.errors import ConfigError, SupervisionError

# commands from clients to a service, and from a service to its workers and servers


@dataclass(frozen=True, slots=True)
class Ping:
    """Answer: `pid`."""

    op: ClassVar[str] = "ping"


@dataclass(frozen=True, slots=True)
class GetSource:
    """Answer: `settings`, those in `config.OF_SOURCE`."""

    op: ClassVar[str] = "source"


@dataclass(frozen=True, slots=True)
class GetStatus:
    """A service answers `status` in the shape of cli/JSON.md; a worker or server answers a `ProcessReport`."""

    op: ClassVar[str] = "status"


@dataclass(frozen=True, slots=True)
class StopService:
    op: ClassVar[str] = "stop"


@dataclass(frozen=True, slots=True)
class RollBack:
    """Roll a vbucket back to its newest kept boundary at or below a seqno. Answer: `result`."""

    op: ClassVar[str] = "rollback"
    vbid: int
    to: int


@dataclass(frozen=True, slots=True)
class Resync:
    """Read a vbucket again from seqno 0, next to its old copy. Answer: `result`."""

    op: ClassVar[str] = "resync"
    vbid: int


@dataclass(frozen=True, slots=True)
class GrantLease:
    """Grant or renew a lease. Answer: `id`, `until_ms`."""

    op: ClassVar[str] = "lease"
    id: str
    name: str
    seconds: float
    positions: list[list[int]]
    """[vbid, branch, seqno] each."""


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    """End a lease. A service answers `released`."""

    op: ClassVar[str] = "release"
    id: str


@dataclass(frozen=True, slots=True)
class HoldPositions:
    op: ClassVar[str] = "lease"
    id: str
    until_ms: int
    positions: list[list[int]]


@dataclass(frozen=True, slots=True)
class NoteContact:
    """To a DCP process: the vbuckets that have no contact with the source."""

    op: ClassVar[str] = "contact"
    lost: list[list[int]]
    """[vbid, milliseconds since the last contact] each."""


ControlCommand = Ping | GetSource | GetStatus | StopService | RollBack | Resync | GrantLease | ReleaseLease
ProcessCommand = GetStatus | RollBack | Resync | HoldPositions | ReleaseLease | NoteContact

# the pipe between the supervisor and one process


@dataclass(frozen=True, slots=True)
class StartWorker:
    op: ClassVar[str] = "start-worker"
    slot: int
    """The numbered place of the process."""
    groups: list[int]
    settings: Values
    """From `config.to_wire`."""
    leases: list[HoldPositions] = field(default_factory=list)
    """Leases that exist when the worker starts."""
    cluster_map: dict[str, Any] | None = None
    """The newest cluster map, from `ClusterMap.to_wire`."""
    map_floor: list[int] | None = None
    """Epoch and revision of the newest map ever followed."""
    group_mark: int = -1
    """Inherited descriptor of the `GroupMark`: shared memory in which the worker notes its current group."""
    quarantined: list[list[Any]] = field(default_factory=list)
    """[group, reason] of each group that must not be opened."""
    ends_on_refusal: bool = False
    """True: the worker ends if the source refuses it. False: it reports the refusal and retries."""


@dataclass(frozen=True, slots=True)
class StartServer:
    op: ClassVar[str] = "start-server"
    slot: int
    settings: Values
    kind: str
    revision: int
    """Revision of the cluster map that a KV or DCP server gives its clients."""
    login_secret: str
    listeners: list[list[Any]]
    """[address, inherited descriptor or None] each."""


@dataclass(frozen=True, slots=True)
class StopWork:
    op: ClassVar[str] = "stop"


@dataclass(frozen=True, slots=True)
class Request:
    op: ClassVar[str] = "request"
    id: int
    command: ProcessCommand


@dataclass(frozen=True, slots=True)
class NewClusterMap:
    """From a worker: a new cluster map. To a worker: the cluster map to follow."""

    op: ClassVar[str] = "map"
    cluster_map: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat: the event loop of the process runs."""

    op: ClassVar[str] = "beat"


@dataclass(frozen=True, slots=True)
class Turned:
    """A worker's news: it has opened all streams, lost a stream, or caught up."""

    op: ClassVar[str] = "turned"


@dataclass(frozen=True, slots=True)
class Ready:
    op: ClassVar[str] = "ready"


@dataclass(frozen=True, slots=True)
class Answer:
    """A value, or the error of a refused request."""

    op: ClassVar[str] = "answer"
    id: int
    value: Reply | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ExitReport:
    """The reason why the process exits, or why the supervisor kills it."""

    op: ClassVar[str] = "failed"
    message: str
    exit_code: int | None = None
    fatal: bool = False
    """True if a restart would end in the same way."""


StartMessage = StartWorker | StartServer
PipeMessage = (
    StartWorker | StartServer | StopWork | Request | NewClusterMap | Beat | Turned | Ready | Answer | ExitReport
)

Message = ControlCommand | ProcessCommand | PipeMessage

# reports


Rows = list[dict[str, Any]]
"""Rows of a report. The reporting process chooses their keys."""


class GroupFailure(TypedDict):
    group: int
    message: str
    exit_code: int


class ProcessReport(TypedDict, total=False):
    vbuckets: Rows
    groups: Rows
    nodes: Rows
    counters: dict[str, int]
    """Name -> count. A count only rises."""
    map: dict[str, int | None]
    """`rev_epoch`, `rev` and number of `nodes` of the followed cluster map."""
    error: str | None
    selection: str
    warnings: list[str]
    readers: Rows
    failed_groups: list[GroupFailure]
    request_seconds: Mapping[str, object]
    connections: int
    """Only an HTTP server reports this and the next three fields."""
    streams: int
    turned_away: int
    unsent_bytes: int


Status = dict[str, Any]
Reply = dict[str, Any]
"""The answer to a command. The command's docstring names the keys, if any."""

# the wire


def encode(message: Message) -> Reply:
    values = {each.name: _encoded(getattr(message, each.name)) for each in fields(message)}
    return {"op": message.op} | values


def _encoded(value: Any) -> Any:
    if isinstance(value, get_args(Message)):
        return encode(value)
    if isinstance(value, list) and value and isinstance(value[0], get_args(Message)):
        return [encode(each) for each in value]
    return value


def control_command(message: Mapping[str, Any]) -> ControlCommand:
    """Decode an object from the control socket. Raises SupervisionError, ConfigError."""
    return cast(ControlCommand, _decode(ControlCommand, message))


def pipe_message(message: Mapping[str, Any]) -> PipeMessage:
    """Decode an object from a pipe. Raises SupervisionError, ConfigError."""
    return cast(PipeMessage, _decode(PipeMessage, message))


def _decode(kinds: Any, message: Mapping[str, Any]) -> Message:
    known = _by_op(kinds)
    kind = known.get(str(message.get("op")))
    if kind is None:
        raise SupervisionError(f"unknown command {message.get('op')!r}", hint=", ".join(known))
    return _decode_as(kind, message)


def _decode_as(kind: Any, message: Mapping[str, Any]) -> Message:
    values = {}
    for name, (hint, required) in _fields_of(kind).items():
        if name in message:
            values[name] = _decoded(hint, message[name], f"{kind.op}: {name}")
        elif required:
            raise ConfigError(f"{kind.op}: {name} is missing", hint=f"give {_name_of(hint)}")
    return cast(Message, kind(**values))


def _decoded(hint: Any, value: Any, place: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is types.UnionType:
        if isinstance(value, Mapping) and hasattr(arguments[0], "op"):
            return _decode(hint, value)
        if value is None and types.NoneType in arguments:
            return None
        return _decoded(arguments[0], value, place)
    if origin is list and isinstance(value, list) and hasattr(arguments[0], "op"):
        return [_decode_as(arguments[0], each) for each in value]
    is_truth = isinstance(value, bool) and hint is not bool  # a bool is an int in Python
    if is_truth or not isinstance(value, origin or (int | float if hint is float else hint)):
        raise ConfigError(f"{place} is {value!r}", hint=f"give {_name_of(hint)}")
    return value


@cache
def _by_op(kinds: Any) -> Mapping[str, Any]:
    return {kind.op: kind for kind in get_args(kinds)}


@cache
def _fields_of(kind: Any) -> dict[str, tuple[Any, bool]]:
    hints = get_type_hints(kind)
    return {
        each.name: (hints[each.name], each.default is MISSING and each.default_factory is MISSING)
        for each in fields(kind)
    }


def _name_of(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", list: "a list"}
    return names.get(get_origin(hint) or hint, "another value")
