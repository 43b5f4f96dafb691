"""Settings in force: frozen, sent to other processes; the password is read from its place each time."""

from __future__ import annotations

import json
import os
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from mirror.config import PasswordSource, from_wire, to_wire
from mirror.config_reader import MASK, load
from mirror.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("DCP_MIRROR_") or name == "CREDENTIALS_DIRECTORY":
            monkeypatch.delenv(name)


def test_settings_are_frozen_and_survive_the_way_to_another_process(tmp_path: Path) -> None:
    settings = load({"data": tmp_path, "source": "couchbase://demo@localhost/demo", "collections": "a.b,c.d"}).settings
    with pytest.raises(FrozenInstanceError):
        settings.workers = 9  # type: ignore[misc]
    assert from_wire(json.loads(json.dumps(to_wire(settings)))) == settings


def test_password_comes_from_environment_then_file_then_secrets_folder(
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


def test_unreadable_password_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        PasswordSource(tmp_path / "absent", None).read()
    big = tmp_path / "big"
    big.write_bytes(b"x" * 5000)
    with pytest.raises(ConfigError, match="larger"):
        PasswordSource(big, None).read()
    big.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        PasswordSource(big, None).read()
