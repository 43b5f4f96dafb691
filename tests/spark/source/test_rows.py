"""Changes as rows and batches."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from mirror.spark.source import columns as rows_module
from mirror.spark.source.columns import CHANGES, change_batches, change_row, control_row, event_micros
from storage.format import records
from storage.model import Branch
from tests.storage.frames import encode_deletion


def test_a_batch_is_full_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "BATCH_ROWS", 3)
    rows = [control_row("resync", vbid, "", 1, 0, 7, 9) for vbid in range(7)]
    assert [batch.num_rows for batch in change_batches(rows, ["vbid"])] == [3, 3, 1]


def test_an_event_time_is_the_clock_in_the_cas() -> None:
    at = datetime(2026, 1, 31, 12, 0, 0, 123457, UTC)
    nanoseconds = (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1000
    cas = (nanoseconds & ~0xFFFF) + 0x10000 + 7  # the 7th version of one moment; the clock counts in steps of 65.5 us
    row = records.decode_row(3, Branch(2), records.encode_mutation(b"k", b"{}", 5, cas=cas))
    (found,) = change_batches([change_row(row, "s.c", "mutation", 1, 6, (2, 5))], ["event_time"])
    assert timedelta(0) <= found.column("event_time")[0].as_py() - at < timedelta(microseconds=66)
    assert event_micros(0) is None


def test_changes_have_the_columns_that_were_requested() -> None:
    deletion = records.decode_row(3, Branch(2), encode_deletion(b"\xff", 5))
    rows = [
        change_row(deletion, "s.c", "deletion", 2**64 - 1, 6, (2, 5)),
        control_row("collection_dropped", 3, "s.c", 2, 6, 8, 6),
    ]
    (batch_,) = change_batches(rows, CHANGES.names)
    assert batch_.schema == CHANGES
    assert batch_.column("key").cast(pa.binary()).to_pylist() == [b"\xff", None]
    assert batch_.drop_columns(["key"]).to_pylist()[0] == {
        "collection": "s.c", "vbid": 3, "seqno": 5, "rev_seqno": 2, "cas": 1, "flags": 0, "expiry": 0, "datatype": 0,
        "value": None, "kind": "deletion", "branch": 2, "vbuuid": -1, "snapshot_end_seqno": 6, "at_branch": 2,
        "at_seqno": 5, "event_time": None,
    }  # fmt: skip
    (few,) = change_batches(rows, ["kind", "vbid"])
    assert few.to_pylist() == [{"kind": "deletion", "vbid": 3}, {"kind": "collection_dropped", "vbid": 3}]
