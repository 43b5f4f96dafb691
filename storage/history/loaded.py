"""A vbucket as a writer continues it: its state and the positions in its trees. Reads the small records only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from storage.env.transaction import Transaction
from storage.errors import CorruptedError
from storage.history import branches, chain, manifests
from storage.model import Branch, Manifest, Seqno, VbucketState


@dataclass(frozen=True, slots=True)
class LoadedVbucket:
    state: VbucketState
    indexed_seqno: int
    manifest_key: manifests.Key
    manifest_keys: list[manifests.Key]
    """Manifests of the staging branch above what is published, rising."""
    manifest_depth: int
    """The number of rows that the manifest of the state is made of."""
    counters: branches.BoundaryCounters
    """Of the newest published boundary of the staging branch."""


def load(txn: Transaction, vbid: int, known: Mapping[manifests.Key, Manifest] | None = None) -> LoadedVbucket:
    """Read the state of a vbucket. `known`: manifests that the caller remembers."""
    pub, row = txn.pub(vbid), txn.state_row(vbid)
    staging, staged, published = row.staging_branch, row.staged_seqno, row.staging_published_seqno
    serves_staging = staging == pub.branch
    if staged < published or (serves_staging and published != pub.seqno):
        raise CorruptedError(
            f"positions contradict each other (published {pub.seqno}, staged {staged})", path=txn.path, vbid=vbid
        )
    manifest_key = pub.manifest_key
    if not serves_staging:  # a deferred rollback continues a boundary, a resync the beginning
        links = chain.load(txn, vbid, staging, published) if published else ()
        manifest_key = manifests.key_on(txn, vbid, links)
    manifest, depth = manifests.read(txn, vbid, manifest_key, known)
    above = list(manifests.between(txn, vbid, staging, published, staged))
    for _, change in above:
        depth = 1 if change.whole else depth + 1
    if above:
        manifest = manifest.changed(*(change for _, change in above))
    stored = row._asdict()
    indexed_seqno = stored.pop("indexed_seqno")
    state = VbucketState(
        vbid=vbid,
        branch=Branch(pub.branch),
        published_seqno=Seqno(pub.seqno),
        history_floor_seqno=Seqno(pub.floor_seqno),
        local_purge_seqno=Seqno(branches.purge_row(txn, vbid).local_purge_seqno),
        manifest=manifest,
        **stored,
    )
    boundary = chain.boundary_at(txn, vbid, staging, published) if published else None
    counters = branches.BoundaryCounters(0, 0)
    if boundary is not None:
        counters = branches.BoundaryCounters(boundary.ordinal, boundary.row_bytes)
    return LoadedVbucket(state, indexed_seqno, manifest_key, [key for key, _ in above], depth, counters)
