"""Compares two copies of a vbucket exactly, although each was taken at its own moment.

Knows fingerprints and the seqnos of both copies; must never know how they were read. `here` is the mirror's state at
its published boundary B, `there` the source's state at the end E of a snapshot, on the same history (the caller checks
that). For each key it compares the newest versions at or below B and E. L is the lower of B and E.

- Both sides are complete up to L. So two versions at or below L must be the same version, and a key that one side lacks
  must be absent on the other.
- The other side cannot know a version above L yet: the key is `MOVED`, and is compared again once that side is further.
- Tombstones are purged in time. If only the mirror holds one, the source has purged it or no longer sends it: both say
  that the document is absent. If only the source holds one, the mirror's purger must have passed it; else a deletion is
  missing. A *document* that only the mirror holds is a difference, unless B < E and the source has purged above B: its
  deletion may have come and gone (`excuse_purged`).
- Versions that differ in their revision alone, by one, are the same (`REV_ONLY`): when a durable delete aborts,
  kv_engine 7.2.4 raises the revision of the committed version, in memory until it restarts.
- If a document's collection is gone on the other side, and that side is the later one, the drop or flush came between
  the two moments. Otherwise it is a difference.
- Expiry does not matter: an expired document is a version on both sides until its deletion has a seqno.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from storage.format import keys
from storage.format.digest import Digest, Fingerprint
from storage.model import Manifest

DIFFERENCES_MAX = 100
"""Listed differing keys of a vbucket; the rest is counted."""
MOVED_MAX = 20_000
"""Keys of a vbucket that are remembered to be compared again; with more, the whole vbucket is."""


class Verdict(Enum):
    EQUAL = "equal"
    MISSING_HERE = "missing_here"
    MISSING_THERE = "missing_there"
    DIFFERENT = "different"
    MOVED = "moved"
    """The key changed between the two moments."""
    REV_ONLY = "rev_only"
    PURGED_HERE = "purged_here"
    PURGED_THERE = "purged_there"


DIFFERENCES = frozenset((Verdict.MISSING_HERE, Verdict.MISSING_THERE, Verdict.DIFFERENT))
COMPARED = DIFFERENCES | {Verdict.EQUAL, Verdict.REV_ONLY}


@dataclass(frozen=True, slots=True)
class Side:
    seqno: int
    manifest: Manifest
    purge_seqno: Callable[[], int] = lambda: 0
    """Tombstones at or below it may be gone. Read it after missing one, because it rises."""

    def has_collection(self, version: Fingerprint) -> bool:
        """True if the version's collection exists and was not recreated since."""
        collection = self.manifest.collections.get(keys.split_key(version.key)[0])
        return collection is not None and version.seqno > collection.begin_seqno


@dataclass(frozen=True, slots=True)
class Difference:
    verdict: Verdict
    here: Fingerprint | None
    there: Fingerprint | None

    @property
    def key(self) -> bytes:
        """The key with its collection id."""
        version = self.here or self.there
        assert version is not None, "a difference is of something"
        return version.key

    @property
    def fields(self) -> list[str]:
        """The differing fields. `content` means value, xattrs, flags, expiry or datatype."""
        if self.here is None or self.there is None:
            return []
        names = ("seqno", "rev_seqno", "cas", "deleted", "digest")
        found = [name for name in names if getattr(self.here, name) != getattr(self.there, name)]
        return [name.replace("digest", "content") for name in found]


@dataclass(slots=True)
class VbucketResult:
    vbid: int
    state: str = "equal"
    """equal; different; rollback: the mirror holds history that the source lost; unreadable; behind: nothing is
    published; or unfinished."""
    detail: str = ""
    branch: int = 0
    published_seqno: int = 0
    source_seqno: int = 0
    documents: int = 0
    """Documents compared on this side."""
    tombstones: int = 0
    source_documents: int = 0
    source_tombstones: int = 0
    digest: str = ""
    """Digest of the keys compared at the first look, equal to `source_digest` if they are equal."""
    source_digest: str = ""
    missing_here: int = 0
    missing_there: int = 0
    different: int = 0
    rev_only: int = 0
    """Keys that differ in their revision alone, by one: counted as equal."""
    purged_here: int = 0
    purged_there: int = 0
    moved: int = 0
    """Keys that changed during the comparison and were compared again."""
    not_compared: int = 0
    """Keys that kept changing, or that the source changed after the mirror's position."""
    behind_seqnos: int = 0
    """Seqnos read from the source above the mirror's position: not compared."""
    differences: list[Difference] = field(default_factory=list)

    @property
    def difference_count(self) -> int:
        return self.missing_here + self.missing_there + self.different

    @property
    def equal(self) -> bool:
        return self.state == "equal"

    @property
    def wrong(self) -> bool:
        """True if the data is not the source's or cannot be read. A result may be neither equal nor wrong."""
        return self.state in ("different", "rollback", "unreadable")

    def excuse_purged(self) -> None:
        """Do not count keys missing at the source: it purged deletions above the mirror's position."""
        if self.published_seqno < self.source_seqno:
            self.not_compared += self.missing_there
            self.documents -= self.missing_there
            self.missing_there = 0
            self.differences = [each for each in self.differences if each.verdict is not Verdict.MISSING_THERE]
            if self.state == "different" and not self.difference_count:
                self.state = "equal"

    def count(self, verdict: Verdict, here: Fingerprint | None, there: Fingerprint | None) -> None:
        name = verdict.value
        if verdict is not Verdict.EQUAL:
            setattr(self, name, getattr(self, name) + 1)
        if verdict in DIFFERENCES:
            self.state = "different"
            if len(self.differences) < DIFFERENCES_MAX:
                self.differences.append(Difference(verdict, here, there))
        if verdict in COMPARED:
            if here is not None:
                self.tombstones += here.deleted
                self.documents += not here.deleted
            if there is not None:
                self.source_tombstones += there.deleted
                self.source_documents += not there.deleted


def not_said(results: Iterable[VbucketResult]) -> str:
    found = list(results)
    seqnos, keys_left = sum(each.behind_seqnos for each in found), sum(each.not_compared for each in found)
    revisions = sum(each.rev_only for each in found)
    parts = [
        f"compared up to the published seqnos: the source is {seqnos:,} seqnos ahead" if seqnos else "",
        f"{keys_left:,} keys changed meanwhile and were not compared" if keys_left else "",
        f"of {revisions:,} keys the revision alone differs, by one: durable deletes were aborted" if revisions else "",
    ]
    return ", ".join(part for part in parts if part)


def judge(here: Fingerprint | None, there: Fingerprint | None, mirror: Side, source: Side) -> Verdict:
    both_seqno = min(mirror.seqno, source.seqno)
    if here is not None and here.seqno > mirror.seqno:
        return Verdict.DIFFERENT  # the mirror has not published this seqno
    if any(version is not None and version.seqno > both_seqno for version in (here, there)):
        return Verdict.MOVED
    if here is not None and there is not None:
        if here == there:
            return Verdict.EQUAL
        raised = here._replace(rev_seqno=there.rev_seqno) == there and abs(here.rev_seqno - there.rev_seqno) == 1
        return Verdict.REV_ONLY if raised else Verdict.DIFFERENT
    if there is not None:
        if not mirror.has_collection(there) and mirror.seqno > source.seqno:
            return Verdict.MOVED
        return Verdict.PURGED_HERE if there.deleted and there.seqno <= mirror.purge_seqno() else Verdict.MISSING_HERE
    assert here is not None, "a key is on one side at least"
    if here.deleted:
        return Verdict.PURGED_THERE
    if not source.has_collection(here) and source.seqno > mirror.seqno:
        return Verdict.MOVED
    return Verdict.MISSING_THERE


class OutOfOrder(Exception):
    """Raised if the mirror's keys do not rise: a row holds another key than its reference."""


def pairs(
    here: Iterable[Fingerprint], there: Iterable[Fingerprint]
) -> Iterator[tuple[Fingerprint | None, Fingerprint | None]]:
    """Yield the newest versions of each key from two rising sequences. Raises OutOfOrder if `here` does not rise."""
    left, right = _rising(here), iter(there)
    mine, theirs = next(left, None), next(right, None)
    while mine is not None or theirs is not None:
        if theirs is None or (mine is not None and mine.key < theirs.key):
            yield mine, None
            mine = next(left, None)
        elif mine is None or theirs.key < mine.key:
            yield None, theirs
            theirs = next(right, None)
        else:
            yield mine, theirs
            mine, theirs = next(left, None), next(right, None)


def _rising(versions: Iterable[Fingerprint]) -> Iterator[Fingerprint]:
    last = b""
    for version in versions:
        if version.key <= last:
            raise OutOfOrder(f"key {version.key!r} comes after {last!r}")
        last = version.key
        yield version


def compare(
    result: VbucketResult,
    here: Iterable[Fingerprint],
    there: Iterable[Fingerprint],
    mirror: Side,
    source: Side,
    *,
    remember: bool = True,
) -> dict[bytes, Fingerprint | None] | None:
    """Compare two whole copies into `result`. Returns the moved keys with the source's version of each.

    Returns None if too many moved; then `result` is of no use. Without `remember` they are only counted.
    """
    mine, theirs = Digest(), Digest()
    moved: dict[bytes, Fingerprint | None] = {}
    for left, right in pairs(here, there):
        verdict = judge(left, right, mirror, source)
        result.count(verdict, left, right)
        if verdict is Verdict.MOVED:
            version = left or right
            assert version is not None, "a key is on one side at least"
            if not remember:
                continue
            if len(moved) >= MOVED_MAX:
                return None
            moved[version.key] = right
            continue
        if verdict not in COMPARED:
            continue
        if left is not None:
            mine.add(left)
        if right is not None:
            theirs.add(left if verdict is Verdict.REV_ONLY and left is not None else right)
    result.digest, result.source_digest = mine.hex(), theirs.hex()
    return moved
