"""A view of a branch sees the rows of a plain list, and finds the boundaries behind long snapshots."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.env import directory
from storage.env.environment import Environment
from storage.env.transaction import Transaction
from storage.format import keys, records
from storage.history import chain
from tests.storage.model import IDENTITY

# branch -> (parent, base_seqno): 1 is the root, 2 and 3 left it at 10, 4 left 3 at 15, 5 has no parent
TREE = {1: (None, 0), 2: (1, 10), 3: (1, 10), 4: (3, 15), 5: (None, 0)}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    path = str(tmp_path_factory.mktemp("chain") / "mirror")
    directory.create(path, IDENTITY)
    environment = Environment(directory.group_path(path, 0), [0, 2], writable=True)
    environment.open_all()
    with environment.begin(write=True) as txn:
        for branch, (parent, base) in TREE.items():
            row = records.encode_branch(records.BranchRow(parent, base, 0, 1, 0))
            txn.put(keys.BRANCH_KEY.pack(0, branch), row, db=environment.db(keys.DB_BRANCH))
    yield environment
    environment.close()


ROWS = st.sets(st.tuples(st.integers(1, 5), st.integers(1, 20), st.sampled_from([0x57, 0x58])), max_size=25)


@settings(max_examples=3 * settings().max_examples, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=ROWS, branch=st.integers(1, 5), cut=st.integers(0, 22))
def test_the_newest_version_is_the_greatest_visible_one(
    environment: Environment, rows: set[tuple[int, int, int]], branch: int, cut: int
) -> None:
    dups = sorted({(b, s): keys.DUP.pack(b, s, kind) for b, s, kind in rows}.values())
    with environment.read() as txn:
        links = chain.load(txn, 0, branch, cut)
    cuts = {link.branch: link.cut for link in links}
    visible = [dup for dup in dups if keys.DUP.unpack(dup)[1] <= cuts.get(keys.DUP.unpack(dup)[0], -1)]
    txn = environment.begin(write=True)
    try:
        cursor = txn.cursor(environment.db(keys.keys_db(0)))
        cursor.putmulti([(b"\0a", keys.DUP.pack(1, 1, 0x57)), (b"\0z", keys.DUP.pack(1, 1, 0x57))])
        cursor.putmulti([(b"\0key", dup) for dup in dups])
        found = chain.newest_version(txn.cursor(environment.db(keys.keys_db(0))), b"\0key", links)
    finally:
        txn.abort()
    assert found == (max(visible) if visible else None)


@settings(max_examples=3 * settings().max_examples, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sets(st.integers(1, 400), max_size=8), st.integers(0, 420), st.sets(st.integers(1, 400), max_size=3))
def test_leaps_over_long_snapshots_leave_no_boundary_out(
    environment: Environment, ends: set[int], cut: int, purged: set[int]
) -> None:
    """Also where the purger took boundaries at which a leap lands."""
    txn = environment.begin(write=True)
    try:
        tree = environment.db(keys.rows_db(0))
        before = 0
        for seqno in sorted(ends):
            txn.put(keys.ROW.pack(1, seqno), b"row", db=tree)
            txn.put(
                keys.ROW.pack(1, seqno) + keys.BOUNDARY_SUFFIX, keys.BOUNDARY.pack(0, 7, seqno, seqno, 0, 0), db=tree
            )
            chain.put_span(Transaction(environment, txn), 0, 1, seqno, before)
            before = seqno
        kept = {seqno for seqno in ends if not purged or seqno > max(purged)}
        for seqno in ends - kept:
            txn.delete(keys.ROW.pack(1, seqno) + keys.BOUNDARY_SUFFIX, db=tree)
        links = chain.load(Transaction(environment, txn), 0, 1, cut)
        found = [boundary.seqno for boundary in chain.boundaries(Transaction(environment, txn), 0, links)]
    finally:
        txn.abort()
    assert found == sorted((seqno for seqno in kept if seqno <= cut), reverse=True)


def test_only_long_snapshots_are_remembered(environment: Environment) -> None:
    txn = environment.begin(write=True)
    try:
        chain.put_span(Transaction(environment, txn), 0, 1, chain.SPAN_SEQNOS, 0)
        assert txn.stat(environment.db(keys.DB_SPAN))["entries"] == 0
        chain.put_span(Transaction(environment, txn), 0, 1, chain.SPAN_SEQNOS + 1, 0)
        assert txn.stat(environment.db(keys.DB_SPAN))["entries"] == 1
    finally:
        txn.abort()
