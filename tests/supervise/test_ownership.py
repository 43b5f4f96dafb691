"""Files and directories of other users, or that others may write, are refused by name before a service starts."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from mirror.config_reader import validated
from mirror.errors import ConfigError
from mirror.ownership import behind_links, private_file, refuse_files_of_others, refuse_others
from tests.cli.conftest import call_here

NAMED = (
    *("users_file", "password_file", "listen_tls_key_file", "tls_client_key_file"),
    *("tls_ca_file", "listen_tls_client_ca_file"),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("x")
    path.chmod(0o644)
    return path


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
@pytest.mark.parametrize("setting", [*NAMED, "config"])
def test_a_file_that_others_may_write_is_refused_by_name(file: Path, setting: str, mode: int) -> None:
    settings = validated({} if setting == "config" else {setting: file})
    config = file if setting == "config" else None
    refuse_files_of_others(settings, config)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"{file} can be written by other users") as caught:
        refuse_files_of_others(settings, config)
    assert f"chmod go-w {file}" in caught.value.hint


@pytest.mark.parametrize("setting", ["listen_tls_cert_file", "tls_client_cert_file"])
def test_a_certificate_file_with_a_key_is_checked_like_a_key(file: Path, setting: str) -> None:
    file.chmod(0o666)
    with pytest.raises(ConfigError, match="can be written"):
        refuse_files_of_others(validated({setting: file}), None)


def test_a_file_of_another_user_is_refused_unless_it_is_of_root(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 4711)
    if file.stat().st_uid:
        with pytest.raises(ConfigError, match="belongs to user"):
            refuse_others(file, "the users file")
        return
    refuse_others(file, "the users file")
    os.chown(file, 4712, -1)
    with pytest.raises(ConfigError, match="belongs to user 4712"):
        refuse_others(file, "the users file")


def test_a_new_file_takes_no_mode_of_another_users_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared folder another user could make the file first, readable for all."""
    for geteuid, mode in ((os.geteuid, 0o644), (lambda: file.stat().st_uid + 4711, 0o600)):
        monkeypatch.setattr(os, "geteuid", geteuid)
        file.chmod(0o644)
        with private_file(file) as new:
            new.write(b"new")
        assert (stat.S_IMODE(file.stat().st_mode), file.read_bytes()) == (mode, b"new")


def test_a_link_of_another_user_is_not_followed(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.symlink_to("second")
    second.symlink_to(file)
    assert behind_links(str(first)) == str(file)
    assert behind_links(str(file)) == str(file)
    found = os.lstat

    def with_foreign_second(path: str) -> os.stat_result:
        there = found(path)
        return os.stat_result((*there[:4], 4712, *there[5:])) if path == str(second) else there

    monkeypatch.setattr(os, "lstat", with_foreign_second)
    for path in (first, second):
        with pytest.raises(ConfigError, match=f"{second} is a link of user 4712"):
            behind_links(str(path))
    monkeypatch.undo()
    second.unlink()
    second.symlink_to("first")
    with pytest.raises(ConfigError, match="leads to itself"):
        behind_links(str(first))


def test_a_service_does_not_start_with_a_file_that_others_may_write(tmp_path: Path, file: Path) -> None:
    file.chmod(0o666)
    source = "couchbase://demo@127.0.0.1:1/orders"
    for flags in (("--config", file), ("--set", f"users_file={file}"), ("--set", f"password_file={file}")):
        file.write_text("")
        found = call_here("run", "--source", source, "--data", tmp_path / "data", *flags)
        assert found.code == 2
        assert f"{file} can be written by other users" in found.err
    assert not (tmp_path / "data").exists()
