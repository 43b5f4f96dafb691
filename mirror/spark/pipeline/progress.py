"""What a stream does, batch by batch, from Spark's own query listener.

Knows Spark's progress events and what is worth saying of one; never how it is shown. Invariant: a listener never ends
a stream: what it cannot read is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from mirror.spark.tables.documents import Applied

BATCHES_HELD_MAX = 100
"""What batches did is held so long for the event that tells of them."""


@dataclass(frozen=True)
class BatchFigures:
    """One batch."""

    batch: int
    events: int
    events_per_s: float
    duration_ms: int
    """From the trigger to the end of the batch."""
    inserted: int | None = None
    updated: int | None = None
    deleted: int | None = None
    misfits: int | None = None
    """Documents that do not fit the schema of `sync`."""
    lag_seqnos: int | None = None
    """How far the source was ahead when the batch ended, where that is known."""


@dataclass(frozen=True)
class MergeFigures:
    """One merge of batches into the tables of documents."""

    batch: int
    """The newest batch that is in them now."""
    inserted: int
    updated: int
    deleted: int
    misfits: int
    rewritten_bytes: int
    """Of the files that it wrote."""
    duration_ms: int


class Listener(StreamingQueryListener):
    """Turns progress events into figures."""

    def __init__(self, on_figures: Callable[[BatchFigures], None]) -> None:
        """`on_figures` is called in a thread of Spark's."""
        self._on_figures = on_figures
        self._applied: dict[int, Applied] = {}

    def applied(self, batch: int, done: Applied) -> None:
        """What a batch did to the tables, reported before Spark reports the batch."""
        self._applied[batch] = done
        while len(self._applied) > BATCHES_HELD_MAX:
            del self._applied[next(iter(self._applied))]

    def onQueryStarted(self, event: Any) -> None:
        """Nothing to say yet."""

    def onQueryProgress(self, event: Any) -> None:
        """A batch has ended, or there was nothing to do."""
        progress = event.progress
        done = self._applied.pop(progress.batchId, None)
        if not progress.numInputRows and done is None:
            return
        self._on_figures(
            BatchFigures(
                batch=progress.batchId,
                events=progress.numInputRows,
                events_per_s=round(progress.processedRowsPerSecond, 1),
                duration_ms=int(progress.durationMs.get("triggerExecution", 0)),
                inserted=done.inserted if done else None,
                updated=done.updated if done else None,
                deleted=done.deleted if done else None,
                misfits=done.misfits if done else None,
                lag_seqnos=lag_of(progress.sources),
            )
        )

    def onQueryIdle(self, event: Any) -> None:
        """Nothing to say."""

    def onQueryTerminated(self, event: Any) -> None:
        """Anyone who waits for the query hears of it."""


def lag_of(sources: Any) -> int | None:
    """What the source says is published, less where the batch ended: seqnos, over all vbuckets."""
    try:
        end, published = (seqnos_of(text) for text in (sources[0].endOffset, sources[0].latestOffset))
    except (IndexError, KeyError, TypeError, ValueError, AttributeError):
        return None
    return sum(max(0, seqno - end.get(vbid, 0)) for vbid, seqno in published.items())


def seqnos_of(text: str) -> dict[str, int]:
    """Where each vbucket stands in an offset (offsets.py), as Spark shows it."""
    return {vbid: at[1] for vbid, at in json.loads(text)["vbuckets"].items()}
