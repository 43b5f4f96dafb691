"""SIGKILL at every internal step of a rollback, and of all that clears up after one; then started again.

A child runs the operation and kills itself at its n-th put, delete or commit; then what a restarted mirror would do is
done, and every keyspace must hold what the uninterrupted run left there, byte for byte. n rises until the child lives:
by twenty in the default suite, by three in `.ci/run`, by one with `-m long`.
After each kill a reader must find the documents of one of the published ends, whole, and the integrity walk nothing.

What a restarted mirror does is decided by what is stored alone, as in the service, with a source that answers the
same again. Only the fencing number and the file's pages may differ.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from storage.admin.check import check
from storage.env import directory
from storage.env.environment import Environment
from storage.format import keys, records, runs
from storage.history import branches, index, purge, removal
from storage.history.purge import Window
from storage.model import FailoverLog, Seqno, SnapshotRange, Vbuuid
from storage.read.view import open_view
from storage.write import background
from storage.write.writer import GroupWriter, WriterOptions
from tests.storage.model import IDENTITY, keys_of, row
from tests.storage.rig import settle

VBID = 0
OLD, NEW = Vbuuid(0xA), Vbuuid(0xB)
OLD_LOG = FailoverLog.of([(OLD, 0)])
NEW_LOG = FailoverLog.of([(NEW, 23), (OLD, 0)])
OTHER_LOG = FailoverLog.of([(0xC, 0)])
NAMES = keys_of(VBID, 12)
KEEP_ALL = Window()
NOW_MS = 1_700_000_000_000
STEPS_MAX = 2_000

Rows = list[tuple[int, bytes, bytes | None]]


def rows_of(first: int, last: int, mark: bytes) -> Rows:
    """A row for each seqno; each fifth is a tombstone."""
    return [
        (seqno, NAMES[seqno * 5 % len(NAMES)], None if seqno % 5 == 0 else mark + b"%d" % seqno)
        for seqno in range(first, last + 1)
    ]


# --- counting and killing


@dataclass
class Fuse:
    """Kills the process at the n-th step; 0: never."""

    at: int = 0
    count: int = 0

    def step(self) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


class Counting:
    """A write transaction or a cursor of one, which counts what it changes, and a commit before and after."""

    def __init__(self, inner: Any, fuse: Fuse) -> None:
        self._inner = inner
        self._fuse = fuse

    def __getattr__(self, name: str) -> Any:
        known = getattr(self._inner, name)
        if name == "cursor":
            return lambda *args, **options: Counting(known(*args, **options), self._fuse)
        if name not in ("put", "putmulti", "delete", "commit"):
            return known

        def counted(*args: Any, **options: Any) -> Any:
            self._fuse.step()
            answer = known(*args, **options)
            if name == "commit":
                self._fuse.step()
            return answer

        return counted

    def __enter__(self) -> Counting:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()


@contextmanager
def counting(fuse: Fuse) -> Iterator[None]:
    """Every write transaction of the block counts."""
    begin = Environment.begin

    def counted(self: Environment, *, write: bool = False, buffers: bool = False) -> Any:
        txn = begin(self, write=write, buffers=buffers)
        return Counting(txn, fuse) if write else txn

    Environment.begin = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Environment.begin = begin  # type: ignore[method-assign]


# --- the store and its source


def open_writer(data: str, window: Window = KEEP_ALL) -> GroupWriter:
    return GroupWriter(
        directory.group_path(data, 0),
        WriterOptions(group=0, identity=IDENTITY, sync="unsafe", clock_ms=lambda: NOW_MS, window=window),
    )


def stage(target: GroupWriter, rows: Rows, start: int, end: int) -> None:
    """Rows of the snapshot [start, end] that are above what is held."""
    vbucket = target.vbuckets[VBID]
    held = vbucket.state.staged_seqno
    made = [row(vbucket.prefix, name, value, seqno) for seqno, name, value in rows if seqno > held]
    vbucket.stage(made, 100, SnapshotRange(Seqno(start), Seqno(end)))


def fetch(target: GroupWriter, snapshots: list[tuple[int, int, Rows]]) -> None:
    """The stream from where the store stands: each snapshot in pieces that are written down, then published."""
    vbucket = target.vbuckets[VBID]
    for start, end, rows in snapshots:
        if vbucket.complete_seqno is not None:  # it was complete when the last writer died
            settle(target)
        if end <= vbucket.state.staging_published_seqno:
            continue
        for first in range(0, len(rows), 4):
            piece = rows[first : first + 4]
            if piece[-1][0] > vbucket.state.staged_seqno:
                stage(target, piece, start, end)
                target.commit(flush_open=True)
        vbucket.publish(end, start)
        settle(target)


OLD_SNAPSHOTS = [(0, 10, rows_of(1, 10, b"old")), (10, 20, rows_of(11, 20, b"old")), (20, 30, rows_of(21, 30, b"old"))]
NEW_SNAPSHOTS = [(20, 26, rows_of(21, 26, b"new")), (26, 33, rows_of(27, 33, b"new"))]
OTHER_SNAPSHOTS = [(0, 14, rows_of(1, 14, b"other")), (14, 17, rows_of(15, 17, b"other"))]


def prepared(data: str, *, part: bool = False) -> None:
    """Three published snapshots, and perhaps a part of a fourth on disk."""
    target = open_writer(data)
    target.vbuckets[VBID].save(failover_log=OLD_LOG)
    fetch(target, OLD_SNAPSHOTS)
    if part:
        stage(target, rows_of(31, 37, b"part"), 30, 40)
        target.commit(flush_open=True)
    target.close()


def rolled_back(data: str) -> None:
    target = open_writer(data)
    target.vbuckets[VBID].rollback(25)
    target.vbuckets[VBID].save(failover_log=NEW_LOG)
    fetch(target, NEW_SNAPSHOTS)
    target.close()


# --- what is interrupted; each is what a start does, from whatever is stored


def roll_back(data: str) -> None:
    target = open_writer(data)
    vbucket = target.vbuckets[VBID]
    if vbucket.state.rollback_count == 0:  # the source says ROLLBACK to 25 to all that hold more of the old history
        assert vbucket.rollback(25).boundary_seqno == 20
    vbucket.save(failover_log=NEW_LOG)
    fetch(target, NEW_SNAPSHOTS)
    target.close()


def abandon(data: str) -> None:
    target = open_writer(data)
    vbucket = target.vbuckets[VBID]
    if vbucket.state.branch == 1:  # the source continues only at 30; the branch records that the part was left
        vbucket.abandon()
    assert vbucket.state.staged_seqno >= 30
    fetch(target, [(30, 40, rows_of(31, 40, b"again"))])
    target.close()


def resync(data: str) -> None:
    target = open_writer(data)
    vbucket = target.vbuckets[VBID]
    if vbucket.state.failover_log == OLD_LOG:  # the source does not know our history
        vbucket.begin_resync()
    vbucket.save(failover_log=OTHER_LOG)
    fetch(target, OTHER_SNAPSHOTS)
    target.close()


def purge_to(data: str, window: Window) -> None:
    target = open_writer(data, window)
    settle(target)
    target.close()


purge_retracted = partial(purge_to, window=Window(time_ms=0))
purge_versions = partial(purge_to, window=Window(boundaries=1))


@dataclass(frozen=True)
class Case:
    before: Callable[[str], None]
    interrupted: Callable[[str], None]
    steps_min: int
    published: tuple[int, ...]
    """The seqnos that readers may find published after a kill."""


prepared_with_part = partial(prepared, part=True)


def prepared_and_rolled_back(data: str) -> None:
    prepared(data)
    rolled_back(data)


CASES = {
    "rollback": Case(prepared, roll_back, 30, (30, 20, 26, 33)),
    "rollback inside a staged snapshot": Case(prepared_with_part, roll_back, 30, (30, 20, 26, 33)),
    "abandon": Case(prepared_with_part, abandon, 20, (30, 40)),
    "resync and swap": Case(prepared, resync, 30, (30, 14, 17)),
    "resync over a staged snapshot": Case(prepared_with_part, resync, 30, (30, 14, 17)),
    "purge of retracted rows": Case(prepared_and_rolled_back, purge_retracted, 30, (33,)),
    "purge of versions": Case(prepared, purge_versions, 20, (30,)),
    "purge of versions after a rollback": Case(prepared_and_rolled_back, purge_versions, 30, (33,)),
}


# --- looking


def dump(data: str) -> list[tuple[bytes, bytes, bytes]]:
    """Every keyspace, sorted, without what belongs to one owner: its fencing number, history ids and chain ids."""
    environment = Environment(directory.group_path(data, 0), IDENTITY.group_vbids(0))
    try:
        environment.open_all()
        names = [*keys.SHARED_DBS]
        for vbid in IDENTITY.group_vbids(0):
            names += [keys.rows_db(vbid), keys.keys_db(vbid)]
        found = []
        with environment.read() as txn:
            for name in names:
                found += [(name, bytes(key), bytes(value)) for key, value in txn.cursor(name).iternext()]
    finally:
        environment.close()
    return sorted((name, key, _without_ids(name, value)) for name, key, value in found if key != b"fence")


def _without_ids(name: bytes, value: bytes) -> bytes:
    """A row without random ids. Each owner adds one to a branch, and one that was killed is followed by another."""
    if name == keys.DB_PURGE:
        return repr(branches.PurgeRow(*keys.PURGE.unpack(value))._replace(chain_id=0)).encode()
    if name == keys.DB_BRANCH:
        return repr(records.decode_branch(value)._replace(history_ids=())).encode()
    return value


def seen(data: str) -> tuple[int, tuple[tuple[bytes, bytes, int], ...]]:
    """Return the published seqno and the documents that a reader finds."""
    with open_view(data, partial=True) as view:
        documents = tuple((each.key, each.value, int(each.seqno)) for each in view.scan(VBID))
        return int(view.state(VBID).published_seqno), documents


def in_a_child(work: Callable[[], None]) -> int:
    """Run in a process of its own; its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a few rows reach, so that each operation has many steps."""
    monkeypatch.setattr("storage.write.pending.INLINE_INDEX_ROWS", 3)
    monkeypatch.setattr(background, "PURGE_INTERVAL_MS", 0)
    monkeypatch.setattr(index, "SLICE_ROWS", 3)
    monkeypatch.setattr(index, "RUN_ROWS", 5)
    monkeypatch.setattr(runs, "_CHUNK_ROWS", 2)
    monkeypatch.setattr(purge, "STEP_ROWS", 8)
    monkeypatch.setattr(removal, "RUN_ROWS", 6)
    monkeypatch.setattr(removal, "BATCH_ROWS", 3)


@pytest.mark.parametrize(
    "every",
    [
        pytest.param(20, marks=pytest.mark.small),
        pytest.param(3, marks=pytest.mark.ci),
        pytest.param(1, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_an_operation_killed_at_any_step_and_started_again_ends_the_same(
    name: str, every: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    case = CASES[name]
    before = tmp_path / "before"
    directory.create(str(before), IDENTITY)
    assert in_a_child(lambda: case.before(str(before))) == 0
    whole = str(shutil.copytree(before, tmp_path / "whole"))
    assert in_a_child(lambda: case.interrupted(whole)) == 0
    expected = dump(whole)
    assert expected != dump(str(before)), "the operation changes nothing"
    assert seen(whole)[0] == case.published[-1]

    data = tmp_path / "data"
    kills = 0
    views = set()
    for step in range(every, STEPS_MAX, every):
        shutil.copytree(before, data)

        def interrupted(step: int = step) -> None:
            with counting(Fuse(step)):
                case.interrupted(str(data))

        status = in_a_child(interrupted)
        if status == 0:
            break
        assert status == -signal.SIGKILL, f"step {step}: exit status {status}"
        kills += 1
        published, documents = seen(str(data))
        views.add((published, documents))
        assert published in case.published, f"killed at step {step}: published {published}"
        report = check(str(data))
        assert not report.problems, f"killed at step {step}: {report.problems[:5]}"
        assert in_a_child(lambda: case.interrupted(str(data))) == 0
        after = dump(str(data))
        assert after == expected, f"killed at step {step}: {_difference(after, expected)}"
        assert not check(str(data)).problems
        shutil.rmtree(data)
    else:
        raise AssertionError(f"still killed at step {STEPS_MAX}")
    record_property("kills", f"killed at {kills} steps, every {every}")
    record_property("seed", "none needed")
    assert kills >= case.steps_min // every, f"only {kills} steps"
    if every == 1:  # else a state that lasts for a step or two may be passed over
        assert len(views) == len(case.published), f"readers saw {len(views)} states, expected {case.published}"


def _difference(found: list[tuple[bytes, bytes, bytes]], expected: list[tuple[bytes, bytes, bytes]]) -> str:
    more = [each for each in found if each not in expected][:3]
    less = [each for each in expected if each not in found][:3]
    return f"there is {more}, there should be {less}"
