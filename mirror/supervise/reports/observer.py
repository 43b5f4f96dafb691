"""Finds events by comparing each report with the previous one. Pure: the caller passes rows and times.

News of vbuckets is collected for a second, so that a node's failover is one event. In a vbucket's first report only
troubles are news; what a new worker reports again is no news. Neither is contact lost for less than a second, or for
less than ten by a vbucket that moves to another node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mirror.health import BROKEN, DEGRADED, REPORTED, Trouble, connects
from mirror.supervise.events.kinds import (
    DamageFound,
    Degraded,
    DiskFree,
    DiskFull,
    Event,
    FirstFillDone,
    ResyncBegun,
    ResyncDone,
    SourceBack,
    SourceLost,
    SourceReached,
    SourceUnreachable,
    VbucketsRolledBack,
)
from mirror.supervise.status import VbucketRow

VbucketNews = VbucketsRolledBack | ResyncBegun | ResyncDone | SourceLost | SourceBack | DamageFound

VBIDS_NAMED = 10
"""Vbuckets that an event names; the others are only counted."""
FORGOTTEN_MS = 60_000
COLLECT_MS = 1_000
"""News of one kind is collected for this long."""
CONTACT_LOST_MS = 1_000
"""Contact lost for this long is news."""


def _rose(known: int | None, count: int | None) -> bool:
    return known is not None and count is not None and count > known


@dataclass(slots=True)
class _Known:
    rollback_count: int | None
    resync_count: int | None
    resyncs_begun: int | None
    """Counted by the vbucket's worker; None after the worker has restarted."""
    damaged: bool
    node: str | None = None
    """The last node from which the present worker streamed the vbucket."""
    silent_since_ms: int | None = None
    lost_since_ms: int | None = None


@dataclass(slots=True)
class _News:
    since_ms: int
    vbids: list[int] = field(default_factory=list)
    rollbacks: list[tuple[int, int] | None] = field(default_factory=list)
    """From and to seqno of each; None: unknown."""
    nodes: dict[str, None] = field(default_factory=dict)
    why: str = ""
    away_ms: int = 0


class Observer:
    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._news: dict[type[VbucketNews], _News] = {}
        self._full: set[int] = set()
        self._unreachable_since_ms: int | None = None
        self._filling: bool | None = None
        self._troubles: dict[str, tuple[int, int, bool]] = {}
        """Trouble -> (time when it began, time when it was last seen, True if it was reported)."""

    def fill_begins(self) -> None:
        self._filling = True

    def forget(self, groups: Iterable[int], rows: Iterable[VbucketRow]) -> None:
        """Forget the counters and contacts of a worker that ended: the next worker counts from 0."""
        gone = set(groups)
        for row in rows:
            known = self._known.get(row["vbid"])
            if row["group"] in gone and known is not None:
                known.resyncs_begun = known.node = known.silent_since_ms = None

    def source_answers(self, error: str | None, now_ms: int) -> list[Event]:
        since_ms = self._unreachable_since_ms
        if error is not None:
            self._unreachable_since_ms = now_ms if since_ms is None else since_ms
            return [SourceUnreachable(why=error)] if since_ms is None else []
        self._unreachable_since_ms = None
        return [SourceReached(after_s=(now_ms - since_ms) / 1000)] if since_ms is not None else []

    def observe(
        self, rows: Sequence[VbucketRow], groups: Sequence[Mapping[str, Any]], held_count: int | None, now_ms: int
    ) -> list[Event]:
        """Compare the rows of all vbuckets and the workers' reports of groups. Return the due events."""
        failed = {row["group"] for row in groups if row.get("error")}
        for row in rows:
            self._look_at(row, now_ms, stored=row["group"] not in failed)
        return [*self._fill(rows, held_count), *self._disk(groups), *self.due(now_ms)]

    def troubles(self, found: Sequence[Trouble], now_ms: int) -> list[Event]:
        """Return events for new troubles that last a second. After a minute's absence a trouble is new again."""
        new: list[Event] = []
        for trouble in found:
            if trouble.state != DEGRADED or trouble.what in REPORTED:
                continue
            kind = trouble.what.partition(",")[0]  # a figure may follow the comma
            since_ms, seen_ms, reported = self._troubles.get(kind, (now_ms, now_ms, False))
            if now_ms - seen_ms > FORGOTTEN_MS:
                since_ms, reported = now_ms, False
            if not reported and now_ms - since_ms >= COLLECT_MS:
                new.append(Degraded(vbuckets=len(trouble.rows), why=trouble.reason))
                reported = True
            self._troubles[kind] = since_ms, now_ms, reported
        return new

    def due(self, now_ms: int, *, at_once: bool = False) -> list[Event]:
        """Return events for the news that were collected for long enough; with `at_once`, for all."""
        found = {kind: news for kind, news in self._news.items() if at_once or now_ms - news.since_ms >= COLLECT_MS}
        for kind in found:
            del self._news[kind]
        return [_event(kind, news) for kind, news in found.items()]

    def _look_at(self, row: VbucketRow, now_ms: int, *, stored: bool) -> None:
        """Compare a row with the previous one. Without `stored` its store failed: it needs no contact."""
        vbid = row["vbid"]
        begun = row["resyncs_begun"]
        known = self._known.get(vbid)
        if known is None:
            known = _Known(row["rollback_count"], row["resync_count"], begun, damaged=False)
            self._known[vbid] = known
        if row["state"] == "starting":
            return  # no worker has reported it yet
        if _rose(known.rollback_count, row["rollback_count"]):
            # A worker reports its last rollback only: not an earlier one, nor one of the worker before it.
            is_last = row["rollback_count"] == (known.rollback_count or 0) + 1
            self._add(VbucketsRolledBack, vbid, now_ms).rollbacks.append(row["last_rollback"] if is_last else None)
        if begun is not None and begun > (known.resyncs_begun or 0):
            self._add(ResyncBegun, vbid, now_ms, row["resync_why"] or "")
        if _rose(known.resync_count, row["resync_count"]):
            self._add(ResyncDone, vbid, now_ms)
        damaged = row["state"] == "damaged"
        if damaged and not known.damaged:
            self._add(DamageFound, vbid, now_ms, row["detail"] or "")
        known.damaged, known.resyncs_begun = damaged, begun
        if row["rollback_count"] is not None:
            known.rollback_count = row["rollback_count"]
        if row["resync_count"] is not None:
            known.resync_count = row["resync_count"]
        if stored and not damaged:
            self._look_at_contact(row, known, now_ms)

    def _look_at_contact(self, row: VbucketRow, known: _Known, now_ms: int) -> None:
        """Note a contact that is lost or regained, or that a new worker does not get."""
        if row["node"] is not None:
            if known.lost_since_ms is not None:
                news = self._add(SourceBack, row["vbid"], now_ms)
                news.away_ms = max(news.away_ms, now_ms - known.lost_since_ms)
            known.node, known.silent_since_ms, known.lost_since_ms = row["node"], None, None
            return
        if known.lost_since_ms is not None or connects(row) or row["state"] == "no-active-node":
            return
        if known.node is None and (self._unreachable_since_ms is not None or row["state"] in BROKEN):
            return  # another event reports it
        if known.silent_since_ms is None:
            known.silent_since_ms = now_ms - (row["silent_ms"] or 0 if known.node is not None else 0)
        if now_ms - known.silent_since_ms >= CONTACT_LOST_MS:
            known.lost_since_ms = known.silent_since_ms
            news = self._add(SourceLost, row["vbid"], now_ms, row["last_error"] or row["detail"] or "")
            news.nodes |= {known.node: None} if known.node is not None else {}

    def _add(self, kind: type[VbucketNews], vbid: int, now_ms: int, why: str = "") -> _News:
        news = self._news.setdefault(kind, _News(now_ms))
        news.vbids.append(vbid)
        news.why = news.why or why
        return news

    def _fill(self, rows: Sequence[VbucketRow], held_count: int | None) -> list[Event]:
        if self._filling is False or not held_count or len(rows) < held_count:
            return []
        if any(row["state"] in ("starting", "damaged") for row in rows):
            return []
        if all(row["published_seqno"] or row["lag_seqnos"] == 0 for row in rows):
            was_filling, self._filling = self._filling, False
            seqnos = sum(row["published_seqno"] or 0 for row in rows)
            return [FirstFillDone(vbuckets=len(rows), seqnos=seqnos)] if was_filling else []
        if any(row["lag_seqnos"] for row in rows):
            self._filling = True
        return []

    def _disk(self, groups: Sequence[Mapping[str, Any]]) -> list[Event]:
        full = {row["group"]: str(row["error"]) for row in groups if row.get("full")}
        reported = {row["group"] for row in groups}
        new = sorted(full.keys() - self._full)
        free = sorted(group for group in self._full if group in reported and group not in full)
        self._full = (self._full | set(new)) - set(free)
        found: list[Event] = [DiskFull(groups=tuple(new), why=full[new[0]])] if new else []
        return [*found, DiskFree(groups=tuple(free))] if free else found


def _seqnos(news: _News) -> dict[str, Any]:
    spans = [span for span in news.rollbacks if span is not None]
    if len(spans) < len(news.rollbacks):
        return {"seqnos": None, "from_seqno": None, "to_seqno": None}
    one = spans[0] if len(spans) == 1 else (None, None)
    seqnos = sum(from_seqno - to_seqno for from_seqno, to_seqno in spans)
    return {"seqnos": seqnos, "from_seqno": one[0], "to_seqno": one[1]}


_FIELDS: Mapping[type[VbucketNews], Callable[[_News], dict[str, Any]]] = {
    VbucketsRolledBack: _seqnos,
    ResyncBegun: lambda news: {"why": news.why},
    ResyncDone: lambda _: {},
    SourceLost: lambda news: {"nodes": tuple(news.nodes), "why": news.why},
    SourceBack: lambda news: {"away_s": news.away_ms / 1000},
    DamageFound: lambda news: {"why": news.why},
}
"""Kind of news -> the event's fields besides the vbuckets."""


def _event(kind: type[VbucketNews], news: _News) -> Event:
    vbids = sorted(set(news.vbids))
    return kind(vbuckets=len(vbids), vbids=tuple(vbids[:VBIDS_NAMED]), **_FIELDS[kind](news))
