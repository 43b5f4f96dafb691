"""Figures of a stream, batch by batch, from Spark's query listener.

Knows Spark's progress events; never the display of figures. Invariant: a lag that cannot be read is None, not an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryListener


@dataclass(frozen=True)
class BatchFigures:
    batch: int
    events: int
    events_per_s: float
    duration_ms: int
    """Time from the trigger to the end of the batch."""
    lag_seqnos: int | None = None
    """Number of published seqnos above the batch's end offset; None if unknown."""


@dataclass(frozen=True)
class MergeFigures:
    batch: int
    """The newest batch in `documents`."""
    inserted: int
    updated: int
    deleted: int
    misfits: int
    rewritten_bytes: int
    duration_ms: int


class Listener(StreamingQueryListener):
    """Turns progress events into figures, and calls `on_figures` in one of Spark's threads."""

    def __init__(self, on_figures: Callable[[BatchFigures], None]) -> None:
        self._on_figures = on_figures

    def onQueryStarted(self, event: Any) -> None:
        """Do nothing."""

    def onQueryProgress(self, event: Any) -> None:
        progress = event.progress
        if not progress.numInputRows:
            return
        self._on_figures(
            BatchFigures(
                batch=progress.batchId,
                events=progress.numInputRows,
                events_per_s=round(progress.processedRowsPerSecond, 1),
                duration_ms=int(progress.durationMs.get("triggerExecution", 0)),
                lag_seqnos=lag_of(progress.sources),
            )
        )

    def onQueryTerminated(self, event: Any) -> None:
        """Do nothing."""


def lag_of(sources: Any) -> int | None:
    try:
        end, published = (seqnos_of(text) for text in (sources[0].endOffset, sources[0].latestOffset))
    except (IndexError, KeyError, TypeError, ValueError, AttributeError):
        return None
    return sum(max(0, seqno - end.get(vbid, 0)) for vbid, seqno in published.items())


def seqnos_of(text: str) -> dict[str, int]:
    return {vbid: at[1] for vbid, at in json.loads(text)["vbuckets"].items()}
