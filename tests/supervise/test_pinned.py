"""A report names the processes that hold pages of a group's file, and for how long. The readers are real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mirror.supervise.processes.pinned import SHOWN_S, PinnedPages
from tests.serve.kv_rig import Store
from tests.supervise.conftest import eventually_now

READS = """
import sys
from storage.read.view import open_view
view = open_view(sys.argv[1], partial=True)
reader = view.reader(0)
with reader.environment.read() as txn:
    txn.pub(0)
    print("reads", flush=True)
    sys.stdin.read()
"""


def look(pins: PinnedPages, group: int, store: Store) -> None:
    """As a worker does for each report."""
    pins.look(group, store.writer.readers(), store.writer.figures()["file_bytes"])


class Reader:
    """A process that stays in a transaction until it is ended."""

    def __init__(self, path: str) -> None:
        command = [sys.executable, "-c", READS, path]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"reads\n"

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self, *, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize("kill", [False, True])
def test_a_reader_that_stays_is_named_with_its_age_and_pinned_bytes(tmp_path: Path, kill: bool) -> None:
    store = Store(tmp_path, vbuckets=1)
    store.put(b"a", b"x", 1)
    now_s = 0.0
    pins = PinnedPages(lambda: now_s)
    reader = Reader(store.path)
    try:
        look(pins, 0, store)
        assert pins.rows() == [], "who sees the newest commit holds nothing up"
        for seqno in range(2, 40):
            store.put(b"a", b"x" * 20_000, seqno)
            look(pins, 0, store)
        now_s = SHOWN_S
        (row,) = pins.rows()
        assert (row["group"], row["pid"], row["age_s"]) == (0, reader.pid, SHOWN_S)
        assert row["grown_bytes"] > 20_000
        assert pins.warnings() == []
        now_s = 61
        look(pins, 0, store)
        (warning,) = pins.warnings()
        assert f"process {reader.pid} has read from group 0 within one transaction for more than 60 s" in warning
    finally:
        reader.end(kill=kill)
    if kill:
        eventually_now(store.writer.environment.env.reader_check)  # the writer's, every few seconds
    look(pins, 0, store)
    assert (pins.rows(), pins.warnings()) == ([], [])
    store.close()


def test_readers_of_several_groups_are_distinguished(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = Store(tmp_path / "one", vbuckets=1), Store(tmp_path / "two", vbuckets=1)
    now_s = 0.0
    pins = PinnedPages(lambda: now_s)
    for store in (one, two):
        store.put(b"a", b"x", 1)
    reader = Reader(two.path)
    try:
        for store in (one, two):
            store.put(b"a", b"y", 2)
        for _ in range(2):
            look(pins, 0, one)
            look(pins, 1, two)
            now_s += SHOWN_S
        assert [(row["group"], row["pid"]) for row in pins.rows()] == [(1, reader.pid)]
    finally:
        reader.end()
    one.close()
    two.close()
