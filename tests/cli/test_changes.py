from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cli.changes import load_cursor, save_cursor, tokens_from
from mirror.errors import ConfigError, SupervisionError
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.thread import SandboxThread
from storage.model import Branch, Seqno
from storage.read.view import Token, open_view
from tests.cli.conftest import COMMAND, LIMIT_S, background, call, environment, output_to_closed_pipe, succeed
from tests.supervise.conftest import eventually_now as eventually

ID = "00000000000000ff"


def test_changes_of_all_vbuckets_hold_all_events(mirrored: Path) -> None:
    lines = call("changes", "--data", mirrored, "--json").lines
    assert {line["vbid"] for line in lines} == set(range(16))
    kinds = [line["kind"] for line in lines]
    assert kinds.count("deletion") == 20
    assert kinds.count("mutation") == 203


def test_events_for_people_are_a_line_each(mirrored: Path) -> None:
    line = call("changes", "--data", mirrored, "--vbid", "3").out.splitlines()[0].split("\t")
    assert Token.parse(line[0]).vbid == 3
    assert line[1] in ("mutation", "deletion")


@pytest.mark.parametrize("token", ["nonsense", "1:2", "1:2:3", "1:2:3:4", f"-1:2:3:{ID}", f"99999:1:1:{ID}", ""])
def test_a_malformed_token_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="token"):
        tokens_from([token])


def test_a_token_of_an_unknown_branch_is_refused(mirrored: Path) -> None:
    call("changes", "--data", mirrored, "--since", f"3:77:5:{ID}").assert_complains(1, "branch 77")


def test_a_token_of_another_vbucket_is_refused(mirrored: Path) -> None:
    assert set(tokens_from([f"1:2:3:{ID}", f"4:5:6:{ID}"])) == {1, 4}
    assert "another vbucket" in call("changes", "--data", mirrored, "--since", f"1:1:1:{ID}", "--vbid", "2").complaint


def test_a_follower_sees_each_write_and_each_retraction_once(tmp_path: Path) -> None:
    """A write, then a failover that loses it, then another write: the follower hears of each, once."""
    data = tmp_path / "data"
    with SandboxThread(SandboxCluster(nodes=2, vbuckets=4)) as source:
        cluster = source.cluster
        source.call(cluster.set, "first", b"1", vbid=2)
        with background("run", "--source", source.connection_string, "--data", data, "--groups", "2") as service:
            eventually(lambda: (data / "mirror.json").exists() and call("get", "--data", data, "first").code in (0, 5))
            with background("changes", "--data", data, "--vbid", "2", "--follow", "--json") as follower:
                assert follower.stdout is not None
                assert received(follower.stdout.readline()) == ("mutation", "first")
                source.call(cluster.set, "second", b"2", vbid=2)
                assert received(follower.stdout.readline()) == ("mutation", "second")
                source.call(cluster.failover, 2, lose=1)
                rolled_back = json.loads(follower.stdout.readline())
                assert rolled_back["kind"] == "rollback"
                assert rolled_back["rollback"]["to_seqno"] == 1
                assert received(follower.stdout.readline()) == ("retraction", "second")
                source.call(cluster.set, "third", b"3", vbid=2)
                assert received(follower.stdout.readline()) == ("mutation", "third")
                os.kill(follower.pid, signal.SIGINT)
                _, err = follower.communicate(timeout=LIMIT_S)
                assert (follower.returncode, err) == (0, "")
            service.terminate()
            service.communicate(timeout=LIMIT_S)


def received(line: str) -> tuple[str, Any]:
    event = json.loads(line)
    return event["kind"], event["document"]["key"]


def keys(lines: list[Any]) -> list[tuple[str, str]]:
    return [(line["kind"], line["document"]["key"]) for line in lines]


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SandboxThread, Path]]:
    data = tmp_path_factory.mktemp("moving") / "data"
    with SandboxThread(SandboxCluster(vbuckets=4)) as source:
        source.call(source.cluster.bucket.create_scope, "shop")
        source.call(source.cluster.bucket.create_collection, "shop", "orders")
        write(source, "first")
        catch_up(source, data)
        yield source, data


def write(source: SandboxThread, name: str) -> None:
    for vbid in range(4):
        source.call(source.cluster.set, f"{name}-{vbid}", {}, vbid=vbid)
    source.call(source.cluster.set, f"{name} order", {}, collection="shop.orders", vbid=1)


def catch_up(source: SandboxThread, data: Path) -> None:
    succeed("run", "--source", source.connection_string, "--data", data, "--until-caught-up", "--groups", "2")


def test_a_cursor_file_holds_the_position_in_all_vbuckets(moving: tuple[SandboxThread, Path], tmp_path: Path) -> None:
    source, data = moving
    file = tmp_path / "position"
    follow_up = ["changes", "--data", data, "--since", "now", "--cursor", file, "--json"]
    assert call(*follow_up).lines == []
    write(source, "second")
    catch_up(source, data)
    before = file.read_text()
    since = call("changes", "--data", data, "--since", file, "--json").lines
    assert file.read_text() == before  # --since only reads it
    first = call(*follow_up, "--limit", "2").lines
    rest = call(*follow_up).lines
    assert (len(first), first + rest) == (2, since)
    assert sorted(keys(since)) == [("mutation", "second order"), *(("mutation", f"second-{vbid}") for vbid in range(4))]
    assert call(*follow_up).lines == []


def test_a_limit_does_not_end_a_call_within_a_rollback(tmp_path: Path) -> None:
    """The cursor file has one position before the rollback's events: a call that ended between them would repeat them,
    and so would each call after it.
    """
    data = tmp_path / "data"
    follow_up = ["changes", "--data", data, "--since", "now", "--cursor", tmp_path / "position", "--json"]
    with SandboxThread(SandboxCluster(nodes=2, vbuckets=4)) as source:
        for written in (("first",), ("second", "third")):
            for key in written:
                source.call(source.cluster.set, key, b"1", vbid=2)
            catch_up(source, data)
        assert call(*follow_up).lines == []
        source.call(source.cluster.failover, 2, lose=2)
        source.call(source.cluster.set, "fourth", b"1", vbid=2)
        catch_up(source, data)
    lines = call(*follow_up, "--limit", "1").lines
    assert [line["kind"] for line in lines] == ["rollback", "retraction", "retraction"]
    assert keys(call(*follow_up, "--limit", "1").lines) == [("mutation", "fourth")]
    assert call(*follow_up, "--limit", "1").lines == []


def test_a_cursor_file_does_not_replace_a_device(mirrored: Path, tmp_path: Path) -> None:
    (tmp_path / "null").symlink_to(os.devnull)
    result = call("changes", "--data", mirrored, "--cursor", tmp_path / "null")
    result.assert_complains(2, "is no regular file")
    assert (result.out, (tmp_path / "null").is_char_device()) == ("", True)


def test_a_cursor_file_is_not_ahead_of_the_output_that_was_read(
    moving: tuple[SandboxThread, Path], tmp_path: Path
) -> None:
    _, data = moving
    file = tmp_path / "position"
    assert output_to_closed_pipe("changes", "--data", data, "--cursor", file, "--json") == (0, "")
    assert not file.exists()


def test_a_reader_that_leaves_early_does_not_move_the_cursor(mirrored: Path, tmp_path: Path) -> None:
    """The cursor passed events that `head` had left in the pipe."""
    every = call("changes", "--data", mirrored, "--json").out.splitlines(keepends=True)
    command = shlex.join([*COMMAND, "changes", "--data", str(mirrored), "--cursor", str(tmp_path / "at"), "--json"])
    for _ in range(3):
        piped = subprocess.run(
            ["bash", "-c", f"{command} | head -3; exit ${{PIPESTATUS[0]}}"],
            env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert (piped.returncode, piped.stdout, piped.stderr) == (0, "".join(every[:3]), "")
        assert not (tmp_path / "at").exists()


@pytest.mark.parametrize("command", [("changes", "--json"), ("export",)], ids=["changes", "export"])
def test_the_cursor_moves_after_all_output_was_read(mirrored: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    file = tmp_path / "position"

    def unread(pipe: int) -> int:
        return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)

    for reads_all in (False, True):
        with background(*command, "--data", mirrored, "--cursor", file) as running:
            assert running.stdout is not None
            pipe = running.stdout.fileno()
            assert os.read(pipe, 100)
            eventually(partial(unread, pipe))
            assert not file.exists()
            while reads_all and os.read(pipe, 1 << 20):
                pass
            running.stdout.close()
            assert running.wait(LIMIT_S) == 0
        assert file.exists() == reads_all
    with open_view(str(mirrored)) as view:
        assert load_cursor(file) == {vbid: view.token(vbid) for vbid in view.vbids}


def test_changes_of_a_collection_hold_no_other_events(moving: tuple[SandboxThread, Path]) -> None:
    _, data = moving
    lines = call("changes", "--data", data, "--collection", "shop.orders", "--json").lines
    created = [line["document"]["event"] for line in lines if line["kind"] == "system_event"]
    assert created == ["collection_created"] * 4
    written = [key for kind, key in keys(lines) if kind == "mutation"]
    assert written[0] == "first order"
    assert all(key.endswith(" order") for key in written)
    assert call("changes", "--data", data, "--collection", str(lines[0]["document"]["collection_id"])).out
    assert "no collection 'shop.none'" in call("changes", "--data", data, "--collection", "shop.none").complaint


TOKENS = {vbid: Token(vbid, Branch(2), Seqno(7 + vbid), 0xFF) for vbid in (3, 1)}


def test_a_saved_cursor_is_loaded_and_no_other_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "position"
    save_cursor(path, TOKENS.values())
    save_cursor(path, TOKENS.values())
    assert load_cursor(path) == TOKENS
    assert [line.split(":")[0] for line in path.read_text().splitlines()[1:]] == ["1", "3"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["position"]


@pytest.mark.parametrize("content", [b"1:2:3\n", b"\xff\xfe", b"{}"])
def test_a_file_that_is_not_a_cursor_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "position"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a cursor file"):
        load_cursor(path)


def test_a_missing_or_unwritable_file_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_cursor(tmp_path / "none")
    with pytest.raises(SupervisionError, match="cannot be written"):
        save_cursor(tmp_path / "none" / "position", TOKENS.values())
