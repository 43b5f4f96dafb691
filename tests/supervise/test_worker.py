"""The start of worker and server processes, and the modules that they load."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from mirror.config import to_wire
from mirror.errors import SupervisionError
from mirror.health import assess
from mirror.messages import StartWorker
from mirror.supervise.processes.child import worker_command
from mirror.supervise.processes.quarantine import GroupMark
from mirror.supervise.processes.worker import BEHIND_S, NEW_CONTAINERS_MAX, News, open_stores, settle_collector
from mirror.supervise.status import reported_row
from storage.env import directory
from storage.errors import Full
from storage.model import Identity
from storage.write.writer import GroupWriter, WriterOptions
from tests.supervise.scripted import settings_for


def loaded_by(module: str) -> set[str]:
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {*done.stdout.split()}


@pytest.mark.parametrize("name", ["worker", "server"])
def test_a_process_loads_no_library_that_it_does_not_use(name: str) -> None:
    """Modules that check settings or draw would double the start time; a worker's are a fourth of a server's."""
    loaded = loaded_by(f"mirror.supervise.processes.{name}")
    assert "structlog" in loaded
    assert not loaded & {"pydantic", "rich", "typer", "attr"}
    of_workers = {"mirror.feed.follow.consumer", "mirror.ingest.machine"}
    assert loaded & of_workers == (of_workers if name == "worker" else set())


def test_a_report_is_news_when_streams_open_end_or_have_caught_up() -> None:
    news = News()
    assert not news.turned((False, False), 0.0)
    assert news.turned((True, False), 1.0)
    assert news.turned((True, True), 1.1), "the first time"
    assert not news.turned((True, True), 1.2)
    assert not news.turned((True, False), 1.3)
    assert not news.turned((True, True), 1.4), "behind for a moment, as with live writes"
    assert not news.turned((True, False), 2.0)
    assert news.turned((True, True), 2.0 + BEHIND_S)
    assert news.turned((False, False), 9.0), "a stream ended"


def test_the_command_line_holds_no_secret() -> None:
    assert worker_command(5) == [sys.executable, "-P", "-m", "mirror.supervise.processes.worker", "5"]


async def test_a_full_disk_does_not_end_a_worker_that_cannot_open_any_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a group commits. A restart on a full disk ended there, while the running service had served readers."""
    data = tmp_path / "data"
    directory.create(str(data), Identity("c1", "demo", "b1", 8, 4))
    is_full = [True]
    opened = GroupWriter.__init__

    def no_space(self: GroupWriter, path: str, options: WriterOptions) -> None:
        if is_full[0]:
            raise Full("no space left to write", path=path)
        opened(self, path, options)

    monkeypatch.setattr(GroupWriter, "__init__", no_space)
    monkeypatch.setattr("mirror.supervise.processes.worker.STORE_RETRY_S", 0.05)
    source = "couchbase://demo@127.0.0.1:1/demo"  # an unused port
    settings = to_wire(settings_for(data, source=source))
    mark = GroupMark.descriptor()
    start = StartWorker(0, [0, 2], settings, [], None, None, mark, [], ends_on_refusal=False)
    work = await open_stores(start, lambda _message: None)
    report = work.status()
    health = assess(
        [reported_row(row, row["vbid"] % 4) | {"worker": 0, "report_age_s": 0.1} for row in report["vbuckets"]],
        4, lag_limit_s=30, groups=report["groups"],
    )  # fmt: skip
    assert (health.state, health.message) == ("disk full", "4 of 4 vbuckets cannot be written, the disk is full")
    is_full[0] = False
    with pytest.raises(SupervisionError, match="group 0 can be opened now"):
        await work.run()


class Node:
    def __init__(self) -> None:
        self.other: Node | None = None


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def collections() -> int:
    return sum(int(each["collections"]) for each in gc.get_stats())


def collections_of(count: int) -> int:
    before = collections()
    rows = [(b"key", b"frame", [number]) for number in range(count)]
    assert len(rows) == count
    return collections() - before


def test_rows_of_a_batch_cause_no_garbage_collection() -> None:
    assert collections_of(20_000) > 20
    settle_collector()
    assert gc.get_freeze_count() > 0
    assert collections_of(20_000) == 0


def test_cycles_are_collected_within_the_policy() -> None:
    settle_collector()
    first, second = Node(), Node()
    first.other, second.other = second, first
    gone = weakref.ref(first)
    del first, second
    assert gone() is not None
    assert collections_of(NEW_CONTAINERS_MAX) >= 1
    assert gone() is None
