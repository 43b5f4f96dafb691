"""Visibility: which rows of a vbucket a reader sees, and at which seqnos it can stand.

**The problem.** The source sends snapshots: documents a (seqno 1) and b (2) in one, c (3) in the next. A reader must
see a snapshot as a whole or not at all, even if its rows take a hundred transactions. Then a failover loses c, and the
source gives seqno 3 to d. The rollback must take effect at once for a million rows as for one, and c must stay stored
for a while: readers of changes have to be told what they lost.

    key (branch, seqno)   (1,1) (1,2) |2   (1,3) |3   (2,3) |3   (2,4)          |2: the boundary at seqno 2
    row                     a     b          c          d          e
    `pub`                 branch 2, published_seqno 3
    chain                 branch 2: base 2, cut 3, then branch 1: base 0, cut 2
    visible                 a     b                     d
    not visible                        c: above the cut of branch 1      e: staged, above published_seqno

**The rule.**

1. A row is visible if its branch is on the chain of the served branch and its seqno is at most the cut there: of the
   served branch the published_seqno, of a parent the base of its child. Nothing in a row says if it is visible.
2. Rows are staged above published_seqno. One transaction writes the last of them, the boundary, and `pub`.
3. A rollback goes to a kept boundary B, never between two, because a snapshot has only the newest version of each key.
   It opens the next branch with base B. The parent is the branch with that boundary. So a branch without publishes is
   never a parent, and bases and branch numbers both rise from the root to the tip.
4. A chain holds only links that show something. Its first link is the branch with the row or boundary at the position,
   and that branch is in tokens and pins. At seqno 0 a chain is empty, and all histories are the same.
5. Therefore the references of a key, sorted by (branch, seqno), rise along every chain: the last visible one is the
   newest version, mostly the very last (`newest_version`).

**Rejected.** *To remove rows in the rollback*: a rollback of a million rows takes seconds, a crash leaves half of it,
and readers cannot learn what was taken back. *A flag in each row*: the same writes. *One line of history instead of a
tree*, in which a rollback hides the range of keys behind its boundary: no parents, and reads after failovers were
faster; but nothing then moves old rows together (`merge`), and after 3,000 rollbacks of a vbucket with 2,000 documents
the file was larger by half. *The branch served just before as the parent*: each snapshot that was given up made the
chain longer, and branches without rows needed rules for the positions on them.

**What would break.** If a row could lie at or below its branch's base, two rows of one seqno would be visible. If a
rollback went between two boundaries, an older version could be missing that the source has again. If `pub` changed in
another transaction than the boundary, a crash between them would leave a position to which no rollback can go."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from storage.env.transaction import Transaction, seek_before
from storage.errors import VERIFY, CorruptedError
from storage.format import keys, records
from storage.format.keys import BOUNDARY_SUFFIX, ROW_KEY_SIZE
from storage.format.records import BRANCH, ROW_KEY, SEQNO
from storage.model import SEQNO_MAX, Boundary, Branch, Seqno


class ChainLink(NamedTuple):
    """One branch of a chain: rows with base_seqno < seqno <= cut are visible."""

    branch: int
    base_seqno: int
    cut: int
    history_ids: records.HistoryIds = ()

    def history_id(self, seqno: int) -> int:
        return records.history_id_at(self.history_ids, seqno)


Chain = tuple[ChainLink, ...]
"""Links from the tip to the root, without those that show nothing: the newest link has the row or boundary at the
position. Empty at seqno 0, which is the same in every history.
"""

Row = tuple[bytes, bytes]
"""Row key (branch, seqno) and stored row."""


class Piece(NamedTuple):
    """Rows of a chain that one transaction read (`piece`)."""

    rows: list[Row]
    to_seqno: int
    """Seqno up to which rows were read: the chain's cut if it has no further rows."""
    large_bytes: int = 0
    """Bytes of the next row if it is too large, and so `rows` is empty."""


SPAN_SEQNOS = 100
"""A snapshot of more seqnos than this gets a row in `span`, which lets a search for boundaries skip the snapshot."""


def load(txn: Transaction, vbid: int, branch: int, cut: int) -> Chain:
    links: list[ChainLink] = []
    current: int | None = branch
    while current is not None and cut:
        try:
            row = records.decode_branch(txn.get(keys.DB_BRANCH, keys.BRANCH_KEY.pack(vbid, current)))
        except CorruptedError as error:
            raise CorruptedError(f"branch {current}: {error.message}", path=txn.path, vbid=vbid) from error
        if row.parent is not None and row.parent >= current:
            raise CorruptedError(f"branch {current} has parent {row.parent}", path=txn.path, vbid=vbid)
        if row.base_seqno < cut:
            links.append(ChainLink(current, row.base_seqno, cut, row.history_ids))
            cut = row.base_seqno
        current = row.parent
    return tuple(links)


def recut(chain: Chain, cut: int) -> Chain:
    if chain and cut > chain[0].base_seqno:  # the cuts of the other links are at most this base
        return chain if cut >= chain[0].cut else (chain[0]._replace(cut=cut), *chain[1:])
    return tuple(link if link.cut <= cut else link._replace(cut=cut) for link in chain if link.base_seqno < cut)


def same(one: Chain, other: Chain) -> bool:
    """Return True if both chains see the same rows on the same branches."""
    return len(one) == len(other) and all(
        (a.branch, a.base_seqno, a.cut) == (b.branch, b.base_seqno, b.cut) for a, b in zip(one, other, strict=True)
    )


def sees(chain: Chain, branch: int, seqno: int) -> bool:
    at = _link_of(chain, branch, 0)
    return not seqno or (at < len(chain) and chain[at].branch == branch and seqno <= chain[at].cut)


def common_seqno(served: Chain, other: Chain) -> int | None:
    """Return the seqno up to which two chains share their history; None if they share no branch."""
    cuts = {link.branch: link.cut for link in served}
    return max((min(link.cut, cuts[link.branch]) for link in other if link.branch in cuts), default=None)


def has_gap(txn: Transaction, vbid: int, chain: Chain, after_seqno: int) -> bool:
    """Return True if rows of a chain above `after_seqno`, which readers left by a rollback or resync, may be purged."""
    for link in chain:
        if link.cut > after_seqno:
            row = records.decode_branch(txn.get(keys.DB_BRANCH, keys.BRANCH_KEY.pack(vbid, link.branch)))
            if row.kept_seqno < link.cut:
                return True
    return False


def newest_version(cursor: Any, wire_key: bytes, chain: Chain) -> bytes | None:
    """Return the reference (13 bytes) to the newest version of `wire_key` that `chain` sees, or None. `cursor` is on
    the key tree.

    Costs one seek for each branch with invisible versions of the key; a long chain costs no more.
    """
    if not cursor.set_key(wire_key) or not cursor.last_dup():
        return None
    dup: bytes = cursor.value()
    at = 0
    while (at := _link_of(chain, records.branch_of(dup), at)) < len(chain):
        link = chain[at]
        limit = keys.ROW.pack(link.branch, link.cut) + b"\xff"
        if dup[BRANCH] == limit[BRANCH] and dup[ROW_KEY] <= limit[ROW_KEY]:
            return dup
        if cursor.set_range_dup(wire_key, limit):
            if not cursor.prev_dup():
                return None
        else:
            cursor.set_key(wire_key)
            cursor.last_dup()
        dup = cursor.value()
    return None


def _link_of(chain: Sequence[ChainLink], branch: int, start: int) -> int:
    """Return the smallest index >= `start` of a link with a branch number <= `branch`; len(chain) if there is none."""
    if start < len(chain) and chain[start].branch <= branch:
        return start
    return bisect_left(chain, -branch, start, key=lambda link: -link.branch)


def boundary_of(key: bytes, value: bytes, vbid: int, link: ChainLink | None = None) -> Boundary:
    """Decode a boundary row. `link` is the link of the row's branch; without a link the history id is 0 (unknown)."""
    branch, seqno = keys.ROW.unpack_from(key)
    if len(value) != keys.BOUNDARY.size:
        raise CorruptedError(f"boundary row {branch}:{seqno} has {len(value)} bytes", vbid=vbid)
    history_id = link.history_id(seqno) if link is not None else 0
    fields = *keys.BOUNDARY.unpack(value), history_id
    return Boundary(Branch(branch), Seqno(seqno), *fields)


def boundary_at(txn: Transaction, vbid: int, branch: int, seqno: int) -> Boundary | None:
    """Return the newest kept boundary at or below the position (branch, seqno), or None."""
    return next(boundaries(txn, vbid, load(txn, vbid, branch, seqno)), None)


def newest_boundary(txn: Transaction, vbid: int, chain: Chain, to_seqno: int) -> Boundary | None:
    """Return the newest kept boundary of a loaded chain at or below `to_seqno`, or None."""
    return next(boundaries(txn, vbid, recut(chain, to_seqno)), None)


def boundaries(txn: Transaction, vbid: int, chain: Chain) -> Iterator[Boundary]:
    """Yield the kept boundaries of a chain, newest first.

    Walks rows backwards, and skips long snapshots by `span`: at most `SPAN_SEQNOS` rows are read between two
    boundaries.
    """
    cursor = txn.cursor(keys.rows_db(vbid))
    spans = txn.cursor(keys.DB_SPAN)
    for link in chain:
        prefix = keys.PREFIX.pack(link.branch)
        position: int | None = _before_span(spans, vbid, link)
        while position is not None:
            if not seek_before(cursor, keys.ROW.pack(link.branch, position) + b"\x02"):
                return  # parents have smaller keys, so they have no rows either
            position = None
            for key in cursor.iterprev(values=False):  # reading a value of 20 MiB would take 4 ms
                if not key.startswith(prefix):
                    break
                if len(key) == keys.BOUNDARY_KEY_SIZE:
                    boundary = boundary_of(key, cursor.value(), vbid, link)
                    yield boundary
                    if spans.set_key(keys.SPAN_KEY.pack(vbid, link.branch, boundary.seqno)):
                        (position,) = keys.SEQNO.unpack(spans.value())
                        break


def boundaries_after(txn: Transaction, vbid: int, chain: Chain, after_seqno: int) -> Iterator[Boundary]:
    """Yield the kept boundaries of a chain above `after_seqno`, rising. Like `boundaries`, skips long snapshots."""
    cursor = txn.cursor(keys.rows_db(vbid))
    spans = txn.cursor(keys.DB_SPAN)
    for link in reversed(chain):
        limit = keys.ROW.pack(link.branch, link.cut) + b"\xff"
        position = max(after_seqno, link.base_seqno)
        while position < link.cut:
            first = position + 1
            span_key = keys.SPAN_KEY.pack(vbid, link.branch, first)
            if spans.set_range(span_key) and spans.key()[:6] == span_key[:6]:
                (before,) = keys.SEQNO.unpack(spans.value())
                if before < first:  # a long snapshot: its end is the next boundary
                    first = int.from_bytes(spans.key()[6:], "big")
            position = link.cut
            if first <= link.cut and cursor.set_range(keys.ROW.pack(link.branch, first)):
                for key in cursor.iternext(values=False):
                    if key > limit:
                        break
                    if len(key) == keys.BOUNDARY_KEY_SIZE:
                        boundary = boundary_of(key, cursor.value(), vbid, link)
                        yield boundary
                        position = boundary.seqno
                        break


# -- walks over rows --------------------------------------------------------------------------------------------------


def rows_after(
    txn: Transaction, vbid: int, chain: Chain, after_seqno: int = 0, *, boundaries: bool = False
) -> Iterator[Row]:
    """Yield the rows of a chain with seqnos above `after_seqno`, rising. With `boundaries`, yield boundaries, too.

    If `txn` returns buffers, the values are buffers. Raises CorruptedError if a flipped bit in a key may hide a row.
    """
    cursor = txn.cursor(keys.rows_db(vbid))
    for link in reversed(chain):
        start = max(after_seqno, link.base_seqno)
        if start >= link.cut or not cursor.set_range(keys.ROW.pack(link.branch, start + 1)):
            continue
        end = keys.ROW.pack(link.branch, link.cut) + keys.BOUNDARY_SUFFIX
        previous = b""
        entries: Iterator[Row] = cursor.iternext()
        if not isinstance(cursor.key(), bytes):
            entries = ((bytes(key), value) for key, value in entries)
        for row in entries:
            key = row[0]
            if previous < key <= end:
                previous = key
                if len(key) == ROW_KEY_SIZE or (boundaries and key[ROW_KEY_SIZE:] == BOUNDARY_SUFFIX):
                    yield row
                    continue
                if key[ROW_KEY_SIZE:] == BOUNDARY_SUFFIX:
                    continue
            elif key > end:
                check_place(txn, vbid, *row)
                if not cursor.next() or bytes(cursor.key()) > key:
                    break
            raise not_in_order(txn, vbid)


def piece(
    txn: Transaction,
    vbid: int,
    chain: Chain,
    after_seqno: int,
    rows_max: int,
    bytes_max: int,
    large_bytes: int | None = None,
) -> Piece:
    """Return the next rows of a chain above `after_seqno`: at most `rows_max`, and only as many as fit into
    `bytes_max`, but at least one.

    With `large_bytes`, `txn` must return buffers. The rows then end before a row that has more bytes, as counted by
    `records.bytes_to_read`.
    """
    found: list[Row] = []
    add = found.append
    left = bytes_max
    for row in islice(rows_after(txn, vbid, chain, after_seqno), rows_max):
        if large_bytes is not None:
            if (large := records.bytes_to_read(row[1])) > large_bytes:
                return Piece(found, records.seqno_of(row[0]) - 1, 0 if found else large)
            row = row[0], bytes(row[1])
        left -= len(row[1])
        if left <= 0:
            if left == 0 or not found:
                add(row)
            break
        add(row)
    else:
        if len(found) < rows_max:
            return Piece(found, chain[0].cut)
    return Piece(found, records.seqno_of(found[-1][0]))


def rows_before(txn: Transaction, vbid: int, chain: Chain, after_seqno: int, to_seqno: int) -> Iterator[Row]:
    """Yield the rows of a chain with after_seqno < seqno <= to_seqno, newest first. Values as by `rows_after`."""
    cursor = txn.cursor(keys.rows_db(vbid))
    for link in chain:
        low, high = max(after_seqno, link.base_seqno), min(to_seqno, link.cut)
        if low >= high or not seek_before(cursor, keys.ROW.pack(link.branch, high) + b"\x02"):
            continue
        end = keys.ROW.pack(link.branch, low) + b"\x02"
        for key, value in cursor.iterprev():
            row_key = bytes(key)
            if row_key < end:
                break
            if len(row_key) == keys.ROW_KEY_SIZE:
                yield row_key, value


def has_rows(txn: Transaction, vbid: int, branch: int, after_seqno: int, to_seqno: int = SEQNO_MAX) -> bool:
    """Return True if a branch has rows or boundaries with after_seqno < seqno <= to_seqno."""
    cursor = txn.cursor(keys.rows_db(vbid))
    last = keys.ROW.pack(branch, to_seqno) + keys.BOUNDARY_SUFFIX
    return bool(cursor.set_range(keys.ROW.pack(branch, after_seqno) + b"\x02") and cursor.key() <= last)


def check_place(txn: Transaction, vbid: int, key: bytes, value: bytes) -> None:
    """Raise CorruptedError if a row's key has another seqno than the row."""
    if len(key) == keys.ROW_KEY_SIZE and value[24:32] != key[SEQNO]:
        raise not_in_order(txn, vbid)


def not_in_order(txn: Transaction, vbid: int) -> CorruptedError:
    return CorruptedError("the rows are not in order", path=txn.path, vbid=vbid, hint=VERIFY)


# -- spans ------------------------------------------------------------------------------------------------------------


def _before_span(spans: Any, vbid: int, link: ChainLink) -> int:
    key = keys.SPAN_KEY.pack(vbid, link.branch, link.cut)
    if spans.set_range(key) and spans.key()[:6] == key[:6] and spans.key() != key:
        (before,) = keys.SEQNO.unpack(spans.value())
        return min(link.cut, int(before))
    return link.cut


def put_span(txn: Transaction, vbid: int, branch: int, end_seqno: int, before_seqno: int) -> None:
    """Record in `span` that no boundary lies between two seqnos, if they are more than `SPAN_SEQNOS` apart."""
    if end_seqno - before_seqno > SPAN_SEQNOS:
        key = keys.SPAN_KEY.pack(vbid, branch, end_seqno)
        txn.put(keys.DB_SPAN, key, keys.SEQNO.pack(before_seqno))
