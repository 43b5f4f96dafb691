"""The process of test_power_cut.py that writes: commits, rollbacks, purges and syncs, some of which fail."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from hashlib import sha1
from random import Random

from storage.env import directory
from storage.errors import StorageError
from storage.history.purge import Window
from storage.model import FailoverLog, Identity
from storage.read.view import open_view
from storage.write.writer import GroupWriter, WriterOptions
from tests.storage.rig import stage

IDENTITY = Identity("cluster", "bucket", "uuid", 4, 1)
ROUNDS = 60


def digest(path: str) -> str:
    """Everything that readers see, in one word."""
    found = sha1(usedforsecurity=False)
    with open_view(path, partial=True) as view:
        for vbid in range(4):
            state = view.state(vbid)
            found.update(repr((state.branch, state.published_seqno, state.failover_log, state.rollback_count)).encode())
            for document in view.scan(vbid):
                found.update(repr((document.key, document.seqno, document.value)).encode())
    return found.hexdigest()


def write(path: str, seed: int) -> None:
    """Write, and print the digest of each commit as JSON."""
    shim = ctypes.CDLL(None)
    random = Random(seed)
    now = [1_700_000_000_000]
    directory.create(path, IDENTITY)
    writer = GroupWriter(
        directory.group_path(path, 0),
        WriterOptions(
            group=0, identity=IDENTITY, clock_ms=lambda: now[0], map_size=1 << 19, window=Window(time_ms=500)
        ),
    )
    digests = [digest(path)]
    shim.power_cut_mark(ctypes.c_long(0))

    def committed() -> None:
        now = digest(path)
        if now != digests[-1]:  # a purge that finds nothing commits nothing
            digests.append(now)
            shim.power_cut_mark(ctypes.c_long(len(digests) - 1))

    failing = set(random.sample(range(5, ROUNDS), 12))
    for number in range(ROUNDS):
        shim.power_cut_fail_syncs(ctypes.c_long(number in failing))
        with contextlib.suppress(StorageError):
            for vbid in random.sample(range(4), random.randrange(1, 4)):
                put(writer, random, vbid)
            writer.commit()
            committed()
            if random.random() < 0.15:
                writer.vbuckets[0].rollback(max(0, writer.vbuckets[0].state.published_seqno - random.randrange(1, 30)))
                committed()
            now[0] += random.choice((25, 100, 300, 1000))
            for _ in range(random.randrange(3)):
                writer.step()
                committed()
        shim.power_cut_fail_syncs(ctypes.c_long(0))
        with contextlib.suppress(StorageError):
            writer.reopen()
    print(json.dumps(digests), flush=True)  # noqa: T201
    os._exit(0)


def put(writer: GroupWriter, random: Random, vbid: int) -> None:
    writer.vbuckets[vbid].save(failover_log=FailoverLog.of([(10, 0)]))
    first = writer.vbuckets[vbid].state.published_seqno + 1
    items: list[tuple[bytes, bytes | None, int]] = []
    for seqno in range(first, first + random.choice((1, 3, 40))):
        value = random.randbytes(random.choice((40, 300, 9000)))
        items.append((b"k%d" % random.randrange(50), value, seqno))
    last = items[-1][2]
    stage(writer, last, *items, vbid=vbid)
    writer.vbuckets[vbid].publish(last, first)


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]))
