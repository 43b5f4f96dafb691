"""The process of test_disk_errors.py that writes: the same commits, rollbacks and purges again and again, each time
with errors at another write or sync of the file. After each one that fails the group is opened again, and must be as it
was after the last commit that succeeded, or after the one that failed; in the end it must be sound.
"""

from __future__ import annotations

import ctypes
import errno
import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from storage.admin.check import check
from storage.env import directory
from storage.errors import StorageError
from storage.history.purge import Window
from storage.model import FailoverLog, Identity
from storage.read.view import open_view
from storage.write.writer import GroupWriter, WriterOptions
from tests.storage.rig import stage

VBUCKETS = 3
IDENTITY = Identity("cluster", "bucket", "uuid", VBUCKETS, 1)
ROUNDS = 14
ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}

State = dict[bytes, tuple[int, bytes]]
"""Key -> seqno and value."""


class Run:
    """A group that is filled while some operations of the disk fail."""

    def __init__(self, path: Path, sync: str) -> None:
        self.path = str(path)
        self.random = Random(5)
        self.now_ms = 1_700_000_000_000
        directory.create(self.path, IDENTITY)
        self.writer = GroupWriter(
            directory.group_path(self.path, 0),
            WriterOptions(
                group=0,
                identity=IDENTITY,
                sync=sync,
                clock_ms=lambda: self.now_ms,
                map_size=1 << 19,
                window=Window(time_ms=300),
            ),
        )
        self.states: list[dict[int, State]] = [{0: {}} for _ in range(VBUCKETS)]
        """For each vbucket the state at each seqno that was published and not rolled back."""
        self.tips = [0] * VBUCKETS
        """The newest seqno of each vbucket that is published for certain."""
        self.errors: Counter[str] = Counter()
        self.problems: list[str] = []

    def run(self) -> None:
        for number in range(ROUNDS):
            self.attempt(self.write_round)
            self.now_ms += 100
            if number % 4 == 3:
                self.attempt(self.step)
            if number % 5 == 4:
                self.attempt(self.roll_back)
            self.now_ms += 300
            self.attempt(self.step)

    def attempt(self, work: Any) -> None:
        """Check that a failure is a named error of the store, and judge at once what may be published then."""
        self.may_be: list[set[int]] = [{tip} for tip in self.tips]
        try:
            work()
        except StorageError as error:
            self.errors[type(error).__name__] += 1
            while self.writer.owner.lost:
                try:
                    self.writer.reopen()
                except StorageError as again:
                    self.errors[type(again).__name__] += 1
        self.judge()

    def judge(self) -> None:
        found = [int(self.writer.vbuckets[vbid].state.published_seqno) for vbid in range(VBUCKETS)]
        if any(seqno not in allowed for seqno, allowed in zip(found, self.may_be, strict=True)):
            self.problems.append(f"published {found}, expected {self.may_be}")
        self.tips = found

    def step(self) -> None:
        self.writer.step()

    def write_round(self) -> None:
        ends = []
        for vbid in range(VBUCKETS):
            self.writer.vbuckets[vbid].save(failover_log=FailoverLog.of([(10, 0)]))
            first = self.tips[vbid] + 1
            state = dict(self.states[vbid][self.tips[vbid]])
            items: list[tuple[bytes, bytes | None, int]] = []
            for seqno in range(first, first + self.random.choice((1, 4, 30))):
                key, value = b"k%d" % self.random.randrange(30), self.random.randbytes(self.random.choice((40, 5000)))
                items.append((key, value, seqno))
                state[key] = (seqno, value)
            end = first + len(items) - 1
            stage(self.writer, end, *items, vbid=vbid)
            self.writer.vbuckets[vbid].publish(end, first)
            self.states[vbid] = {at: old for at, old in self.states[vbid].items() if at < first} | {end: state}
            ends.append(end)
        self.may_be = [{tip, end} for tip, end in zip(self.tips, ends, strict=True)]
        self.writer.commit()
        self.may_be = [{end} for end in ends]

    def roll_back(self) -> None:
        floor = self.writer.vbuckets[1].state.history_floor_seqno
        target = max((at for at in self.states[1] if floor <= at < self.tips[1]), default=0) or self.tips[1]
        self.may_be[1] = {self.tips[1], target}
        result = self.writer.vbuckets[1].rollback(self.tips[1] - 1)
        self.may_be[1] = {int(result.boundary_seqno) or self.tips[1]}
        if result.boundary_seqno and result.boundary_seqno != target:
            self.problems.append(f"a rollback to {result.boundary_seqno}, expected {target}")

    def end(self) -> None:
        """Close, and compare what is stored with what was written."""
        self.writer.close()
        with open_view(self.path, partial=True) as view:
            for vbid in range(VBUCKETS):
                seqno = int(view.state(vbid).published_seqno)
                stored = {document.key: (int(document.seqno), document.value) for document in view.scan(vbid)}
                if seqno != self.tips[vbid] or stored != self.states[vbid][seqno]:
                    self.problems.append(f"vb {vbid} at {seqno} is not what was written")
        self.problems += check(self.path).problems


def main(folder: Path, sync: str, name: str, count: int, tries: int) -> None:
    """Print, as JSON, what happened with `count` errors in a row at about `tries` places that lie evenly."""
    shim = ctypes.CDLL(None)
    shim.disk_operations.restype = ctypes.c_long

    def one(at: int) -> tuple[Run, int]:
        path = folder / "data"
        shutil.rmtree(path, ignore_errors=True)
        shim.disk_errors(ctypes.c_long(-1), ctypes.c_long(0), ctypes.c_int(0))
        run = Run(path, sync)
        shim.disk_errors(ctypes.c_long(at), ctypes.c_long(count), ctypes.c_int(ERRORS[name]))
        run.run()
        operations = shim.disk_operations()
        shim.disk_errors(ctypes.c_long(-1), ctypes.c_long(0), ctypes.c_int(0))
        run.end()
        return run, operations

    healthy, operations = one(-1)
    errors: Counter[str] = Counter(healthy.errors)
    problems = [f"without errors: {problem}" for problem in healthy.problems]
    places = range(0, operations, max(1, operations // tries))
    unnoticed = []
    for at in places:
        run, _ = one(at)
        errors += run.errors
        problems += [f"errors from operation {at} on: {problem}" for problem in run.problems]
        if not run.errors:
            unnoticed.append(at)
    found = {
        "operations": operations,
        "places": len(places),
        "errors": errors,
        "healthy": healthy.errors,
        "unnoticed": unnoticed,
        "problems": problems,
    }
    print(json.dumps(found), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
