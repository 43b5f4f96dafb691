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

from storage import bulk, directory, records, stream
from storage.check import check
from storage.errors import StorageError
from storage.model import Branch, Vbid
from storage.purge import Window
from storage.view import View, open_view
from storage.writer import GroupWriter
from tests.storage.model import IDENTITY, keys_of, log, row, span

VBIDS = (0, 2)
KEY_COUNT = 250
KEYS = {vbid: keys_of(vbid, KEY_COUNT) for vbid in VBIDS}
"""The last tenth of them is never written."""


def make(path: str, seed: int) -> None:
    """A mirror with several versions of some keys, tombstones, rollbacks, and what a purge leaves."""
    rng = random.Random(seed)
    directory.create(path, IDENTITY)
    clock = iter(range(1_000_000, 10**9, 1_000))
    vbids = directory.group_vbids(IDENTITY, 0)
    writer = GroupWriter.open(
        directory.group_path(path, 0),
        group=0,
        vbids=vbids,
        identity=IDENTITY,
        clock_ms=lambda: next(clock),
        map_size=1 << 28,
    )
    for vbid in VBIDS:
        writer.save_failover_log(vbid, log())
        written = KEYS[vbid][: -KEY_COUNT // 10]
        _publish(writer, rng, vbid, rng.sample(written, len(written)))
        for _ in range(rng.randrange(4, 12)):
            _publish(writer, rng, vbid, rng.choices(written[:20], k=5) + rng.choices(written, k=10))
            if rng.random() < 0.15:
                writer.rollback(vbid, writer.state(vbid).published_seqno - rng.randrange(20))
    writer.background.purger.window = Window(boundaries=rng.randrange(2, 8))
    for _ in range(rng.choice((0, 1, 100))):
        now_ms = writer.owner.clock.now_ms()
        planned = writer.background.purger.plan(now_ms)
        if planned is not None:
            writer.background.purge(planned, now_ms)
    writer.close()


def _publish(writer: GroupWriter, rng: random.Random, vbid: int, written: list[bytes]) -> None:
    at = writer.state(vbid).staged_seqno
    prefix = writer.row_prefix(vbid)
    rows = [
        row(prefix, key, None if rng.random() < 0.1 else rng.randbytes(rng.choice((20, 200, 200, 3_000))), seqno)
        for seqno, key in enumerate(dict.fromkeys(written), at + 1)
    ]
    writer.stage(vbid, rows, sum(len(frame) for _, frame in rows), span(at + 1, at + len(rows)))
    writer.publish(vbid, at + len(rows), 0)
    writer.commit()


def _get(view: View, key: bytes, as_of: int | None = None) -> Any:
    return view.get(key, as_of=as_of)


def _find(view: View, key: bytes) -> Any:
    return view.find(b"\0" + key).document


def _scan(view: View, vbid: int) -> Any:
    return list(view.scan(vbid))


def _bulk(view: View, vbid: int, key_range: bulk.KeyRange) -> Any:
    frames = [frame for chunk in bulk.documents(view, view.pin(vbid), None, key_range) for frame in chunk.frames]
    return sorted(records.decode_row(Vbid(vbid), Branch(0), frame) for frame in frames)


def _changes(view: View, vbid: int) -> Any:
    return [(change.kind, change.document) for change in view.changes(vbid)]


def _stream(view: View, vbid: int) -> Any:
    state = stream.served_state(view, vbid)
    found, at = [], 0
    while at < state.seqno:
        rows, at = stream.rows(view, vbid, state, at, bytes_max=1 << 30)
        found += rows
    return found


def reads(view: View) -> dict[str, list[Callable[[View], Any]]]:
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
    """How a read ended."""
    try:
        return "right" if read(view) == right else "wrong"
    except StorageError as error:
        return "error" if "group-0000" in str(error) or error.vbid is not None else f"nameless {error!r}"
    except Exception as error:
        return f"nameless {error!r}"


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main(path: str, seed: int, first: int, count: int) -> None:
    """Flip bits, but those of the meta pages: `first` to `first + count` of the random sequence of `seed`."""
    file = os.path.join(directory.group_path(path, 0), "data.mdb")
    with open(file, "rb") as opened:
        good = opened.read()
    with open_view(path) as view:
        every = reads(view)
        right = {kind: [read(view) for read in of_kind] for kind, of_kind in every.items()}
    for number in range(first, first + count):
        at = random.Random(f"{seed} {number}").randrange(8 * 4096 * 2, 8 * len(good))
        _say(f"{number} {at} ")
        with open(file, "r+b") as damaged:
            damaged.seek(at // 8)
            damaged.write(bytes([good[at // 8] ^ 1 << at % 8]))
        try:
            with open_view(path) as view:
                ended = {
                    kind: {outcome(view, *pair) for pair in zip(of_kind, right[kind], strict=True)}
                    for kind, of_kind in every.items()
                }
        except StorageError as error:
            ended = {"open": {"error" if "group-0000" in str(error) else f"nameless {error!r}"}}
        if any(found != {"right"} for found in ended.values()) and not check(path).problems:
            ended["check"] = {"wrong"}
        _say(f"{ {kind: sorted(found - {'right'}) for kind, found in ended.items() if found != {'right'}} }\n")
        with open(file, "r+b") as repaired:
            repaired.seek(at // 8)
            repaired.write(good[at // 8 : at // 8 + 1])


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
