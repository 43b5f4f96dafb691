"""Any reader of changes ends with what is served, whatever rollbacks and deferred rollbacks lie between, and wherever
the reader stopped.

Histories are drawn that share rows above the boundary to which a rollback goes: a replica that is promoted has part of
a snapshot (docs/protocol.md 2.5), and rows of both histories are then equal. They create, flush, drop and recreate a
collection. A reader forgets its documents at the events that end it, but not at its creation.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from tempfile import TemporaryDirectory
from typing import NamedTuple

from hypothesis import example, given
from hypothesis import strategies as st

from storage.env import directory
from storage.model import Collection, Seqno
from storage.read.view import Change, Token, View, open_view
from storage.write.writer import GroupWriter
from tests.storage.model import DEFAULT, IDENTITY, SCOPES, A, B, C, log, manifest_at
from tests.storage.rig import commit, open_writer, put, system_event

Copy = dict[tuple[int, bytes], tuple[int, bytes]]
Rows = list[tuple[bytes, str | None, bool]]
History = tuple[str, int, int, Rows]


class Reader(NamedTuple):
    copy: Copy
    token: Token | None


ORDERS = b"orders"
"""In place of a key: the collection begins anew or, with None, ends."""
X = b"x"
"""A key of this collection while that exists, otherwise of the default collection."""
ROWS = st.lists(
    st.tuples(st.sampled_from((A, B, C, X, ORDERS)), st.sampled_from(("value", "other value", None)), st.booleans())
)
"""(key, value, True if a snapshot ends with the row); None: a deletion."""
HISTORY = st.tuples(st.sampled_from(("rollback", "deferred rollback")), st.integers(0, 9), st.integers(0, 9), ROWS)
"""A new history begins by a rollback to a seqno. The third value is the number of rows above it that both histories
share; the rows follow.
"""


def apply(view: View, copy: Copy, changes: Iterable[Change]) -> None:
    for change in changes:
        document = change.document
        if document is None:
            continue
        key = document.collection_id, document.key
        if change.kind == "system_event":
            before, after = (
                manifest_at(view, document.branch, seqno) for seqno in (document.seqno - 1, document.seqno)
            )
            ended = {each for each, entry in before.collections.items() if after.collections.get(each) != entry}
            for key in [each for each in copy if each[0] in ended]:
                del copy[key]
        elif change.kind in ("mutation", "restoration"):
            copy[key] = document.seqno, document.value
        else:
            copy.pop(key, None)


def follow(view: View, reader: Reader) -> Reader:
    copy, changes = dict(reader.copy), list(view.changes(0, since=reader.token))
    apply(view, copy, changes)
    assert copy == served(view)
    return Reader(copy, changes[-1].token if changes else reader.token)


def stopped(view: View, reader: Reader, count: int) -> Reader:
    """Return a reader that stopped after some changes."""
    copy, changes = dict(reader.copy), list(islice(view.changes(0, since=reader.token), count))
    apply(view, copy, changes)
    return Reader(copy, changes[-1].token if changes else reader.token)


def served(view: View) -> Copy:
    return {(each.collection_id, each.key): (each.seqno, each.value) for each in view.scan(0)}


@example(
    [(A, "value", True), (A, "value", False), (A, "value", False)], [("deferred rollback", 1, 1, [(B, "value", False)])]
)
@example(
    [(B, "value", True), (A, "value", False), (C, "value", False)],
    [("deferred rollback", 1, 2, [(B, "value", False)]), ("rollback", 1, 2, [(B, "value", False)])],
)
@example(
    [(A, "value", False), (A, "value", True), (B, "value", False), (A, "value", False)],
    [("deferred rollback", 2, 1, [(C, "value", False)]), ("rollback", 2, 0, [(A, "value", False)])],
)
@example(  # a lost version that the new history has above its reached seqno
    [(A, "value", True), (B, "value", True), (C, "value", False)], [("deferred rollback", 1, 2, [(A, "value", False)])]
)
@example(  # a reader that stops in the middle of the first deferred rollback's events
    [(A, None, True), (B, "value", False), (B, "value", False)],
    [
        ("deferred rollback", 2, 2, [(B, None, False), (B, "other value", False)]),
        ("deferred rollback", 1, 0, [(A, None, False), (A, "other value", False), (B, None, False)]),
        ("deferred rollback", 1, 0, [(B, "other value", False)]),
    ],
)
@example(  # a reader from the middle of a snapshot, whose version a later row replaces
    [(A, "value", True), (B, "other value", False), (B, "other value", False)],
    [
        ("deferred rollback", 2, 0, [(C, None, False), (B, "value", False)]),
        ("deferred rollback", 1, 0, [(A, "other value", False)]),
        ("rollback", 5, 2, [(A, None, False), (A, None, True)]),
    ],
)
@example(  # a collection of the lost history alone
    [(A, "value", True), (ORDERS, "value", False), (X, "value", False)],
    [("deferred rollback", 1, 0, [(B, "value", False)])],
)
@example(  # a collection that both histories create
    [(A, "value", True), (ORDERS, "value", False), (X, "value", False)],
    [("deferred rollback", 1, 0, [(B, "value", False), (A, "value", False), (ORDERS, "value", False)])],
)
@example(  # a lost version, of which the new history has only an older one that a flush ended
    [(A, "value", True), (ORDERS, "value", False), (X, "value", False), (ORDERS, "value", False), (X, "value", False)],
    [("deferred rollback", 1, 3, [(A, "value", False)])],
)
@given(ROWS.filter(bool), st.lists(HISTORY, max_size=3))
def test_a_reader_of_any_token_ends_with_the_served_documents(first: Rows, histories: list[History]) -> None:
    with TemporaryDirectory() as folder:
        path = f"{folder}/data"
        directory.create(path, IDENTITY)
        writer = open_writer(path)
        writer.vbuckets[0].save(failover_log=log())
        try:
            live_through(writer, path, first, histories)
        finally:
            writer.close()


def live_through(writer: GroupWriter, path: str, first: Rows, histories: list[History]) -> None:
    readers, stopped_readers = [Reader({}, None)], list[Reader]()
    with open_view(path) as view:
        rows: Rows = []

        def write(above: int, following: Rows) -> None:
            """Publish the rows of the present history above a seqno, and then more of them."""
            rows.extend(following)
            for seqno, (key, value, ends) in enumerate(rows[above:], above + 1):
                there = next(
                    (value is not None for key, value, _ in reversed(rows[: seqno - 1]) if key == ORDERS), False
                )
                if key == ORDERS:
                    begun = [] if value is None else [Collection(9, 8, "orders", Seqno(seqno))]
                    system_event(writer, seqno, DEFAULT, *begun, scopes=SCOPES)
                else:
                    stored = None if value is None else b"%s %d" % (value.encode(), seqno)
                    put(writer, key, seqno, stored, cid=9 if key == X and there else 0)
                if ends or seqno == len(rows):
                    commit(writer, seqno)
                    readers.extend([follow(view, readers[0]), follow(view, readers[-1])])
                    some = [*readers[-4:], *stopped_readers[-4:]]
                    stopped_readers.extend(stopped(view, each, count) for each in some for count in (1, 2))

        write(0, first)
        for kind, to_seqno, shared, following in histories:
            if not following:
                continue
            went_to = writer.vbuckets[0].rollback(to_seqno, deferred=kind == "deferred rollback").boundary_seqno
            if not went_to:
                continue
            del rows[went_to + shared :]
            write(int(went_to), following)
        for reader in (*readers, *stopped_readers):
            follow(view, reader)
        for reader in readers:  # as Spark reads: all changes, or none
            copy = dict(reader.copy)
            apply(view, copy, view.changes_between(reader.token, view.token(0)))
            assert copy == served(view)
