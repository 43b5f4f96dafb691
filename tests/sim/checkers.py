"""Invariants after every commit of the mirror and after every step of the simulation.

After a commit, for each vbucket that it may have changed:
- what is published is the source's state at that seqno of that history, key by key and field by field, tombstones
  included (above the purges), and the seqno is one at which the source announced a snapshot's end;
- branches only move as they may: forward on the same branch, back to the newest kept boundary that a rollback allowed,
  to an equal copy after abandoning, to a whole new copy after a resync;
- the kept boundaries are exactly those that were published, less what was rolled back and what the floor has passed;
  each of them, read as of its seqno, is what the source was there; below the floor there is an error that names it.
After a step: machines are valid, and what is published under an open stream is part of that stream's history.
Followers hold a copy and a token: following the changes brings the copy up to date exactly, or is refused where
history was purged or resynced since the token; never while a lease holds it.
Readers that stay open over many steps (scans, pages, bulk reads, changes) end with what the source held at the boundary
that they named when they began, or are refused.
After a power cut each group is as it was after its last commit or, with `sync=safe`, after the one before; and sound.
What is mirrored of a bucket is what its selection names.

Not verified: that a refused follower could have been served; the order of changes of different keys.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from mirror.ingest.state import Phase
from mirror.sandbox.data.item import Item
from storage.admin.check import check
from storage.env.environment import SHARED
from storage.errors import NoSuchBoundary, ViewInvalidated
from storage.format import keys
from storage.format.records import Pub
from storage.history import branches, chain
from storage.history.removal import Dead
from storage.model import Branch, BranchReason, Document, Seqno
from storage.read.view import Change, Rollback, Time, Token, View
from storage.write.writer import GroupWriter, RollbackResult
from tests.ingest.toy_store import validate
from tests.sandbox.past import state_of
from tests.sim.mirror import HeldLease, Mirror
from tests.sim.source import Source, State
from tests.storage.open_readers import Contents, OpenReader, Position, apply, begin, wire_key

SHOWN = 8
READERS_MAX = 10
"""Readers that are open at a time."""
NOTHING = Pub(Branch(1), Seqno(0), Seqno(0))
"""What a vbucket serves at first."""


def facts(item: Item) -> tuple[Any, ...]:
    """Return the fields of a version that must arrive."""
    return (item.seqno, item.kind, item.rev_seqno, item.cas, item.flags, item.datatype, item.value)


def reported(document: Document) -> tuple[Any, ...]:
    """Return the same fields of what a reader sees."""
    return (
        document.seqno,
        int(document.kind),
        document.rev_seqno,
        document.cas,
        document.flags,
        document.datatype,
        document.value,
    )


@dataclass
class Watched:
    """The checker's knowledge of one vbucket of the mirror."""

    pub: Pub = NOTHING
    branch: int = 1
    seqno: int = 0
    floor: int = 0
    boundaries: list[int] = field(default_factory=list)
    """Published and not rolled back, oldest first."""
    resyncs: int = 0
    dead_removed: list[tuple[int, int]] = field(default_factory=list)
    """(branch, from which seqno) of retracted rows that the purger took."""
    merges: int = 0
    """Steps that moved rows to another branch."""
    rolling_back_to: int | None = None
    shown: str | None = None
    """The stream filter of the published copy."""
    recreated: bool = False
    """The source deleted the vbucket since the last publish: what every copy had persisted may be lost."""


@dataclass
class Follower:
    """A reader of changes: its copy of a vbucket, and the token up to which the copy is true."""

    vbid: int
    token: Token | None = None
    copy: Contents = field(default_factory=dict)
    resyncs: int = 0
    removed: int = 0
    merges: int = 0

    def catches_up_with(self, watched: Watched) -> None:
        self.resyncs, self.removed, self.merges = watched.resyncs, len(watched.dead_removed), watched.merges

    def apply(self, change: Change, rollbacks: list[Rollback], counts: Counter[str]) -> None:
        self.token = change.token
        if change.kind == "rollback":
            assert change.rollback is not None
            assert change.rollback in rollbacks, f"{change.rollback} is none of {rollbacks}"
            counts["rollbacks followed"] += 1
        elif change.kind in ("system_event", "restoration", "retraction"):
            counts[f"{change.kind.replace('_', ' ')}s followed"] += 1
        apply(self.copy, change.kind, change.document)


class Checker:
    def __init__(self, mirror: Mirror, source: Source, rng: Random, counts: Counter[str]) -> None:
        self.mirror = mirror
        self.source = source
        self.rng = rng
        self.counts = counts
        self.vbids = range(len(source.bucket.vbuckets))
        self.watched = [Watched() for _ in self.vbids]
        self.followers = [Follower(vbid) for vbid in self.vbids for _ in range(3)]
        self.readers: list[OpenReader] = []
        self._positions: list[list[Position]] = [[] for _ in self.vbids]
        """The served documents when a reader began."""
        self._proven: dict[int, tuple[int, int, int]] = {}
        self._late: list[GroupWriter] = []
        self._lost_leases: list[HeldLease] = []
        self._before: dict[int, dict[int, Watched]] = {}
        """By group, the state before the last commit, which a power cut may undo."""
        self._txnids: dict[int, int] = {}
        self._power_was_cut: set[int] = set()
        fate = mirror.fate
        fate.committed = self.on_commit
        fate.rolling_back = self.on_rolling_back
        fate.rolled_back = self.on_rolled_back
        fate.purged_rows = self.on_purged_rows
        fate.merged = self.on_merged
        fate.before_failure = mirror.drop_view
        fate.lease_lost = self.on_lease_lost

    # --- what the mirror does

    def on_rolling_back(self, vbid: int, to_seqno: int) -> None:
        self.watched[vbid].rolling_back_to = to_seqno

    def on_rolled_back(self, vbid: int, to_seqno: int, result: RollbackResult) -> None:
        watched = self.watched[vbid]
        watched.rolling_back_to = None
        if result.boundary_seqno == 0:
            kept = [seqno for seqno in watched.boundaries if watched.floor <= seqno <= to_seqno]
            assert not kept, f"vb {vbid}: no boundary found at or below {to_seqno}, but {kept} are kept"
            return

    def on_purged_rows(self, vbid: int, dead: Dead) -> None:
        if dead.since_ms is not None:
            self.watched[vbid].dead_removed.append((dead.branch, dead.after_seqno))

    def on_lease_lost(self, lease: HeldLease) -> None:
        """Note a lease that cannot be resumed. The commit that was under way may explain it later."""
        self._lost_leases.append(lease)

    def on_merged(self, vbid: int) -> None:
        self.watched[vbid].merges += 1

    def on_commit(self, writer: GroupWriter) -> None:
        """Check a commit before anything else happens."""
        announced, _ = SHARED.open.get(writer.environment.path, (None, 0))
        if writer not in self.mirror.writers or announced is not writer.environment:
            self._late.append(writer)  # it is only just being opened, and no view can be had before that is done
            return
        self.counts["commits"] += 1
        with writer.environment.read() as txn:
            pubs = {vbid: txn.pub(vbid) for vbid in writer.vbids}
        if writer.disk is not None:
            self._after_power_cut(writer, pubs)
            if self._txnids.get(writer.group) != writer.disk.txnid:
                self._txnids[writer.group] = writer.disk.txnid
                self._before[writer.group] = {
                    vbid: replace(self.watched[vbid], boundaries=list(self.watched[vbid].boundaries)) for vbid in pubs
                }
        for vbid, pub in pubs.items():
            moved = pub != self.watched[vbid].pub
            if moved:
                self._moved(writer, vbid, pub)
            if moved or self.rng.random() < 0.15:
                self.verify(vbid)

    def power_was_cut(self) -> None:
        self._power_was_cut = set(range(len(self.mirror.disks.disks)))

    def _after_power_cut(self, writer: GroupWriter, pubs: dict[int, Pub]) -> None:
        """Accept the loss of a group's last commit as a whole, and of nothing else."""
        if writer.group not in self._power_was_cut:
            return
        self._power_was_cut.discard(writer.group)
        before = self._before.get(writer.group, {})
        now = {vbid: self.watched[vbid].pub for vbid in pubs}
        if pubs == now or pubs != {vbid: each.pub for vbid, each in before.items()}:
            return
        assert self.mirror.sync == "safe", f"a power cut undid a commit, with sync={self.mirror.sync}"
        self.counts["commits undone by a power cut"] += 1
        for vbid, old in before.items():
            newer = self.watched[vbid]
            if old.pub == newer.pub:
                continue
            self._proven.pop(vbid, None)
            self.watched[vbid] = replace(
                old,
                resyncs=newer.resyncs + 1,  # positions that were read since are none of this history
                dead_removed=newer.dead_removed,
                merges=newer.merges,
                recreated=old.recreated or newer.recreated,
            )

    def catch_up(self) -> None:
        """Check the commits of writers that have opened since."""
        late, self._late = self._late, []
        for writer in late:
            if writer in self.mirror.writers:
                self.on_commit(writer)
        while self._lost_leases:
            lease = self._lost_leases.pop()
            assert lease.undone or self.watched[lease.vbid].resyncs > lease.resyncs, f"{lease} is not kept any more"

    def _moved(self, writer: GroupWriter, vbid: int, pub: Pub) -> None:
        watched = self.watched[vbid]
        branch, seqno, floor, *_ = pub
        with writer.environment.read() as txn:
            row = branches.get_branch(txn, vbid, branch)
            before = chain.load(txn, vbid, watched.branch, watched.seqno)
            shown = txn.state_row(vbid).stream_filter or None
        if not watched.seqno or (row.reason == BranchReason.RESYNC and branch != watched.branch):
            watched.shown = shown
        if branch == watched.branch:
            assert seqno >= watched.seqno, f"vb {vbid}: published {seqno} after {watched.seqno}"
            if seqno > watched.seqno:
                self._is_persisted(vbid, seqno)
                watched.boundaries.append(seqno)
                self.counts["publishes"] += 1
        elif row.reason != BranchReason.RESYNC:
            base = row.base_seqno
            begins = [link.branch for link in before if link.base_seqno < base <= link.cut]
            assert begins == [row.parent] * (base > 0), f"vb {vbid}: branch {branch} does not follow {watched.branch}"
            deferred = row.reason == BranchReason.DEFERRED_ROLLBACK
            assert base == seqno or deferred, f"vb {vbid}: branch {branch} from {base} published {seqno}"
            if deferred:
                self._deferred(vbid, base, seqno)
            elif row.reason == BranchReason.ABANDONED:
                assert seqno == watched.seqno, f"vb {vbid}: abandoning moved {watched.seqno} to {seqno}"
                self.counts["staged rows abandoned on disk"] += 1
            else:
                to_seqno = watched.rolling_back_to
                assert to_seqno is not None, f"vb {vbid}: a rollback that was not requested"
                kept = [each for each in watched.boundaries if max(1, watched.floor) <= each <= to_seqno]
                assert kept[-1:] == [seqno], f"vb {vbid}: rollback to {to_seqno} went to {seqno}, kept are {kept}"
                watched.boundaries = [each for each in watched.boundaries if each <= seqno]
                self.counts["rollbacks"] += 1
        else:
            self._is_persisted(vbid, seqno)
            watched.recreated = False
            watched.boundaries = [seqno] * (seqno > 0)
            watched.resyncs += 1
            self.counts["resyncs published"] += 1
        if floor > watched.floor and branch == watched.branch and watched.floor:
            self.counts["floors raised"] += 1
        watched.pub, watched.branch, watched.seqno, watched.floor = pub, branch, seqno, floor

    def _is_persisted(self, vbid: int, seqno: int) -> None:
        if self.mirror.persisted:
            persisted = self.source.persisted[vbid]
            assert seqno <= persisted or self.watched[vbid].recreated, f"vb {vbid}: {seqno} of {persisted} persisted"
            self.counts["published once persisted"] += 1

    def _deferred(self, vbid: int, base: int, seqno: int) -> None:
        """Check a rollback and publish in one step: readers go back only if the other history is shorter."""
        watched = self.watched[vbid]
        self._is_persisted(vbid, seqno)
        high = self.source.vbucket(vbid).high_seqno
        shorter = watched.recreated or seqno >= min(watched.seqno, high)
        assert seqno >= watched.seqno or shorter, f"vb {vbid}: readers went back from {watched.seqno} to {seqno}"
        assert base in watched.boundaries, f"vb {vbid}: a rollback to {base}, kept are {watched.boundaries}"
        watched.boundaries = [each for each in watched.boundaries if each <= base]
        if seqno > base:
            watched.boundaries.append(seqno)
        watched.recreated = False
        self.counts["deferred rollbacks"] += 1

    # --- what readers see

    def verify(self, vbid: int, *, every: bool = False) -> None:
        """Check the newest boundary, one or all of the older ones, and a read below the floor."""
        watched = self.watched[vbid]
        view = self.mirror.view
        state = view.state(vbid)
        assert (state.branch, state.published_seqno) == (watched.branch, watched.seqno)
        kept = {int(boundary.seqno): boundary for boundary in view.boundaries(vbid)}
        expected = [seqno for seqno in watched.boundaries if seqno >= watched.floor]
        assert sorted(kept) == expected, f"vb {vbid}: boundaries {sorted(kept)}, published were {expected}"
        assert not expected or expected[0] == watched.floor, f"vb {vbid}: floor {watched.floor}, boundaries {expected}"
        for lease in self.mirror.active_leases(vbid):
            if lease.resyncs == watched.resyncs and lease.boundary in watched.boundaries:
                assert lease.boundary in kept, f"vb {vbid}: {lease} is held, and {sorted(kept)} are kept"
                self.counts["boundaries under a lease"] += 1
        self.compare(view, vbid, watched.seqno, int(kept[watched.seqno].vbuuid) if watched.seqno else 0, None)
        if not watched.seqno:
            return
        announced = self.source.bucket.sent[vbid].snapshot_ends
        assert watched.seqno in announced, f"vb {vbid}: published {watched.seqno}, where no snapshot ends"
        chosen = expected if every else [self.rng.choice(expected)]
        for seqno in chosen:
            self.counts["as-of reads"] += 1
            self.compare(view, vbid, seqno, int(kept[seqno].vbuuid), seqno)
        self._between(view, vbid, expected)
        if watched.floor > 1:
            self._below_floor(view, vbid, watched.floor)

    def _between(self, view: View, vbid: int, expected: list[int]) -> None:
        """Check that a seqno or a time between boundaries reads the newest boundary not above it."""
        requested = self.rng.randint(expected[0], expected[-1])
        seqno = max(each for each in expected if each <= requested)
        state = self._expected(vbid, seqno, view)
        if not state:
            return
        key = self.rng.choice(sorted(state))
        self._get(view, vbid, key, state[key], requested)
        boundary = next(each for each in view.boundaries(vbid) if each.seqno == seqno)
        newest_then = next(each for each in view.boundaries(vbid) if each.time_ms <= boundary.time_ms)
        state = self._expected(vbid, newest_then.seqno, view)
        if key in state:
            self._get(view, vbid, key, state[key], Time(boundary.time_ms))

    def _get(self, view: View, vbid: int, key: bytes, item: Item, as_of: Any) -> None:
        collection_id, name = keys.split_key(key)
        found = view.get(name, collection_id, as_of=as_of, now=0, raw=True)
        if item.deleted:
            assert found is None, f"vb {vbid}: {key!r} as of {as_of} is {found}, deleted at {item.seqno}"
        else:
            assert found is not None, f"vb {vbid}: {key!r} as of {as_of} is missing; {item}"
            assert reported(found) == facts(item), f"vb {vbid}: {key!r} as of {as_of}: {found}, not {item}"

    def _below_floor(self, view: View, vbid: int, floor: int) -> None:
        seqno = self.rng.randrange(floor)
        with pytest.raises(NoSuchBoundary) as refused:
            list(view.scan(vbid, as_of=seqno))
        assert str(floor) in str(refused.value), f"{refused.value} does not name the floor {floor}"
        self.counts["reads below the floor"] += 1

    def _expected(self, vbid: int, seqno: int, view: View) -> State:
        boundary = next(each for each in view.boundaries(vbid) if each.seqno == seqno)
        return self.seen(vbid, self.source.line(vbid, seqno, boundary.vbuuid), seqno)

    def seen(self, vbid: int, line: list[Item], seqno: int) -> State:
        """Return the part of a history's state that the mirror must show."""
        return self.source.seen(self.source.state(line, seqno), line, self.watched[vbid].shown)

    def compare(self, view: View, vbid: int, seqno: int, vbuuid: int, as_of: int | None) -> None:
        """Compare all documents of a vbucket with the source's state at a seqno of a history."""
        line = self.source.line(vbid, seqno, vbuuid) if seqno else []
        expected = self.seen(vbid, line, seqno)
        if self.rng.random() < 0.01 and seqno and self.source.collections and self.watched[vbid].shown is None:
            assert expected == state_of(line, seqno, tombstones=True)
        purged = max(self.source.purged.get(id(line), 0), view.state(vbid).local_purge_seqno)
        unshown = self.source.unshown(self.watched[vbid].shown)
        documents = view.scan(vbid, as_of=as_of, deletions=True, raw=True, now=0)
        found = {wire_key(each): each for each in documents if each.collection_id not in unshown}
        wrong = []
        for key, item in expected.items():
            document = found.pop(key, None)
            if document is None:
                if not (item.deleted and item.seqno <= purged):
                    wrong.append(f"{key!r} is missing, {item}")
            elif reported(document) != facts(item):
                wrong.append(f"{key!r} is {document}, not {item} {facts(item)}")
            elif document.expiry != item.expiry and not (item.deleted and document.expiry == 0):
                wrong.append(f"{key!r} expires at {document.expiry}, not {item.expiry}")
        wrong += [f"{key!r} is {document}, but was never there" for key, document in found.items()]
        at = f"as of {as_of}" if as_of is not None else f"published {seqno}"
        assert not wrong, f"vb {vbid} {at} of {vbuuid:#x}, {len(wrong)} differences:\n" + "\n".join(wrong[:SHOWN])
        self.counts["states compared"] += 1

    # --- after a step

    def after_step(self) -> None:
        mirror = self.mirror
        if not mirror.alive:
            return
        for vbid, actor in mirror.actors.items():
            machine = actor.host.machine
            if machine is None:
                continue
            validate(machine)
            if machine.phase is Phase.STREAMING and machine.opaque is not None:
                self._check_line(vbid, machine.opaque)

    def _check_line(self, vbid: int, opaque: int) -> None:
        """Check that the published state is part of the history of the accepted stream."""
        watched = self.watched[vbid]
        if self.mirror.actors[vbid].host.machine.resyncing or not watched.seqno:  # type: ignore[union-attr]
            return
        if self.mirror.writers[vbid % len(self.mirror.writers)].vbuckets[vbid].state.staging_branch != watched.branch:
            return
        line = self.source.lines[opaque]
        proof = (watched.branch, watched.seqno, id(line))
        if self._proven.get(vbid) == proof:
            return
        assert watched.seqno <= len(line), f"vb {vbid}: published {watched.seqno} of a history that ends at {len(line)}"
        boundary = self.mirror.view.boundaries(vbid)[0]
        held = self.source.line(vbid, watched.seqno, boundary.vbuuid)
        ours, theirs = (self.source.state(each, watched.seqno) for each in (held, line))
        assert {k: facts(v) for k, v in ours.items()} == {k: facts(v) for k, v in theirs.items()}, (
            f"vb {vbid}: what is published at {watched.seqno} is not the past of the stream that was accepted"
        )
        self._proven[vbid] = proof
        self.counts["streams proven to be on our history"] += 1

    # --- followers

    def follow(self, follower: Follower, *, stop_after: int | None = None) -> None:
        vbid = follower.vbid
        watched = self.watched[vbid]
        view = self.mirror.view
        leased = self.lease_of(follower) is not None
        try:
            for count, change in enumerate(view.changes(vbid, since=follower.token, raw=True)):
                follower.apply(change, view.rollbacks(vbid), self.counts)
                if stop_after is not None and count >= stop_after:
                    self.counts["followers stopped in the middle"] += 1
                    follower.catches_up_with(watched)
                    return
        except ViewInvalidated as error:
            self._check_refusal(follower, watched, error)
            follower.token, follower.copy = None, {}
            self.follow(follower)
            return
        follower.catches_up_with(watched)
        if leased:
            self.counts["followers with a lease brought up to date"] += 1
        self._compare_copy(follower, view)
        if watched.seqno and follower.token is None:
            return  # nothing but tombstones that are gone: there was no event to take a token from
        self.counts["followers brought up to date"] += 1

    def _check_refusal(self, follower: Follower, watched: Watched, error: ViewInvalidated) -> None:
        assert follower.token is not None, f"reading from the beginning was refused: {error}"
        held = self.lease_of(follower)
        if held is not None and held.position == (follower.token.branch, follower.token.seqno):
            # The token may be older than its lease, and of a commit that a power cut had undone by then.
            assert held.undone or watched.resyncs > follower.resyncs, f"refused what {held} holds: {error}"
        if watched.resyncs > follower.resyncs:
            self.counts["followers refused after a resync"] += 1
            return
        if watched.merges > follower.merges and ("no branch" in str(error) or "of a history" in str(error)):
            self.counts["followers refused after branches were merged"] += 1
            return
        local_purge = self.mirror.view.state(follower.vbid).local_purge_seqno
        if "of a rollback" in str(error):
            assert len(watched.dead_removed) > follower.removed, f"refused, but nothing retracted was purged: {error}"
            self.counts["followers refused after retracted rows were purged"] += 1
        else:
            assert local_purge, f"refused, but nothing was purged: {error}"
            self.counts["followers refused after tombstones were purged"] += 1

    def lease_of(self, follower: Follower) -> HeldLease | None:
        name = self.name_of(follower)
        return next((lease for lease in self.mirror.active_leases(follower.vbid) if lease.name == name), None)

    def name_of(self, follower: Follower) -> str:
        """Return the name of a follower's leases."""
        return next((f"follower {at}" for at, each in enumerate(self.followers) if each is follower), "none")

    def lease(self, follower: Follower, seconds: float) -> None:
        """Grant or renew a lease on a follower's position."""
        token, watched = follower.token, self.watched[follower.vbid]
        assert token is not None
        held = self.lease_of(follower)
        position = (int(token.branch), int(token.seqno))
        if held is not None and held.position != position:
            self.mirror.release(held.name)
            held = None
        until_ms = self.mirror.wall_ms() + int(seconds * 1000)
        if held is not None and held.until_ms <= self.mirror.monotonic_ms():
            held = None
        if held is None:
            below = [each for each in watched.boundaries if watched.floor <= each <= token.seqno]
            boundary = below[-1] if below and token.branch == watched.branch else None
            ahead = token.branch == watched.branch and token.seqno > watched.seqno
            undone = not below and (ahead or not watched.seqno)  # of nothing at all, perhaps another branch is served
            held = HeldLease(
                self.name_of(follower), follower.vbid, position, boundary, undone, watched.resyncs, until_ms
            )
        held.until_wall_ms = until_ms
        try:
            self.mirror.lease(held)
        except NoSuchBoundary:
            self.mirror.leases.pop(held.name, None)
            self.counts["leases refused"] += 1
        else:
            self.counts["leases granted"] += 1

    def _compare_copy(self, follower: Follower, view: View) -> None:
        vbid = follower.vbid
        watched = self.watched[vbid]
        expected = self._expected(vbid, watched.seqno, view) if watched.seqno else {}
        live = {key: (item.seqno, item.value) for key, item in expected.items() if not item.deleted}
        unshown = self.source.unshown(watched.shown)
        wrong = [
            f"{key!r} is {follower.copy.get(key)}, not {live.get(key)}"
            for key in sorted(live.keys() | follower.copy.keys())
            if live.get(key) != follower.copy.get(key) and keys.split_key(key)[0] not in unshown
        ]
        assert not wrong, f"follower of vb {vbid} at {follower.token}:\n" + "\n".join(wrong[:SHOWN])

    # --- readers that stay open

    def read_slowly(self) -> None:
        """Begin a reader, or let some read on a little."""
        vbid = self.rng.choice(self.vbids)
        watched = self.watched[vbid]
        if watched.seqno and len(self.readers) < READERS_MAX and self.rng.random() < 0.6:
            state = self._expected(vbid, watched.seqno, self.mirror.view)
            live = {key: (item.seqno, item.value) for key, item in state.items() if not item.deleted}
            now = Position(self.mirror.view.pin(vbid, now=0), live)
            reader = begin(lambda: self.mirror.view, now, self._positions[vbid], self.rng)
            reader.ignored = lambda: self.source.unshown(watched.shown)
            self._positions[vbid] = [*self._positions[vbid][-5:], now]
            chosen = [reader]
        else:
            chosen = [each for each in self.readers if self.rng.random() < 0.4]
        for reader in chosen:
            more = reader.goes_on(self.rng.choice((1, 1, 2, 30)))
            if reader in self.readers:
                self.readers.remove(reader)
            if more:
                self.readers.append(reader)
            else:
                end = "finished" if reader.refused is None else f"ended by {type(reader.refused).__name__}"
                self.counts[f"{reader.kind} that stayed open {end}"] += 1

    # --- the whole

    def check_store(self) -> None:
        report = check(self.mirror.path)
        assert not report.problems, report.problems[:SHOWN]
        self.counts["integrity walks"] += 1

    def check_everything(self) -> None:
        self.check_store()
        if self.source.selection:
            self._check_selection()
        for vbid in self.vbids:
            self.verify(vbid, every=True)
        for follower in self.followers:
            self.follow(follower)
            fresh = Follower(follower.vbid)
            self.follow(fresh)

    def _check_selection(self) -> None:
        """Compare the published documents with the source's documents of the selected names."""
        shown = self.mirror.consumer.collections.resolved
        if shown.missing and not shown.streams:  # what it held of a collection that is gone, it may hold
            return
        for vbid in self.vbids:
            state = self.source.state(self.source.vbucket(vbid).log, self.source.vbucket(vbid).high_seqno)
            expected = {
                key: item.seqno
                for key, item in state.items()
                if not item.deleted and item.collection_id in shown.collection_ids
            }
            found = {wire_key(each): each.seqno for each in self.mirror.view.scan(vbid, raw=True, now=0)}
            assert found == expected, f"vb {vbid}: {shown} is mirrored as {found}, the source holds {expected}"
        self.counts["selections compared with the source"] += 1
