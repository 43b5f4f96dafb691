"""Readers that stay open over thousands of random steps of the store, with limits so small that the purger always runs
behind them: what each ends with equals the model, or it was refused.

    pytest tests/storage/test_open_readers.py                                 4,000 steps
    pytest -m long tests/storage/test_open_readers.py                         1,000,000 steps
    DCP_MIRROR_READERS_SEED=<seed of a failure> pytest tests/storage/test_open_readers.py     that world alone
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from random import Random
from threading import Event, Lock, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from storage.admin.check import check
from storage.history import branches, chain, index, merge, purge, removal
from storage.read import bulk, scan, vbucket_reader
from storage.read.view import open_view
from tests.seeds import seed_from
from tests.storage.open_readers import REFUSALS
from tests.storage.test_writer import TO_THE_END, VBIDS, Store

STEPS_OF_A_WORLD = 400
KINDS = ("scan", "pages", "pages within", "bulk", "seqnos", "changes", "changes since", "changes between")


def shrink(patch: pytest.MonkeyPatch, rng: Random) -> None:
    """Limits that a few rows reach."""
    patch.setattr(branches, "HISTORY_IDS_MAX", rng.choice((2, 3, 64)))
    patch.setattr(bulk, "GET_ROWS", rng.choice((1, 2, 128)))
    patch.setattr(bulk, "REMEMBERED_MAX", rng.choice((1, 500_000)))
    patch.setattr(bulk, "ROWS_PER_DOCUMENT", rng.choice((0, 3)))
    patch.setattr(chain, "SPAN_SEQNOS", rng.choice((1, 3, 100)))
    patch.setattr("storage.write.pending.INLINE_INDEX_ROWS", rng.choice((0, 3, 20_000)))
    patch.setattr(index, "SLICE_ROWS", rng.choice((1, 2, 20_000)))
    patch.setattr(index, "RUN_ROWS", rng.choice((1, 5, 200_000)))
    patch.setattr(merge, "LINKS_MAX", rng.choice((0, 0, 1, 16)))
    patch.setattr(merge, "ROLLBACKS_KEPT", rng.choice((0, 1, 16)))
    patch.setattr(purge, "STEP_ROWS", rng.choice((1, 2, 5)))
    patch.setattr(removal, "RUN_ROWS", rng.choice((1, 3, 400_000)))
    patch.setattr(removal, "BATCH_ROWS", rng.choice((1, 4_000)))
    patch.setattr(scan, "CHUNK_ROWS", rng.choice((1, 2, 3)))
    patch.setattr(vbucket_reader, "CHAINS_MAX", rng.choice((1, 8)))
    patch.setattr(vbucket_reader, "MANIFESTS_MAX", rng.choice((1, 2)))


class ReadingThread:
    """Opens a view, reads and closes it, again and again, while others work, and fork."""

    def __init__(self, path: str) -> None:
        self.lock = Lock()
        """Held during each turn: a writer that is to be opened again needs all views closed."""
        self.error: Exception | None = None
        self._path = path
        self._ended = Event()
        self._thread = Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ended.wait(0.005):
                with self.lock, open_view(self._path, partial=True) as view, suppress(*REFUSALS):
                    for document in (document for vbid in VBIDS for document in view.scan(vbid, now=0)):
                        assert document.value == b"%d" % document.seqno, document
        except Exception as error:
            self.error = error

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        assert self.error is None, repr(self.error)


def live_through(seed: int, steps: int, counts: Counter[str]) -> None:
    """Run one world: a store, its model, and readers."""
    rng = Random(seed)
    store: Any = Store()

    def vbid() -> int:
        return rng.choice(VBIDS)

    def stage() -> None:
        items = [(rng.randrange(6), rng.random() < 0.4) for _ in range(rng.choice((1, 1, 2, 8)))]
        store.stage(vbid=vbid(), data=items)

    def publish() -> None:
        stage()
        store.complete_snapshot(vbid=vbid(), skipped=rng.choice((0, 0, 2)))
        store.commit(flush=False)

    def read_on() -> None:
        before = store.readers
        store.read_on(steps=rng.choice((1, 1, 1, 2, 50)))
        for reader in before:
            if reader not in store.readers:
                counts[f"{reader.kind} {'refused' if reader.refused else 'finished'}"] += 1

    def crash_and_reopen() -> None:
        with threads[0].lock, threads[1].lock:
            store.crash_and_reopen()

    weights: dict[Callable[[], Any], float] = {
        publish: 30,
        stage: 2,
        lambda: store.complete_snapshot(vbid=vbid(), skipped=rng.choice((0, 2))): 2,
        lambda: store.commit(flush=rng.random() < 0.5): 3,
        store.step: 5,
        store.finish: 1,
        lambda: store.roll_back(vbid=vbid(), share=rng.choice((1.0, 0.95, 0.8, 0.5, rng.random()))): 3,
        lambda: store.abandon(vbid=vbid()): 1,
        lambda: store.begin_resync(vbid=vbid()): 0.8,
        crash_and_reopen: 0.3,
        store.fork: 0.3,
        lambda: store.purge(keep=rng.randint(1, 4), steps=rng.choice((1, 1, 2, 5, TO_THE_END))): 14,
        lambda: store.take_token(vbid=vbid()): 2,
        store.changes_bring_every_token_up_to_date: 0.5,
        lambda: store.begin_to_read(vbid=vbid(), seed=rng.randrange(1000)): 30,
        read_on: 22,
        store.views_show_the_model: 0.3,
        store.as_of_shows_every_boundary: 0.1,
    }
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch, rng)
        store.dead_for_ms = rng.choice((5, 40, 400))
        threads: list[ReadingThread] = []
        try:
            store.create()
            threads += [ReadingThread(store.path), ReadingThread(store.path)]
            for number, action in enumerate(rng.choices(list(weights), list(weights.values()), k=steps)):
                try:
                    action()
                    if store.tokens and rng.random() < 0.02:
                        chosen = rng.choice(store.tokens)
                        data: Any = SimpleNamespace(draw=lambda _, chosen=chosen: chosen)
                        store.hold(data=data, looks=rng.choice((5, 1000)))
                    del store.tokens[:-6], store.readers[:-12]
                except Exception as error:
                    raise AssertionError(f"DCP_MIRROR_READERS_SEED={seed}, step {number}: {error!r}") from error
            assert check(store.path).problems == []
        finally:
            try:
                for thread in threads:
                    thread.end()
            finally:
                store.teardown()


def run(steps_min: int, record_property: Callable[[str, object], None]) -> None:
    counts: Counter[str] = Counter()
    if replayed := os.environ.get("DCP_MIRROR_READERS_SEED"):
        live_through(int(replayed), STEPS_OF_A_WORLD, counts)
        return
    first_seed = seed_from("DCP_MIRROR_READERS_RUN")
    seeds = Random(first_seed)
    worlds = steps_min // STEPS_OF_A_WORLD
    for _ in range(worlds):
        live_through(seeds.randrange(2**31), STEPS_OF_A_WORLD, counts)
    reported = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    summary = f"{steps_min} steps in {worlds} worlds, DCP_MIRROR_READERS_RUN={first_seed}: {reported}"
    record_property("readers", summary)
    print(summary)  # noqa: T201 - shown with -s
    missing = [f"{kind} {how}" for kind in KINDS for how in ("finished", "refused") if not counts[f"{kind} {how}"]]
    assert not missing, f"this never happened: {missing}"


def test_a_reader_that_stays_open_agrees_with_the_model_or_is_refused(record_property: Any) -> None:
    run(4_000, record_property)


@pytest.mark.long
@pytest.mark.timeout(24 * 3600)
def test_readers_that_stay_open_agree_with_the_model_over_a_million_steps(record_property: Any) -> None:
    run(1_000_000, record_property)
