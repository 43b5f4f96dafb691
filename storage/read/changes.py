"""Published events of a vbucket in seqno order, from any position on, also across a rollback.

As long as the events between two positions are kept, every read of them yields the same events. If part of a range is
already gone, the read raises before the first event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from storage.env.transaction import Transaction
from storage.errors import ViewInvalidated
from storage.format import keys, records, seal
from storage.format.tokens import Token
from storage.history import branches, chain
from storage.model import Branch, Document, Manifest, Rollback, Seqno, Vbuuid
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
    after_seqno: Seqno
    """The last seqno of the history that start and end share."""
    purged_before: int = 0
    """The result of `validity.purged_seqno` when a read from seqno 0 began; otherwise 0."""


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
        if start is None:
            return Range(served, (), Seqno(0), validity.purged_seqno(reader, txn, served, 0))
        reader.chain_of_position(txn, start.branch, start.seqno, start.history_id)
        lost: chain.Chain = ()
        after = start.seqno
        if not chain.sees(served.links, start.branch, start.seqno):
            lost = chain.load(txn, reader.vbid, start.branch, start.seqno)
            after = _common_seqno(reader.vbid, served, lost, start)
        if any(link.kept_seqno < link.cut and after < link.cut for link in lost):
            raise retractions.rows_gone(reader.vbid)
        before = validity.purged_seqno(reader, txn, served, after) if not start.seqno else 0
        validity.check_tombstones(reader, txn, served, after, before)
    return Range(served, lost, after, before)


def check_kept(reader: VbucketReader, txn: Transaction, way: Range) -> None:
    """Raise ViewInvalidated if part of the range is gone."""
    validity.check(reader, txn, way.served)
    validity.check_tombstones(reader, txn, way.served, way.after_seqno, way.purged_before)
    if way.lost:
        validity.check_unmoved(reader, txn, way.lost)
    for link in way.lost:
        if branches.get_branch(txn, reader.vbid, link.branch).kept_seqno < link.cut > way.after_seqno:
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


def _common_seqno(vbid: int, served: Served, lost: chain.Chain, start: Token) -> Seqno:
    """Return the last seqno of the history that `served` shares with `start`, a position that `served` does not see.
    Raises ViewInvalidated.
    """
    if start.seqno < lost[0].base_seqno:
        raise ViewInvalidated("the token was not given by this mirror", vbid=vbid)
    after = chain.common_seqno(served.links, lost)
    if after is None:
        raise ViewInvalidated("the vbucket was resynced since this token", vbid=vbid, hint=_FROM_BEGINNING)
    if not any(link.base_seqno == after and link.branch > start.branch for link in served.links):
        raise ViewInvalidated("the token is ahead of the published seqno", vbid=vbid, hint=_FROM_BEGINNING)
    return Seqno(after)


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
    common_seqno = way.after_seqno
    rising = (link for link in reversed(way.served.links) if link.branch > token.branch)
    child = next(link for link in rising if link.base_seqno == common_seqno)
    begin = Branch(child.branch)
    unknown = Rollback(reader.vbid, token.branch, token.seqno, begin, common_seqno, Vbuuid(0), Vbuuid(0), 0)
    record = next((each for each in rollbacks(reader) if each.to_branch == begin), unknown)
    undone = retractions.undone(
        reader, way.served, way.lost, common_seqno, None if pieces is None else pieces.bytes_max
    )
    end = Token(reader.vbid, begin, common_seqno, child.history_id(common_seqno))

    def change(each: retractions.Undone, at: Token) -> Change:
        return Change(each.kind, at, retractions.document_of(reader, each, raw))

    following = next(undone, None)  # look one position ahead, to know which event is the last
    yield from _repeated(lambda: Change("rollback", token if following else end, rollback=record), pieces)
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
    served, _, after_seqno, purged_before = way
    pieces = pieces or Pieces(scan.CHUNK_BYTES)

    def document(branch: Branch, row_key: bytes, stored: bytes) -> Document:
        reader.verify(row_key, stored)
        return records.decode_row(reader.vbid, branch, stored, raw, True, seal.SIZE)

    for link in reversed(served.links):
        position, branch = max(after_seqno, link.base_seqno), Branch(link.branch)
        while position < link.cut:
            with reader.environment.read() as txn:
                validity.check(reader, txn, served)
                validity.check_tombstones(reader, txn, served, position, purged_before)
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
