from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli import status
from mirror import client
from mirror.supervise.status import stored_status
from tests.cli.conftest import call, copy_of

JSON_MD = Path(status.__file__).with_name("JSON.md").read_text()
FIELDS = [
    "service", "state", "message", "reasons", "troubles", "since_ms", "pid", "uptime_s", "time_ms", "data", "source",
    "source_error", "bucket",
    "bucket_uuid", "cluster_uuid", "vbucket_count", "vbuckets_held", "group_count", "selection", "sync", "warnings",
    "supervisor", "workers", "servers", "listeners", "leases", "readers", "totals", "catch_up", "events", "vbuckets",
]  # fmt: skip


def test_the_status_comes_from_the_store_with_the_service_down(mirrored: Path) -> None:
    shown = call("status", "--data", mirrored, "--json").json
    assert list(shown) == FIELDS
    assert (shown["service"], shown["state"], shown["workers"]) == ("down", "stored", [])
    assert shown["totals"]["documents"] == 183
    assert shown["totals"]["vbuckets"] == 16
    assert [row["vbid"] for row in shown["vbuckets"]] == list(range(16))


def test_every_printed_field_is_documented(mirrored: Path) -> None:
    shown = call("status", "--data", mirrored, "--json").json
    names = [*shown, *shown["totals"], *shown["supervisor"], *shown["vbuckets"][0]]
    assert [name for name in names if f"`{name}`" not in JSON_MD] == []


def test_the_status_for_people_is_a_summary_with_all_vbuckets_on_request(mirrored: Path) -> None:
    text = call("status", "--data", mirrored).out
    assert "not running" in text
    assert "16 stored" in text
    assert len(call("status", "--data", mirrored, "--all").out.splitlines()) > 16


def test_a_large_mirror_is_counted_only_on_request(mirrored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "COUNT_SEQNOS_MAX", 10)
    document = stored_status(mirrored)
    status.count_documents(mirrored, document)
    assert document["totals"]["documents"] is None
    status.count_documents(mirrored, document, always=True)
    assert document["totals"]["documents"] == 183


def test_vbuckets_unknown_to_the_service_are_filled_in_from_the_store(
    mirrored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = stored_status(mirrored) | {"service": "up", "state": "starting"}
    answer["vbuckets"] = [row | {"state": "streaming"} for row in answer["vbuckets"][:3]]
    monkeypatch.setattr(client, "ask", lambda *_: {"status": json.loads(json.dumps(answer))})
    document = status.current_status(mirrored)
    assert [row["vbid"] for row in document["vbuckets"]] == list(range(16))
    assert document["totals"]["states"] == {"streaming": 3, "stored": 13}


def damaged_copy(mirrored: Path, to: Path, group: int) -> Path:
    """Copy a mirror and overwrite all pages of a group's file but the two meta pages."""
    file = copy_of(mirrored, to) / f"group-{group:04}" / "data.mdb"
    with file.open("r+b") as pages:
        pages.seek(2 * 4096)
        pages.write(b"\xa5" * (file.stat().st_size - 2 * 4096))
    return to


def test_a_damaged_group_is_shown_in_the_rows_of_its_vbuckets(mirrored: Path, tmp_path: Path) -> None:
    """A damaged group once ended every `status` with an error, while the page showed the other groups."""
    data = damaged_copy(mirrored, tmp_path / "data", 1)
    result = call("status", "--data", data, "--json")
    rows = result.json["vbuckets"]
    assert (result.code, len(rows)) == (0, 16)
    damaged = [row for row in rows if row["state"] == "damaged"]
    assert {row["group"] for row in damaged} == {1}
    assert all("group-0001" in row["detail"] for row in damaged)
    assert result.json["totals"]["documents"] is None, "a part of them is not their number"
    assert "4 of 16 vbuckets damaged: group 1" in result.json["message"]
    assert [each["vbuckets"] for each in result.json["troubles"]] == [0, 4]
    for command in (("status",), ("status", "--all")):
        shown = call(*command, "--data", data)
        assert shown.code == 0
        assert "damaged" in shown.out
    assert call("status", "--data", data, "--ready").code == 1


def test_a_damaged_group_has_no_count_of_documents(mirrored: Path, tmp_path: Path) -> None:
    """The service's rows were fine, its group was not, and counting ended the command."""
    document = stored_status(mirrored)
    status.count_documents(damaged_copy(mirrored, tmp_path / "data", 1), document)
    broken = [row for row in document["vbuckets"] if row["documents"] is None]
    assert {row["group"] for row in broken} == {1}
    assert len(document["warnings"]) == 1
    assert "group-0001" in document["warnings"][0]
    assert document["totals"]["documents"] is None
