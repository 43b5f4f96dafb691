from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from cli.exits import Absent, CommandEnded, code_of, guarded
from mirror.errors import AuthRejected, BucketChanged, ConfigError, ConnectFailed, MirrorError
from mirror.wire.errors import RemoteProtocolError
from storage.errors import CorruptedError, Full, NotAMirror, StorageError, WrongBucket
from tests.cli.conftest import call_here, environment, output_to_closed_pipe


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MirrorError("broken"), 1),
        (ConnectFailed("refused"), 1),
        (ConfigError("bad"), 2),
        (BucketChanged("another"), 3),
        (AuthRejected("no"), 4),
        (Absent("no document"), 5),
        (StorageError("x"), 1),
        (Full("x"), 1),
        (NotAMirror("x"), 2),
        (CorruptedError("x"), 3),
        (WrongBucket("x"), 3),
        (RemoteProtocolError("x"), 1),
        (typer.BadParameter("x"), 2),
        (KeyboardInterrupt(), 130),
        (typer.Abort(), 130),
        (FileNotFoundError(2, "No such file", "/x"), 1),
        (ZeroDivisionError("a bug"), 1),
        (CommandEnded(3), 3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_each_error_has_its_exit_code(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise error

    assert code_of(error)[0] == code
    assert guarded(command) == code
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.count("\n") == (0 if code == 130 or isinstance(error, CommandEnded) else 1)


def test_success_is_exit_0() -> None:
    assert guarded(lambda: None) == 0
    assert guarded(lambda: 7) == 7


def test_a_bug_says_how_to_see_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise ZeroDivisionError("a bug")

    guarded(command)
    assert "DCP_MIRROR_LOG_LEVEL=debug" in capsys.readouterr().err
    monkeypatch.setenv("DCP_MIRROR_LOG_LEVEL", "debug")
    guarded(command)
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["dance"],
        ["status", "--nonsense"],
        ["run", "--workers", "many"],
        ["scan", "--vbid", "-1", "--data", "/tmp"],
        ["get"],
        ["get", "a", "b"],
        ["config", "hide"],
        ["changes", "--limit", "0"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line_and_exit_2(arguments: list[str]) -> None:
    result = call_here(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert "--help" in result.complaint
    assert len(result.err.splitlines()) == 1


def test_python_without_asserts_is_refused() -> None:
    command = [sys.executable, "-O", "-m", "cli.main", "--help"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "asserts" in done.stderr


def test_a_reader_that_leaves_early_is_not_a_failure(mirrored: Path) -> None:
    assert output_to_closed_pipe("scan", "--data", mirrored, "--json") == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [["get", "key"], ["scan"], ["status"], ["state"], ["check"], ["changes"], ["events"], ["export"]],
    ids=lambda arguments: arguments[0],
)
def test_a_directory_without_a_mirror_is_named(tmp_path: Path, arguments: list[str]) -> None:
    for place in (tmp_path, tmp_path / "missing"):
        call_here(*arguments, "--data", place).assert_complains(2, str(place))
