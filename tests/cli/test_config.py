from __future__ import annotations

from pathlib import Path

from mirror.config_reader import NAMES
from tests.cli.conftest import call_here


def test_each_setting_is_shown_with_its_origin(tmp_path: Path) -> None:
    (tmp_path / "mirror.toml").write_text('source = "couchbase://reader@db/orders"\n')
    result = call_here(
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
    assert set(NAMES) < set(rows)
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
        result = call_here(*arguments, env={"DCP_MIRROR_PASSWORD": "hunter2"})
        assert result.code == 0
        assert "hunter2" not in result.out + result.err
        assert "********" in result.out


def test_the_settings_for_people_are_a_table() -> None:
    result = call_here("config", "show")
    assert result.out.splitlines()[0].split() == ["setting", "value", "from"]
    assert any(line.split()[:1] == ["batch_bytes_max"] for line in result.out.splitlines())


def test_each_setting_is_explained_with_its_bounds() -> None:
    rows = {row["name"]: row for row in call_here("config", "explain", "--json").json}
    assert set(rows) == set(NAMES)
    assert all(row["meaning"] and row["section"] for row in rows.values())
    assert rows["noop_interval_s"]["values"] == "number, seconds, 0.1 to 10800"
    assert rows["request_timeout_s"]["values"] == "number, seconds, above 0, at most 600"
    assert rows["batch_bytes_max"]["values"] == "integer, bytes, 65536 to 67108864"
    assert rows["sync"]["values"] == "`safe`, `full`, `unsafe`"


def test_a_setting_is_explained_to_people() -> None:
    said = call_here("config", "explain", "history_s").out
    assert "Superseded versions, tombstones" in said
    assert "integer, seconds, 0 to" in said
    assert "only in a new data directory" in call_here("config", "explain", "groups").out


def test_a_setting_that_does_not_exist_is_named_with_the_nearest() -> None:
    call_here("config", "explain", "histori_s").assert_complains(2, "did you mean history_s")
