"""`backup`: under load and without a service, to a directory and to stdout, and what it refuses."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.thread import SandboxThread
from storage.format.tokens import Token
from storage.read.view import open_view
from tests.cli.conftest import COMMAND, LIMIT_S, background, call, environment, fill, output_to_closed_pipe, succeed
from tests.processes import caught_up
from tests.supervise.conftest import eventually_now as eventually

JSON_MD = (Path(__file__).parents[2] / "cli" / "JSON.md").read_text()


def is_caught_up(data: Path) -> bool:
    status = call("status", "--data", data, "--json")
    return bool(status.out) and caught_up(status.json)


@contextmanager
def under_load(source: SandboxThread) -> Iterator[None]:
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.wait(0.01):
            if number % 10 or not number:
                source.call(source.cluster.set, f"order::{number % 500:03}", b'{"written": %d}' % number)
            else:
                source.call(source.cluster.delete, f"order::{(number - 5) % 500:03}")
            number += 1

    writing = threading.Thread(target=write)
    writing.start()
    try:
        yield
    finally:
        stop.set()
        writing.join()


def tokens_of(data: Path) -> dict[int, Token]:
    with open_view(data) as view:
        return {vbid: view.token(vbid) for vbid in view.vbids}


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_a_backup_made_under_load_is_restored_catches_up_and_equals_its_source(tmp_path: Path) -> None:
    """To a directory, as a tar on stdout, and as of a time before; the service and its writers go on meanwhile."""
    data, folder, tar = tmp_path / "data", tmp_path / "folder", tmp_path / "copy.tar"
    with SandboxThread(SandboxCluster(vbuckets=8)) as source:
        source.call(fill, source.cluster)
        flags = ("run", "--source", source.connection_string, "--data", data, "--groups", "2")
        with background(*flags) as service, under_load(source):
            eventually(lambda: is_caught_up(data))
            before = tokens_of(data)
            moment = datetime.now(UTC)
            eventually(lambda: min(token.seqno - before[vbid].seqno for vbid, token in tokens_of(data).items()) >= 5)
            made = succeed("backup", "--data", data, "--to", folder, "--json")
            assert [name for name in made.json if f"`{name}`" not in JSON_MD] == []
            assert (made.json["groups"], made.json["vbuckets"]) == (2, 8)
            streamed = succeed("backup", "--data", data, "--to", "-")
            tar.write_bytes(streamed.raw)
            older = succeed(
                "backup", "--data", data, "--to", tmp_path / "older", "--as-of", moment.isoformat(), "--json"
            )
            assert older.json["published_seqnos"] < made.json["published_seqnos"]
            status = call("status", "--data", data, "--json").json
            assert (status["service"], status["totals"]["resync_count"]) == ("up", 0)
            service.send_signal(signal.SIGTERM)
            _, said = service.communicate(timeout=LIMIT_S)
            assert (service.returncode, "error" in said) == (0, False), said
        source.call(source.cluster.set, "written afterwards", {})
        for copy in (folder, tar, tmp_path / "older"):
            target = copy.with_name(f"restored {copy.name}")
            restored = succeed("restore", "--from", copy, "--data", target, "--json")
            if copy == folder:
                assert restored.json["published_seqnos"] == made.json["published_seqnos"]
            assert call("check", "--data", target).code == 0
            tokens = tokens_of(target)
            if copy.name == "older":
                with open_view(data) as view:
                    for vbid, token in tokens.items():
                        times_ms = {each.seqno: each.time_ms for each in view.boundaries(vbid)}
                        newer = [time_ms for seqno, time_ms in times_ms.items() if seqno > token.seqno]
                        assert times_ms[token.seqno] <= moment.timestamp() * 1000 < min(newer)
            succeed("run", "--source", source.connection_string, "--data", target, "--until-caught-up")
            equal = call("verify", "--data", target, "--source", source.connection_string, "--json")
            assert (equal.code, equal.json["ok"]) == (0, True), equal.err
            with open_view(target) as view:  # resumed: each of its positions is on the way to what it has now
                assert all(view.check_way(token, view.token(vbid)) == token.seqno for vbid, token in tokens.items())
                assert sum(view.history(vbid).resync_count for vbid in view.vbids) == 0
                changed = {
                    change.document.key
                    for token in tokens.values()
                    for change in view.changes(since=token)
                    if change.document
                }
                assert b"written afterwards" in changed


def test_stdout_holds_only_a_tar(mirrored: Path, tmp_path: Path) -> None:
    made = succeed("backup", "--data", mirrored, "--to", "-")
    assert "copied to stdout" in made.err
    with tarfile.open(fileobj=io.BytesIO(made.raw)) as tar:
        names = tar.getnames()
    assert names == [f"group-000{group}/data.mdb.000000" for group in range(4)] + ["backup.json"]


def test_a_killed_backup_leaves_nothing_that_restore_accepts(mirrored: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [*COMMAND, "backup", "--data", str(mirrored), "--to", "-"], stdout=writing, env=environment()
    )
    os.close(writing)
    with open(reading, "rb") as pipe:
        begun = pipe.read(4096)  # what is written later waits in the pipe, which is smaller than a group
        process.kill()
        process.wait()
    (tmp_path / "begun.tar").write_bytes(begun)
    call("restore", "--from", tmp_path / "begun.tar", "--data", tmp_path / "target").assert_complains(
        3, "damaged or cut short"
    )
    assert not (tmp_path / "target").exists()


def test_a_reader_that_leaves_before_the_end_is_a_failure(mirrored: Path) -> None:
    code, said = output_to_closed_pipe("backup", "--data", mirrored, "--to", "-")
    assert code == 1
    assert said.splitlines()[-1].startswith("dcp-mirror: stdout was closed before the backup was complete")
    assert "Traceback" not in said


def test_a_mistake_is_one_line(mirrored: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    for arguments, code, words in (
        (["--to", tmp_path / "full"], 1, "is not empty: it holds notes"),
        (["--to", tmp_path / "a", "--as-of", "7"], 2, "takes a time here"),
        (["--to", tmp_path / "b", "--as-of", "2001-01-01"], 1, "nothing is kept as of 2001-01-01"),
        (["--to", "-", "--json"], 2, "--to - and --json both print to stdout"),
        (["--to", "/proc/backup"], 1, "/proc/backup"),
    ):
        call("backup", "--data", mirrored, *arguments).assert_complains(code, words)
    assert "no such directory" in call("backup", "--data", tmp_path / "none", "--to", tmp_path / "c").complaint
