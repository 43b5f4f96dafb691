"""A mirror of one bucket, its writer for group 0, and a reader: what most tests of the store begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import storage.format.runs
import storage.history.index
import storage.history.purge
import storage.read.scan
from storage.admin.check import check
from storage.env import directory
from storage.env.environment import Environment
from storage.read.view import View, open_view
from storage.write.writer import GroupWriter
from tests.storage.model import IDENTITY, log
from tests.storage.rig import Clock, open_writer


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> str:
    directory.create(str(tmp_path / "mirror"), IDENTITY)
    return str(tmp_path / "mirror")


@pytest.fixture
def writer(path: str, clock: Clock) -> Iterator[GroupWriter]:
    """A writer of group 0; the mirror must be sound after the test."""
    opened = open_writer(path, clock=clock)
    opened.vbuckets[0].save(failover_log=log())
    yield opened
    opened.close()
    assert check(path).problems == []


@pytest.fixture
def environment(path: str) -> Iterator[Environment]:
    """The environment of group 0, open for writing without a writer."""
    opened = Environment(directory.group_path(path, 0), IDENTITY.group_vbids(0), writable=True)
    opened.open_all()
    yield opened
    opened.close()


@pytest.fixture
def view(path: str, writer: GroupWriter) -> Iterator[View]:
    with open_view(path, partial=True) as opened:
        yield opened


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits so small that a dozen rows reach the paths that millions take in service."""
    monkeypatch.setattr("storage.write.pending.INLINE_INDEX_ROWS", 3)
    monkeypatch.setattr(storage.history.index, "SLICE_ROWS", 2)
    monkeypatch.setattr(storage.history.index, "RUN_ROWS", 5)
    monkeypatch.setattr(storage.format.runs, "_CHUNK_ROWS", 2)
    monkeypatch.setattr(storage.read.scan, "CHUNK_ROWS", 3)
    monkeypatch.setattr(storage.history.purge, "STEP_ROWS", 2)
    monkeypatch.setattr(storage.history.purge, "LOOK_VBUCKETS", 10)
