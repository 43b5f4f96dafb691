"""Leases: positions that readers hold for a while, so that the purger keeps the history from there on.

Knows positions in the vbuckets of one group, and the end of each lease; never the reader. A lease of (vbid, branch,
seqno) makes these promises until it ends:
- the floor of the vbucket does not pass the newest kept boundary at or below the position;
- after a rollback, the floor does not pass the last seqno that the served history shares with the position's history;
- rows that this rollback retracts are kept, so reads at the position, and `changes` since it, still work.

After a resync a lease holds the rows of the replaced copy, but nothing of the new one, which shares no history with
the position. A lease at seqno 0 holds nothing, because all changes since 0 can always be listed. If a power cut undid a
publish, a lease may name an unpublished position. Such a lease holds the kept history below the position, and the
position itself once it is published again. If no boundary at or below the position is kept, the floor stays.
Invariants:
- a lease is granted only for history that is still kept;
- a released or expired lease holds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from storage.env.transaction import Transaction
from storage.errors import CorruptedError, NoSuchBoundary
from storage.history import chain

LEASES_MAX = 256
"""Maximum number of leases in a group, because the purger checks every lease. A Spark job has one lease."""

LEASE_MAX_MS = 86_400_000
"""Longest time from a lease's last renewal to its end, milliseconds: a limit in case a clock is wrong."""

Position = tuple[int, int]
"""Branch and seqno."""


@dataclass(frozen=True, slots=True)
class HeldLease:
    positions: Mapping[int, Position]
    until_ms: int


class Leases:
    def __init__(self) -> None:
        self._held: dict[str, HeldLease] = {}

    def put(self, name: str, positions: Mapping[int, Position], until_ms: int) -> None:
        """Grant a lease on positions that `check_kept` accepted. It replaces an older lease of the same name."""
        self._held[name] = HeldLease(positions, until_ms)

    def renew(self, name: str, positions: Mapping[int, Position], until_ms: int, now_ms: int) -> bool:
        """Renew a lease. Return False if no lease `name` holds exactly these positions: their history may be gone."""
        self.prune(now_ms)
        lease = self._held.get(name)
        if lease is None or lease.positions != positions:
            return False
        self._held[name] = HeldLease(positions, until_ms)
        return True

    def release(self, name: str) -> None:
        self._held.pop(name, None)

    def prune(self, now_ms: int) -> None:
        self._held = {name: lease for name, lease in self._held.items() if lease.until_ms > now_ms}

    @property
    def full(self) -> bool:
        return len(self._held) >= LEASES_MAX

    def of(self, vbid: int, now_ms: int) -> list[Position]:
        active = (lease.positions for lease in self._held.values() if lease.until_ms > now_ms)
        return [positions[vbid] for positions in active if vbid in positions and positions[vbid][1]]

    def floor_max(self, txn: Transaction, vbid: int, served: chain.Chain, now_ms: int) -> int | None:
        """Return the seqno that the floor of the served chain must not pass; None: no limit."""
        limits = [
            common
            for branch, seqno in self.of(vbid, now_ms)
            if (common := chain.common_seqno(served, chain.load(txn, vbid, branch, seqno))) is not None
        ]
        if not limits:
            return None
        boundary = chain.newest_boundary(txn, vbid, served, min(limits))
        return boundary.seqno if boundary is not None else 0

    def held_rows(self, txn: Transaction, vbid: int, now_ms: int) -> Iterator[chain.ChainLink]:
        for branch, seqno in self.of(vbid, now_ms):
            yield from chain.load(txn, vbid, branch, seqno)


def check_kept(txn: Transaction, vbid: int, position: Position) -> None:
    """Raise NoSuchBoundary if history that a lease of the position must keep is already gone."""
    if not position[1]:
        return
    branch, published, floor, *_ = txn.pub(vbid)
    served = chain.load(txn, vbid, branch, published)
    try:
        held = chain.load(txn, vbid, *position)
    except CorruptedError:
        held = ()
    common = chain.common_seqno(served, held)
    if common is None or common < floor or chain.has_gap(txn, vbid, held, common):
        raise NoSuchBoundary(
            f"{position[0]}:{position[1]} is not kept; history begins at {branch}:{floor}",
            vbid=vbid,
            hint="begin again from the published position, or keep more history",
        )
