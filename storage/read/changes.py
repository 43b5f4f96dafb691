"""Changes: the published events of a vbucket in seqno order, and a rollback as readers of them see it.

**The problem.** A follower applied a (seqno 1), b (2), a newer version of a (3) and c (4). A failover lost 3 and 4, and
the source gave 3 to d. The follower's copy has a@3, b and c; it must become a@1, b and d. The follower may have stopped
anywhere, also while it was told this, and further failovers may follow.

    follower's token    (1, 4)      its chain, now lost:   branch 1 up to 4
    served position     (2, 3)      its chain:             branch 2 above 2, branch 1 up to 2
    shared                          up to seqno 2

    event               rollback   retraction a@3   restoration a@1   retraction c@4   mutation d@3
    its token            (1, 4)        (1, 4)            (1, 4)           (1, 2)          (2, 3)

**The rule.**

1. The token's chain and the served chain share their rows up to one seqno (`chain.common_seqno`). The rollback that
   went to that seqno is reported first.
2. Each key that the lost rows changed gets one retraction, of its newest lost version. If an older version is visible
   again, its restoration follows. A drop or flush has no events of documents, so after a lost drop the collection's
   documents are all restored (`retractions`).
3. Then come the served rows above the shared seqno, as for any reader.
4. All events of a rollback but the last have the token from which the reader came. A reader that stopped among them
   gets all of them again. To apply them twice is harmless: one removes a key, the other sets it.
5. A deferred rollback (`publish = persisted`) gives the same events, once the new history is served.

A read from the beginning never sees lost rows. If part of a range is gone, the read raises before its first event, and
if the purger overtakes it, in the middle (`validity`).

**Rejected.** *A reset*, after which the follower reads the vbucket again: each failover would make every follower copy
the bucket. *The difference of both histories*, without the events that both have: after a promotion of a replica these
are most. It was built, and needed a filter with rules for drops, flushes and overwritten versions, and the same answer
at each reading although the served history grew meanwhile.

**What would break.** If the first of two retractions already had the token (1, 2), a follower that stopped behind it
would keep c for ever. If every lost version were retracted, and not only the newest, a follower would remove a key
after its restoration. If the shared seqno came from the rollback's record and not from the chains, a second rollback
below the first would leave rows between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from storage.env.transaction import Transaction
from storage.errors import ViewInvalidated
from storage.format import keys, records, seal
from storage.format.tokens import CollectionName, Token
from storage.history import chain
from storage.model import Branch, Document, Manifest, Rollback, Seqno
from storage.read import retractions, scan, validity
from storage.read.vbucket_reader import Served, VbucketReader

_FROM_BEGINNING = "read it from the beginning"


@dataclass(slots=True)
class Pieces:
    """Lets a reader with little memory limit the bytes read at once, and get a change again after dropping it."""

    bytes_max: int
    """Maximum bytes of rows that are read at once; one document may be larger."""
    again: bool = False
    """A reader that dropped the last change sets this to True. The change is then read and yielded again."""


@dataclass(frozen=True, slots=True)
class Change:
    """One published event. `kind` is mutation, deletion, expiration, system_event, rollback, retraction or restoration.

    A rollback is the first event of its new branch. Then each key's newest lost version is retracted; if an older
    version is visible again, its restoration follows. `token` resumes after this event. Of a rollback, its retractions
    and restorations, only the last has such a token; the others' tokens repeat the rollback.
    """

    kind: str
    token: Token
    document: Document | None = None
    rollback: Rollback | None = None


class Range(NamedTuple):
    served: Served
    """The state at the end of the range."""
    lost: chain.Chain
    """The chain of the range's start if `served` does not see the start; otherwise empty."""
    rollback: Rollback | None
    """The rollback by which readers left `lost`."""
    after_seqno: Seqno
    """The last seqno of the history that start and end share."""
    purge_seqno_before: int = 0
    """The result of `validity.purge_seqno` when a read from seqno 0 began; otherwise 0."""


def rollbacks(reader: VbucketReader) -> list[Rollback]:
    with reader.environment.read() as txn:
        return recorded_rollbacks(txn, reader.vbid)


def recorded_rollbacks(txn: Transaction, vbid: int) -> list[Rollback]:
    return [records.decode_rollback(vbid, value) for _, value in txn.of_vbucket(keys.DB_ROLLBACK, vbid)]


def resolve_range(reader: VbucketReader, start: Token | None, end: Token | None) -> Range:
    """Return the range from `start` (None: the beginning) to `end` (None: the state served now).

    Raises Unavailable, and ViewInvalidated if the range is not kept, or a resync lies between the positions.
    """
    with reader.environment.read() as txn:
        served = reader.readable(txn) if end is None else validity.served_at(reader, txn, end)
        if start is None or not start.seqno:
            return Range(served, (), None, Seqno(0), validity.purge_seqno(reader, txn, served, 0))
        lost = reader.chain_of_position(txn, start.branch, start.seqno, start.history_id)
        if chain.sees(served.links, start.branch, start.seqno):
            way = Range(served, (), None, start.seqno)
        else:
            way = Range(served, lost, *_taken_back_by(txn, served, lost, start))
        if chain.has_gap(txn, reader.vbid, way.lost, way.after_seqno):
            raise retractions.rows_gone(reader.vbid)
        validity.check_tombstones(reader, txn, served, way.after_seqno)
    return way


def check_kept(reader: VbucketReader, txn: Transaction, way: Range) -> None:
    """Raise ViewInvalidated if part of the range is gone."""
    validity.check(reader, txn, way.served)
    validity.check_tombstones(reader, txn, way.served, way.after_seqno, way.purge_seqno_before)
    if way.lost:
        validity.check_unmoved(reader, txn, way.lost)
    if chain.has_gap(txn, reader.vbid, way.lost, way.after_seqno):
        raise retractions.rows_gone(reader.vbid)


def manifest_at(reader: VbucketReader, way: Range, branch: int, seqno: int) -> Manifest:
    """Return the collections as of a position in the range. Below the purge seqno, return the collections as of the
    purge seqno: older manifests may be gone. Raises ViewInvalidated.
    """
    with reader.environment.read() as txn:
        check_kept(reader, txn, way)
        served = reader.served(txn)
        if chain.sees(served.links, branch, seqno):
            seqno = max(seqno, reader.purge_row(txn).local_purge_seqno)
            branch = served.pub.branch
        return reader.manifest_on(txn, reader.chain_at(txn, branch, seqno))


def had_collection(reader: VbucketReader, at: Token, collection: CollectionName) -> bool:
    """Return True if the collection existed at a position. Raises ViewInvalidated."""
    manifest = manifest_at(reader, resolve_range(reader, at, None), at.branch, at.seqno)
    return manifest.collection(collection) is not None


def _taken_back_by(txn: Transaction, served: Served, lost: chain.Chain, start: Token) -> tuple[Rollback, Seqno]:
    """Return the rollback by which readers left `lost`, and the last seqno that `lost` shares with `served`. Raises
    ViewInvalidated.
    """
    common_seqno = chain.common_seqno(served.links, lost)
    if common_seqno is None:
        raise ViewInvalidated("the vbucket was resynced since this token", vbid=start.vbid, hint=_FROM_BEGINNING)
    for each in recorded_rollbacks(txn, start.vbid):
        if each.to_branch > start.branch and each.to_seqno == common_seqno:
            return each, Seqno(common_seqno)
    if served.pub.branch == start.branch:
        raise ViewInvalidated("the token is ahead of the published seqno", vbid=start.vbid, hint=_FROM_BEGINNING)
    raise retractions.rows_gone(start.vbid)


def since(reader: VbucketReader, token: Token | None, raw: bool, pieces: Pieces | None = None) -> Iterator[Change]:
    """Yield the changes from `token` (None: the beginning) to now. A reader may go on from any event's token."""
    yield from between(reader, token, resolve_range(reader, token, None), raw, pieces)


def between(
    reader: VbucketReader, start: Token | None, way: Range, raw: bool, pieces: Pieces | None = None
) -> Iterator[Change]:
    """Yield the changes of a range, for a reader that takes all of them or none."""
    if start is not None and way.lost:
        yield from _taken_back(reader, start, way, raw, pieces)
    yield from _published(reader, way, raw, pieces)


def _published(reader: VbucketReader, way: Range, raw: bool, pieces: Pieces | None) -> Iterator[Change]:
    links = {link.branch: link for link in way.served.links}

    def change(document: Document) -> Change:
        branch, seqno = document.branch, document.seqno
        at = Token(reader.vbid, branch, seqno, links[branch].history_id(seqno))
        return Change(document.kind.name.lower(), at, document)

    yield from map(change, rows(reader, way, raw, pieces))  # a loop would keep the last document


def _taken_back(reader: VbucketReader, token: Token, way: Range, raw: bool, pieces: Pieces | None) -> Iterator[Change]:
    """Yield a rollback, its retractions and restorations. A reader that stopped within these events gets all of them
    again, also after further rollbacks.
    """
    bytes_max = None if pieces is None else pieces.bytes_max
    undone = retractions.undone(reader, way.served, way.lost, way.after_seqno, bytes_max)
    shared = next(link for link in way.lost if link.base_seqno < way.after_seqno)
    end = Token(reader.vbid, Branch(shared.branch), way.after_seqno, shared.history_id(way.after_seqno))

    def change(each: retractions.Undone, at: Token) -> Change:
        return Change(each.kind, at, retractions.document_of(reader, each, raw))

    following = next(undone, None)  # look one position ahead, to know which event is the last
    yield from _repeated(lambda: Change("rollback", token if following else end, rollback=way.rollback), pieces)
    while following is not None:
        each, following = following, next(undone, None)
        yield from _repeated(partial(change, each, token if following else end), pieces)


def _repeated(change: Callable[[], Change], pieces: Pieces | None) -> Iterator[Change]:
    """Yield a change, and yield it again each time the reader sets `pieces.again`."""
    yield change()
    while pieces is not None and pieces.again:
        pieces.again = False
        yield change()


def rows(reader: VbucketReader, way: Range, raw: bool, pieces: Pieces | None = None) -> Iterator[Document]:
    """Yield every row of a range, rising in seqno. Raises ViewInvalidated."""
    served, after_seqno, purge_seqno_before = way.served, way.after_seqno, way.purge_seqno_before
    pieces = pieces or Pieces(scan.CHUNK_BYTES)

    def document(branch: Branch, row_key: bytes, stored: bytes) -> Document:
        reader.verify(row_key, stored)
        return records.decode_row(reader.vbid, branch, stored, raw, True, seal.SIZE)

    for link in reversed(served.links):
        position, branch = max(after_seqno, link.base_seqno), Branch(link.branch)
        while position < link.cut:
            with reader.environment.read() as txn:
                validity.check(reader, txn, served)
                validity.check_tombstones(reader, txn, served, position, purge_seqno_before)
                found, to_seqno, _ = chain.piece(txn, reader.vbid, (link,), position, scan.CHUNK_ROWS, pieces.bytes_max)
            found.reverse()
            while found:
                seqno = records.seqno_of(found[-1][0])
                yield document(branch, *found.pop())  # no variable keeps a row that the reader may release
                if pieces.again:
                    pieces.again = False
                    break
                position = seqno
            else:
                position = to_seqno
