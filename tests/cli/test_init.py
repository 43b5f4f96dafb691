"""`init`: a settings file that `run` takes, after the source was tried, and the files of the unit below a root."""

from __future__ import annotations

import os
import shlex
import tomllib
from pathlib import Path

import pytest

from cli import init
from mirror.config import Settings
from mirror.config_reader import load
from mirror.sandbox.thread import SandboxThread
from tests.cli.conftest import call, succeed
from tests.terminal import Terminal, plain


def test_the_settings_file_works_with_run_and_the_next_steps_are_printed(source: SandboxThread, tmp_path: Path) -> None:
    to, data = tmp_path / "made" / "orders.toml", tmp_path / "data"
    made = succeed("init", "--source", source.connection_string, "--data", data, "--to", to)
    assert any(line.startswith("ok    login") for line in made.out.splitlines())
    next_lines = [line.split()[1:] for line in made.out.splitlines() if line.startswith("next")]
    assert next_lines == [["dcp-mirror", "run", "--config", str(to)], ["dcp-mirror", "status", "--config", str(to)]]
    succeed(*next_lines[0][1:], "--until-caught-up")
    assert call(*next_lines[1][1:], "--json").json["data"] == str(data)
    call("init", "--source", source.connection_string, "--data", tmp_path, "--to", to).assert_complains(
        2, f"{to} exists"
    )
    assert call("init", "--source", source.connection_string, "--data", tmp_path, "--to", to, "--force").code == 0
    assert [entry.name for entry in to.parent.iterdir()] == ["orders.toml"]


def test_a_source_that_refuses_the_login_gets_no_settings_file(source: SandboxThread, tmp_path: Path) -> None:
    arguments = ["init", "--source", source.connection_string, "--data", tmp_path / "data", "--to", tmp_path / "s.toml"]
    refused = call(*arguments, env={"DCP_MIRROR_PASSWORD": "wrong"})
    assert (refused.code, "nothing was written" in refused.err) == (4, True)
    assert list(tmp_path.iterdir()) == []
    assert "give --source" in call("init").complaint
    assert "give --data" in call("init", "--source", source.connection_string).complaint


def test_a_missing_value_is_prompted_for_until_it_is_valid(source: SandboxThread, tmp_path: Path) -> None:
    folder = tmp_path / "with a space"
    folder.mkdir()
    (folder / "notes").write_text("mine")
    with Terminal("init", cwd=folder, DCP_MIRROR_PASSWORD="") as terminal:
        terminal.until("Source (couchbases://user@host/bucket): ")
        terminal.type("orders\n")
        assert "Error: the connection string is wrong: " in terminal.until("Source (couchbases://user@host/bucket): ")
        terminal.type(f"{source.connection_string}\n")
        terminal.until("Data directory [demo]: ")
        terminal.type("notes\n")
        assert "Error: notes is not a directory" in terminal.until("Data directory [demo]: ")
        terminal.type("\n")
        terminal.until("Password for bucket demo (kept in a file of its own): ")
        terminal.type("wrong\n")
        assert "fail  login" in plain(terminal.until("Password, again (Ctrl-C ends this): "))
        terminal.type("demo\n")
        assert "ok    login" in plain(terminal.until("written  "))
        assert terminal.end() == 0
        assert "wrong\r" not in terminal.shown.replace("is wrong", ""), "a password is not echoed"
        lines = terminal.shown.splitlines()
    to = folder / "dcp-mirror.toml"
    assert tomllib.loads(to.read_text()) == {
        "source": source.connection_string,
        "data": str(folder / "demo"),
        "password_file": str(folder / "dcp-mirror.password"),
    }
    assert (folder / "dcp-mirror.password").read_text() == "demo"
    assert (folder / "dcp-mirror.password").stat().st_mode & 0o777 == 0o600
    run, status = (shlex.split(line)[1:] for line in lines if line.startswith("next"))
    assert (run[0], status[0]) == ("dcp-mirror", "dcp-mirror")
    for command, shown in ((run, "caught up"), (status, "demo (16 vbuckets)")):
        more = ("--until-caught-up",) if command is run else ()
        with Terminal(*command[1:], *more, cwd=tmp_path, DCP_MIRROR_PASSWORD="") as terminal:
            assert terminal.end() == 0, terminal.shown
            assert shown in plain(terminal.shown)


@pytest.mark.parametrize("key", ["\x03", "\x04"], ids=["Ctrl-C", "Ctrl-D"])
@pytest.mark.parametrize("question", ["Source", "Password"])
def test_a_question_can_be_cancelled(question: str, key: str, tmp_path: Path) -> None:
    given = () if question == "Source" else ("--source", "couchbase://demo@127.0.0.1:1/demo", "--data", tmp_path / "d")
    with Terminal("init", *given, cwd=tmp_path, DCP_MIRROR_PASSWORD="") as terminal:
        terminal.until(question)
        terminal.until(": ")
        assert terminal.end(pressing=key) == 130
        assert "Traceback" not in terminal.shown
        assert "rror" not in terminal.shown
    assert list(tmp_path.iterdir()) == []


def test_an_unreachable_source_is_named_and_no_file_is_written(tmp_path: Path) -> None:
    with Terminal("init", cwd=tmp_path, DCP_MIRROR_PASSWORD="") as terminal:
        terminal.until("Source (couchbases://user@host/bucket): ")
        terminal.type("couchbase://demo@127.0.0.1:1/demo\n")
        terminal.until("Data directory [demo]: ")
        terminal.type("\n")
        terminal.until("Password for bucket demo (kept in a file of its own): ")
        terminal.type("demo\n")
        said = terminal.until("nothing was written: correct the failed step, or give --no-check")
        assert "127.0.0.1:1" in said
        assert terminal.end() == 1
        assert "again" not in said, "the password is not what failed"
    assert list(tmp_path.iterdir()) == []


def test_a_settings_file_does_not_replace_a_device(tmp_path: Path) -> None:
    (tmp_path / "null").symlink_to(os.devnull)
    arguments = ["--source", "couchbase://a@b/c", "--data", tmp_path / "data", "--to", tmp_path / "null"]
    call("init", *arguments, "--no-check", "--force").assert_complains(2, "is no regular file")
    assert (tmp_path / "null").is_char_device()


def test_systemd_files_go_below_a_root_and_only_the_owner_reads_the_password(tmp_path: Path) -> None:
    arguments = ["--no-check", "--systemd", "orders", "--root", tmp_path]
    made = succeed(
        "init", "--source", "couchbases://reader@db1/orders", *arguments, env={"DCP_MIRROR_PASSWORD": "secret"}
    )
    etc = tmp_path / "etc"
    found = {str(path.relative_to(etc)) for path in etc.rglob("*") if path.is_file()}
    assert found == {
        "systemd/system/dcp-mirror@.service",
        "sysusers.d/dcp-mirror.conf",
        "tmpfiles.d/dcp-mirror.conf",
        "dcp-mirror/orders.toml",
        "dcp-mirror/orders.password",
    }
    assert (etc / "dcp-mirror" / "orders.password").read_text() == "secret"
    assert os.stat(etc / "dcp-mirror" / "orders.password").st_mode & 0o777 == 0o600
    assert tomllib.loads((etc / "dcp-mirror" / "orders.toml").read_text()) == {
        "source": "couchbases://reader@db1/orders"
    }
    assert "secret" not in made.out + made.err
    assert made.out.splitlines()[-1].endswith("systemctl enable --now dcp-mirror@orders")
    assert call("init", "--source", "couchbase://a@b/c", "--systemd", "../x", "--no-check").code == 2


def test_every_setting_is_listed_and_has_its_default_when_uncommented(tmp_path: Path) -> None:
    lines = init.settings_text({"source": "couchbase://a@b/c"}).splitlines()
    settings = [line.removeprefix("#") for line in lines if line and not line.startswith("# ")]
    with_default = [line for line in settings if not line.endswith("=")]
    file = tmp_path / "settings.toml"
    file.write_text("\n".join(with_default))
    loaded = load(config_file=file).settings
    assert loaded.source == "couchbase://a@b/c"
    names = [line.split(" =")[0] for line in with_default[1:]]
    assert {name: getattr(loaded, name) for name in names} == {name: getattr(Settings(), name) for name in names}
    assert max(map(len, lines)) <= 120
