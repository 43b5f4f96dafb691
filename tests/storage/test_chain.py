"""A view of a branch sees the rows of a plain list, and finds the boundaries behind long snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.env import directory
from storage.env.environment import Environment
from storage.env.transaction import Transaction
from storage.format import keys, records
from storage.history import chain
from tests.storage.frames import sealed
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


def fill(environment: Environment, txn: Any, rows: Iterable[tuple[int, int]]) -> list[tuple[bytes, bytes]]:
    """Write a row of up to 50 bytes of value for each (branch, seqno), and a boundary behind each third seqno."""
    entries = []
    for branch, seqno in sorted(rows):
        key = keys.ROW.pack(branch, seqno)
        entries.append((key, sealed(records.encode_mutation(b"k", b"v" * (seqno * 7 % 50), seqno))))
        if seqno % 3 == 0:
            entries.append((key + keys.BOUNDARY_SUFFIX, bytes(keys.BOUNDARY.size)))
    txn.cursor(environment.db(keys.rows_db(0))).putmulti(entries)
    return entries


@settings(max_examples=3 * settings().max_examples, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.sets(st.tuples(st.integers(1, 5), st.integers(1, 20)), max_size=40),
    branch=st.integers(1, 5),
    cut=st.integers(0, 22),
    after=st.integers(0, 22),
    rows_max=st.integers(1, 6),
    bytes_max=st.integers(1, 400),
    buffers=st.booleans(),
)
def test_each_walk_finds_the_rows_of_a_plain_list(
    environment: Environment,
    rows: set[tuple[int, int]],
    branch: int,
    cut: int,
    after: int,
    rows_max: int,
    bytes_max: int,
    buffers: bool,
) -> None:
    with environment.read() as reading:
        links = chain.load(reading, 0, branch, cut)
    spans = {link.branch: (link.base_seqno, link.cut) for link in links}
    writing = environment.begin(write=True, buffers=buffers)
    try:
        # a row lies above the base of its branch
        written = fill(environment, writing, {each for each in rows if each[1] > TREE[each[0]][1]})
        txn = Transaction(environment, writing)
        seen = [
            (key, value)
            for key, value in written
            if (span := spans.get(records.branch_of(key))) and max(span[0], after) < records.seqno_of(key) <= span[1]
        ]
        visible = [each for each in seen if len(each[0]) == keys.ROW_KEY_SIZE]
        walked = chain.rows_after(txn, 0, links, after, boundaries=True)
        assert [(key, bytes(value)) for key, value in walked] == seen
        falling = chain.rows_before(txn, 0, links, after, cut)
        assert [(key, bytes(value)) for key, value in falling] == visible[::-1]
        for link in links if not buffers else ():
            low = max(link.base_seqno, after)
            inside = any(records.branch_of(key) == link.branch for key, _ in seen)
            assert chain.has_rows(txn, 0, link.branch, low, link.cut) == (inside and low < link.cut)
        pieces, position = [], after
        while position < cut:
            piece = chain.piece(txn, 0, links, position, rows_max, bytes_max)
            sizes = [len(value) for _, value in piece.rows]
            assert len(sizes) <= rows_max
            assert len(sizes) <= 1 or sum(sizes) <= bytes_max
            assert piece.to_seqno > position
            pieces += piece.rows
            position = piece.to_seqno
        assert [(key, bytes(value)) for key, value in pieces] == visible
    finally:
        writing.abort()


def test_a_piece_ends_before_a_large_row_and_names_its_bytes(environment: Environment) -> None:
    writing = environment.begin(write=True, buffers=True)
    try:
        written = [each for each in fill(environment, writing, [(1, 1), (1, 7), (1, 2)]) if len(each[0]) == 12]
        txn, links = Transaction(environment, writing), (chain.ChainLink(1, 0, 9),)
        large = len(written[2][1])
        assert chain.piece(txn, 0, links, 0, 9, 999, large - 1) == (written[:2], 6, 0)
        assert chain.piece(txn, 0, links, 6, 9, 999, large - 1) == ([], 6, large)
        assert chain.piece(txn, 0, links, 6, 9, 999, large) == (written[2:], 9, 0)
    finally:
        writing.abort()


@settings(max_examples=3 * settings().max_examples, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sets(st.integers(1, 400), max_size=8), st.integers(0, 420), st.sets(st.integers(1, 400), max_size=3))
def test_leaps_over_long_snapshots_find_every_boundary(
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
