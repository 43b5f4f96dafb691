"""The manifest and its system events, in both shapes, next to the recorded ones."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from mirror.sandbox.data.manifest import BucketManifest, ManifestError, ManifestStep
from mirror.wire import codec_dcp
from mirror.wire import events as ev
from mirror.wire.constants import Opcode, SystemEventId
from mirror.wire.system_events import decode_system_event
from tests.recordings import frames

from .recorded import stream_of


def recorded_events(name: str) -> list[ev.SystemEvent]:
    found = [codec_dcp.decode(f) for f in stream_of(frames(name)) if f.opcode == Opcode.DCP_SYSTEM_EVENT]
    return [event for event in found if isinstance(event, ev.SystemEvent)]


def as_event(change: ManifestStep, version: int, body: bytes) -> ev.SystemEvent:
    return ev.SystemEvent(1, 5, change.event, version, change.key, body)


def test_bodies_have_the_recorded_bytes() -> None:
    """The changes that made the recorded events, each with the uid it carried."""
    begin, end = SystemEventId.COLLECTION_BEGIN, SystemEventId.COLLECTION_END
    made = [
        ManifestStep(SystemEventId.SCOPE_CREATE, 0, 8, name="inventory"),
        ManifestStep(begin, 0, 8, 8, "hotel"),
        ManifestStep(begin, 1, 8, 9, "route"),
        ManifestStep(SystemEventId.SCOPE_CREATE, 1, 9, name="s2"),
        ManifestStep(begin, 1, 9, 10, "tmp", 600),
        ManifestStep(begin, 2, 9, 0x1234, "bigid"),
        ManifestStep(end, 3, 8, 9),
        ManifestStep(end, 3, 9, 0x1234),
        ManifestStep(end, 3, 9, 10),
        ManifestStep(SystemEventId.SCOPE_DROP, 4, 9),
    ]
    recorded = recorded_events("72_k1_collections_live")
    flat = {e.seqno: decode_system_event(e) for e in recorded_events("72_k17_flatbuffers_system_events")}
    assert len(flat) == 6
    for change, event in zip(made, recorded, strict=True):
        ours = decode_system_event(as_event(change, 2, change.flat_body()))
        assert flat.get(event.seqno, ours) == ours
    assert [(c.event, c.version, c.key, c.body()) for c in made] == [
        (e.event, e.version, e.key, e.value) for e in recorded
    ]


def test_both_shapes_say_the_same() -> None:
    for change in (
        ManifestStep(SystemEventId.SCOPE_CREATE, 7, 8, name="s"),
        ManifestStep(SystemEventId.SCOPE_CREATE, 0, 8, name="a longer name"),
        ManifestStep(SystemEventId.COLLECTION_BEGIN, 7, 8, 9, "c"),
        ManifestStep(SystemEventId.COLLECTION_BEGIN, 7, 8, 9, "ttl", 60),
        ManifestStep(SystemEventId.COLLECTION_BEGIN, 0, 0, 9, "c"),
        ManifestStep(SystemEventId.COLLECTION_END, 7, 8, 9),
        ManifestStep(SystemEventId.SCOPE_DROP, 7, 8),
    ):
        plain = decode_system_event(as_event(change, change.version, change.body()))
        flat = decode_system_event(as_event(change, 2, change.flat_body()))
        assert type(plain) is type(flat)
        for name in ("manifest_uid", "scope_id", "collection_id", "name", "max_ttl"):
            assert getattr(plain, name, None) == getattr(flat, name, None), (change, name)


def test_settings_change_and_history_is_kept_by_default_where_the_bucket_says_so() -> None:
    manifest = BucketManifest(history_default=True)
    manifest.create_scope("s")
    created = manifest.create_collection("s", "c")[0]
    modified = manifest.modify_collection("s.c", max_ttl=5, history=False)[0]
    assert (created.history, modified.history, modified.max_ttl, modified.version) == (True, False, 5, 2)
    assert modified.body() == modified.flat_body()
    assert [c.get("history") for c in json.loads(manifest.to_json())["scopes"][1]["collections"]] == [None]
    assert json.loads(manifest.to_json())["scopes"][0]["collections"][0]["history"] is True
    assert manifest.flush_collection("s.c")[0].flush_uid == 4


def test_the_systems_own_is_left_out_for_who_may_not_see_it() -> None:
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
    assert [c.system for c in manifest.drop_scope("_system")] == [True, True]
    assert manifest.system_scopes == {8}


def test_a_scope_goes_with_its_collections_under_the_uid_before() -> None:
    manifest = BucketManifest()
    manifest.create_scope("s")
    manifest.create_collection("s", "c")
    manifest.create_collection("s", "d", collection_id=0x1234)
    changes = manifest.drop_scope("s")
    assert [(c.event, c.collection_id, c.uid) for c in changes] == [(1, 0x1234, 3), (1, 8, 3), (4, 0, 4)]
    assert (manifest.uid, list(manifest.scopes), list(manifest.collections)) == (4, [0], [0])
    manifest.create_scope("t")
    manifest.create_collection("t", "c")
    assert manifest.collection("t.c").collection_id == 0x1235  # type: ignore[union-attr]


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
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


def test_names_are_looked_up_with_the_default_left_out() -> None:
    manifest = BucketManifest()
    assert manifest.collection("_default._default") == manifest.collection("._default") == manifest.collections[0]
    assert manifest.collection("_default.x") is None
    assert manifest.collection("x._default") is None


def test_a_vbucket_is_sent_once_more_what_it_lost_of_the_manifest() -> None:
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
    reported = manifest.missed(known, lost)
    assert [(each.event.name, each.name or each.collection_id) for each in reported] == [
        ("SCOPE_CREATE", "late"),
        ("COLLECTION_BEGIN", "new"),
        ("COLLECTION_BEGIN", "kept"),
        ("COLLECTION_END", known[2].collection_id),
    ]
    assert (reported[2].max_ttl, reported[2].flush_uid) == (5, lost[4].uid)
    assert [each.uid for each in reported] == [known[-1].uid] * 3 + [manifest.uid]
    assert manifest.missed([*known, *lost], []) == []
    dropped = manifest.drop_scope("shop")
    assert [each.event.name for each in manifest.missed([*known, *lost], dropped)] == ["COLLECTION_END", "SCOPE_DROP"]
