"""The status that the store alone gives."""

from __future__ import annotations

from pathlib import Path

from mirror.supervise.status import stored_status
from storage.env import directory
from storage.model import Identity


def test_a_store_without_a_service_has_the_same_shape_with_nothing_invented(tmp_path: Path) -> None:
    data = tmp_path / "data"
    directory.create(str(data), Identity("cluster", "bucket", "uuid", 4, 2))
    found = stored_status(data)
    assert (found["service"], found["state"], found["bucket"], found["vbucket_count"]) == (
        "down",
        "stored",
        "bucket",
        4,
    )
    assert [row["vbid"] for row in found["vbuckets"]] == [0, 1, 2, 3]
    assert [row["group"] for row in found["vbuckets"]] == [0, 1, 0, 1]
    assert {row["lag_s"] for row in found["vbuckets"]} == {None}
    assert found["workers"] == []
    assert found["totals"]["documents_per_s"] is None
