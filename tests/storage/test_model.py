"""The nouns: what they promise by themselves."""

from __future__ import annotations

import pytest

from storage.model import Branch, Document, FailoverEntry, FailoverLog, Kind, Manifest, Seqno, Vbuuid


def test_an_untouched_bucket_has_the_default_collection_alone() -> None:
    manifest = Manifest.initial()
    assert manifest.uid == 0
    assert {c.name: (c.collection_id, c.begin_seqno) for c in manifest.collections.values()} == {"_default": (0, 0)}
    assert manifest.scopes == {0: "_default"}


@pytest.mark.parametrize(("kind", "deleted"), [(Kind.MUTATION, False), (Kind.DELETION, True), (Kind.EXPIRATION, True)])
def test_deletions_and_expirations_are_tombstones(kind: Kind, deleted: bool) -> None:
    document = Document(0, 0, b"k", Seqno(1), 1, 1, 0, 0, 0, b"", kind, Branch(1))
    assert document.deleted is deleted


def test_nouns_do_not_change() -> None:
    entry = FailoverEntry(Vbuuid(1), Seqno(2))
    with pytest.raises(AttributeError):
        entry.seqno = Seqno(3)  # type: ignore[misc]


# --- failover logs


def log(*entries: tuple[int, int]) -> FailoverLog:
    return FailoverLog.of(entries)


OURS = ((0xC, 20), (0xB, 10), (0xA, 0))


@pytest.mark.parametrize(
    ("seqno", "vbuuid"), [(0, 0), (1, 0xA), (9, 0xA), (10, 0xB), (19, 0xB), (20, 0xC), (1000, 0xC)]
)
def test_a_boundary_lies_on_the_newest_history_that_had_begun(seqno: int, vbuuid: int) -> None:
    assert log(*OURS).vbuuid_at(seqno) == vbuuid


def test_a_boundary_below_every_entry_lies_on_no_known_history() -> None:
    assert log((0xC, 20)).vbuuid_at(19) == 0


def test_entries_that_share_a_seqno_name_the_newest_of_them() -> None:
    assert log((0xC, 10), (0xB, 10), (0xA, 0)).vbuuid_at(10) == 0xC


def test_pruning_drops_what_began_above_the_boundary() -> None:
    assert log(*OURS).pruned(10) == log((0xB, 10), (0xA, 0))


def test_where_pruning_leaves_nothing_the_boundarys_own_vbuuid_stands_in() -> None:
    assert log((0xC, 20)).pruned(15, 0xB) == log((0xB, 15))
    assert log((0xC, 20)).pruned(15) == ()
    assert log((0xC, 20)).pruned(0, 0xB) == ()


@pytest.mark.parametrize(("vbuuid", "end"), [(0xC, 99), (0xB, 20), (0xA, 10), (0xD, None)])
def test_a_history_ends_where_the_next_one_began(vbuuid: int, end: int | None) -> None:
    assert log(*OURS).end_of(vbuuid, 99) == end
