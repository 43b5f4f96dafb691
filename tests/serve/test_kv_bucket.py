"""What readers may know of the bucket: apart from the documents' own tests, a store that fails and one recreated."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mirror.clock import ManualClock
from mirror.serve.auth import Reader
from mirror.serve.kv_bucket import MANIFEST_FRESH_S, KvBucket, manifest_to_json
from mirror.server.errors import Refused
from mirror.wire.constants import Status
from storage import directory, keys
from storage.errors import CorruptedError
from storage.model import Collection, Document, Manifest, ManifestUid, Seqno
from tests.serve.kv_rig import DEFAULT, Store

READER = Reader("r")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    made.logs()
    made.put(b"a", b"1", 1)
    yield made
    made.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def bucket(store: Store, clock: ManualClock) -> Iterator[KvBucket]:
    opened = KvBucket(store.path, clock, stale_allowed=False)
    yield opened
    opened.close()


def test_a_read_that_fails_is_a_temporary_failure(bucket: KvBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CorruptedError("bad page")

    monkeypatch.setattr(bucket.view, "find", fail)
    monkeypatch.setattr(bucket.view, "state", fail)
    monkeypatch.setattr(bucket.view, "manifest", fail)
    for read in (lambda: bucket.find(b"\0a", None, READER), lambda: bucket.state(0), bucket.manifest):
        with pytest.raises(Refused) as caught:
            read()
        assert caught.value.status == Status.ETMPFAIL


def test_a_damaged_document_is_served_only_where_reads_are_not_verified(
    bucket: KvBucket, store: Store, clock: ManualClock
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
    careless = KvBucket(store.path, clock, stale_allowed=False, verify_reads=False)
    found = careless.find(b"\0a", vbid, READER)
    assert isinstance(found, Document)
    assert found.value == b"0"
    careless.close()


def test_a_group_that_was_made_anew_is_opened_again(bucket: KvBucket, store: Store, tmp_path: Path) -> None:
    assert not bucket.reopen_if_replaced()
    assert bucket.find(b"\0a", None, READER) is not None
    path = directory.group_path(store.path, 0)
    store.writer.close()
    os.rename(path, tmp_path / "damaged")
    assert not bucket.reopen_if_replaced()
    other = Store(tmp_path / "other")
    other.logs()
    other.put(b"a", b"2", 1)
    other.close()
    shutil.copytree(directory.group_path(other.path, 0), path)
    assert bucket.reopen_if_replaced()
    found = bucket.find(b"\0a", None, READER)
    assert isinstance(found, Document)
    assert found.value == b"2"


def test_the_newest_manifest_is_looked_for_now_and_then(bucket: KvBucket, store: Store, clock: ManualClock) -> None:
    assert bucket.manifest().uid == 0
    first = bucket.manifest_json(READER)
    store.collections(3, {8: "s"}, DEFAULT, Collection(8, 8, "c", Seqno(0)), vbids=[5])
    assert bucket.manifest().uid == 0
    assert bucket.manifest_json(READER) is first
    clock.advance(MANIFEST_FRESH_S + 0.1)
    assert bucket.manifest().uid == 3
    assert b'"uid":"3"' in bucket.manifest_json(READER)


def test_collection_ids_of_every_length(bucket: KvBucket, store: Store) -> None:
    wide = Collection(0xFFFF_FFFF, 8, "wide", Seqno(0))
    store.collections(3, {8: "s"}, DEFAULT, wide)
    store.put(b"a", b"wide", 9, cid=0xFFFF_FFFF)
    limited = Reader("r", ("s.wide",))
    found = bucket.find(b"\xff\xff\xff\xff\x0fa", None, limited)
    assert isinstance(found, Document)
    assert found.value == b"wide"
    with pytest.raises(Refused) as caught:
        bucket.find(b"\0a", None, limited)
    assert caught.value.status == Status.EACCESS
    assert bucket.find(b"\xff\xff\xff\xff\x0fnone", None, limited) is None


def test_a_manifest_names_only_what_its_reader_may_read(
    bucket: KvBucket, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, hidden = Collection(8, 8, "mine", Seqno(0)), Collection(9, 8, "hidden", Seqno(0))
    store.collections(3, {8: "s", 9: "secret", 10: "empty"}, DEFAULT, mine, hidden, Collection(10, 9, "x", Seqno(0)))
    limited = Reader("r", ("s.mine", "empty.*"))
    found = json.loads(bucket.manifest_json(limited))
    named = {scope["name"]: [each["name"] for each in scope["collections"]] for scope in found["scopes"]}
    assert named == {"_default": [], "s": ["mine"], "empty": []}
    everything = json.loads(bucket.manifest_json(READER))
    assert [scope["name"] for scope in everything["scopes"]] == ["_default", "s", "secret", "empty"]
    monkeypatch.setattr("mirror.serve.kv_bucket.MANIFEST_TEXTS_MAX", 1)
    for number in range(5):
        bucket.manifest_json(Reader("r", (f"s.{number}",)))
    assert bucket._manifest_json is not None
    assert len(bucket._manifest_json[1]) == 1


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
    found = json.loads(manifest_to_json(manifest))
    assert visits == 1000
    assert [len(scope["collections"]) for scope in found["scopes"]] == [0] + [1] * 1000
