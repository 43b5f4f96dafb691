"""The service as people start it: what works, and one clear line for everything that cannot."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from mirror import client
from mirror.messages import GetStatus
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.thread import SandboxThread
from tests.cli.conftest import LIMIT_S, background, call, call_here, copy_of, succeed
from tests.processes import caught_up
from tests.supervise.conftest import eventually_now as eventually

UNREACHABLE = "couchbase://demo@127.0.0.1:1/demo"


def test_a_run_until_caught_up_ends_with_everything_published(source: SandboxThread, tmp_path: Path) -> None:
    result = succeed("run", "--source", source.connection_string, "--data", tmp_path, "--until-caught-up", "--json")
    assert result.json["caught_up"] is True
    assert result.json["vbuckets"] == result.json["vbuckets_done"] == 16
    high = source.call(lambda: sum(vbucket.high_seqno for vbucket in source.cluster.vbuckets))
    assert result.json["published_seqnos"] == high
    again = call("run", "--source", source.connection_string, "--data", tmp_path, "--until-caught-up")
    assert again.code == 0
    assert "caught up" in again.err
    assert again.out == ""


def test_a_run_can_mirror_some_of_the_vbuckets(source: SandboxThread, tmp_path: Path) -> None:
    def run(data: Path, vbuckets: str, *flags: str) -> Any:
        setting = f"vbuckets={vbuckets}"
        return call(
            "run", "--source", source.connection_string, "--data", data, "--until-caught-up", "--set", setting, *flags
        )

    data = tmp_path / "part"
    result = run(data, "4-9", "--json")
    assert result.code == 0, result.err
    assert result.json["vbuckets"] == result.json["vbuckets_done"] == 6
    status = call("status", "--data", data, "--json").json
    assert (status["vbucket_count"], status["vbuckets_held"]) == (16, 6)
    assert [row["vbid"] for row in status["vbuckets"]] == list(range(4, 10))
    assert status["totals"]["documents"] > 0
    assert call("check", "--data", data).code == 0
    scanned = {json.loads(line)["vbid"] for line in call("scan", "--data", data, "--json").out.splitlines()}
    assert scanned <= set(range(4, 10))
    elsewhere = call("scan", "--data", data, "--vbid", "3")
    assert elsewhere.code == 1
    assert "this mirror holds vbuckets 4 to 9" in elsewhere.err
    for where, vbuckets, words in (
        (data, "0-3", "was made to hold vbuckets 4-9"),
        (tmp_path / "beyond", "4-16", "the bucket has 16"),
        (tmp_path / "nonsense", "9-4", "not a range of vbuckets"),
    ):
        refused = run(where, vbuckets)
        assert refused.code == 2
        assert words in refused.err
    assert not (tmp_path / "beyond" / "mirror.json").exists()


def test_a_service_runs_until_stopped_and_answers_meanwhile(source: SandboxThread, tmp_path: Path) -> None:
    with background("run", "--source", source.connection_string, "--data", tmp_path, "--workers", "2") as service:
        eventually(lambda: caught_up((client.ask(tmp_path, GetStatus()) or {}).get("status")))
        status = call("status", "--data", tmp_path, "--json").json
        assert (status["service"], status["pid"]) == ("up", service.pid)
        assert [worker["phase"] for worker in status["workers"]] == ["running", "running"]
        assert status["totals"]["documents"] == 183
        call("run", "--source", source.connection_string, "--data", tmp_path).assert_complains(1, str(service.pid))
        service.send_signal(signal.SIGINT)
        _, err = service.communicate(timeout=LIMIT_S)
    assert service.returncode == 0
    assert "Traceback" not in err
    assert call("check", "--data", tmp_path).code == 0


@pytest.mark.parametrize(
    ("url", "words"), [("nonsense", "scheme"), ("couchbase://demo:secret@localhost/demo", "password"), ("", "empty")]
)
def test_an_invalid_connection_string_is_refused(tmp_path: Path, url: str, words: str) -> None:
    result = call_here("run", "--source", url, "--data", tmp_path / "data")
    assert (result.code, result.out) == (2, "")
    assert words in result.complaint
    assert "secret" not in result.err
    assert not (tmp_path / "data").exists()


def test_a_wrong_password_is_reported_at_once(source: SandboxThread, tmp_path: Path) -> None:
    arguments = ["run", "--source", source.connection_string, "--data", tmp_path / "data"]
    result = call(*arguments, env={"DCP_MIRROR_PASSWORD": "wrong"})
    assert result.code == 4
    assert result.err.splitlines() == [result.complaint]  # nothing before it
    assert "password" in result.complaint
    assert "wrong" not in result.complaint.replace("wrong user or password", "")
    assert not (tmp_path / "data" / "mirror.json").exists()


def test_an_address_without_a_source_is_named(tmp_path: Path) -> None:
    limited = ["--set", "bootstrap_timeout_s=0.5"]
    result = call("run", "--source", UNREACHABLE, "--data", tmp_path / "data", "--until-caught-up", *limited)
    result.assert_complains(1, "127.0.0.1:1")


def test_a_run_until_caught_up_that_is_stopped_earlier_exits_130(tmp_path: Path) -> None:
    arguments = ["--source", UNREACHABLE, "--data", tmp_path, "--until-caught-up", "--json"]
    with background("run", *arguments) as service:
        eventually(lambda: (client.ask(tmp_path, GetStatus()) or {}).get("status", {}).get("source_error"))
        service.terminate()
        out, err = service.communicate(timeout=LIMIT_S)
    assert service.returncode == 130, err
    assert json.loads(out)["caught_up"] is False
    unexpected = [line for line in err.splitlines() if "error" in line and "source-unreachable" not in line]
    assert unexpected == []
    assert "caught up:" not in err


@pytest.mark.parametrize(("flags", "code"), [([], 0), (["--until-caught-up"], 130)])
def test_a_service_stopped_before_it_has_read_its_settings_ends_cleanly(
    tmp_path: Path, flags: list[str], code: int
) -> None:
    os.mkfifo(tmp_path / "mirror.toml")
    arguments = ["--config", tmp_path / "mirror.toml", "--data", tmp_path / "data", "--source", UNREACHABLE]
    with background("run", *arguments, *flags) as service, (tmp_path / "mirror.toml").open("w"):
        service.terminate()  # it waits for the file's text
        _, err = service.communicate(timeout=LIMIT_S)
    assert (service.returncode, err) == (code, "")
    assert not (tmp_path / "data").exists()


def test_a_missing_option_is_named(tmp_path: Path) -> None:
    assert "--data" in call_here("run", "--source", UNREACHABLE).complaint
    assert "--source" in call_here("run", "--data", tmp_path).complaint
    assert call_here("run").code == 2


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        (["--workers", "0"], {}, "workers"),
        (["--set", "nonsense=1"], {}, "nonsense"),
        (["--set", "nonsense"], {}, "NAME=VALUE"),
        ([], {"DCP_MIRROR_WORKERS": "x"}, "workers"),
        ([], {"DCP_MIRROR_WROKERS": "2"}, "WROKERS"),
        ([], {"DCP_MIRROR_DCP": "nowhere"}, "dcp"),
        (["--config", "/nonexistent.toml"], {}, "/nonexistent.toml"),
        (["--collection", "airline"], {}, "SCOPE.COLLECTION"),
        (["--collection", "a.b", "--scope", "a"], {}, "both a scope and collections"),
        (["--scope", "a.b"], {}, "not the name of a scope"),
    ],
)
def test_an_invalid_setting_is_named_and_nothing_is_made(
    tmp_path: Path, arguments: list[str], env: dict[str, str], words: str
) -> None:
    call_here("run", "--source", UNREACHABLE, "--data", tmp_path / "data", *arguments, env=env).assert_complains(
        2, words
    )
    assert not (tmp_path / "data").exists()


def test_one_collection_is_mirrored_and_read_by_its_name(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with SandboxThread(SandboxCluster(vbuckets=4, seed=7)) as source:
        bucket = source.cluster.bucket
        source.call(bucket.create_scope, "inventory")
        source.call(bucket.create_collection, "inventory", "airline")
        source.call(bucket.set, "af", {"name": "Air France"}, collection="inventory.airline")
        arguments = ["run", "--source", source.connection_string, "--data", data, "--until-caught-up"]
        assert call(*arguments, "--collection", "inventory.airline").code == 0
        other = call(*arguments, "--scope", "inventory")
        assert call(*arguments).code == 0, "what it was made for need not be said again"
    other.assert_complains(2, "mirrors collections inventory.airline, not scope inventory")
    assert call("get", "--data", data, "af", "--collection", "inventory.airline", "--json").json["value"] == {
        "name": "Air France"
    }
    assert call("status", "--data", data, "--json").json["selection"] == "collections inventory.airline"
    absent = call("get", "--data", data, "af", "--collection", "inventory.route")
    assert absent.code != 0
    assert "inventory.airline" in absent.complaint, "what is known here is said"


def test_damaged_data_is_named(mirrored: Path, source: SandboxThread, tmp_path: Path) -> None:
    data = copy_of(mirrored, tmp_path / "data")
    (data / "group-0001" / "data.mdb").write_bytes(b"garbage" * 1000)
    arguments = ["run", "--source", source.connection_string, "--data", data, "--until-caught-up"]
    call(*arguments).assert_complains(3, "group-0001")
    (data / "mirror.json").write_text("{")
    assert call(*arguments).code == 3


def test_a_bucket_that_was_recreated_is_mirrored_next_to_its_old_data(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with SandboxThread(SandboxCluster(vbuckets=4)) as source:
        arguments = ["run", "--source", source.connection_string, "--data", data, "--until-caught-up", "--groups", "2"]
        source.call(source.cluster.set, "old", {"a": 1})
        assert call(*arguments).code == 0
        source.call(source.cluster.bucket.recreate)
        source.call(source.cluster.set, "new", {"a": 2})
        call(*arguments).assert_complains(3, "move the old one away")
        aside = data.rename(tmp_path / "old")
        assert call(*arguments).code == 0
    assert call("get", "--data", data, "new").code == 0
    assert call("get", "--data", data, "old").code == 5
    assert call("get", "--data", aside, "old").out == '{"a":1}'


def test_each_listener_is_announced_once_and_a_slow_stop_is_reported(
    source: SandboxThread, mirrored: Path, tmp_path: Path
) -> None:
    data = copy_of(mirrored, tmp_path / "data")
    arguments = ["run", "--source", source.connection_string, "--data", data, "--http", "0", "--kv", "0"]
    with background(*arguments) as service:
        assert service.stdout is not None
        said = sorted(service.stdout.readline() for _ in range(2))
        call("stop", "--data", data, "--timeout", "0").assert_complains(1, "has not ended within 0 s")
        out, err = service.communicate(timeout=LIMIT_S)
    assert [line.split()[0] for line in said] == ["http", "kv"]
    assert (service.returncode, out) == (0, "")
    assert not any(line.split()[1] in err for line in said)


def test_a_password_file_that_is_ignored_is_a_warning(source: SandboxThread, tmp_path: Path) -> None:
    options = ("--set", f"password_file={tmp_path / 'nope'}", "--until-caught-up")
    result = call("run", "--source", source.connection_string, "--data", tmp_path / "data", *options)
    assert result.code == 0
    assert result.err.count("password-file-ignored") == 1
    assert "used=DCP_MIRROR_PASSWORD" in result.err
