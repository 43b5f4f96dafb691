"""Filters of stream requests: what is refused, what passes, and how events change it."""

from __future__ import annotations

import pytest

from mirror.sandbox.data.item import Item, mutation_frame
from mirror.sandbox.data.manifest import BucketManifest
from mirror.sandbox.data.sandbox_vbucket import system_key
from mirror.sandbox.dcp.filter import parse
from mirror.wire import codec_dcp
from mirror.wire.events import CollectionCreated, CollectionDropped, ScopeCreated, ScopeDropped, SystemEventContent
from mirror.wire.system_events import encode_system_event


@pytest.fixture
def manifest() -> BucketManifest:
    made = BucketManifest()
    made.create_scope("s")
    made.create_collection("s", "c")
    made.create_collection("s", "d")
    made.create_collection("_default", "e")
    return made


def test_a_filter_by_scope_takes_in_new_collections_and_ends_with_the_scope(manifest: BucketManifest) -> None:
    scope = parse(b'{"scope":"8"}', manifest, has_collections=True, has_stream_ids=False)
    assert scope.shown == frozenset({8, 9})
    assert not scope.passes(document(11))
    assert scope.passes(event(CollectionCreated(1, 8, 11, "")))
    assert scope.passes(document(11))
    assert not scope.passes(event(CollectionCreated(1, 0, 12, "")))
    assert scope.passes(event(CollectionDropped(1, 8, 11)))
    assert not scope.passes(document(11))
    assert not scope.passes(event(ScopeDropped(1, 9)))
    assert not scope.empty
    assert scope.passes(event(ScopeDropped(1, 8)))
    assert scope.empty


def document(collection_id: int) -> Item:
    key = bytes((collection_id,)) + b"k"
    return Item(1, key, mutation_frame(0, key, 1, 1, 1, b""))


def event(content: SystemEventContent) -> Item:
    about_scope = isinstance(content, ScopeCreated | ScopeDropped)
    id_ = content.scope_id if isinstance(content, ScopeCreated | ScopeDropped) else content.collection_id
    key = system_key(about_scope=about_scope, id_=id_)
    return Item(1, key, codec_dcp.encode(encode_system_event(content, vbid=0, seqno=1)))
