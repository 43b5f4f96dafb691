"""Where readers of changes may stop: published boundaries, and what they need to choose among them.

Knows chains, boundaries and manifests of a View; must never know who asks, nor what a batch is. Every answer is read in
one transaction. Invariant: a Boundary that is given lies on the chain that is served now and is kept.
"""

from __future__ import annotations

from typing import NamedTuple

from storage.errors import ViewInvalidated
from storage.format import keys
from storage.history import branches, chain
from storage.model import Boundary, Manifest
from storage.read.view import Token, View


class PublishedPosition(NamedTuple):
    """How far a vbucket is published, and how far a reader's position has that history in common with it."""

    boundary: Boundary | None
    """The newest; None: nothing was published yet."""
    common_seqno: int | None
    """The position's own seqno where it is on the served chain, less after a rollback; None: nothing in common."""
    row_count: int
    mean_row_bytes: int


def published(view: View, vbid: int, since: Token | None) -> PublishedPosition:
    """What is published, as seen from a position; None is the beginning."""
    reader = view.reader(vbid)
    with reader.environment.read() as txn:
        served = reader.readable(txn)
        stat = txn.stat(keys.rows_db(vbid))
        pages = stat["leaf_pages"] + stat["overflow_pages"]
        mean = stat["psize"] * pages // max(1, stat["entries"])
        common: int | None = 0
        if since is not None and since.seqno:
            try:
                links = reader.chain_of_position(txn, since.branch, since.seqno, since.history_id)
                common = chain.common_seqno(served.links, links)
            except ViewInvalidated:
                common = None
        boundary = chain.newest_boundary(txn, reader.vbid, served.links, served.seqno)
        return PublishedPosition(boundary, common, int(stat["entries"]), max(1, mean))


def newest(view: View, vbid: int, to_seqno: int) -> Boundary | None:
    """The newest kept boundary not above a seqno."""
    reader = view.reader(vbid)
    with reader.environment.read() as txn:
        served = reader.readable(txn)
        found = chain.newest_boundary(txn, reader.vbid, served.links, to_seqno)
        return found if found is not None and found.seqno >= served.floor_seqno else None


def following(view: View, vbid: int, after_seqno: int) -> Boundary | None:
    """The oldest kept boundary above a seqno."""
    reader = view.reader(vbid)
    with reader.environment.read() as txn:
        served = reader.readable(txn)
        after = max(after_seqno, served.floor_seqno - 1)
        return next(chain.boundaries_after(txn, reader.vbid, served.links, after), None)


def boundaries_between(view: View, vbid: int, branch: int, after_seqno: int, seqno: int) -> list[Boundary]:
    """The kept boundaries on the way to (branch, seqno), above a seqno, rising."""
    reader = view.reader(vbid)
    found = []
    with reader.environment.read() as txn:
        links = reader.chain_at(txn, branch, seqno)
        for boundary in chain.boundaries(txn, reader.vbid, links):
            if boundary.seqno <= after_seqno:
                break
            found.append(boundary)
    found.reverse()
    return found


def manifest_at(view: View, vbid: int, branch: int, seqno: int) -> Manifest:
    """Scopes and collections as of a position; of one below what was purged, those that rows down there can be of."""
    reader = view.reader(vbid)
    with reader.environment.read() as txn:
        served = reader.served(txn)
        if chain.sees(served.links, branch, seqno):
            seqno = max(seqno, branches.purge_row(txn, vbid).local_purge_seqno)
            branch = served.branch
        return reader.manifest_on(txn, reader.chain_at(txn, branch, seqno))
