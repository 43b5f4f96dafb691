"""The bucket as readers see it, without its documents: a failing store, a recreated one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from mirror.serve.access.auth import Reader
from mirror.serve.bucket.bucket import MANIFEST_FRESH_S, ServedBucket
from mirror.server.cluster_config import render_manifest
from mirror.server.errors import NeedsMemory, Refused
from mirror.server.turns import LARGE_BYTES
from mirror.wire.constants import Status
from storage.env import directory
from storage.errors import CorruptedError
from storage.format import keys, records
from storage.model import Collection, Document, Manifest, ManifestUid, Seqno
from tests.manual_clock import ManualClock
from tests.serve.kv_rig import DEFAULT, Store

READER = Reader("r")


@pytest.fixture
def store(store: Store) -> Store:
    store.put(b"a", b"1", 1)
    return store


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def bucket(store: Store, clock: ManualClock) -> Iterator[ServedBucket]:
    opened = ServedBucket(store.path, clock)
    yield opened
    opened.close()


def test_a_read_that_fails_is_a_temporary_failure(bucket: ServedBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CorruptedError("bad page")

    monkeypatch.setattr(bucket.view, "find", fail)
    monkeypatch.setattr(bucket.view, "state", fail)
    monkeypatch.setattr(bucket.view, "manifest", fail)
    for read in (lambda: bucket.find(b"\0a", None, READER), lambda: bucket.state(0), bucket.manifest):
        with pytest.raises(Refused) as caught:
            read()
        assert caught.value.status == Status.ETMPFAIL


def test_a_damaged_document_is_served_only_if_reads_are_not_verified(
    bucket: ServedBucket, store: Store, clock: ManualClock
) -> None:
    vbid = bucket.view.vbid_of(b"a")
    environment = store.writer.environment
    with environment.begin(write=True) as txn:
        tree = environment.db(keys.rows_db(vbid))
        row_key = keys.ROW.pack(1, 1)
        stored = bytearray(txn.get(row_key, db=tree))
        stored[-5] ^= 1
        txn.put(row_key, bytes(stored), db=tree)
    with pytest.raises(Refused) as refused:
        bucket.find(b"\0a", vbid, READER)
    assert refused.value.status == Status.ETMPFAIL
    careless = ServedBucket(store.path, clock, verify_reads=False)
    found = careless.find(b"\0a", vbid, READER)
    assert isinstance(found, Document)
    assert found.value == b"0"
    careless.close()


def replaced(store: Store, other: Store, between: Callable[[], bool] = lambda: True) -> None:
    """Put another store's group in the place of the first."""
    path = directory.group_path(store.path, 0)
    for each in (store, other):
        each.close()
    os.rename(path, f"{path}.damaged")
    assert between()
    shutil.copytree(directory.group_path(other.path, 0), path)


def test_a_group_that_was_recreated_is_opened_again(bucket: ServedBucket, store: Store, tmp_path: Path) -> None:
    assert not bucket.reopen_if_replaced()
    assert bucket.find(b"\0a", None, READER) is not None
    other = Store(tmp_path / "other")
    other.logs()
    other.put(b"a", b"2", 1)
    replaced(store, other, lambda: not bucket.reopen_if_replaced())
    assert bucket.reopen_if_replaced()
    found = bucket.find(b"\0a", None, READER)
    assert isinstance(found, Document)
    assert found.value == b"2"


def test_a_manifest_shared_by_many_vbuckets_is_decoded_once(
    bucket: ServedBucket, store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All were, in one step: with 1,024 vbuckets and 1,000 collections it took 4 s."""
    uids, decoded = Mock(wraps=records.manifest_uid), Mock(wraps=records.decode_manifest)
    monkeypatch.setattr(records, "manifest_uid", uids)
    monkeypatch.setattr(records, "decode_manifest", decoded)
    orders = Collection(9, 8, "orders", Seqno(2))

    def newest() -> tuple[int, int, int]:
        uids.reset_mock()
        decoded.reset_mock()
        clock.advance(MANIFEST_FRESH_S + 0.1)
        return bucket.manifest().uid, uids.call_count, decoded.call_count

    store.collections(3, {8: "s"}, DEFAULT, uid=0x1_0000_0003)
    assert newest() == (0x1_0000_0003, 16, 1)
    first = bucket.visible(READER).text
    assert newest() == (0x1_0000_0003, 0, 0)
    assert bucket.visible(READER).text is first
    store.collections(4, {8: "s"}, DEFAULT, orders, uid=0x1_0000_0004, vbids=[5, 7])
    assert bucket.manifest().uid == 0x1_0000_0003, "it is looked for now and then"
    assert newest()[:2] == (0x1_0000_0004, 2)
    assert bucket.manifest().collections[9].name == "orders"
    store.collections(5, {8: "s"}, DEFAULT, orders, uid=0x1_0000_0004, vbids=[2])
    assert newest() == (0x1_0000_0004, 1, 0), "the same manifest of another vbucket is no newer one"
    assert bucket.view.manifest_uids() == {vbid: bucket.view.manifest(vbid).uid for vbid in range(16)}


def test_uids_of_a_file_that_was_replaced_are_read_again(bucket: ServedBucket, store: Store, tmp_path: Path) -> None:
    store.collections(3, {8: "s"}, DEFAULT, uid=4)
    assert set(bucket.view.manifest_uids().values()) == {4}
    other = Store(tmp_path / "other")
    other.logs()
    other.put(b"a", b"1", 1)
    other.collections(3, {8: "s"}, DEFAULT, uid=5)
    replaced(store, other)
    bucket.view.groups.environment(0).look_now()
    bucket.view.groups._leave_replaced()
    assert set(bucket.view.manifest_uids().values()) == {5}


@pytest.mark.parametrize("size", [10, 2 * LARGE_BYTES])
def test_a_seqno_exists_only_as_the_newest_version_of_a_key(bucket: ServedBucket, store: Store, size: int) -> None:
    key = b"k" * 250
    vbid = store.put(key, bytes(size), 7)
    store.put(key, bytes(size), 9)
    deleted = store.put(b"gone", b"{}", 8)
    store.delete(b"gone", 12)
    store.collections(20, {8: "s"}, DEFAULT)
    assert [seqno for seqno in (0, 7, 9, 10, 20, 21) if bucket.holds_seqno(vbid, seqno)] == [9]
    assert [bucket.holds_seqno(deleted, seqno) for seqno in (8, 12)] == [False, True]


def test_a_collection_id_of_any_length_is_read(bucket: ServedBucket, store: Store) -> None:
    wide = Collection(0xFFFF_FFFF, 8, "wide", Seqno(0))
    store.collections(3, {8: "s"}, DEFAULT, wide)
    store.put(b"a", b"wide", 9, cid=0xFFFF_FFFF)
    limited = Reader("r", frozenset({"s.wide"}))
    found = bucket.find(b"\xff\xff\xff\xff\x0fa", None, limited)
    assert isinstance(found, Document)
    assert found.value == b"wide"
    with pytest.raises(Refused) as caught:
        bucket.find(b"\0a", None, limited)
    assert caught.value.status == Status.EACCESS
    assert bucket.find(b"\xff\xff\xff\xff\x0fnone", None, limited) is None


def test_rights_are_checked_before_the_size_of_a_document(bucket: ServedBucket, store: Store) -> None:
    """A client without the right to a collection could make the listener read its largest documents."""
    mine = Collection(9, 8, "mine", Seqno(0))
    store.collections(3, {8: "s"}, DEFAULT, mine, Collection(10, 8, "hidden", Seqno(0)))
    limited = Reader("r", frozenset({"s.mine"}))
    for seqno, (collection_id, status) in enumerate([(0, Status.EACCESS), (10, Status.UNKNOWN_COLLECTION)], 4):
        wire_key = keys.encode_collection_id(collection_id) + b"large"
        store.put(b"large", bytes(1000), seqno, cid=collection_id)
        with pytest.raises(Refused) as caught:
            bucket.find(wire_key, None, limited, bytes_max=100)
        assert caught.value.status == status
        with pytest.raises(NeedsMemory):
            bucket.find(wire_key, None, READER, bytes_max=100)


def test_a_manifest_names_only_what_its_reader_may_read(
    bucket: ServedBucket, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, hidden = Collection(8, 8, "mine", Seqno(0)), Collection(9, 8, "hidden", Seqno(0))
    store.collections(3, {8: "s", 9: "secret", 10: "empty"}, DEFAULT, mine, hidden, Collection(10, 9, "x", Seqno(0)))
    limited = Reader("r", frozenset({"s.mine", "empty.*"}))
    found = json.loads(bucket.visible(limited).text)
    named = {scope["name"]: [each["name"] for each in scope["collections"]] for scope in found["scopes"]}
    assert named == {"_default": [], "s": ["mine"], "empty": []}
    everything = json.loads(bucket.visible(READER).text)
    assert [scope["name"] for scope in everything["scopes"]] == ["_default", "s", "secret", "empty"]
    monkeypatch.setattr("mirror.serve.bucket.bucket.VISIBLE_MAX", 1)
    for number in range(5):
        bucket.visible(Reader("r", frozenset({f"s.{number}"})))
    assert len(bucket._visible[1]) == 1


def test_a_manifest_is_written_in_one_walk_over_its_collections() -> None:
    """Many scopes once cost a walk over all collections each."""
    visits = 0

    class Counting(dict[int, Collection]):
        def values(self) -> Any:
            nonlocal visits
            for each in super().values():
                visits += 1
                yield each

    collections = Counting({each: Collection(each, each, f"c{each}", Seqno(0)) for each in range(8, 1008)})
    manifest = Manifest(ManifestUid(1), {0: "_default"} | {each: f"s{each}" for each in collections}, collections)
    found = json.loads(render_manifest(manifest.uid, manifest.scopes, manifest.collections.values()))
    assert visits == 1000
    assert [len(scope["collections"]) for scope in found["scopes"]] == [0] + [1] * 1000
