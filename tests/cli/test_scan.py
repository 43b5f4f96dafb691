from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.cli.conftest import call, succeed
from tests.spark.mirrors import VBUCKETS, SmallMirror, orders


def test_a_scan_is_limited_by_prefix_count_or_vbucket(mirrored: Path) -> None:
    assert [line["key"] for line in call("scan", "--data", mirrored, "--json", "--prefix", "tex").lines] == ["text"]
    assert len(call("scan", "--data", mirrored, "--json", "--limit", "7").lines) == 7
    assert call("scan", "--data", mirrored, "--json", "--limit", "0").lines == []
    every = call("scan", "--data", mirrored, "--json").lines
    of_one = call("scan", "--data", mirrored, "--json", "--vbid", "3").lines
    assert of_one == [line for line in every if line["vbid"] == 3] != []
    assert [line.get("key", "") for line in of_one] == sorted(line.get("key", "") for line in of_one)


def test_documents_for_people_are_readable_lines(mirrored: Path) -> None:
    result = call("scan", "--data", mirrored, "--prefix", "order::00")
    assert len(result.out.splitlines()) == 9
    assert 'order::001\t{"number": 1}' in result.out


def test_a_read_as_of_a_seqno_needs_a_vbucket(mirrored: Path) -> None:
    call("scan", "--data", mirrored, "--as-of", "5").assert_complains(2, "seqnos count in one vbucket: name it")
    assert call("scan", "--data", mirrored, "--as-of", "2999-01-01", "--limit", "1").code == 0


@pytest.mark.parametrize("vbid", ["16", "70000", "x"])
def test_an_unknown_vbucket_is_refused(mirrored: Path, vbid: str) -> None:
    result = call("scan", "--data", mirrored, "--vbid", vbid)
    assert result.code in (1, 2)
    assert result.complaint


def test_a_scan_as_of_a_time_names_the_boundary_of_every_vbucket(mirrored: Path) -> None:
    boundaries = {
        row["vbid"]: [(each["time_ms"], each["seqno"]) for each in row["boundaries"]]
        for row in call("state", "--data", mirrored, "--json").json["vbuckets"]
    }
    moment_ms = max(each[-1][0] for each in boundaries.values())  # when the last one got its first boundary
    text = datetime.fromtimestamp(moment_ms / 1000, tz=UTC).isoformat(timespec="milliseconds")
    result = succeed("scan", "--data", mirrored, "--as-of", text.replace("+00:00", "Z"), "--json")
    reported = {vbid: max(each for each in kept if each[0] <= moment_ms)[1] for vbid, kept in boundaries.items()}
    for vbid, seqno in reported.items():
        assert f"as of vbucket {vbid}, seqno {seqno}, published " in result.err
    assert sum(line["key"].startswith("order::") for line in result.lines if "key" in line) == 200


READS: dict[str, tuple[str, ...]] = {
    "get": ("get", "order::000777"),
    "scan": ("scan",),
    "changes": ("changes",),
    "export": ("export",),
    "export to a file": ("export", "--to", "out.jsonl"),
}


@pytest.mark.parametrize("command", READS.values(), ids=READS)
def test_a_mirror_that_is_not_filled_is_read_only_with_partial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    mirror = SmallMirror(tmp_path / "data", filled=False)
    mirror.put(orders(0, 3))
    mirror.close()
    filled = sum(map(bool, mirror.seqnos.values()))
    unreadable = 1 if command[0] == "get" else VBUCKETS - filled
    refused = call(*command, "--data", tmp_path / "data")
    refused.assert_complains(1, "not filled yet")
    assert refused.out == ""
    part = call(*command, "--data", tmp_path / "data", "--partial")
    assert f"{unreadable} of {1 if command[0] == 'get' else VBUCKETS} vbuckets are missing" in part.err
    assert part.code == (5 if command[0] == "get" else 0)
    if command != READS["export"]:
        said = call(*command, "--data", tmp_path / "data", "--partial", "--json").lines[0]
        assert said["missing_vbuckets"] == unreadable
