"""Published events of a vbucket in seqno order, from any position on, also across a rollback.

Knows the row tree, chains and rollback records; `retractions` finds the versions that a rollback takes back, and
`validity` checks each transaction. Invariants:
- every piece of rows is read in one checked transaction and holds at most `CHUNK_ROWS` rows;
- as long as the events between two positions are kept, every read yields the same events;
- a range that is not kept is refused before its first event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from storage.env.transaction import Transaction
from storage.errors import ViewInvalidated
from storage.format import keys, records, seal
from storage.format.tokens import Token
from storage.history import branches, chain, index
from storage.model import Branch, Document, Manifest, Rollback, Seqno, Vbuuid
from storage.read import retractions, scan, validity
from storage.read.vbucket_reader import Served, VbucketReader

_FROM_BEGINNING = "read it from the beginning"


@dataclass(slots=True)
class Pieces:
    """Serves a reader with little memory: limits what is read at once, and yields a change again that was dropped."""

    bytes_max: int
    """Maximum bytes of rows that are read at once; one document may be larger."""
    again: bool = False
    """A reader that dropped the last change sets this to True. The change is then read and yielded again."""


@dataclass(frozen=True, slots=True)
class Change:
    """One published event. `kind` is mutation, deletion, expiration, system_event, rollback, retraction or restoration.

    A rollback is the first event of its new branch. Then each key's newest lost version is retracted; if an older
    version is visible again, its restoration follows. `token` resumes after this event; within a rollback only the last
    event's token does, and the others repeat the rollback.
    """

    kind: str
    token: Token
    document: Document | None = None
    rollback: Rollback | None = None


class Range(NamedTuple):
    served: Served
    """The state at the end of the range."""
    lost: chain.Chain
    """The chain of the first position if `served` does not see that position; otherwise empty."""
    after_seqno: Seqno
    """The last seqno of the history that both positions share."""
    purged_before: int = 0
    """The result of `validity.purged_seqno` when a read from seqno 0 began; otherwise 0."""


def rollbacks(reader: VbucketReader) -> list[Rollback]:
    with reader.environment.read() as txn:
        stored = txn.of_vbucket(keys.DB_ROLLBACK, reader.vbid)
        return [records.decode_rollback(reader.vbid, value) for _, value in stored]


def resolve_range(reader: VbucketReader, start: Token | None, end: Token | None) -> Range:
    """Return the range from `start` (None: the beginning) to `end` (None: the state served now). Raises ViewInvalidated
    if the range is not kept, or a resync lies between the positions.
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
    """Return the seqno up to which the served chain shares the history of `start`, which is not on this chain."""
    if start.seqno < lost[0].base_seqno:
        raise ViewInvalidated("the token was not given by this mirror", vbid=vbid)
    after = chain.common_seqno(served.links, lost)
    if after is None:
        raise ViewInvalidated("the vbucket was resynced since this token", vbid=vbid, hint=_FROM_BEGINNING)
    if not any(link.base_seqno == after and link.branch > start.branch for link in served.links):
        raise ViewInvalidated("the token is ahead of the published seqno", vbid=vbid, hint=_FROM_BEGINNING)
    return Seqno(after)


def between(
    reader: VbucketReader, token: Token | None, end: Token | None, raw: bool, pieces: Pieces | None = None
) -> Iterator[Change]:
    """Yield the changes from `token` (None: the beginning) to `end` (None: the state served now)."""
    way = resolve_range(reader, token, end)
    served, lost, after, _ = way
    replacing: chain.Chain = ()
    step_end: Token | None = None
    last: Seqno | None = None
    if token is not None and lost:
        record, replacing = _rollback_from(reader, served, token, after)
        bytes_max = None if pieces is None else pieces.bytes_max
        if replacing:
            step_end = _token_at(reader.vbid, served.links, min(token.seqno, replacing[0].cut))
            last = _last_of_step(reader, way, replacing, step_end.seqno, raw, bytes_max)
        undone = retractions.undone(reader, served, lost, record.to_seqno, replacing, bytes_max)
        follows = last is not None
        yield from _after_rollback(reader, served, token, record, undone, raw, pieces, step_end, follows=follows)
    links = {link.branch: link for link in served.links}

    def change(document: Document) -> Change:
        branch, seqno = document.branch, document.seqno
        if token is not None and step_end is not None and seqno <= step_end.seqno:
            at = step_end if seqno == last else token
        else:
            at = Token(reader.vbid, branch, seqno, links[branch].history_id(seqno))
        return Change(document.kind.name.lower(), at, document)

    documents = rows(reader, way, raw, pieces)
    if replacing:
        documents = filter(retractions.NewToReader(reader, lost, replacing, raw), documents)
    yield from map(change, documents)  # the variable of a loop would keep the last document


def _token_at(vbid: int, links: chain.Chain, seqno: int) -> Token:
    link = next(link for link in reversed(links) if seqno <= link.cut)
    return Token(vbid, Branch(link.branch), Seqno(seqno), link.history_id(seqno))


def _last_of_step(
    reader: VbucketReader, way: Range, replacing: chain.Chain, to_seqno: Seqno, raw: bool, bytes_max: int | None
) -> Seqno | None:
    """Return the seqno of the last document up to `to_seqno` that is new to a reader from `way.lost`; None if all were
    given.
    """
    is_new = retractions.NewToReader(reader, way.lost, replacing, raw)
    documents = rows(reader, way, raw, None if bytes_max is None else Pieces(bytes_max))
    last = None
    for document in takewhile(lambda each: each.seqno <= to_seqno, documents):
        if is_new(document):
            last = document.seqno
    return last


def _rollback_from(
    reader: VbucketReader, served: Served, token: Token, common_seqno: int
) -> tuple[Rollback, chain.Chain]:
    """Return the rollback that took readers from the token's history to the served one. If it was deferred,
    return also the served chain up to the seqno that its first publish reached, or up to a later rollback below that
    seqno; otherwise an empty chain.
    """
    rising = [link for link in reversed(served.links) if link.branch > token.branch]
    while rising[0].base_seqno != common_seqno:
        del rising[0]
    records_of = {each.to_branch: each for each in rollbacks(reader)}
    reached: int | None = None
    for link in rising:
        if reached is not None and link.base_seqno >= reached:
            break
        known = records_of.get(Branch(link.branch))
        if known is None or known.reached_seqno is None:
            reached = None if reached is None else link.base_seqno
            break
        reached = known.reached_seqno
    begin = Branch(rising[0].branch)
    unknown = Rollback(reader.vbid, token.branch, token.seqno, begin, Seqno(common_seqno), Vbuuid(0), Vbuuid(0), 0)
    return records_of.get(begin, unknown), () if reached is None else chain.recut(served.links, reached)


def _after_rollback(
    reader: VbucketReader,
    served: Served,
    token: Token,
    record: Rollback,
    undone: Iterator[retractions.Undone],
    raw: bool,
    pieces: Pieces | None,
    step_end: Token | None,
    *,
    follows: bool,
) -> Iterator[Change]:
    """Yield the rollback, its retractions and restorations. The last has the first token of the new branch.

    A deferred rollback has a `step_end`: the reader keeps versions up to there that both histories have, so no earlier
    token is true. The last event has that token, unless one `follows` in the step. If `undone` is empty, no event is
    yielded.
    """
    if step_end is None:
        child = next(link for link in served.links if link.branch == record.to_branch)
        end = Token(reader.vbid, record.to_branch, record.to_seqno, child.history_id(record.to_seqno))
    else:
        end = token if follows else step_end

    def change(each: retractions.Undone, at: Token) -> Change:
        return Change(each.kind, at, retractions.document_of(reader, each, raw))

    # Only the last event has a token of the new branch. To know which is last, look one position ahead.
    following = next(undone, None)
    if following is None and step_end is not None:
        return
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
        position, last = max(after_seqno, link.base_seqno), link.cut
        branch, prefix = Branch(link.branch), keys.PREFIX.pack(link.branch)
        while position < last:
            with reader.environment.read() as txn:
                validity.check(reader, txn, served)
                validity.check_tombstones(reader, txn, served, position, purged_before)
                found = index.rows_between(txn, reader.vbid, prefix, position, last, scan.CHUNK_ROWS, pieces.bytes_max)
            if not found:
                break
            found.reverse()
            while found:
                seqno = records.seqno_of(found[-1][0])
                yield document(branch, *found.pop())  # no variable keeps a row that the reader may release
                if pieces.again:
                    pieces.again = False
                    found.clear()
                else:
                    position = seqno
