"""The kinds of events: each is a class with a name, level and sentence.

The log, `dcp-mirror events`, the status page and docs/operations.md show these names. Vbuckets
with the same news are one event, which counts all vbuckets and names the first. An event has no content of a document.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar, Literal, TypedDict, cast

Level = Literal["info", "warning", "error"]


class ShownEvent(TypedDict):
    number: int
    time_ms: int
    event: str
    level: str
    text: str


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


@dataclass(frozen=True, kw_only=True)
class _Kind:
    name: ClassVar[str]
    level: ClassVar[Level]
    sentence: ClassVar[str]

    def __init_subclass__(cls, *, name: str = "", level: Level = "info", sentence: str = "") -> None:
        cls.name, cls.level, cls.sentence = name, level, sentence

    @property
    def text(self) -> str:
        """The sentence, formatted with this event: `{0.why}`."""
        return self.sentence.format(self)


@dataclass(frozen=True, kw_only=True)
class _OfVbuckets(_Kind):
    vbuckets: int
    vbids: tuple[int, ...]

    @property
    def counted(self) -> str:
        return _counted(self.vbuckets, "vbucket")


@dataclass(frozen=True, kw_only=True)
class _OfGroups(_Kind):
    groups: tuple[int, ...]

    @property
    def counted(self) -> str:
        return _counted(len(self.groups), "group")


@dataclass(frozen=True, kw_only=True)
class VbucketsRolledBack(_OfVbuckets, name="rollback", level="warning"):
    seqnos: int | None
    """Number of retracted seqnos of all vbuckets; None: unknown."""
    from_seqno: int | None
    """None for several rollbacks, or if unknown."""
    to_seqno: int | None

    @property
    def text(self) -> str:
        span = "" if self.to_seqno is None else f" from seqno {self.from_seqno:,} to {self.to_seqno:,}"
        retracted = "" if self.seqnos is None else f", {_counted(self.seqnos, 'seqno')} retracted"
        return f"{self.counted} rolled back{span}{retracted}"


@dataclass(frozen=True, kw_only=True)
class ResyncBegun(_OfVbuckets, name="resync-begun", level="warning", sentence="{0.counted} resynced from 0: {0.why}"):
    why: str


@dataclass(frozen=True, kw_only=True)
class ResyncDone(_OfVbuckets, name="resync-done", sentence="the resync of {0.counted} is done"):
    pass


@dataclass(frozen=True, kw_only=True)
class FirstFillDone(
    _Kind, name="first-fill-done", sentence="the first fill is done: {0.vbuckets:,} vbuckets, {0.seqnos:,} seqnos"
):
    vbuckets: int
    seqnos: int


@dataclass(frozen=True, kw_only=True)
class SourceUnreachable(
    _Kind,
    name="source-unreachable",
    level="error",
    sentence="the source has not been reached since the service started: {0.why}",
):
    why: str


@dataclass(frozen=True, kw_only=True)
class SourceReached(_Kind, name="source-reached", sentence="the source has answered after {0.after_s:.1f} s"):
    after_s: float


@dataclass(frozen=True, kw_only=True)
class SourceLost(_OfVbuckets, name="source-lost", level="error"):
    nodes: tuple[str, ...]
    """The nodes that streamed the vbuckets; empty if their worker has had no contact."""
    why: str

    @property
    def text(self) -> str:
        what = f"{self.counted} {'lost contact with' if self.nodes else 'without contact to'} the source"
        return f"{what}: {self.why}" if self.why else what


@dataclass(frozen=True, kw_only=True)
class SourceBack(
    _OfVbuckets, name="source-back", sentence="{0.counted} regained contact with the source after {0.away_s:.1f} s"
):
    away_s: float


@dataclass(frozen=True, kw_only=True)
class DamageFound(_OfVbuckets, name="damage-found", level="error", sentence="{0.counted} damaged: {0.why}"):
    why: str


@dataclass(frozen=True, kw_only=True)
class Degraded(_Kind, name="degraded", level="error", sentence="{0.why}"):
    """The mirror has a trouble that no other event reports."""

    vbuckets: int
    """0: the whole mirror."""
    why: str


@dataclass(frozen=True, kw_only=True)
class DiskFull(_OfGroups, name="disk-full", level="error", sentence="the disk is full for {0.counted}: {0.why}"):
    why: str


@dataclass(frozen=True, kw_only=True)
class DiskFree(_OfGroups, name="disk-free", sentence="the disk has space again for {0.counted}"):
    pass


@dataclass(frozen=True, kw_only=True)
class MapChanged(_Kind, name="map-changed"):
    rev_epoch: int
    rev: int
    nodes: int

    @property
    def text(self) -> str:
        return f"new cluster map: revision {self.rev_epoch}.{self.rev}, {_counted(self.nodes, 'node')}"


@dataclass(frozen=True, kw_only=True)
class WorkerEnded(_Kind, name="worker-ended", level="error"):
    process: str
    """For example `worker 0` or `http 1`."""
    pid: int
    exit: str
    why: str | None
    pause_ms: int
    """Pause before the replacement starts."""

    @property
    def text(self) -> str:
        return f"{self.process} (process {self.pid}) died: {self.exit}{f': {self.why}' if self.why else ''}"


@dataclass(frozen=True, kw_only=True)
class LeaseExpired(
    _Kind,
    name="lease-expired",
    level="warning",
    sentence="the lease of {0.reader!r} on {0.vbuckets:,} vbuckets has expired: its reader may lose history",
):
    lease: str
    reader: str
    vbuckets: int


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
    | WorkerEnded
    | LeaseExpired
)


def fields_of(event: Event) -> dict[str, object]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(event).items()}


def to_json(event: Event, number: int, time_ms: int) -> ShownEvent:
    head = {"number": number, "time_ms": time_ms, "event": event.name, "level": event.level, "text": event.text}
    return cast(ShownEvent, head | fields_of(event))
