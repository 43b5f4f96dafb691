"""Figures of a batch, out of what Spark reports."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from mirror.spark.pipeline.progress import BatchFigures, Listener, lag_of
from mirror.spark.source.offsets import At, Offset


def offset(**seqnos: int) -> str:
    at = {int(vbid[1:]): At(1, seqno, 7) for vbid, seqno in seqnos.items()}
    return json.dumps(Offset("path", "uuid", at).encode())


def reported(batch: int, rows: int = 10, **offsets: str) -> Any:
    return SimpleNamespace(
        progress=SimpleNamespace(
            batchId=batch,
            numInputRows=rows,
            processedRowsPerSecond=123.456,
            durationMs={"triggerExecution": 789, "addBatch": 700},
            sources=[SimpleNamespace(**offsets)],
        )
    )


def test_a_batch_is_reported_with_its_figures() -> None:
    seen: list[BatchFigures] = []
    listener = Listener(seen.append)
    listener.onQueryProgress(reported(3, endOffset=offset(v0=5, v2=9), latestOffset=offset(v0=7, v1=10, v2=4)))
    assert seen == [BatchFigures(3, 10, 123.5, 789, lag_seqnos=12)]


def test_a_trigger_without_rows_is_not_reported() -> None:
    seen: list[BatchFigures] = []
    Listener(seen.append).onQueryProgress(reported(4, rows=0))
    assert seen == []


@pytest.mark.parametrize(
    "sources", [[], [SimpleNamespace(endOffset="{}", latestOffset=None)], [SimpleNamespace()], None]
)
def test_a_source_without_latest_offsets_has_no_lag(sources: Any) -> None:
    assert lag_of(sources) is None
