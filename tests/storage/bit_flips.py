"""A mirror of which one bit is flipped at a time: `python -m tests.storage.bit_flips PATH SEED FIRST COUNT`.

Prints a line for each flip: its number, the bit, and each kind of read that did not end "right": by an "error" (one
that names the group or the vbucket) or "wrong". `check` is wrong if it finds nothing although a read did. A process of
its own, because a damaged page may end it by a signal.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from storage.admin.check import check
from storage.env import directory
from storage.errors import StorageError
from storage.format import records
from storage.history.purge import Window
from storage.model import Branch
from storage.read import bulk
from storage.read import stream_reads as stream
from storage.read.view import View, open_view
from storage.write.writer import GroupWriter, WriterOptions
from tests.storage.model import IDENTITY, keys_of, log
from tests.storage.rig import publish

VBIDS = (0, 2)
Reads = dict[str, list[Callable[[View], Any]]]
KEY_COUNT = 250
KEYS = {vbid: keys_of(vbid, KEY_COUNT) for vbid in VBIDS}
"""The last tenth of them is never written."""


def opened_writer(path: str, first_ms: int) -> GroupWriter:
    """The writer of group 0, whose clock rises by a second at every look."""
    clock = iter(range(first_ms, 10**10, 1_000))
    return GroupWriter(
        directory.group_path(path, 0),
        WriterOptions(group=0, identity=IDENTITY, clock_ms=lambda: next(clock), sync="unsafe", map_size=1 << 28),
    )


def make(path: str, seed: int) -> None:
    """A mirror with several versions of some keys, tombstones, rollbacks, and what a purge leaves."""
    rng = random.Random(seed)
    directory.create(path, IDENTITY)
    writer = opened_writer(path, 1_000_000)
    for vbid in VBIDS:
        writer.vbuckets[vbid].save(failover_log=log())
        written = KEYS[vbid][: -KEY_COUNT // 10]
        _publish(writer, rng, vbid, rng.sample(written, len(written)))
        for _ in range(rng.randrange(4, 12)):
            _publish(writer, rng, vbid, rng.choices(written[:20], k=5) + rng.choices(written, k=10))
            if rng.random() < 0.15:
                writer.vbuckets[vbid].rollback(writer.vbuckets[vbid].state.published_seqno - rng.randrange(20))
    writer.background.purger.window = Window(boundaries=rng.randrange(2, 8))
    _purge(writer, rng.choice((0, 1, 100)))
    writer.close()


def go_on(path: str) -> None:
    """More steps of a writer: snapshots, a rollback, and the purge of what became too old."""
    rng = random.Random(0)
    writer = opened_writer(path, 10**9)
    try:
        for vbid in VBIDS:
            _publish(writer, rng, vbid, rng.choices(KEYS[vbid], k=20))
            writer.vbuckets[vbid].rollback(writer.vbuckets[vbid].state.published_seqno - 1)
            _publish(writer, rng, vbid, rng.choices(KEYS[vbid], k=20))
        writer.background.purger.window = Window(boundaries=2)
        _purge(writer, 20)
    finally:
        writer.close()


def _purge(writer: GroupWriter, steps: int) -> None:
    for _ in range(steps):
        now_ms = writer.owner.clock.now_ms()
        planned = writer.background.purger.plan(now_ms)
        if planned is not None:
            writer.background.purge(planned, now_ms)


def _publish(writer: GroupWriter, rng: random.Random, vbid: int, written: list[bytes]) -> None:
    at = writer.vbuckets[vbid].state.staged_seqno
    items = [
        (key, None if rng.random() < 0.1 else rng.randbytes(rng.choice((20, 200, 200, 3_000))), seqno)
        for seqno, key in enumerate(dict.fromkeys(written), at + 1)
    ]
    publish(writer, vbid, items)


def _get(view: View, key: bytes, as_of: int | None = None) -> Any:
    return view.get(key, as_of=as_of)


def _find(view: View, key: bytes) -> Any:
    return view.find(b"\0" + key)


def _scan(view: View, vbid: int) -> Any:
    return list(view.scan(vbid))


def _bulk(view: View, vbid: int, key_range: bulk.KeyRange) -> Any:
    frames = [
        frame for chunk in bulk.documents(view.reader(vbid), view.pin(vbid), None, key_range) for frame in chunk.frames
    ]
    return sorted(records.decode_row(vbid, Branch(0), frame) for frame in frames)


def _changes(view: View, vbid: int) -> Any:
    return [(change.kind, change.document) for change in view.changes(vbid)]


def _stream(view: View, vbid: int) -> Any:
    state = stream.served_state(view.reader(vbid))
    found, at = [], 0
    while at < state.pub.seqno:
        rows, at, _ = stream.rows(view.reader(vbid), state, at, bytes_max=1 << 30)
        found += rows
    return found


def reads(view: View) -> Reads:
    """Every read, by kind."""
    every = [key for vbid in VBIDS for key in KEYS[vbid]]
    older = {vbid: int(view.boundaries(vbid)[-1].seqno) for vbid in VBIDS}
    return {
        "get": [partial(_get, key=key) for key in every],
        "find": [partial(_find, key=key) for key in every],
        "get as of": [partial(_get, key=key, as_of=older[vbid]) for vbid in VBIDS for key in KEYS[vbid][:40]],
        "scan": [partial(_scan, vbid=vbid) for vbid in VBIDS],
        "bulk": [partial(_bulk, vbid=vbid, key_range=bulk.EVERY_KEY) for vbid in VBIDS],
        "bulk by keys": [partial(_bulk, vbid=vbid, key_range=bulk.KeyRange(prefix=b"k")) for vbid in VBIDS],
        "changes": [partial(_changes, vbid=vbid) for vbid in VBIDS],
        "stream": [partial(_stream, vbid=vbid) for vbid in VBIDS],
    }


def outcome(view: View, read: Callable[[View], Any], right: Any) -> str:
    """The outcome of a read."""
    try:
        return "right" if read(view) == right else "wrong"
    except StorageError as error:
        return "error" if "group-0000" in str(error) or error.vbid is not None else f"nameless {error!r}"
    except Exception as error:
        return f"nameless {error!r}"


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def answers(path: str) -> tuple[Reads, dict[str, list[Any]]]:
    """The reads of a sound mirror, and what they find."""
    with open_view(path) as view:
        every = reads(view)
        return every, {kind: [read(view) for read in of_kind] for kind, of_kind in every.items()}


def ended(path: str, every: Reads, right: dict[str, list[Any]], *, writes: bool) -> dict[str, set[str]]:
    """Return the outcome of each kind of read, also after a writer has opened the file, unless that failed."""
    at = "write" if writes else "open"
    try:
        if writes:
            go_on(path)
            at = "open"
        with open_view(path) as view:
            return {
                kind: {outcome(view, *pair) for pair in zip(of_kind, right[kind], strict=True)}
                for kind, of_kind in every.items()
            }
    except StorageError as error:
        return {at: {"error" if "group-0000" in str(error) or error.vbid is not None else f"nameless {error!r}"}}


def main(path: str, seed: int, first: int, count: int) -> None:
    """Flip bits, but those of the meta pages: `first` to `first + count` of the random sequence of `seed`. Behind each
    other one a writer goes on.
    """
    file = os.path.join(directory.group_path(path, 0), "data.mdb")
    with open(file, "rb") as opened:
        good = opened.read()
    go_on(path)
    expected = {True: answers(path)}
    _write(file, good)
    expected[False] = answers(path)
    for number in range(first, first + count):
        at = random.Random(f"{seed} {number}").randrange(8 * 4096 * 2, 8 * len(good))
        _say(f"{number} {at} ")
        _write(file, good[: at // 8] + bytes([good[at // 8] ^ 1 << at % 8]) + good[at // 8 + 1 :])
        writes = bool(number % 2)
        found = ended(path, *expected[writes], writes=writes)
        if any(each != {"right"} for each in found.values()) and not check(path).problems:
            found["check"] = {"wrong"}
        _say(f"{ {kind: sorted(each - {'right'}) for kind, each in found.items() if each != {'right'}} }\n")
        _write(file, good)


def _write(file: str, data: bytes) -> None:
    with open(file, "r+b") as opened:
        opened.truncate(len(data))
        opened.write(data)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
