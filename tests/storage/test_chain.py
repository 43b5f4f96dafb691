"""Chains, cuts and boundaries: what a view of a branch sees, against a plain list of rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.env import directory
from storage.env.environment import Environment
from storage.env.transaction import Transaction
from storage.errors import CorruptedError
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


def test_cuts_never_rise_towards_the_root(environment: Environment) -> None:
    with environment.read() as txn:
        assert [(link.branch, link.cut) for link in chain.load(txn, 0, 4, 99)] == [(4, 99), (3, 15), (1, 10)]
        assert [(link.branch, link.cut) for link in chain.load(txn, 0, 4, 12)] == [(4, 12), (3, 12), (1, 10)]
        assert [(link.branch, link.cut) for link in chain.load(txn, 0, 5, 7)] == [(5, 7)]
        with pytest.raises(CorruptedError, match="branch 9"):
            chain.load(txn, 0, 9, 1)


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


BOUNDARIES = st.sets(st.tuples(st.integers(1, 5), st.integers(1, 20)), max_size=20)


@settings(max_examples=3 * settings().max_examples, deadline=None, suppress_health_check=list(HealthCheck))
@given(BOUNDARIES, st.integers(1, 5), st.integers(0, 22), st.integers(0, 22))
def test_boundaries_of_a_chain_come_newest_first_and_once(
    environment: Environment, stored: set[tuple[int, int]], branch: int, cut: int, to_seqno: int
) -> None:
    with environment.read() as txn:
        links = chain.load(txn, 0, branch, cut)
    cuts = {link.branch: link.cut for link in links}
    visible = sorted({seqno for at, seqno in stored if seqno <= cuts.get(at, -1)}, reverse=True)
    if any(seqno <= TREE[at][1] for at, seqno in stored):
        stored = {(at, seqno) for at, seqno in stored if seqno >= TREE[at][1]}  # as the writer would have it
        visible = sorted({seqno for at, seqno in stored if seqno <= cuts.get(at, -1)}, reverse=True)
    txn = environment.begin(write=True)
    try:
        for at, seqno in stored:
            tree = environment.db(keys.rows_db(0))
            txn.put(keys.ROW.pack(at, seqno), b"row", db=tree)
            txn.put(
                keys.ROW.pack(at, seqno) + keys.BOUNDARY_SUFFIX, keys.BOUNDARY.pack(0, 7, seqno, seqno, 0, 0), db=tree
            )
        found = [b.seqno for b in chain.boundaries(Transaction(environment, txn), 0, links)]
        newest = chain.newest_boundary(Transaction(environment, txn), 0, links, to_seqno)
    finally:
        txn.abort()
    assert found == visible
    assert (newest.seqno if newest else None) == max((s for s in visible if s <= to_seqno), default=None)


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
