"""The nouns: what they promise by themselves."""

from __future__ import annotations

import dataclasses

import pytest

from storage.model import Branch, Document, FailoverEntry, Kind, Manifest, Seqno, Vbid, Vbuuid


def test_an_untouched_bucket_has_the_default_collection_alone() -> None:
    manifest = Manifest.initial()
    assert manifest.uid == 0
    assert {c.name: (c.collection_id, c.begin_seqno) for c in manifest.collections.values()} == {"_default": (0, 0)}
    assert manifest.scopes == {0: "_default"}


@pytest.mark.parametrize(("kind", "deleted"), [(Kind.MUTATION, False), (Kind.DELETION, True), (Kind.EXPIRATION, True)])
def test_deletions_and_expirations_are_tombstones(kind: Kind, deleted: bool) -> None:
    document = Document(Vbid(0), 0, b"k", Seqno(1), 1, 1, 0, 0, 0, b"", kind, Branch(1))
    assert document.deleted is deleted


def test_nouns_do_not_change() -> None:
    entry = FailoverEntry(Vbuuid(1), Seqno(2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.seqno = Seqno(3)  # type: ignore[misc]
