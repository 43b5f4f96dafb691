"""Manifests: what each system event makes of one, also when events before it were deduplicated away."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mirror.ingest.collections import apply
from mirror.wire.events import (
    CollectionCreated,
    CollectionDropped,
    CollectionModified,
    ScopeCreated,
    ScopeDropped,
    SystemEventContent,
)
from storage.model import Collection, Manifest, Seqno

HOTEL = CollectionCreated(3, 8, 9, "hotel", max_ttl=600)


def after(*contents: SystemEventContent) -> Manifest:
    manifest = Manifest.initial()
    for seqno, content in enumerate(contents, start=1):
        manifest = apply(manifest, content, Seqno(seqno * 10))
    return manifest


def test_a_collection_begins_at_its_events_seqno() -> None:
    manifest = after(ScopeCreated(2, 8, "inventory"), HOTEL)
    assert manifest.uid == 3
    assert manifest.scopes == {0: "_default", 8: "inventory"}
    assert manifest.collections[9] == Collection(9, 8, "hotel", Seqno(20), 600)
    assert manifest.collections[0] == Collection(0, 0, "_default", Seqno(0))


def test_a_begin_of_a_known_collection_is_a_flush_of_its_documents() -> None:
    assert after(HOTEL, HOTEL).collections[9].begin_seqno == 20
    assert after(CollectionCreated(1, 0, 0, "_default")).collections[0].begin_seqno == 10


def test_a_modification_keeps_the_documents() -> None:
    collection = after(HOTEL, CollectionModified(4, 8, 9, "hotel", max_ttl=None)).collections[9]
    assert collection == Collection(9, 8, "hotel", Seqno(10), None)


def test_a_modification_whose_begin_was_deduplicated_away_hides_nothing() -> None:
    assert after(CollectionModified(4, 8, 9, "hotel")).collections[9].begin_seqno == 0


def test_a_dropped_collection_is_gone_and_an_unknown_one_is_no_error() -> None:
    assert 9 not in after(HOTEL, CollectionDropped(4, 8, 9)).collections
    assert after(CollectionDropped(4, 8, 9)).uid == 4


def test_the_default_collection_can_be_dropped() -> None:
    assert after(CollectionDropped(1, 0, 0)).collections == {}


def test_a_dropped_scope_leaves_its_collections_to_their_own_events() -> None:
    manifest = after(ScopeCreated(2, 8, "inventory"), HOTEL, ScopeDropped(5, 8))
    assert manifest.scopes == {0: "_default"}
    assert 9 in manifest.collections


CIDS = st.integers(0, 3)
CONTENTS = st.one_of(
    st.builds(CollectionCreated, CIDS, CIDS, CIDS, st.just("c")),
    st.builds(CollectionModified, CIDS, CIDS, CIDS, st.just("c")),
    st.builds(CollectionDropped, CIDS, CIDS, CIDS),
    st.builds(ScopeCreated, CIDS, CIDS, st.just("s")),
    st.builds(ScopeDropped, CIDS, CIDS),
)


@given(st.lists(CONTENTS, max_size=8), CONTENTS)
def test_any_event_makes_a_new_manifest_whose_begin_seqnos_never_fall(
    before: list[SystemEventContent], content: SystemEventContent
) -> None:
    old = after(*before)
    copy = Manifest(old.uid, dict(old.scopes), dict(old.collections))
    new = apply(old, content, Seqno(1000))
    assert old == copy
    assert new.uid >= max(old.uid, content.manifest_uid)
    for collection_id, collection in old.collections.items():
        if collection_id in new.collections:
            assert new.collections[collection_id].begin_seqno >= collection.begin_seqno
