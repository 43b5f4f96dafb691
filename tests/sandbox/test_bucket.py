"""The direct way to the data."""

from __future__ import annotations

import json

import pytest

from mirror.sandbox import DocumentError, SandboxCluster
from mirror.sandbox.data.bucket import Bucket
from mirror.sandbox.data.manifest import ManifestError
from mirror.wire.constants import VbucketRole
from tests.sandbox.past import expire


@pytest.fixture
def bucket() -> Bucket:
    return SandboxCluster(nodes=2, vbuckets=16, replicas=1).bucket


def test_values_of_every_kind_are_stored_with_their_datatype(bucket: Bucket) -> None:
    assert bucket.set("d", {"a": [1]}).value == b'{"a":[1]}'
    assert bucket.set("t", "text").datatype == 0
    assert bucket.set("b", b"\xff").value == b"\xff"
    packed = bucket.set("c", {"pad": "x" * 500}, compressed=True, xattrs={"u": 1}, flags=9, expiry=100)
    assert (packed.datatype, packed.flags, packed.expiry > 100) == (7, 9, True)
    assert bucket.get("d") is not None
    bucket.delete("d")
    assert bucket.get("d") is None
    with pytest.raises(DocumentError):
        bucket.delete("d")
    assert expire(bucket, "t").deleted
    assert bucket.document_count == 2
    assert bucket.set("x", {}, vbid=3).seqno == 1
    assert bucket.vbuckets[3].document_count >= 1


def test_collections_are_written_by_name(bucket: Bucket) -> None:
    assert bucket.create_scope("s") == 8
    assert bucket.create_collection("s", "c", collection_id=0x1234) == 0x1234
    item = bucket.set("k", {}, collection="s.c")
    assert item.key == b"\xb4\x24k"
    assert bucket.get("k") is None
    with pytest.raises(ManifestError):
        bucket.set("k", {}, collection="s.d")
    bucket.drop_scope("s")
    assert all(vbucket.high_seqno >= 4 for vbucket in bucket.vbuckets)
    assert bucket.document_count == 0


def test_the_state_of_a_vbucket_depends_on_the_node(bucket: Bucket) -> None:
    bucket.map.owners[0], bucket.map.replicas[0] = 0, [1]
    assert bucket.state_on(0, 0) == VbucketRole.ACTIVE
    assert bucket.state_on(0, 1) == VbucketRole.REPLICA
    assert bucket.state_on(0, 2) == VbucketRole.DEAD
    assert bucket.state_on(99, 0) == VbucketRole.DEAD
    bucket.states[0] = VbucketRole.PENDING
    assert bucket.state_on(0, 0) == VbucketRole.PENDING


def test_a_recreated_bucket_keeps_nothing_of_the_old_one(bucket: Bucket) -> None:
    bucket.create_scope("s")
    bucket.set("k", {})
    old = bucket.map.bucket_uuid, bucket.map.rev, bucket.vbuckets[0].vbuuid
    bucket.recreate()
    assert bucket.document_count == 0
    assert bucket.map.bucket_uuid != old[0]
    assert bucket.map.rev > old[1]
    assert bucket.vbuckets[0].vbuuid != old[2]
    assert json.loads(bucket.manifest.to_json())["uid"] == "0"
    assert bucket.set("k", {}).rev_seqno == 1


def test_the_same_seed_gives_the_same_histories() -> None:
    def uuids(seed: int) -> list[int]:
        return [vbucket.vbuuid for vbucket in SandboxCluster(vbuckets=4, seed=seed).bucket.vbuckets]

    assert uuids(1) == uuids(1) != uuids(2)


def test_a_copy_can_be_held_back_from_persisting(bucket: Bucket) -> None:
    for number in range(3):
        bucket.set(f"k{number}", {}, vbid=1)
    assert bucket.persisted_seqno(1, 0) == 3
    bucket.persistence_holds[1, 0] = 2
    assert (bucket.persisted_seqno(1, 0), bucket.persisted_seqno(1, 1)) == (2, 3)
    del bucket.persistence_holds[1, 0]
    assert bucket.persisted_seqno(1, 0) == 3
    bucket.map.ephemeral = True
    assert bucket.persisted_seqno(1, 0) == 0
