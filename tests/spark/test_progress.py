"""Figures of a batch, out of what Spark tells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mirror.spark.lake import Applied
from mirror.spark.progress import BATCHES_HELD_MAX, BatchFigures, Listener, lag_of


def told(batch: int, rows: int = 10, **metrics: str) -> Any:
    return SimpleNamespace(
        progress=SimpleNamespace(
            batchId=batch,
            numInputRows=rows,
            processedRowsPerSecond=123.456,
            durationMs={"triggerExecution": 789, "addBatch": 700},
            sources=[SimpleNamespace(metrics=metrics)],
        )
    )


def test_a_batch_is_told_with_what_it_did() -> None:
    seen: list[BatchFigures] = []
    listener = Listener(seen.append)
    listener.applied(3, Applied(10, 5, 4, 1))
    listener.onQueryProgress(told(3, lagSeqnos="17"))
    assert seen == [BatchFigures(3, 10, 123.5, 789, inserted=5, updated=4, deleted=1, lag_seqnos=17)]


def test_a_trigger_without_anything_to_do_is_not_told() -> None:
    seen: list[BatchFigures] = []
    Listener(seen.append).onQueryProgress(told(4, rows=0))
    assert seen == []


def test_what_was_done_is_not_held_for_ever() -> None:
    listener = Listener(lambda _: None)
    for number in range(BATCHES_HELD_MAX + 50):
        listener.applied(number, Applied(1, 1, 0, 0))
    assert list(listener._applied) == list(range(50, BATCHES_HELD_MAX + 50))


@pytest.mark.parametrize("sources", [[], [SimpleNamespace(metrics={})], [SimpleNamespace(metrics=None)], None])
def test_a_source_that_does_not_say_how_far_it_is_ahead(sources: Any) -> None:
    assert lag_of(sources) is None
