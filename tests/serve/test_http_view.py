"""The view of a process: opened late, and again when a group was recreated."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mirror.serve.http.view import Mirror
from storage.env import directory
from storage.errors import NotAMirror
from tests.serve.http_site import IDENTITY, Source


def test_no_mirror_yet(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path)
    with pytest.raises(NotAMirror):
        _ = mirror.view
    mirror.refresh()
    directory.create(str(tmp_path), IDENTITY)
    assert mirror.view.identity == IDENTITY
    mirror.close()


def test_a_group_that_was_recreated_is_read_again(source: Source) -> None:
    mirror = Mirror(Path(source.path))
    key = source.key_of(1)
    source.put(key)
    before = mirror.view
    assert before.exists(key)
    mirror.refresh()
    assert mirror.view is before
    source.writers.pop(1).close()
    path = directory.group_path(source.path, 1)
    os.rename(path, path + ".damaged")
    os.mkdir(path + ".new")
    directory.create_environment(path + ".new", 1, directory.group_vbids(IDENTITY, 1), IDENTITY, time_ms=1)
    os.rename(path + ".new", path)
    mirror.refresh()
    assert mirror.view is not before
    assert not mirror.view.exists(key)
    shutil.rmtree(path + ".damaged")
    mirror.close()
