"""The command `on_event`: it gets each event, and nothing that it does harms the service."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path

import pytest

from mirror.errors import ConfigError
from mirror.supervise.events import hook as module
from mirror.supervise.events.hook import RUNNING_MAX, WAITING_MAX, Hook
from tests.supervise.conftest import eventually


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "on event.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return f"'{path}' {tmp_path}"


def logged(capsys: pytest.CaptureFixture[str]) -> str:
    return "".join(capsys.readouterr())


def texts(folder: Path, pattern: str) -> list[str]:
    """Return the contents of the files that are written already."""
    return [text for path in folder.glob(pattern) if (text := path.read_text())]


async def test_each_event_is_one_run_with_its_json_on_stdin_and_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCP_MIRROR_PASSWORD", "secret")
    hook = Hook(script(tmp_path, 'echo "$DCP_MIRROR_PASSWORD" > "$1/password"; cat > "$1/$$.json"'))
    events = [{"number": number, "event": "rollback"} for number in range(5)]
    for event in events:
        hook.put(event)
    await eventually(lambda: len(texts(tmp_path, "*.json")) == 5)
    await hook.close()
    found = [json.loads(text) for text in texts(tmp_path, "*.json")]
    assert sorted(found, key=lambda each: each["number"]) == events
    assert (tmp_path / "password").read_text() == "\n"


async def test_a_hook_without_a_command_keeps_no_event(tmp_path: Path) -> None:
    """An event of before the command was set is not given to it; one of after it is."""
    hook = Hook(None)
    hook.put({"number": 1})
    hook.use(script(tmp_path, 'cat > "$1/$$.json"'))
    hook.put({"number": 2})
    await eventually(lambda: texts(tmp_path, "*.json"))
    await hook.close()
    assert [json.loads(text) for text in texts(tmp_path, "*.json")] == [{"number": 2}]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("exit 3", "exit code 3"), (None, "No such file"), ("exec sleep 60", "did not end within")],
    ids=["it fails", "it is not there", "it hangs"],
)
async def test_a_failure_is_logged_once_and_again_after_a_success(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    complaint: str,
) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 0.2 if text and "sleep" in text else 60.0)
    hook = Hook("/nonexistent/program" if text is None else script(tmp_path, text))
    for _ in range(3):
        hook.put({})
    await eventually(lambda: hook.idle)
    monkeypatch.setattr(module, "TIMEOUT_S", 60.0)
    said = logged(capsys)
    assert said.count("on-event-failed") == 1
    assert complaint in said
    hook.use("true")
    hook.put({})
    await eventually(lambda: hook.idle)
    hook.use("false")
    hook.put({})
    await eventually(lambda: hook.idle)
    assert "exit code 1" in logged(capsys)
    await hook.close()


async def test_a_closing_hook_runs_the_command_for_all_waiting_events(tmp_path: Path) -> None:
    hook = Hook(script(tmp_path, 'cat > "$1/$$.json"'))
    for number in range(RUNNING_MAX + 3):
        hook.put({"number": number})
    await hook.close()
    assert len(texts(tmp_path, "*.json")) == RUNNING_MAX + 3


async def test_a_hook_bounds_its_runs_its_waiting_events_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hook = Hook(script(tmp_path, 'echo $$ > "$1/$$.pid"; exec sleep 600'))
    for number in range(RUNNING_MAX + WAITING_MAX + 5):
        hook.put({"number": number})
    await eventually(lambda: len(texts(tmp_path, "*.pid")) == RUNNING_MAX)
    assert logged(capsys).count("on-event-too-slow") == 1
    pids = [int(text) for text in texts(tmp_path, "*.pid")]
    monkeypatch.setattr(module, "TIMEOUT_S", 0.1)
    await asyncio.wait_for(hook.close(), 30)
    assert f"waiting={WAITING_MAX}" in logged(capsys)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("command", ["", "notify 'open"])
def test_a_malformed_command_is_refused(command: str) -> None:
    with pytest.raises(ConfigError, match="on_event"):
        Hook(command)
