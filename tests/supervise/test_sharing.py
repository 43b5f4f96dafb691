"""`readers_group`: set, changed and wrong, from the settings to the modes of the files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from mirror.config import Settings
from mirror.errors import ConfigError
from mirror.ownership import readers_gid
from mirror.supervise.processes.worker import share
from storage.env import directory
from storage.model import Identity
from tests.supervise import in_process
from tests.supervise.conftest import eventually
from tests.supervise.in_process import vbids_of, vbucket
from tests.supervise.scripted import settings_for

ROOT = os.geteuid() == 0
GROUP = "54321" if ROOT else str(os.getegid())


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_an_unknown_readers_group_is_a_config_error() -> None:
    assert readers_gid(Settings()) is None
    assert readers_gid(Settings(readers_group=GROUP)) == int(GROUP)
    with pytest.raises(ConfigError, match="no group 'absent group'"):
        readers_gid(Settings(readers_group="absent group"))


async def test_the_service_gives_the_group_access_at_its_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_process.use(monkeypatch, lambda groups: {"vbuckets": [vbucket(vbid) for vbid in vbids_of(groups)]})
    data = tmp_path / "data"
    for group, mode in ((None, 0o700), (GROUP, 0o750)):
        async with in_process.serving(data, settings_for(data, workers=1, readers_group=group)):
            await eventually(lambda mode=mode: data.exists() and mode_of(data) == mode)  # type: ignore[misc]
    assert (mode_of(data / directory.FILE), data.stat().st_gid) == (0o640, int(GROUP))
    said = "".join(capsys.readouterr())
    assert said.count("readers-group-locked-out") == (1 if ROOT else said.count("readers-group-locked-out"))


async def test_a_new_mirror_is_readable_by_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process.use(monkeypatch, lambda groups: {"vbuckets": [vbucket(vbid) for vbid in vbids_of(groups)]})
    async with in_process.serving(tmp_path, settings_for(tmp_path, workers=1, readers_group=GROUP)) as service:
        await eventually(lambda: service.reports.document()["events"])
        assert mode_of(tmp_path / directory.FILE) == 0o640


def test_a_failed_change_of_group_is_logged_and_the_service_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(tmp_path / "data")
    directory.create(data, Identity("c", "b", "u", 4, 2))
    folder = directory.group_path(data, 0)
    share(folder, int(GROUP))
    assert oct(os.stat(os.path.join(folder, "lock.mdb")).st_mode)[-3:] == "660"
    os.rename(os.path.join(folder, "lock.mdb"), os.path.join(folder, "moved"))
    os.symlink("moved", os.path.join(folder, "lock.mdb"))
    share(folder, int(GROUP))
    assert "readers-group-refused" in "".join(capsys.readouterr())
