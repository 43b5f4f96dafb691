"""`sync` as a real process, to be killed in the middle of a batch, and the verdict on its tables.

Knows the command, Spark's checkpoint (a batch runs while the offset log is one ahead of the commit log), the mirror and
the source; nothing of how sync works. Invariant: a kill counts only if the checkpoint, looked at after the process is
gone, proves that it hit a running batch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from deltalake import DeltaTable

from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.thread import SandboxThread
from storage.env import directory
from storage.read.view import open_view
from tests.cli.conftest import COMMAND
from tests.crash.service import gone, until
from tests.sandbox.past import state_at
from tests.spark.standalone import spark_environment

LIMIT_S = 240.0
"""For a driver to start and do a batch. It takes some ten seconds; on a busy machine many times that."""
PUBLISHED = ("mutation", "deletion", "expiration")


class Kill(NamedTuple):
    """A kill, and what the checkpoint said before and after it."""

    victim: str
    before: tuple[int, int]
    after: tuple[int, int]

    @property
    def confirmed(self) -> bool:
        """True if the kill hit a running batch: its begin is on disk, its end is not."""
        return self.after[0] == self.before[0] == self.after[1] + 1

    def __str__(self) -> str:
        return f"{self.victim} killed in batch {self.after[0]}, last committed {self.after[1]}"


class Stream:
    def __init__(self, lake: Path, *arguments: str) -> None:
        self.lake = lake
        self.log = lake.parent / "sync.log"
        self.kills: list[Kill] = []
        self._arguments = [*COMMAND, "sync", "--to", str(lake), *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if error is not None and self.log.exists():
            error.add_note("the stream's last words:\n" + "\n".join(self.log.read_text().splitlines()[-30:]))

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._arguments, *more],
                env=spark_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self._process

    def finish(self) -> None:
        """Run until all that is there is in the tables."""
        assert self.start("--available-now").wait(LIMIT_S) == 0

    def terminate(self) -> int:
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(LIMIT_S)

    def batches(self) -> tuple[int, int]:
        """The newest batch that was begun, and the newest that was done; -1: none."""
        folder = self.lake / "_checkpoint"
        return (newest(folder / "offsets"), newest(folder / "commits"))

    def _running_batch(self) -> tuple[int, int] | None:
        assert self._process is not None
        assert self._process.poll() is None, "the stream ended by itself"
        begun, done = self.batches()
        return (begun, done) if begun > done else None

    def kill_in_batch(self, victim: str, kill: Callable[[], None], revive: Callable[[], object]) -> Kill:
        """Kill somebody while a batch runs, and start it again; until the checkpoint, looked at right after the kill,
        proves that it did.
        """
        for _ in range(50):
            before = until("a batch to run", self._running_batch, limit_s=LIMIT_S, poll_s=0.002)
            kill()
            found = Kill(victim, before, self.batches())
            revive()
            if found.confirmed:
                self.kills.append(found)
                return found
        raise AssertionError("no kill hit a running batch")

    def kill_driver(self, *, whole_group: bool) -> None:
        """SIGKILL Python alone, whose Java then finds out by itself, or all of it."""
        assert self._process is not None
        if whole_group:
            os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()
        self._process.wait()
        until("the driver to be gone", lambda: gone(self._process.pid) if self._process else True, poll_s=0.002)

    def keys_reported(self) -> set[str]:
        """Keys that `changes` has."""
        with contextlib.suppress(Exception):  # there is no table yet
            return set(DeltaTable(str(self.lake / "changes")).to_pyarrow_table(columns=["key"])["key"].to_pylist())
        return set()


def newest(folder: Path) -> int:
    """The highest number among the files; Spark writes them under another name first."""
    with contextlib.suppress(FileNotFoundError):
        return max((int(name) for name in os.listdir(folder) if name.isdigit()), default=-1)
    return -1


def follow(source: SandboxThread, data: Path) -> None:
    """Wait until the mirror has published all that the source has, on its histories."""

    def same() -> bool:
        if not directory.exists(str(data)):
            return False
        with open_view(str(data)) as view:
            states = view.states()
        return source.call(
            lambda: all(
                int(state.published_seqno) == (vbucket := source.cluster.vbucket(state.vbid)).high_seqno
                and bool(state.failover_log)
                and int(state.failover_log[0].vbuuid) == vbucket.failover_log[0].vbuuid
                for state in states
            )
        )

    until("the mirror to follow the source", same, limit_s=LIMIT_S, poll_s=0.1)


def documents_of(cluster: SandboxCluster) -> dict[bytes, tuple[int, bytes]]:
    found: dict[bytes, Any] = {}
    for vbid in range(len(cluster.vbuckets)):
        vbucket = cluster.vbucket(vbid)
        found |= {key: (item.seqno, item.cas) for key, item in state_at(vbucket, vbucket.high_seqno).items()}
    return found


def verdict(source: SandboxThread, data: Path, lake: Path) -> dict[str, int]:
    """Hold both tables against the source and the mirror. Returns what was counted."""
    names = ["kind", "vbid", "collection", "key", "seqno", "cas", "branch", "at_branch", "at_seqno"]
    rows = DeltaTable(str(lake / "changes")).to_pyarrow_table(columns=names).to_pylist()
    twice = [row for row, count in Counter(tuple(row.values()) for row in rows).items() if count > 1]
    assert not twice, f"reported more than once: {twice[:5]}"

    # The current state is the source's.
    table = DeltaTable(str(lake / "documents")).to_pyarrow_table(columns=["collection", "key", "seqno", "cas"])
    held = Counter((row["seqno"], row["cas"], row["key"]) for row in table.to_pylist())
    expected = Counter(
        (seqno, cas, wire_key_text(wire_key))
        for wire_key, (seqno, cas) in source.call(documents_of, source.cluster).items()
    )
    assert held == expected, f"too many: {list(held - expected)[:5]}; missing: {list(expected - held)[:5]}"

    # Every event that the mirror has on its histories is there, and what else is there was taken back.
    published = {(row["vbid"], row["branch"], row["seqno"]): row for row in rows if row["kind"] in PUBLISHED}
    valid: set[tuple[int, int, int]] = set()
    rollbacks: dict[int, list[Any]] = {}
    with open_view(str(data)) as view:
        for vbid in view.vbids:
            rollbacks[vbid] = view.rollbacks(vbid)
            for change in view.changes(vbid):
                if change.kind in PUBLISHED and change.document is not None:
                    valid.add((int(vbid), int(change.document.branch), int(change.document.seqno)))
    missing = valid - published.keys()
    assert not missing, f"events that were never reported: {sorted(missing)[:5]}"
    lost = {at: row for at, row in published.items() if at not in valid}
    retracted = {(row["vbid"], row["branch"], row["seqno"]) for row in rows if row["kind"] == "retraction"}
    needed: set[tuple[int, int, int]] = set()
    for vbid, each in rollbacks.items():
        left = {at: row for at, row in lost.items() if at[0] == vbid}
        drops = {
            (row["branch"], row["seqno"]): row["collection"]
            for row in rows
            if row["vbid"] == vbid and row["kind"] == "collection_dropped"
        }
        for rollback in each:
            # What was reported and is void from here on; of each key the newest is taken back, a collection that was
            # made again being another one. (The stream is let see each rollback by itself. One may go back further than
            # the one before, and void older branches once more.)
            void = [at for at in sorted(left) if at[1] <= rollback.from_branch and at[2] > rollback.to_seqno]
            newest: dict[tuple[int, str, str], tuple[int, int, int]] = {}
            for at in void:
                name = left[at]["collection"]
                recreated = sum(dropped == name and where < at[1:] for where, dropped in drops.items())
                newest[recreated, name, left[at]["key"]] = at
            needed |= set(newest.values())
            for at in void:
                del left[at]
            for where in [at for at in drops if at[0] <= rollback.from_branch and at[1] > rollback.to_seqno]:
                del drops[where]
        assert not left, f"lost by no rollback: {sorted(left)[:5]}"
    wrong = sorted(needed ^ retracted)
    assert not wrong, (
        f"lost, and never taken back: {sorted(needed - retracted)[:5]}; "
        f"taken back without need: {sorted(retracted - needed)[:5]}; {history_of(wrong[0], rows, rollbacks)}"
    )
    return {
        "events": len(rows),
        "documents": len(expected),
        "retractions": len(retracted),
        "restorations": sum(row["kind"] == "restoration" for row in rows),
        "rollbacks": sum(map(len, rollbacks.values())),
    }


def history_of(at: tuple[int, int, int], rows: list[dict[str, Any]], rollbacks: dict[int, list[Any]]) -> str:
    """All reports of a row's key and of its vbucket's collections, and the rollbacks: to see what went wrong."""
    own = [row for row in rows if row["vbid"] == at[0]]
    keys = {row["key"] for row in own if (row["branch"], row["seqno"]) == at[1:]}
    reported = [tuple(row.values()) for row in own if row["key"] in keys | {None}]
    return f"{at}: {reported}; rollbacks: {rollbacks[at[0]]}"


def wire_key_text(wire_key: bytes) -> str:
    position = 0
    while wire_key[position] >= 0x80:
        position += 1
    return wire_key[position + 1 :].decode()
