"""Open sync writes: from a prepare's arrival until its commit or abort.

Knows prepares by key, and what a commit makes of one. Must never know snapshots or instructions; is told of boundaries
only to undo. With sync writes not negotiated none of this happens (the source sends plain mutations).

Invariants: at most one prepare per key (the source allows no second while one is open; a disk snapshot may repeat it:
the later one counts); count and bytes are bounded; what was settled since the newest boundary can be taken back, so
that a commit which comes again after an abandoned snapshot finds its prepare.
"""

from __future__ import annotations

from mirror.wire.codec_dcp import encode
from mirror.wire.events import Deletion, Mutation, Prepare

COUNT_MAX = 8_192
"""Open prepares of one vbucket. Writers wait for each durable write, so thousands in one vbucket mean lost aborts."""

BYTES_MAX = 32 * 1024 * 1024
"""Keys and values of them: one maximal document and change."""

_OVERHEAD = 128
"""What a prepare costs beside its key and value, so that empty ones are bounded too."""


class PreparesOverflow(Exception):
    """More sync writes are open than this program is ready to remember."""


class Prepares:
    """The open prepares of one vbucket."""

    __slots__ = ("_bytes", "_open", "_settled")

    def __init__(self) -> None:
        """Start without any."""
        self._open: dict[bytes, Prepare] = {}
        self._settled: list[Prepare] = []
        self._bytes = 0

    def __len__(self) -> int:
        """Count the open ones."""
        return len(self._open)

    @property
    def byte_count(self) -> int:
        """What they cost, those that can still be taken back included."""
        return self._bytes

    def prepared(self, prepare: Prepare) -> None:
        """Remember a prepare; an older one of its key is replaced."""
        self._forget(prepare.key)
        if len(self._open) + len(self._settled) >= COUNT_MAX or self._bytes + _cost(prepare) > BYTES_MAX:
            raise PreparesOverflow
        self._open[prepare.key] = prepare
        self._bytes += _cost(prepare)

    def settled(self, key: bytes) -> Prepare | None:
        """Take out the prepare that a commit or an abort speaks of; None if it was never seen."""
        prepare = self._open.pop(key, None)
        if prepare is not None:
            self._settled.append(prepare)
        return prepare

    def boundary_reached(self) -> None:
        """What was settled up to here stays settled."""
        if self._settled:
            self._bytes -= sum(map(_cost, self._settled))
            self._settled.clear()

    def undo_to(self, boundary_seqno: int) -> None:
        """Everything above the boundary is to come again, or never was."""
        again = [prepare for prepare in (*self._open.values(), *self._settled) if prepare.seqno <= boundary_seqno]
        self._open = {prepare.key: prepare for prepare in again}
        self._settled.clear()
        self._bytes = sum(map(_cost, self._open.values()))

    def _forget(self, key: bytes) -> None:
        prepare = self._open.pop(key, None)
        if prepare is not None:
            self._bytes -= _cost(prepare)


def committed_row_value(prepare: Prepare, seqno: int, key_prefix: bytes) -> bytes:
    """Build the frame that a committed write would have been without sync writes, in stored form."""
    key = key_prefix + prepare.key
    if prepare.deleted:
        return encode(
            Deletion(
                prepare.vbid,
                key,
                seqno,
                prepare.rev_seqno,
                prepare.cas,
                prepare.datatype,
                prepare.value,
                delete_time=0,
            )
        )
    return encode(
        Mutation(
            prepare.vbid,
            key,
            seqno,
            prepare.rev_seqno,
            prepare.cas,
            prepare.flags,
            prepare.expiry,
            prepare.lock_time,
            prepare.datatype,
            prepare.value,
            prepare.nru,
        )
    )


def _cost(prepare: Prepare) -> int:
    return len(prepare.key) + len(prepare.value) + _OVERHEAD
