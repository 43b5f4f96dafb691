from __future__ import annotations

from pathlib import Path

import pytest

from cli.options import collection_from, data_directory, flags_from
from mirror.errors import ConfigError


@pytest.mark.parametrize("pair", ["nonsense", "=1", ""])
def test_a_malformed_pair_is_refused(pair: str) -> None:
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        flags_from([pair])


def test_a_value_may_hold_an_equals_sign() -> None:
    assert flags_from(["password-file=/a=b"]) == {"password_file": "/a=b"}
    assert flags_from(None) == {}


def test_the_data_directory_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data"):
        data_directory(None)
    monkeypatch.setenv("DCP_MIRROR_DATA", str(tmp_path))
    assert data_directory(None) == tmp_path
    assert data_directory(tmp_path / "flag") == tmp_path / "flag"


@pytest.mark.parametrize(
    ("text", "meant"), [(None, None), ("8", 8), ("orders", "_default.orders"), ("shop.orders", "shop.orders")]
)
def test_a_collection_is_given_by_name_or_number(text: str | None, meant: str | int | None) -> None:
    assert collection_from(text) == meant
