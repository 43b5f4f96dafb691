"""`stop` against a service in a process of its own, and `status --wait-ready` before it has begun."""

from __future__ import annotations

from pathlib import Path

from mirror.sandbox.thread import SandboxThread
from tests.cli.conftest import LIMIT_S, background, call
from tests.processes import without_rootly_powers


def test_a_service_can_be_waited_for_and_stopped(source: SandboxThread, tmp_path: Path) -> None:
    data = tmp_path / "data"
    call("stop", "--data", data).assert_complains(1, "no service runs for")
    assert call("status", "--data", data, "--wait-ready", "--timeout", "0.1").code == 2, "there is no mirror"
    with (
        background("status", "--data", data, "--wait-ready", "--json") as waiting,
        background("run", "--source", source.connection_string, "--data", data) as service,
    ):
        out, _ = waiting.communicate(timeout=LIMIT_S)
        assert (waiting.returncode, '"state":"following"' in out) == (0, True)
        assert call("stop", "--data", data).code == 0
        assert service.wait(LIMIT_S) == 0
    result = call("status", "--data", data, "--wait-ready", "--timeout", "0.1")
    assert (result.code, "no service runs" in result.out) == (1, True)
    again = call("run", "--source", source.connection_string, "--data", data, "--until-caught-up")
    assert again.code == 0, "nothing holds the directory any more"


def test_a_directory_that_the_user_may_not_enter_is_not_reported_as_unserved(tmp_path: Path) -> None:
    """They read that no service runs."""
    data = tmp_path / "closed" / "data"
    data.parent.mkdir(mode=0)
    result = call("stop", "--data", data, preexec_fn=without_rootly_powers)
    result.assert_complains(1, f"this user may not use the control socket of {data}")
