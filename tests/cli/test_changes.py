from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cli.changes import tokens_from
from mirror.errors import ConfigError
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.thread import SandboxThread
from storage.view import Token, open_view
from tests.cli.conftest import LIMIT_S, background, call
from tests.cli.test_run import eventually

ID = "00000000000000ff"


def test_events_come_in_order_and_each_token_goes_on_after_it(mirrored: Path) -> None:
    lines = call("changes", "--data", mirrored, "--vbid", "3", "--json").lines
    assert lines
    assert [line["document"]["seqno"] for line in lines] == sorted(line["document"]["seqno"] for line in lines)
    with open_view(str(mirrored)) as view:
        assert [line["token"] for line in lines] == [str(view.token(3, 1, line["document"]["seqno"])) for line in lines]
    middle = len(lines) // 2
    rest = call("changes", "--data", mirrored, "--since", lines[middle]["token"], "--json").lines
    assert rest == lines[middle + 1 :]
    assert call("changes", "--data", mirrored, "--since", lines[-1]["token"], "--json").lines == []


def test_all_vbuckets_hold_all_events(mirrored: Path) -> None:
    lines = call("changes", "--data", mirrored, "--json").lines
    assert {line["vbid"] for line in lines} == set(range(16))
    kinds = [line["kind"] for line in lines]
    assert kinds.count("deletion") == 20
    assert kinds.count("mutation") == 203


def test_people_get_a_line_each(mirrored: Path) -> None:
    line = call("changes", "--data", mirrored, "--vbid", "3").out.splitlines()[0].split("\t")
    assert Token.parse(line[0]).vbid == 3
    assert line[1] in ("mutation", "deletion")


@pytest.mark.parametrize("token", ["nonsense", "1:2", "1:2:3", "1:2:3:4", f"-1:2:3:{ID}", f"99999:1:1:{ID}", ""])
def test_a_token_that_is_none(mirrored: Path, token: str) -> None:
    result = call("changes", "--data", mirrored, "--since", token)
    assert result.code == 2
    assert "token" in result.complaint


def test_a_token_of_a_history_that_nobody_knows(mirrored: Path) -> None:
    result = call("changes", "--data", mirrored, "--since", f"3:77:5:{ID}")
    assert result.code == 1
    assert "branch 77" in result.complaint


def test_tokens_belong_to_their_vbuckets(mirrored: Path) -> None:
    assert set(tokens_from([f"1:2:3:{ID}", f"4:5:6:{ID}"])) == {1, 4}
    with pytest.raises(ConfigError):
        tokens_from(["1:2:x"])
    assert "another vbucket" in call("changes", "--data", mirrored, "--since", f"1:1:1:{ID}", "--vbid", "2").complaint


def test_following_shows_what_comes_and_what_is_taken_back(tmp_path: Path) -> None:
    """A write, then a failover that loses it, then another write: the follower hears of each, once."""
    data = tmp_path / "data"
    with SandboxThread(SandboxCluster(nodes=2, vbuckets=4)) as source:
        cluster = source.cluster
        source.call(cluster.set, "first", b"1", vbid=2)
        with background("run", "--source", source.connection_string, "--data", data, "--groups", "2") as service:
            eventually(lambda: (data / "mirror.json").exists() and call("get", "--data", data, "first").code in (0, 5))
            with background("changes", "--data", data, "--vbid", "2", "--follow", "--json") as follower:
                assert follower.stdout is not None
                assert heard(follower.stdout.readline()) == ("mutation", "first")
                source.call(cluster.set, "second", b"2", vbid=2)
                assert heard(follower.stdout.readline()) == ("mutation", "second")
                source.call(cluster.failover, 2, lose=1)
                rolled_back = json.loads(follower.stdout.readline())
                assert rolled_back["kind"] == "rollback"
                assert rolled_back["rollback"]["to_seqno"] == 1
                assert heard(follower.stdout.readline()) == ("retraction", "second")
                source.call(cluster.set, "third", b"3", vbid=2)
                assert heard(follower.stdout.readline()) == ("mutation", "third")
                os.kill(follower.pid, signal.SIGINT)
                _, err = follower.communicate(timeout=LIMIT_S)
                assert (follower.returncode, err) == (0, "")
            service.terminate()
            service.communicate(timeout=LIMIT_S)


def heard(line: str) -> tuple[str, Any]:
    event = json.loads(line)
    return event["kind"], event["document"]["key"]
