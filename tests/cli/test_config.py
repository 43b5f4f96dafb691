from __future__ import annotations

from pathlib import Path

from mirror.config import Settings
from tests.cli.conftest import call


def test_each_setting_says_where_it_comes_from(tmp_path: Path) -> None:
    (tmp_path / "mirror.toml").write_text('source = "couchbase://reader@db/orders"\n')
    result = call(
        "config",
        "show",
        "--json",
        "--config",
        tmp_path / "mirror.toml",
        "--set",
        "groups=3",
        env={"DCP_MIRROR_WORKERS": "2"},
    )
    rows = {row["name"]: row for row in result.json}
    assert set(Settings.model_fields) < set(rows)
    assert rows["source"] == {
        "name": "source",
        "value": "couchbase://reader@db/orders",
        "from": f"file {tmp_path / 'mirror.toml'}",
    }
    assert (rows["groups"]["value"], rows["groups"]["from"]) == (3, "flag")
    assert (rows["workers"]["value"], rows["workers"]["from"]) == (2, "environment")
    assert rows["sync"]["from"] == "default"


def test_the_password_is_not_shown() -> None:
    for arguments in (["config", "show"], ["config", "show", "--json"]):
        result = call(*arguments, env={"DCP_MIRROR_PASSWORD": "hunter2"})
        assert result.code == 0
        assert "hunter2" not in result.out + result.err
        assert "********" in result.out


def test_people_get_a_table() -> None:
    result = call("config", "show")
    assert result.out.splitlines()[0].split() == ["setting", "value", "from"]
    assert any(line.split()[:1] == ["commit_interval_ms"] for line in result.out.splitlines())
