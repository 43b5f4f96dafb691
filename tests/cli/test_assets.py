"""The files that are given out, and what happens where there is something else."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import call_here


def test_the_files_are_written_and_never_replace_others(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    result = call_here("assets", "--to", folder)
    assert result.code == 0, result.err
    assert sorted(path.name for path in folder.iterdir()) == ["dcp-mirror-alerts.yml", "dcp-mirror-dashboard.json"]
    assert result.out.split() == [str(folder / "dcp-mirror-alerts.yml"), str(folder / "dcp-mirror-dashboard.json")]
    assert call_here("assets", "--to", folder).code == 0, "the same content may be there"
    (folder / "dcp-mirror-alerts.yml").write_text("groups: []\n")
    call_here("assets", "--to", folder).assert_complains(2, "with other content (move it away")
    assert (folder / "dcp-mirror-alerts.yml").read_text() == "groups: []\n"
    call_here("assets", "--to", folder / "dcp-mirror-alerts.yml").assert_complains(2, "name a directory")
