from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mirror.errors import ConfigError, SupervisionError
from mirror.supervise.lock import LOCK_NAME, ServiceLock


def test_a_second_service_is_refused_and_learns_who_holds_it(tmp_path: Path) -> None:
    lock = ServiceLock(tmp_path / "new" / "data")
    with pytest.raises(SupervisionError, match=str(os.getpid())):
        ServiceLock(tmp_path / "new" / "data")
    lock.release()
    lock.release()
    ServiceLock(tmp_path / "new" / "data").release()


def test_the_lock_of_a_killed_holder_is_free(tmp_path: Path) -> None:
    code = "import os, pathlib, sys; from mirror.supervise.lock import ServiceLock"
    code += "; lock = ServiceLock(pathlib.Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    ServiceLock(tmp_path).release()


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        ServiceLock(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_directory_of_an_interrupted_start_is_taken(tmp_path: Path) -> None:
    (tmp_path / "group-0000").mkdir()
    (tmp_path / "mirror.json.new").touch()
    lock = ServiceLock(tmp_path)
    assert lock.directory == tmp_path
    lock.release()


def test_a_mirror_may_hold_any_files(tmp_path: Path) -> None:
    (tmp_path / "mirror.json").touch()
    (tmp_path / "notes of the operator").touch()
    lock = ServiceLock(tmp_path)
    assert (tmp_path / LOCK_NAME).read_text().split() == [str(os.getpid())]
    lock.release()


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not a directory"):
        ServiceLock(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be written"):
        ServiceLock(tmp_path / "file" / "below")


def test_a_lock_that_is_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    """The service would write its process id into any file that the link names."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    (data / LOCK_NAME).symlink_to(victim)
    with pytest.raises(ConfigError, match=r"service\.lock is a symbolic link"):
        ServiceLock(data)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("mode", [0o1777, 0o770])
def test_a_directory_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(mode)
    with pytest.raises(ConfigError, match="can be written by other users") as caught:
        ServiceLock(data)
    assert f"chmod go-w {data}" in caught.value.hint
    data.chmod(0o750)
    ServiceLock(data).release()


@pytest.mark.parametrize("how", ["removed", "emptied", "moved", "replaced"])
def test_a_directory_that_is_no_longer_at_its_path_is_noticed(tmp_path: Path, how: str) -> None:
    data = tmp_path / "data"
    lock = ServiceLock(data)
    lock.check_place(made=False)
    (data / "mirror.json").touch()
    lock.check_place(made=True)
    if how == "emptied":
        (data / "mirror.json").unlink()
    elif how == "removed":
        shutil.rmtree(data)
    else:
        data.rename(tmp_path / "elsewhere")
    if how == "replaced":
        shutil.copytree(tmp_path / "elsewhere", data)
    with pytest.raises(SupervisionError, match=f"{data} was removed or moved while the service ran"):
        lock.check_place(made=True)
    lock.release()


def test_a_full_disk_does_not_prevent_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The restart of a sound mirror on a full disk ended with "No space left on device", without a path."""

    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", no_space)
    ServiceLock(tmp_path).release()
