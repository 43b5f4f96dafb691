"""`rollback`: offline and through the running service, foretold and done, and what it refuses."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.thread import SandboxThread
from storage.env import directory
from storage.read.view import Token, View
from storage.write.writer import GroupWriter, WriterOptions
from tests.cli.conftest import LIMIT_S, background, call, call_here, filled_source, succeed
from tests.processes import caught_up
from tests.supervise.conftest import eventually_now as eventually

JSON_MD = (Path(__file__).parents[2] / "cli" / "JSON.md").read_text()


@pytest.fixture(scope="module")
def source_and_template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SandboxThread, Path]]:
    with filled_source(SandboxCluster(vbuckets=4), tmp_path_factory.mktemp("rollback") / "data", 2) as made:
        yield made


@pytest.fixture
def source(source_and_template: tuple[SandboxThread, Path]) -> SandboxThread:
    return source_and_template[0]


@pytest.fixture
def data(source_and_template: tuple[SandboxThread, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(source_and_template[1], tmp_path / "data"))


def state_of(data: Path, vbid: int = 1) -> dict[str, Any]:
    return call("state", "--data", data, "--vbid", str(vbid), "--json").json["vbuckets"][0]  # type: ignore[no-any-return]


def documents(data: Path, vbid: int = 1) -> list[str]:
    return call("scan", "--data", data, "--vbid", str(vbid), "--json").out.splitlines()


def test_an_offline_rollback_does_what_its_dry_run_announced(data: Path, source: SandboxThread) -> None:
    before = state_of(data)
    newest, older = before["boundaries"][:2]
    contents = documents(data)
    arguments = ["rollback", "--data", data, "--vbid", "1", "--to", str(newest["seqno"] - 1)]
    foretold = call(*arguments, "--dry-run", "--json").json
    assert (foretold["dry_run"], foretold["done"], foretold["service"]) == (True, False, None)
    assert foretold["boundary"]["seqno"] == older["seqno"]
    assert foretold["retracted"] == foretold["restored"] == newest["seqno"] - older["seqno"] > 0
    assert state_of(data) == before
    result = succeed(*arguments, "--json")
    done = result.json
    assert [name for name in done if f"`{name}`" not in JSON_MD] == []
    assert (done["done"], done["service"], done["branch"]) == (True, "down", before["branch"] + 1)
    assert done["boundary"] == foretold["boundary"]
    fields = ("retracted", "restored", "documents", "from_seqno", "from_branch", "since")
    assert {name: done[name] for name in fields} == {name: foretold[name] for name in fields}
    assert {each["kind"] for each in done["documents"]} == {"retraction", "restoration"}
    after = state_of(data)
    assert (after["published_seqno"], after["rollback_count"]) == (older["seqno"], 1)
    assert len(documents(data)) == len(contents) + done["restored"]
    events = call("changes", "--data", data, "--vbid", "1", "--since", done["since"], "--json").lines
    assert [event["kind"] for event in events].count("retraction") == done["retracted"]
    assert call("check", "--data", data).code == 0
    succeed("run", "--source", source.connection_string, "--data", data, "--until-caught-up")
    assert documents(data) == contents  # the source still has it all: streamed again from there


def test_a_running_service_rolls_back_and_streams_on(data: Path, source: SandboxThread) -> None:
    newest = state_of(data)["published_seqno"]
    contents = documents(data)
    with background("run", "--source", source.connection_string, "--data", data) as service:
        eventually(lambda: caught_up(call("status", "--data", data, "--json").json))
        result = succeed("rollback", "--data", data, "--vbid", "1", "--to", str(newest - 1), "--json")
        assert (result.json["service"], result.json["done"]) == ("up", True)
        assert result.json["retracted"] > 0
        eventually(lambda: state_of(data)["published_seqno"] == newest)
        assert documents(data) == contents
        call("rollback", "--data", data, "--vbid", "1", "--to", "0").assert_complains(1, "history begins at seqno")
        assert state_of(data)["rollback_count"] == 1
        service.send_signal(signal.SIGTERM)
        service.communicate(timeout=LIMIT_S)
    assert service.returncode == 0


def test_an_impossible_rollback_changes_nothing_and_names_the_reason(data: Path) -> None:
    before = state_of(data)
    floor = before["history_floor_seqno"]
    call("rollback", "--data", data, "--vbid", "1", "--to", str(floor - 1)).assert_complains(
        1, f"history begins at seqno {floor}"
    )
    assert "there is no vbucket 99" in call("rollback", "--data", data, "--vbid", "99", "--to", "1").complaint
    assert call("rollback", "--data", data, "--vbid", "1").code == 2
    nothing = call("rollback", "--data", data, "--vbid", "1", "--to", "999999999")
    assert (nothing.code, "nothing to take back" in nothing.out) == (0, True)
    assert state_of(data) == before


def test_a_dry_run_refuses_what_the_rollback_refuses(data: Path) -> None:
    arguments = ["rollback", "--data", data, "--vbid", "1", "--to", str(state_of(data)["published_seqno"] - 1)]
    identity = directory.load(str(data))
    options = WriterOptions(group=1, identity=identity, clock_ms=lambda: 1)
    with closing(GroupWriter(directory.group_path(str(data), 1), options)) as writer:
        writer.vbuckets[1].begin_resync()
    for more in ([], ["--dry-run"]):
        call(*arguments, *more).assert_complains(1, "it is being resynced")


@pytest.mark.parametrize("form", ["--json", "--limit=1"])
def test_a_rollback_whose_documents_were_purged_since_has_succeeded(
    data: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service may purge the branch before the command reads it: "the branch record is missing", exit code 3."""
    token = View.token

    def purged(view: View, vbid: int, branch: int | None = None, seqno: int | None = None) -> Token:
        return token(view, vbid, None if branch is None else 99, seqno)

    monkeypatch.setattr(View, "token", purged)
    newest = state_of(data)["published_seqno"]
    result = call_here("rollback", "--data", data, "--vbid", "1", "--to", str(newest - 1), form)
    assert result.code == 0, result.err
    if form == "--json":
        assert [result.json[name] for name in ("done", "retracted", "restored", "since")] == [True, None, None, None]
    else:
        assert "the retracted documents are gone from history" in result.out


def test_the_boundary_and_the_documents_are_shown_to_people(data: Path) -> None:
    newest = state_of(data)["published_seqno"]
    result = call("rollback", "--data", data, "--vbid", "1", "--to", str(newest - 1), "--limit", "1")
    lines = result.out.splitlines()
    assert lines[0].startswith(f"vbucket 1 went from seqno {newest} to the boundary at seqno ")
    assert "retracted" in lines[0]
    assert len(lines) == 2
    assert lines[1].startswith("retraction\t")
    assert "changes --vbid 1 --since 1:1:" in result.err
