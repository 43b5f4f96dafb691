"""`sync`, to be killed in the middle of its work, and the verdict on its tables.

Knows the command, the names of its files, the mirror and the source; nothing of how sync works. Invariant: a kill
counts only if it left files behind that no commit names.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Protocol

import psutil
from deltalake import DeltaTable

from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.data.bucket import vbucket_of
from mirror.sandbox.thread import SandboxThread
from mirror.spark.pipeline.sync import How, sync
from mirror.spark.runner import LocalRunner
from mirror.spark.tables.documents import BATCH_MARK, batch_of
from storage.env import directory
from storage.read.view import open_view
from tests.cli.conftest import COMMAND, environment
from tests.crash.load import Load
from tests.crash.service import Service, gone, until
from tests.sandbox.past import state_at

VBUCKETS = 16
KEYS = 800
ROLLBACKS = 3
TAIL = 6
LIMIT_S = 240.0
"""For a driver to start and do a batch. It takes some ten seconds; on a busy machine many times that."""
PUBLISHED = ("mutation", "deletion", "expiration")


class Driver(Protocol):
    """A `sync` that can be killed and started again."""

    def start(self) -> None: ...
    def running(self) -> bool: ...
    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process that commits, if it runs."""
        ...

    def kill(self) -> None: ...
    def workers(self) -> list[int]:
        """Process ids of those that do the work."""
        ...

    def worker_lost(self) -> None:
        """Go on after a worker was killed."""
        ...


class LocalDriver:
    """The command on this machine's cores."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.log = folder / "sync.log"
        self._command = [*COMMAND, "sync", *map(str, arguments)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL the driver alone: what it started ends with it."""
        assert self._process is not None
        workers = self.workers()
        self._process.kill()
        self._process.wait()
        until("the driver's processes to end", lambda: all(map(gone, workers)))

    def workers(self) -> list[int]:
        assert self._process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self._process.pid).children()
            return [each.pid for each in children if "spawn_main" in " ".join(each.cmdline())]
        return []

    def worker_lost(self) -> None:
        assert self._process is not None
        assert self._process.wait(LIMIT_S) == 1
        last = self.log.read_text().splitlines()[-1]
        assert last.startswith("dcp-mirror: a process of this job died"), last
        self.start()


class Unfinished:
    """Files of a table that no commit names, and that are of a batch after the newest in the table."""

    def __init__(self, lake: Path, table: str) -> None:
        self._folder = lake / table
        self._done = -1

    def _above(self) -> bool:
        names = (path.name for path in self._folder.glob("**/part-*.parquet"))
        return any((-1 if (number := batch_of(name)) is None else number) > self._done for name in names)

    def __call__(self) -> bool:
        """Return True if there are some. The table is opened only if it may have a new batch."""
        if not self._above():
            return False
        done = DeltaTable(str(self._folder)).transaction_version(BATCH_MARK)
        self._done = -1 if done is None else done
        return self._above()


def kill_at_work(
    driver: Driver, unfinished: Unfinished, wait_s: float, kill: Callable[[], None], revive: Callable[[], None]
) -> None:
    """Kill a process `wait_s` after files of the next batch, or of the next merge, were seen.

    The driver is stopped first: looking for the files takes as long as a small batch, and it would commit meanwhile.
    """

    def at_work() -> bool:
        assert driver.running(), "the driver ended by itself"
        return unfinished()

    while True:  # until the test's own time limit: how many tries miss is a matter of the machine
        until("files at work", at_work, limit_s=LIMIT_S, poll_s=0.01)
        time.sleep(wait_s)
        driver.send(signal.SIGSTOP)
        hit = unfinished()
        if hit:
            kill()
        driver.send(signal.SIGCONT)
        if hit:
            revive()
            return
        wait_s /= 2


def through_kills(
    source: SandboxThread,
    folder: Path,
    driver_of: Callable[..., Driver],
    victims: list[str],
    changes: int,
    rate: int,
    seed: int = 20261121,
) -> str:
    """Kill driver, workers and mirror at random moments while the source is written and fails over, and say what the
    tables are at the end.

    Whatever dies, and whenever: each event is in `changes` once, what the source lost is taken back, and `documents` is
    the source.
    """
    rng = Random(seed)
    load = Load(source.cluster, seed, rate=0, keys=KEYS)
    source.call(load.write, changes // 2)
    writing = asyncio.run_coroutine_threadsafe(load.run(), source._loop)
    data, lake = folder / "data", folder / "lake"
    limits = ["--trigger", "0.2", "--max-age", "0", "--max-rows", max(500, changes // 20)]
    driver = driver_of(folder, "--data", data, "--to", lake, *limits)
    with Service(source.connection_string, data, "--groups", "4", "--workers", "2") as service:

        def kill_workers(count: int) -> None:
            for pid in driver.workers()[:count]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        def kill_all() -> None:
            kill_workers(2)
            driver.kill()

        def revive_mirror() -> None:
            service.kill_supervisor()
            service.start()

        kills: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "worker": (partial(kill_workers, 1), driver.worker_lost),
            "workers": (partial(kill_workers, 2), driver.worker_lost),
            "mirror": (lambda: os.kill(service.pid, signal.SIGKILL), revive_mirror),
            "driver": (driver.kill, driver.start),
            "driver and workers": (kill_all, driver.start),
        }
        try:
            service.start()
            follow(source, data)
            driver.start()
            load.rate = rate
            for number, victim in enumerate(victims):
                unfinished = Unfinished(lake, ("changes", "documents")[number % 2])
                kill_at_work(driver, unfinished, rng.uniform(0, 0.5), *kills[victim])
                if number < ROLLBACKS or rng.random() < 0.2:
                    lose_a_tail(source, load, lake, data, f"tail{number}")
                left = changes // 2 * (number + 1) // len(victims) - (load.written - changes // 2)
                source.call(load.write, max(0, left))
            load.rate = 0
            writing.cancel()
            follow(source, data)
        finally:
            driver.kill()
        sync({"path": str(data)}, lake, LocalRunner(1), How(available_now=True))
        found = verdict(source, data, lake)
    assert load.written >= changes
    assert found["rollbacks"] >= ROLLBACKS
    assert found["retractions"] >= ROLLBACKS * TAIL
    assert service.tracebacks() == ""
    return f"{len(victims)} kills ({dict(Counter(victims))}); {found}"


def lose_a_tail(source: SandboxThread, load: Load, lake: Path, data: Path, name: str) -> None:
    """A failover that loses what `changes` has already."""
    rate, load.rate = load.rate, 0
    follow(source, data)
    keys = [f"{name}-{number}" for number in range(TAIL)]
    for key in keys:
        source.call(source.cluster.set, key, b'{"tail": true}')
    lost = Counter(vbucket_of(key.encode(), VBUCKETS) for key in keys)

    def reported() -> bool:
        with contextlib.suppress(Exception):  # there is no table yet
            return set(keys) <= set(
                DeltaTable(str(lake / "changes")).to_pyarrow_table(columns=["key"])["key"].to_pylist()
            )
        return False

    until("the tail to be reported", reported, limit_s=LIMIT_S, poll_s=0.2)
    for vbid, count in lost.items():  # the mirror has a boundary before them: it rolls back, and copies nothing again
        source.call(source.cluster.failover, vbid, lose=count)
    load.rate = rate


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
