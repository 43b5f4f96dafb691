"""The manifest and its system events, in both shapes, next to the recorded ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from mirror.sandbox.data.manifest import BucketManifest, ManifestError
from mirror.wire import codec_dcp
from mirror.wire import events as ev
from mirror.wire.constants import Opcode
from mirror.wire.system_events import decode_system_event, encode_system_event
from tests.recordings import frames

from .recorded import stream_of


def recorded_events(name: str) -> list[ev.SystemEvent]:
    found = [codec_dcp.decode(f) for f in stream_of(frames(name)) if f.opcode == Opcode.DCP_SYSTEM_EVENT]
    return [event for event in found if isinstance(event, ev.SystemEvent)]


def test_events_have_the_recorded_bytes() -> None:
    """The changes that made the recorded events, each with the uid it carried."""
    made: list[ev.SystemEventContent] = [
        ev.ScopeCreated(0, 8, "inventory"),
        ev.CollectionCreated(0, 8, 8, "hotel"),
        ev.CollectionCreated(1, 8, 9, "route"),
        ev.ScopeCreated(1, 9, "s2"),
        ev.CollectionCreated(1, 9, 10, "tmp", 600),
        ev.CollectionCreated(2, 9, 0x1234, "bigid"),
        ev.CollectionDropped(3, 8, 9),
        ev.CollectionDropped(3, 9, 0x1234),
        ev.CollectionDropped(3, 9, 10),
        ev.ScopeDropped(4, 9),
    ]
    recorded = recorded_events("72_k1_collections_live")
    flat = {e.seqno: decode_system_event(e) for e in recorded_events("72_k17_flatbuffers_system_events")}
    assert len(flat) == 6
    for content, event in zip(made, recorded, strict=True):
        assert flat.get(event.seqno, content) == content
        ours = encode_system_event(content, vbid=event.vbid, seqno=event.seqno)
        assert replace(ours, opaque=event.opaque) == event


def test_collection_settings_change_and_history_has_the_default_of_the_bucket() -> None:
    manifest = BucketManifest(history_default=True)
    manifest.create_scope("s")
    assert manifest.create_collection("s", "c") == [ev.CollectionCreated(2, 8, 8, "c", history=True)]
    modified = ev.CollectionModified(3, 8, 8, "c", 5, history=False)
    assert manifest.modify_collection("s.c", max_ttl=5, history=False) == [modified]
    assert [c.get("history") for c in json.loads(manifest.to_json())["scopes"][1]["collections"]] == [None]
    assert json.loads(manifest.to_json())["scopes"][0]["collections"][0]["history"] is True
    assert manifest.flush_collection("s.c") == [ev.CollectionCreated(4, 8, 8, "c", 5, flush_uid=4)]


def test_system_collections_are_left_out_for_users_without_the_privilege() -> None:
    manifest = BucketManifest()
    manifest.create_scope("_system")
    manifest.create_collection("_system", "c")
    manifest.create_collection("_default", "_mobile")
    manifest.create_collection("_default", "mine")
    seen = json.loads(manifest.to_json(with_system=False))["scopes"]
    assert [(scope["name"], [c["name"] for c in scope["collections"]]) for scope in seen] == [
        ("_default", ["_default", "mine"])
    ]
    assert len(json.loads(manifest.to_json())["scopes"]) == 2
    dropped = [ev.CollectionDropped(4, 8, 8, system_collection=True), ev.ScopeDropped(5, 8, system_scope=True)]
    assert manifest.drop_scope("_system") == dropped
    assert manifest.system_scopes == {8}


def test_a_dropped_scope_takes_its_collections_along_under_the_uid_before() -> None:
    manifest = BucketManifest()
    manifest.create_scope("s")
    manifest.create_collection("s", "c")
    manifest.create_collection("s", "d", collection_id=0x1234)
    ended = [ev.CollectionDropped(3, 8, 0x1234), ev.CollectionDropped(3, 8, 8), ev.ScopeDropped(4, 8)]
    assert manifest.drop_scope("s") == ended
    assert (manifest.uid, list(manifest.scopes), list(manifest.collections)) == (4, [0], [0])
    manifest.create_scope("t")
    manifest.create_collection("t", "c")
    assert manifest.collection("t.c").collection_id == 0x1235  # type: ignore[union-attr]


def test_an_impossible_change_is_refused_and_changes_nothing() -> None:
    manifest = BucketManifest()
    manifest.create_scope("s")
    manifest.create_collection("s", "c")
    before = manifest.to_json()
    attempts: tuple[Callable[[], object], ...] = (
        lambda: manifest.create_scope("s"),
        lambda: manifest.create_collection("t", "c"),
        lambda: manifest.create_collection("s", "c"),
        lambda: manifest.create_collection("s", "d", collection_id=8),
        lambda: manifest.drop_collection("s.d"),
        lambda: manifest.flush_collection("t.c"),
        lambda: manifest.drop_scope("_default"),
        lambda: manifest.drop_scope("t"),
    )
    for attempt in attempts:
        with pytest.raises(ManifestError):
            attempt()
    assert manifest.to_json() == before
    assert json.loads(before)["uid"] == "2"


def test_the_default_scope_and_collection_may_be_left_out_of_a_name() -> None:
    manifest = BucketManifest()
    assert manifest.collection("_default._default") == manifest.collection("._default") == manifest.collections[0]
    assert manifest.collection("_default.x") is None
    assert manifest.collection("x._default") is None


def test_a_vbucket_gets_the_manifest_changes_that_it_lost_once_more() -> None:
    manifest = BucketManifest()
    known = [*manifest.create_scope("shop"), *manifest.create_collection("shop", "kept")]
    known += manifest.create_collection("shop", "dropped")
    lost = [*manifest.create_scope("late"), *manifest.create_collection("late", "new")]
    lost += [*manifest.create_collection("shop", "came and went"), *manifest.drop_collection("shop.came and went")]
    lost += [
        *manifest.flush_collection("shop.kept"),
        *manifest.modify_collection("shop.kept", max_ttl=5, history=False),
    ]
    lost += manifest.drop_collection("shop.dropped")
    uid = known[-1].manifest_uid
    assert manifest.missed(known, lost) == [
        ev.ScopeCreated(uid, 9, "late"),
        ev.CollectionCreated(uid, 9, 10, "new"),
        ev.CollectionCreated(uid, 8, 8, "kept", 5, flush_uid=lost[4].manifest_uid),
        ev.CollectionDropped(manifest.uid, 8, 9),
    ]
    assert manifest.missed([*known, *lost], []) == []
    dropped = manifest.drop_scope("shop")
    kinds = [type(each) for each in manifest.missed([*known, *lost], dropped)]
    assert kinds == [ev.CollectionDropped, ev.ScopeDropped]
