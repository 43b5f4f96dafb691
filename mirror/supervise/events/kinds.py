"""The kinds of events: each is a type with its name, level and sentence.

The log, `dcp-mirror events`, the status page, the hook `on_event` and docs/operations.md show these names. Invariants:
vbuckets with the same news are one event, which counts them all and names the first; an event holds no content of a
document.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, cast, get_args

from mirror.messages import ShownEvent

Level = Literal["info", "warning", "error"]


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


@dataclass(frozen=True, kw_only=True)
class _Kind:
    name: ClassVar[str]
    level: ClassVar[Level]

    def __init_subclass__(cls, *, name: str = "", level: Level = "info") -> None:
        cls.name, cls.level = name, level


@dataclass(frozen=True, kw_only=True)
class _OfVbuckets(_Kind):
    vbuckets: int
    vbids: tuple[int, ...]

    @property
    def counted(self) -> str:
        return _counted(self.vbuckets, "vbucket")


@dataclass(frozen=True, kw_only=True)
class VbucketsRolledBack(_OfVbuckets, name="rollback", level="warning"):
    seqnos: int
    """Retracted seqnos of all vbuckets."""
    from_seqno: int | None
    """Of a single vbucket; None for several."""
    to_seqno: int | None

    @property
    def text(self) -> str:
        span = "" if self.to_seqno is None else f" from seqno {self.from_seqno:,} to {self.to_seqno:,}"
        return f"{self.counted} rolled back{span}, {_counted(self.seqnos, 'seqno')} retracted"


@dataclass(frozen=True, kw_only=True)
class ResyncBegun(_OfVbuckets, name="resync-begun", level="warning"):
    why: str

    @property
    def text(self) -> str:
        return f"{self.counted} resynced from 0: {self.why}"


@dataclass(frozen=True, kw_only=True)
class ResyncDone(_OfVbuckets, name="resync-done"):
    @property
    def text(self) -> str:
        return f"the resync of {self.counted} is done"


@dataclass(frozen=True, kw_only=True)
class FirstFillDone(_Kind, name="first-fill-done"):
    vbuckets: int
    seqnos: int

    @property
    def text(self) -> str:
        return f"the first fill is done: {self.vbuckets:,} vbuckets, {self.seqnos:,} seqnos"


@dataclass(frozen=True, kw_only=True)
class SourceUnreachable(_Kind, name="source-unreachable", level="error"):
    why: str

    @property
    def text(self) -> str:
        return f"the source has not been reached since the service started: {self.why}"


@dataclass(frozen=True, kw_only=True)
class SourceReached(_Kind, name="source-reached"):
    after_s: float

    @property
    def text(self) -> str:
        return f"the source has answered after {self.after_s:.1f} s"


@dataclass(frozen=True, kw_only=True)
class SourceLost(_OfVbuckets, name="source-lost", level="error"):
    nodes: tuple[str, ...]
    """The nodes that streamed them."""
    why: str

    @property
    def text(self) -> str:
        what = f"{self.counted} lost contact with the source"
        return f"{what}: {self.why}" if self.why else what


@dataclass(frozen=True, kw_only=True)
class SourceBack(_OfVbuckets, name="source-back"):
    away_s: float

    @property
    def text(self) -> str:
        return f"{self.counted} regained contact with the source after {self.away_s:.1f} s"


@dataclass(frozen=True, kw_only=True)
class DamageFound(_OfVbuckets, name="damage-found", level="error"):
    why: str

    @property
    def text(self) -> str:
        return f"{self.counted} damaged: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Degraded(_Kind, name="degraded", level="error"):
    """The mirror has a trouble that no other event reports."""

    vbuckets: int
    """0: the whole mirror."""
    why: str

    @property
    def text(self) -> str:
        return self.why


@dataclass(frozen=True, kw_only=True)
class DiskFull(_Kind, name="disk-full", level="error"):
    groups: tuple[int, ...]
    why: str

    @property
    def text(self) -> str:
        return f"the disk is full for {_counted(len(self.groups), 'group')}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class DiskFree(_Kind, name="disk-free"):
    groups: tuple[int, ...]

    @property
    def text(self) -> str:
        return f"the disk has space again for {_counted(len(self.groups), 'group')}"


@dataclass(frozen=True, kw_only=True)
class MapChanged(_Kind, name="map-changed"):
    rev_epoch: int
    rev: int
    nodes: int

    @property
    def text(self) -> str:
        return f"the cluster map has changed: revision {self.rev_epoch}.{self.rev}, {_counted(self.nodes, 'node')}"


@dataclass(frozen=True, kw_only=True)
class SettingsRead(_Kind, name="settings-read"):
    in_force: tuple[str, ...]
    """Changed settings that took effect."""
    need_restart: tuple[str, ...]
    """Changed settings that take effect at the next start of the service."""

    @property
    def text(self) -> str:
        parts = [f"in force now: {', '.join(self.in_force)}"] if self.in_force else []
        if self.need_restart:
            parts.append(f"only after a restart of the service: {', '.join(self.need_restart)}")
        return f"settings read again: {'; '.join(parts) or 'nothing has changed'}"


@dataclass(frozen=True, kw_only=True)
class SettingsRefused(_Kind, name="settings-refused", level="error"):
    why: str

    @property
    def text(self) -> str:
        return f"the new settings are refused, the old ones stay in force: {self.why}"


@dataclass(frozen=True, kw_only=True)
class WorkerEnded(_Kind, name="worker-ended", level="error"):
    process: str
    """`worker 0`, `http 1`."""
    pid: int
    exit: str
    why: str | None
    pause_ms: int
    """Pause before its replacement starts."""

    @property
    def text(self) -> str:
        return f"{self.process} (process {self.pid}) died: {self.exit}{f': {self.why}' if self.why else ''}"


@dataclass(frozen=True, kw_only=True)
class LeaseExpired(_Kind, name="lease-expired", level="warning"):
    lease: str
    reader: str
    vbuckets: int

    @property
    def text(self) -> str:
        return f"the lease of {self.reader!r} on {self.vbuckets:,} vbuckets has expired: its reader may lose history"


Event = (
    VbucketsRolledBack
    | ResyncBegun
    | ResyncDone
    | FirstFillDone
    | SourceUnreachable
    | SourceReached
    | SourceLost
    | SourceBack
    | DamageFound
    | Degraded
    | DiskFull
    | DiskFree
    | MapChanged
    | SettingsRead
    | SettingsRefused
    | WorkerEnded
    | LeaseExpired
)

EVENTS: tuple[type[Any], ...] = get_args(Event)


def fields_of(event: Event) -> dict[str, object]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(event).items()}


def to_json(event: Event, number: int, time_ms: int) -> ShownEvent:
    """Return an event in the shape of cli/JSON.md."""
    head = {"number": number, "time_ms": time_ms, "event": event.name, "level": event.level, "text": event.text}
    return cast(ShownEvent, head | fields_of(event))
