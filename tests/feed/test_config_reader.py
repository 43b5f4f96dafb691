"""Reading settings: order of the layers, provenance, clear errors, secrets that stay secret."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from mirror.config import PasswordSource, from_wire, to_wire
from mirror.config_reader import MASK, load
from mirror.errors import ConfigError, ExitCode
from mirror.serve.access.auth import new_salt_key, read_users


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)


def test_a_flag_outranks_the_environment_the_file_and_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mirror.toml"
    file.write_text('workers = 3\ngroups = 4\nsync = "full"\n')
    monkeypatch.setenv("DCP_MIRROR_GROUPS", "5")
    monkeypatch.setenv("DCP_MIRROR_SYNC", "unsafe")
    loaded = load({"sync": "safe", "data": tmp_path, "kv": None}, config_file=file)
    settings = loaded.settings
    assert (settings.workers, settings.groups, settings.sync, settings.batch_bytes_max) == (3, 5, "safe", 8 * 2**20)
    assert loaded.provenance["workers"] == f"file {file}"
    assert loaded.provenance["groups"] == "environment"
    assert loaded.provenance["sync"] == "flag"
    assert loaded.provenance["batch_bytes_max"] == "default"
    assert loaded.provenance["kv"] == "default"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"workers": 0}, "workers"),
        ({"workers": "many"}, "workers"),
        ({"groups": 1000}, "groups"),
        ({"sync": "sometimes"}, "sync"),
        ({"connection_buffer_size": 1}, "connection_buffer_size"),
        ({"noop_interval_s": 0}, "noop_interval_s"),
        ({"source": " "}, "source"),
        ({"tls_minimum_version": "1.0"}, "tls_minimum_version"),
    ],
)
def test_a_bad_value_is_an_error_that_names_the_setting_and_the_remedy(flags: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags)
    assert named in caught.value.what
    assert caught.value.hint
    assert caught.value.exit_code is ExitCode.USAGE
    assert "\n" not in str(caught.value)


def test_an_unknown_setting_is_refused_with_the_nearest_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mirror.toml"
    file.write_text("worker = 3\n")
    with pytest.raises(ConfigError, match="did you mean workers"):
        load(config_file=file)
    monkeypatch.setenv("DCP_MIRROR_GROUP", "3")
    with pytest.raises(ConfigError, match="did you mean groups"):
        load()


def test_a_bad_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(config_file=tmp_path / "absent.toml")
    file = tmp_path / "bad.toml"
    file.write_text("workers = = 3\n")
    with pytest.raises(ConfigError, match="not TOML"):
        load(config_file=file)


def test_a_byte_order_mark_of_a_file_is_ignored(tmp_path: Path) -> None:
    """Editors of Windows write one: "Invalid statement (at line 1, column 1)" was said of a right line."""
    file, password = tmp_path / "mirror.toml", tmp_path / "password"
    file.write_bytes(b"\xef\xbb\xbfworkers = 3\r\n")
    assert load(config_file=file).settings.workers == 3
    password.write_bytes(b"\xef\xbb\xbfsecret\r\n")
    assert PasswordSource(password, None).read() == "secret"
    users = tmp_path / "users.json"
    users.write_bytes(b"\xef\xbb\xbf" + json.dumps({"users": {}, "salt_key": new_salt_key()}).encode())
    users.chmod(0o600)
    assert read_users(users)["users"] == {}


def test_settings_are_frozen_and_unchanged_in_another_process(tmp_path: Path) -> None:
    settings = load({"data": tmp_path, "source": "couchbase://demo@localhost/demo", "collections": "a.b,c.d"}).settings
    with pytest.raises(FrozenInstanceError):
        settings.workers = 9  # type: ignore[misc]
    assert from_wire(json.loads(json.dumps(to_wire(settings)))) == settings


def test_the_password_comes_from_the_environment_then_a_file_then_the_secrets_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir()
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(folder))
    assert PasswordSource.of(load().settings).read() is None
    (folder / "password").write_text("from folder\n")
    assert PasswordSource.of(load().settings).read() == "from folder"
    file = tmp_path / "password"
    file.write_text("from file")
    monkeypatch.setenv("DCP_MIRROR_PASSWORD_FILE", str(file))
    source = PasswordSource.of(load().settings)
    assert source.read() == "from file"
    file.write_text("changed")
    assert source.read() == "changed", "a changed password needs no restart"
    monkeypatch.setenv("DCP_MIRROR_PASSWORD", "from environment")
    assert source.read() == "from environment"
    shown = load().rows()
    assert ("password", MASK, "environment") in shown
    assert "from environment" not in str(shown)


def test_an_unreadable_password_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        PasswordSource(tmp_path / "absent", None).read()
    big = tmp_path / "big"
    big.write_bytes(b"x" * 5000)
    with pytest.raises(ConfigError, match="larger"):
        PasswordSource(big, None).read()
    big.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        PasswordSource(big, None).read()
