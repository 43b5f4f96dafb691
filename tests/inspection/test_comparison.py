"""Two copies of a vbucket at two moments: whatever differs is found, and nothing else is called a difference."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from mirror.inspection import comparison
from mirror.inspection.comparison import OutOfOrder, Side, VbucketResult, Verdict, compare, judge, not_said, pairs
from storage.format.digest import Fingerprint
from storage.model import Collection, Manifest, ManifestUid, Seqno


def version(key: str, seqno: int, *, deleted: bool = False, digest: bytes = b"d", collection: int = 0) -> Fingerprint:
    return Fingerprint(bytes([collection]) + key.encode(), seqno, 1, seqno, deleted, digest)


def manifest(**begins: int) -> Manifest:
    collections = {0: Collection(0, 0, "_default", Seqno(0))}
    for name, begin in begins.items():
        collections[int(name[1:])] = Collection(int(name[1:]), 0, name, Seqno(begin))
    return Manifest(ManifestUid(len(begins)), {0: "_default"}, collections)


def side(seqno: int, *, purge_seqno: int = 0, missing_seqno: int = 0, **begins: int) -> Side:
    return Side(seqno, manifest(**begins), lambda: purge_seqno, missing_seqno)


ALIVE, DEAD = version("k", 5), version("k", 5, deleted=True)


@pytest.mark.parametrize(
    ("here", "there", "mirror", "source", "verdict"),
    [
        (ALIVE, ALIVE, side(9), side(9), Verdict.EQUAL),
        (DEAD, DEAD, side(9), side(7), Verdict.EQUAL),
        (ALIVE, version("k", 5, digest=b"e"), side(9), side(9), Verdict.DIFFERENT),
        (ALIVE, version("k", 6), side(9), side(9), Verdict.DIFFERENT),
        (ALIVE, DEAD, side(9), side(9), Verdict.DIFFERENT),
        (ALIVE, ALIVE._replace(rev_seqno=2), side(9), side(9), Verdict.REV_ONLY),
        (ALIVE._replace(rev_seqno=2), ALIVE, side(9), side(9), Verdict.REV_ONLY),
        (ALIVE, ALIVE._replace(rev_seqno=3), side(9), side(9), Verdict.DIFFERENT),
        (ALIVE, ALIVE._replace(rev_seqno=2, cas=6), side(9), side(9), Verdict.DIFFERENT),
        (ALIVE, version("k", 8), side(7), side(9), Verdict.MOVED),
        (version("k", 8), ALIVE, side(9), side(7), Verdict.MOVED),
        (version("k", 8), None, side(9), side(7), Verdict.MOVED),
        (None, version("k", 8), side(7), side(9), Verdict.MOVED),
        (version("k", 12), ALIVE, side(9), side(7), Verdict.DIFFERENT),
        (None, ALIVE, side(9), side(9), Verdict.MISSING_HERE),
        (None, DEAD, side(9), side(9), Verdict.MISSING_HERE),
        (None, DEAD, side(9, purge_seqno=4), side(9), Verdict.MISSING_HERE),
        (None, DEAD, side(9, purge_seqno=5), side(9), Verdict.PURGED_HERE),
        (None, ALIVE, side(9, purge_seqno=5), side(9), Verdict.MISSING_HERE),
        (None, DEAD, side(9, missing_seqno=5), side(9), Verdict.NEVER_SENT),
        (None, DEAD, side(9, missing_seqno=4), side(9), Verdict.MISSING_HERE),
        (None, ALIVE, side(9, missing_seqno=5), side(9), Verdict.MISSING_HERE),
        (ALIVE, version("k", 6, deleted=True), side(9, missing_seqno=9), side(9), Verdict.DIFFERENT),
        (ALIVE, None, side(9), side(9), Verdict.MISSING_THERE),
        (ALIVE, None, side(7), side(9), Verdict.MISSING_THERE),
        (DEAD, None, side(9), side(9), Verdict.PURGED_THERE),
    ],
)
def test_two_versions_of_a_key_have_a_verdict(
    here: Fingerprint | None, there: Fingerprint | None, mirror: Side, source: Side, verdict: Verdict
) -> None:
    assert judge(here, there, mirror, source) is verdict


def test_a_dropped_collection_counts_as_moved_only_if_the_later_side_lacks_it() -> None:
    doc = version("k", 5, collection=8)
    assert judge(None, doc, side(9), side(7, c8=2)) is Verdict.MOVED
    assert judge(None, doc, side(9, c8=6), side(7, c8=2)) is Verdict.MOVED, "flushed since"
    assert judge(None, doc, side(9), side(9, c8=2)) is Verdict.MISSING_HERE
    assert judge(None, doc, side(7), side(9, c8=2)) is Verdict.MISSING_HERE
    assert judge(doc, None, side(7, c8=2), side(9)) is Verdict.MOVED
    assert judge(doc, None, side(9, c8=2), side(9)) is Verdict.MISSING_THERE


def test_a_raised_revision_is_equal_with_a_note_and_a_difference_names_its_fields() -> None:
    result = VbucketResult(7)
    raised = ALIVE._replace(rev_seqno=2)
    assert compare(result, [ALIVE], [raised], side(9), side(9)) == {}
    assert (result.state, result.rev_only, result.differences, result.documents) == ("equal", 1, [], 1)
    assert result.digest == result.source_digest
    assert "of 1 keys the revision alone differs" in not_said([result])
    compare(result, [ALIVE], [ALIVE._replace(rev_seqno=3, digest=b"e")], side(9), side(9))
    assert result.differences[0].fields == ["rev_seqno", "content"]


def test_pairs_take_each_key_once_and_refuse_keys_that_fall() -> None:
    here = [version("a", 1), version("c", 2), version("d", 3)]
    there = [version("b", 4), version("c", 5)]
    found = [(left.seqno if left else None, right.seqno if right else None) for left, right in pairs(here, there)]
    assert found == [(1, None), (None, 4), (2, 5), (3, None)]
    with pytest.raises(OutOfOrder):
        list(pairs([version("b", 1), version("a", 2)], []))


class Bucket:
    """A vbucket's whole past; its state at any seqno, with tombstones at or below a purge seqno forgotten."""

    def __init__(self, rng: random.Random, keys: int, seqnos: int) -> None:
        self.log = [
            version(f"key-{rng.randrange(keys):03}", seqno, deleted=rng.random() < 0.3)
            for seqno in range(1, seqnos + 1)
        ]

    def state(self, seqno: int, purge_seqno: int = 0) -> list[Fingerprint]:
        newest = {each.key: each for each in self.log[:seqno]}
        return [each for _, each in sorted(newest.items()) if not (each.deleted and each.seqno <= purge_seqno)]


@pytest.mark.parametrize("seed", range(40))
def test_copies_of_one_past_never_differ_and_a_planted_fault_below_both_always_does(seed: int) -> None:
    rng = random.Random(seed)
    bucket = Bucket(rng, keys=30, seqnos=120)
    at_mirror, at_source = rng.randrange(60, 121), rng.randrange(60, 121)
    both = min(at_mirror, at_source)
    mirror_purge, source_purge = rng.randrange(both), rng.randrange(both)
    here, there = bucket.state(at_mirror, mirror_purge), bucket.state(at_source, source_purge)
    mirror, source = side(at_mirror, purge_seqno=mirror_purge), side(at_source)

    def run(changed: Iterable[Fingerprint]) -> tuple[VbucketResult, set[bytes]]:
        result = VbucketResult(7)
        moved = compare(result, changed, there, mirror, source)
        assert moved is not None
        return result, set(moved)

    result, moved = run(here)
    assert (result.state, result.difference_count) == ("equal", 0)
    assert result.digest == result.source_digest
    later = {each.key for each in bucket.log[both : max(at_mirror, at_source)]}
    assert moved == later
    for number, victim in enumerate(here):
        if victim.seqno > both or (victim.deleted and victim.seqno <= source_purge):
            continue
        if victim.key not in later:
            altered = [*here[:number], victim._replace(digest=b"x"), *here[number + 1 :]]
            found, _ = run(altered)
            assert [each.key for each in found.differences] == [victim.key]
            if not (victim.deleted and victim.seqno <= mirror_purge):
                found, _ = run([*here[:number], *here[number + 1 :]])
                assert [(each.key, each.verdict) for each in found.differences] == [(victim.key, Verdict.MISSING_HERE)]
                assert not found.equal
    ghost = version("key-ghost", both)
    found, _ = run(sorted([*here, ghost]))
    assert [(each.key, each.verdict) for each in found.differences] == [(ghost.key, Verdict.MISSING_THERE)]


def test_too_many_moved_keys_are_counted_and_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "MOVED_MAX", 3)
    here = [version(f"key-{number}", 10 + number) for number in range(5)]
    assert compare(VbucketResult(0), here[:3], [], side(20), side(5)) == {each.key: None for each in here[:3]}
    assert compare(VbucketResult(0), here, [], side(20), side(5)) is None
    result = VbucketResult(0)
    assert compare(result, here, [], side(20), side(5), remember=False) == {}
    assert result.moved == 5


def test_only_the_first_differences_are_named_and_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "DIFFERENCES_MAX", 2)
    result = VbucketResult(0)
    compare(result, [version(f"key-{number}", number + 1) for number in range(5)], [], side(9), side(9))
    assert (result.missing_there, len(result.differences), result.state) == (5, 2, "different")
    assert (result.documents, result.source_documents) == (5, 0)


def test_the_summary_names_the_seqnos_and_keys_that_were_not_compared() -> None:
    assert not_said([VbucketResult(0), VbucketResult(1)]) == ""
    found = [VbucketResult(0, behind_seqnos=1000, not_compared=4), VbucketResult(1, behind_seqnos=2)]
    assert not_said(found) == (
        "compared up to the published seqnos: the source is 1,002 seqnos ahead, "
        "4 keys changed meanwhile and were not compared"
    )


def test_a_surplus_document_is_excused_if_its_tombstone_may_be_purged() -> None:
    def result(published_seqno: int, *verdicts: Verdict) -> VbucketResult:
        found = VbucketResult(0, published_seqno=published_seqno, source_seqno=9)
        for verdict in verdicts:
            found.count(verdict, ALIVE, None)
        found.excuse_purged()
        return found

    excused = result(7, Verdict.MISSING_THERE, Verdict.MISSING_THERE)
    assert (excused.state, excused.missing_there, excused.not_compared, excused.differences) == ("equal", 0, 2, [])
    assert result(9, Verdict.MISSING_THERE).missing_there == 1
    assert result(7, Verdict.MISSING_THERE, Verdict.DIFFERENT).state == "different"
