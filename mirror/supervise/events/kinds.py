"""What operators are notified of: each event is a type here, with its name, its level and its sentence.

The one home of the names: the log, `dcp-mirror events`, the status page, the hook `on_event` and docs/operations.md
show these. Knows nothing of how an event is noticed or sent. Invariants: many vbuckets with the same news are one
event, which counts them all and names the first; an event has no content of a document in it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, cast, get_args

from mirror.messages import ShownEvent

Level = Literal["info", "warning", "error"]


def _counted(count: int, what: str) -> str:
    """Return `1 vbucket`, `33 vbuckets`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfVbuckets:
    vbuckets: int
    vbids: tuple[int, ...]
    """The first ones."""

    @property
    def counted(self) -> str:
        return _counted(self.vbuckets, "vbucket")


@dataclass(frozen=True, slots=True, kw_only=True)
class VbucketsRolledBack(_OfVbuckets):
    """Vbuckets went back to a kept boundary."""

    name: ClassVar[str] = "rollback"
    level: ClassVar[Level] = "warning"
    seqnos: int
    """Retracted seqnos of all vbuckets."""
    from_seqno: int | None
    """Of a single vbucket; None for several."""
    to_seqno: int | None

    @property
    def text(self) -> str:
        span = "" if self.to_seqno is None else f" from seqno {self.from_seqno:,} to {self.to_seqno:,}"
        return f"{self.counted} rolled back{span}, {_counted(self.seqnos, 'seqno')} retracted"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResyncBegun(_OfVbuckets):
    """Vbuckets are read again from seqno 0, next to their old copies."""

    name: ClassVar[str] = "resync-begun"
    level: ClassVar[Level] = "warning"
    why: str

    @property
    def text(self) -> str:
        return f"{self.counted} resynced from 0: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResyncDone(_OfVbuckets):
    """New copies have replaced the old ones."""

    name: ClassVar[str] = "resync-done"
    level: ClassVar[Level] = "info"

    @property
    def text(self) -> str:
        return f"the resync of {self.counted} is done"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFillDone:
    """Every vbucket is published for the first time."""

    name: ClassVar[str] = "first-fill-done"
    level: ClassVar[Level] = "info"
    vbuckets: int
    seqnos: int

    @property
    def text(self) -> str:
        return f"the first fill is done: {self.vbuckets:,} vbuckets, {self.seqnos:,} seqnos"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceUnreachable:
    """The source has not answered since the service started."""

    name: ClassVar[str] = "source-unreachable"
    level: ClassVar[Level] = "error"
    why: str

    @property
    def text(self) -> str:
        return f"the source has not been reached since the service started: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReached:
    """The source has answered for the first time since the service started."""

    name: ClassVar[str] = "source-reached"
    level: ClassVar[Level] = "info"
    after_s: float

    @property
    def text(self) -> str:
        return f"the source has answered after {self.after_s:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLost(_OfVbuckets):
    """Vbuckets lost contact with the source."""

    name: ClassVar[str] = "source-lost"
    level: ClassVar[Level] = "error"
    nodes: tuple[str, ...]
    """The nodes that streamed them."""
    why: str

    @property
    def text(self) -> str:
        what = f"{self.counted} lost contact with the source"
        return f"{what}: {self.why}" if self.why else what


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceBack(_OfVbuckets):
    """Vbuckets have contact with the source again."""

    name: ClassVar[str] = "source-back"
    level: ClassVar[Level] = "info"
    away_s: float

    @property
    def text(self) -> str:
        return f"{self.counted} regained contact with the source after {self.away_s:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class DamageFound(_OfVbuckets):
    """Stored data cannot be read."""

    name: ClassVar[str] = "damage-found"
    level: ClassVar[Level] = "error"
    why: str

    @property
    def text(self) -> str:
        return f"{self.counted} damaged: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Degraded:
    """The mirror has a trouble that no other event reports."""

    name: ClassVar[str] = "degraded"
    level: ClassVar[Level] = "error"
    vbuckets: int
    """0: the whole mirror."""
    why: str

    @property
    def text(self) -> str:
        return self.why


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFull:
    """Groups cannot write because the disk is full."""

    name: ClassVar[str] = "disk-full"
    level: ClassVar[Level] = "error"
    groups: tuple[int, ...]
    why: str

    @property
    def text(self) -> str:
        return f"the disk is full for {_counted(len(self.groups), 'group')}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFree:
    """Groups can write again after a full disk."""

    name: ClassVar[str] = "disk-free"
    level: ClassVar[Level] = "info"
    groups: tuple[int, ...]

    @property
    def text(self) -> str:
        return f"the disk has space again for {_counted(len(self.groups), 'group')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MapChanged:
    """Workers follow a newer cluster map."""

    name: ClassVar[str] = "map-changed"
    level: ClassVar[Level] = "info"
    rev_epoch: int
    rev: int
    nodes: int

    @property
    def text(self) -> str:
        return f"the cluster map has changed: revision {self.rev_epoch}.{self.rev}, {_counted(self.nodes, 'node')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsRead:
    """The settings were read again."""

    name: ClassVar[str] = "settings-read"
    level: ClassVar[Level] = "info"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsRefused:
    """New settings are wrong; the old ones stay in force."""

    name: ClassVar[str] = "settings-refused"
    level: ClassVar[Level] = "error"
    why: str

    @property
    def text(self) -> str:
        return f"the new settings are refused, the old ones stay in force: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnded:
    """A process of the service died."""

    name: ClassVar[str] = "worker-ended"
    level: ClassVar[Level] = "error"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseExpired:
    """A reader's lease on history ended without a release."""

    name: ClassVar[str] = "lease-expired"
    level: ClassVar[Level] = "warning"
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
    """The fields of an event as plain values."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(event).items()}


def to_json(event: Event, number: int, time_ms: int) -> ShownEvent:
    """Return an event in the shape of cli/JSON.md."""
    head = {"number": number, "time_ms": time_ms, "event": event.name, "level": event.level, "text": event.text}
    return cast(ShownEvent, head | fields_of(event))
