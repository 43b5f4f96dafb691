from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
import structlog

from mirror import log as logs
from mirror.log import get_logger


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_logs_go_to_stderr_and_leave_stdout_to_data(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up_logs("info")
    structlog.get_logger().info("workers-ready", workers=2)
    structlog.get_logger().debug("not shown")
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "workers-ready" in streams.err
    assert "workers=2" in streams.err
    assert "not shown" not in streams.err


def test_a_line_of_json_is_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up_logs("debug", json=True, process="worker 3")
    structlog.get_logger().debug("shown", bucket="demo")
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["bucket"], line["process"], line["level"]) == ("shown", "demo", "worker 3", "debug")


def test_a_line_leaves_out_unknown_values_and_json_has_null(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up_logs("info")
    get_logger("test").info("rollback", vbuckets=32, from_seqno=None)
    line = capsys.readouterr().err
    assert "vbuckets" in line
    assert "from_seqno" not in line
    logs.set_up_logs("info", json=True)
    get_logger("test").info("rollback", vbuckets=32, from_seqno=None)
    assert json.loads(capsys.readouterr().err)["from_seqno"] is None


def test_control_characters_of_a_client_are_escaped_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    """A failed login logged the user's name as it came, and cleared the screen of the reader of the log."""
    logs.set_up_logs("info")
    get_logger("test").info("logins\x1b[2J", user="a\n2026-01-01 [info] all is well\x1b[2J", peer="::1")
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "\x1b" not in line
    assert r"user='a\n2026-01-01 [info] all is well.[2J'" in line


def test_a_reader_that_left_does_not_end_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w", buffering=1) as closed_pipe:
        monkeypatch.setattr("sys.stderr", closed_pipe)
        logs.set_up_logs("info")
        structlog.get_logger().info("into the void")
        assert os.readlink(f"/proc/self/fd/{write_end}") == os.devnull
