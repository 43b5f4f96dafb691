"""`stop` and `reload` against a service in a process of its own, and `status --wait-ready` before it has begun."""

from __future__ import annotations

from pathlib import Path

from mirror.sandbox.thread import SandboxThread
from tests.cli.conftest import LIMIT_S, background, call
from tests.supervise.conftest import eventually_now as eventually


def test_a_service_is_waited_for_reloaded_and_stopped(source: SandboxThread, tmp_path: Path) -> None:
    data = tmp_path / "data"
    settings = tmp_path / "settings.toml"
    settings.write_text("history_s = 100\n")
    for command in ("stop", "reload"):
        result = call(command, "--data", data)
        result.assert_complains(1, "no service runs for")
    assert call("status", "--data", data, "--wait-ready", "--timeout", "0.1").code == 2, "there is no mirror"
    with (
        background("status", "--data", data, "--wait-ready", "--json") as waiting,
        background("run", "--source", source.connection_string, "--data", data, "--config", settings) as service,
    ):
        out, _ = waiting.communicate(timeout=LIMIT_S)
        assert (waiting.returncode, '"state":"following"' in out) == (0, True)
        settings.write_text("history_s = 200\n")
        assert call("reload", "--data", data).code == 0
        eventually(lambda: "history_s" in call("events", "--data", data).out)
        assert call("stop", "--data", data).code == 0
        assert service.wait(LIMIT_S) == 0
    result = call("status", "--data", data, "--wait-ready", "--timeout", "0.1")
    assert (result.code, "no service runs" in result.out) == (1, True)
    again = call("run", "--source", source.connection_string, "--data", data, "--until-caught-up")
    assert again.code == 0, "nothing holds the directory any more"
