"""Compares two copies of a vbucket exactly, although they were taken at different moments.

`here` is the mirror's copy as of its published boundary B. `there` is the source's copy as of the end E of a snapshot.
The caller checks that both copies are of one history. Each key's newest versions in both copies are compared. L is the
lower of B and E.

- Both copies are complete up to L. So versions at or below L must be equal, and a key that one copy lacks must be
  absent in the other.
- If the later copy has a version above L, the key is `MOVED`: the caller may compare it again after the earlier side
  has caught up.
- Both sides purge old tombstones. A tombstone that only the mirror has is no difference: the source has purged it or no
  longer sends it. A tombstone that only the source has is a missing deletion, except if the mirror's purger has passed
  it, or if the source did not send it: each node purges by itself, and after a failover another node may have it
  (`NEVER_SENT`). A *document* that only the mirror has is a difference. But if B < E and the source has purged above B,
  it may have purged the document's tombstone (`excuse_purged`).
- Versions that differ only in their revision, by one, count as equal (`REV_ONLY`): when a durable delete aborts,
  kv_engine 7.2.4 raises the revision of the committed version in memory.
- If the later copy lacks a document's collection, a drop or flush came between the two moments: the key is `MOVED`. If
  the earlier copy lacks the collection, the key is a difference.
- An expired document is in both copies until its deletion has a seqno.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from storage.format import keys
from storage.format.digest import Digest, Fingerprint
from storage.model import Manifest

DIFFERENCES_MAX = 100
"""Most differing keys listed for a vbucket; all are counted."""
MOVED_MAX = 20_000
"""Limit of moved keys in a vbucket. Above it the whole vbucket is compared again, not only these keys."""


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
    NEVER_SENT = "never_sent"
    """A tombstone that the source had purged where and when this copy began; another node may still have it."""


DIFFERENCES = frozenset((Verdict.MISSING_HERE, Verdict.MISSING_THERE, Verdict.DIFFERENT))
COMPARED = DIFFERENCES | {Verdict.EQUAL, Verdict.REV_ONLY}


@dataclass(frozen=True, slots=True)
class Side:
    seqno: int
    manifest: Manifest
    purge_seqno: Callable[[], int] = lambda: 0
    """Returns the seqno up to which tombstones may be gone. It rises: call this after a tombstone was found missing."""
    missing_seqno: int = 0
    """Tombstones up to here may be missing because the source did not send them."""

    def has_collection(self, version: Fingerprint) -> bool:
        collection = self.manifest.collections.get(keys.split_key(version.key)[0])
        return collection is not None and version.seqno > collection.begin_seqno


@dataclass(frozen=True, slots=True)
class Difference:
    verdict: Verdict
    here: Fingerprint | None
    there: Fingerprint | None

    @property
    def key(self) -> bytes:
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
    """equal; different; rollback: the mirror has history that the source lost; unreadable: damaged; unsure: not
    everything was compared.
    """
    detail: str = ""
    branch: int = 0
    published_seqno: int = 0
    source_seqno: int = 0
    documents: int = 0
    """Compared documents of the mirror."""
    tombstones: int = 0
    source_documents: int = 0
    source_tombstones: int = 0
    digest: str = ""
    """Digest of the mirror's versions that the first scan compared."""
    source_digest: str = ""
    missing_here: int = 0
    missing_there: int = 0
    different: int = 0
    rev_only: int = 0
    """Keys that differ only in their revision, by one; they count as equal."""
    purged_here: int = 0
    purged_there: int = 0
    never_sent: int = 0
    moved: int = 0
    """Keys that changed between the two moments. If a service runs, they were compared again."""
    not_compared: int = 0
    """Keys that kept changing, that the source changed above B, or that `excuse_purged` excused."""
    behind_seqnos: int = 0
    """Seqnos by which the source's copy is ahead of the mirror's; not compared."""
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
        """If B < E, count documents only in the mirror as `not_compared`. Call it if the source has purged above B."""
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
    revisions, unsent = sum(each.rev_only for each in found), sum(each.never_sent for each in found)
    parts = [
        f"compared up to the published seqnos: the source is {seqnos:,} seqnos ahead" if seqnos else "",
        f"{keys_left:,} keys changed meanwhile and were not compared" if keys_left else "",
        f"of {revisions:,} keys the revision alone differs, by one: durable deletes were aborted" if revisions else "",
        f"{unsent:,} tombstones of the source were purged before they could be sent to this mirror" if unsent else "",
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
        if there.deleted and there.seqno <= mirror.missing_seqno:
            return Verdict.NEVER_SENT
        return Verdict.PURGED_HERE if there.deleted and there.seqno <= mirror.purge_seqno() else Verdict.MISSING_HERE
    assert here is not None, "a key is on one side at least"
    if here.deleted:
        return Verdict.PURGED_THERE
    if not source.has_collection(here) and source.seqno > mirror.seqno:
        return Verdict.MOVED
    return Verdict.MISSING_THERE


class OutOfOrder(Exception):
    """The mirror's keys do not rise: a row has another key than its key row."""


def pairs(
    here: Iterable[Fingerprint], there: Iterable[Fingerprint]
) -> Iterator[tuple[Fingerprint | None, Fingerprint | None]]:
    """Yield both versions of each key from two sorted sequences. Raises OutOfOrder if `here` is not sorted."""
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
    """Compare two whole copies; count in `result`, and return the moved keys with the source's version of each.

    Return None if too many keys moved; then `result` is incomplete. Without `remember`, only count the moved keys.
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
