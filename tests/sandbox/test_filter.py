"""Filters of stream requests: what is refused, what passes, and how events change it."""

from __future__ import annotations

import pytest

from mirror.sandbox.data.item import Item, mutation_frame
from mirror.sandbox.data.manifest import BucketManifest
from mirror.sandbox.data.sandbox_vbucket import system_key
from mirror.sandbox.dcp.filter import parse
from mirror.server.errors import Refused
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


def test_a_client_without_collections_gets_the_default_one_and_no_filter(manifest: BucketManifest) -> None:
    legacy = parse(b"", manifest, has_collections=False, has_stream_ids=False)
    assert legacy.passes(document(0))
    assert not legacy.passes(document(8))
    assert not legacy.passes(event(CollectionDropped(1, 0, 0)))
    with pytest.raises(Refused):
        parse(b'{"uid":"0"}', manifest, has_collections=False, has_stream_ids=False)


def test_a_request_without_a_filter_passes_everything(manifest: BucketManifest) -> None:
    for value in (b"", b'{"uid":"ff"}', b'{"purge_seqno":"12"}'):
        whole = parse(value, manifest, has_collections=True, has_stream_ids=False)
        assert whole.all
        assert whole.passes(document(77))
        assert whole.passes(event(ScopeDropped(1, 9)))
    assert whole.purge_seqno == 12


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
