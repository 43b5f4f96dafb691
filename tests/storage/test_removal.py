"""Removing dead ranges: nothing but the range goes, key rows before rows, whatever the sizes and wherever it stops."""

from __future__ import annotations

from itertools import chain
from random import Random

import pytest

import storage.history.removal
from storage.env.environment import Environment
from storage.env.transaction import Transaction
from storage.format import keys
from storage.history.removal import Dead, Removal, deal, marks_of
from tests.storage.model import row

BRANCH = 1


def fill(environment: Environment, count: int, *, seed: int = 1, indexed: bool = True) -> None:
    """Rows 1 to `count` in two branches, with a boundary behind every tenth."""
    rng = Random(seed)
    with environment.begin(write=True) as txn:
        for branch in (BRANCH, BRANCH + 1):
            for seqno in range(1, count + 1):
                key = b"k%d" % rng.randrange(count)
                row_key, frame = row(keys.PREFIX.pack(branch), key, b"value" if seqno % 5 else None, seqno)
                txn.put(row_key, frame, db=environment.db(b"v0"))
                if indexed:
                    txn.put(b"\0" + key, row_key + frame[1:2], db=environment.db(b"k0"))
                if not seqno % 10:
                    boundary = keys.BOUNDARY.pack(seqno, 7, 0, 0, 0, 0)
                    txn.put(row_key + keys.BOUNDARY_SUFFIX, boundary, db=environment.db(b"v0"))


def contents(environment: Environment) -> tuple[set[bytes], set[bytes]]:
    """Keys of the row tree, and what the key tree points to."""
    with environment.read() as txn:
        rows = {key for key, _ in txn.cursor(b"v0")}
        references = {dup[:12] for _, dup in txn.cursor(b"k0")}
    return rows, references


def remove(environment: Environment, dead: Dead, limit: int, *, abort: Random | None = None) -> int:
    """To the end, looking at every step; steps that are aborted now and then are done again."""
    removal = Removal(0, dead)
    removed = 0
    for _ in range(100_000):
        txn = environment.begin(write=True)
        count = removal.step(Transaction(environment, txn), limit)
        if abort is not None and abort.random() < 0.3:
            txn.abort()
            continue
        txn.commit()
        removed += count
        rows, references = contents(environment)
        assert references <= rows, "a reference without its row"
        if not removal.settle():
            return removed
    raise AssertionError("no end")


@pytest.mark.parametrize("limit", [1, 3, 1000])
@pytest.mark.parametrize("run_rows", [7, 1000])
def test_the_range_goes_and_nothing_else(
    environment: Environment, limit: int, run_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.history.removal, "RUN_ROWS", run_rows)
    monkeypatch.setattr(storage.history.removal, "BATCH_ROWS", 5)
    monkeypatch.setattr(storage.history.removal, "SAMPLES_PER_BATCH", 2)
    fill(environment, 60)
    before, _ = contents(environment)
    assert remove(environment, Dead(BRANCH, 20, 50, None), limit, abort=Random(limit)) == 30
    rows, references = contents(environment)
    inside = {key for key in before if key[:4] == b"\0\0\0\1" and 20 < int.from_bytes(key[4:12], "big") <= 50}
    assert rows == before - inside  # the boundary that ends 20 stays
    assert references == {key for key in rows if len(key) == keys.ROW_KEY_SIZE}


def test_rows_without_key_rows_and_empty_ranges(environment: Environment) -> None:
    fill(environment, 20, indexed=False)
    assert remove(environment, Dead(BRANCH, 0, 2**64 - 1, None), 4) == 20
    assert remove(environment, Dead(BRANCH, 0, 2**64 - 1, None), 4) == 0
    assert {key[:4] for key in contents(environment)[0]} == {keys.PREFIX.pack(BRANCH + 1)}


def test_forgotten_in_the_middle_it_is_begun_again(environment: Environment) -> None:
    fill(environment, 40)
    dead = Dead(BRANCH, 5, 35, None)
    removal = Removal(0, dead)
    for _ in range(12):
        with environment.begin(write=True) as txn:
            removal.step(Transaction(environment, txn), 2)
        removal.settle()
    remove(environment, dead, 2)
    assert {int.from_bytes(key[4:12], "big") for key in contents(environment)[1] if key[:4] == b"\0\0\0\1"} == {
        *range(1, 6),
        *range(36, 41),
    }


def test_batches_do_not_overlap_and_none_is_much_larger_than_requested() -> None:
    rng = Random(3)
    slices = [sorted(b"%06d" % rng.randrange(10**6) for _ in range(1000)) for _ in range(20)]
    marks = marks_of(slices, 500)
    batches: list[list[list[bytes]]] = [[] for _ in range(len(marks) + 1)]
    for each in slices:
        deal(each, marks, batches)
    flat = [sorted(chain.from_iterable(batch)) for batch in batches]
    assert list(chain.from_iterable(flat)) == sorted(chain.from_iterable(slices))
    assert max(map(len, flat)) <= 1500
    assert marks_of([[], []], 5) == []
