"""Building key rows late: the rows that a job reads, and the pages that key rows fill."""

from __future__ import annotations

import random

import pytest

from storage.env.environment import Environment
from storage.env.transaction import Transaction
from storage.format import keys, records
from storage.history import index
from storage.history.chain import ChainLink
from tests.storage.model import row

PREFIX = keys.PREFIX.pack(1)


def fill(environment: Environment, count: int, seed: int = 1) -> list[tuple[bytes, bytes]]:
    rng = random.Random(seed)
    rows = [
        row(PREFIX, b"key-%d" % rng.randrange(count // 2 + 1), rng.choice([b"v", None]), n + 1) for n in range(count)
    ]
    with environment.begin(write=True) as txn:
        tree = environment.db(keys.rows_db(0))
        txn.cursor(tree).putmulti(rows, append=True)
        txn.put(keys.ROW.pack(1, count) + keys.BOUNDARY_SUFFIX, keys.BOUNDARY.pack(0, 0, 0, 0, 0, 0), db=tree)
        txn.put(keys.ROW.pack(2, 1), rows[0][1], db=tree)  # of another branch
    return rows


@pytest.mark.parametrize(("after", "to", "limit"), [(0, 20, 100), (3, 9, 100), (3, 9, 2), (9, 9, 5), (20, 50, 5)])
def test_key_rows_are_made_for_the_rows_of_the_link(environment: Environment, after: int, to: int, limit: int) -> None:
    rows = fill(environment, 20)
    expected = [r for n, r in enumerate(rows, 1) if after < n <= to][:limit]
    with environment.read() as txn:
        found, count, last, row_bytes = index.key_rows_of(txn, 0, ChainLink(1, after, to), limit)
    assert found == records.key_rows(expected)
    assert (count, last) == (len(expected), after + len(expected))
    assert row_bytes == sum(len(frame) for _, frame in expected)


def test_key_rows_in_key_order_fill_their_pages(environment: Environment) -> None:
    rows = [(b"\0key-%08d" % n, keys.DUP.pack(1, n, 0x57)) for n in range(20_000)]
    with environment.begin(write=True) as txn:
        index.put_key_rows(Transaction(environment, txn), 0, rows)
        leaf_pages = txn.stat(environment.db(keys.keys_db(0)))["leaf_pages"]
    assert leaf_pages * 4096 < 1.1 * sum(len(key) + len(dup) + 10 for key, dup in rows)
