from __future__ import annotations

from pathlib import Path
from shutil import copytree

from mirror.sandbox.thread import SandboxThread
from tests.cli.conftest import call

FIELDS = [
    "vbid", "branch", "staging_branch", "vbuuid", "failover_log", "published_seqno", "staged_seqno", "snapshot",
    "source_purge_seqno", "local_purge_seqno", "history_floor_seqno", "history_floor_ms", "purged_seqno", "versions",
    "row_bytes", "key_bytes", "stale", "manifest_uid", "rollback_count", "last_rollback_ms", "boundaries",
]  # fmt: skip


def test_positions_and_failover_logs_equal_those_of_the_source(mirrored: Path, source: SandboxThread) -> None:
    shown = call("state", "--data", mirrored, "--json").json
    assert shown["bucket"] == "demo"
    assert [row["vbid"] for row in shown["vbuckets"]] == list(range(16))
    for row in shown["vbuckets"]:
        vbucket = source.cluster.vbucket(row["vbid"])
        assert list(row) == FIELDS
        assert row["published_seqno"] == row["staged_seqno"] == source.call(getattr, vbucket, "high_seqno")
        log = [(f"{entry.vbuuid:012x}", entry.seqno) for entry in source.call(list, vbucket.failover_log)]
        assert [(entry["vbuuid"], entry["seqno"]) for entry in row["failover_log"]] == log
        assert row["vbuuid"] == log[0][0]
        assert row["snapshot"] is None
        if row["published_seqno"]:
            assert row["boundaries"][0]["seqno"] == row["published_seqno"]


def test_the_state_of_one_vbucket_or_of_all_is_shown(mirrored: Path) -> None:
    assert [row["vbid"] for row in call("state", "--data", mirrored, "--vbid", "3", "--json").json["vbuckets"]] == [3]
    table = call("state", "--data", mirrored).out.splitlines()
    assert table[0].split()[:4] == ["vbid", "branch", "vbuuid", "published"]
    assert len(table) == 17


def test_vbuckets_that_can_be_read_are_shown_next_to_a_lost_group(mirrored: Path, tmp_path: Path) -> None:
    data = copytree(mirrored, tmp_path / "data")
    (data / "group-0002" / "data.mdb").write_bytes(b"garbage" * 1000)
    found = call("state", "--data", data)
    assert found.code == 3
    assert "group-0002" in found.err
    shown = [int(line.split()[0]) for line in found.out.splitlines()[1:]]
    assert shown == [vbid for vbid in range(16) if vbid % 4 != 2]
    listed = call("state", "--data", data, "--json")
    assert (listed.code, [row["vbid"] for row in listed.json["vbuckets"]]) == (3, shown)
    alone = call("state", "--data", data, "--vbid", "2", "--json")
    assert (alone.code, alone.out) == (3, "")


def test_an_unknown_vbucket_is_refused(mirrored: Path) -> None:
    assert "no vbucket 99" in call("state", "--data", mirrored, "--vbid", "99").complaint
