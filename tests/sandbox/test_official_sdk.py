"""The official Python SDK as a client of the sandbox; test_sdk_requests repeats a recorded session frame by frame."""

from __future__ import annotations

import pytest
from couchbase.durability import Durability, ServerDurability
from couchbase.exceptions import DocumentExistsException
from couchbase.options import RemoveOptions, UpsertOptions

from mirror.sandbox import SandboxCluster, SandboxThread
from mirror.sandbox.data.item import PREPARE
from tests.serve.test_official_sdk import connect, string_of


def test_a_client_finds_its_way_after_a_failover() -> None:
    with SandboxThread(SandboxCluster(nodes=3, vbuckets=16)) as three:
        cluster = connect(string_of(three))
        default = cluster.bucket("demo").default_collection()
        for index in range(50):
            default.upsert(f"k{index}", {"n": index})
        three.run(three.cluster.failover_node(1))
        for index in range(50):
            assert default.get(f"k{index}").content_as[dict] == {"n": index}
        for vbid in range(16):
            three.call(three.cluster.move, vbid, 2)
        for index in range(50):
            default.upsert(f"k{index}", {"n": -index})
        assert three.cluster.bucket.document_count == 50
        cluster.close()


@pytest.mark.parametrize("profile", ["5.0", "6.5", "7.0", "7.2", "8.0"])
def test_a_current_client_reads_and_writes_at_servers_of_old_and_new_releases(profile: str) -> None:
    """Durable writes, too, where the server has them: they are prepares and commits in the vbucket's log."""
    durable = ServerDurability(Durability.MAJORITY)
    with SandboxThread(SandboxCluster(nodes=2, vbuckets=16, replicas=1, profile=profile)) as source:
        with_sdk = connect(string_of(source))
        try:
            default = with_sdk.bucket("demo").default_collection()
            for index in range(8):
                default.upsert(f"k{index}", {"n": index})
            default.insert("new", {"n": 0})
            with pytest.raises(DocumentExistsException):
                default.insert("new", {})
            default.replace("new", {"n": 9})
            assert default.get("new").content_as[dict] == {"n": 9}
            default.remove("k0")
            assert default.get("k7").content_as[dict] == {"n": 7}
            assert not default.exists("k0").exists
            if source.cluster.bucket.profile.since(6, 5):
                default.upsert("d", {"n": 1}, UpsertOptions(durability=durable))
                default.remove("k1", RemoveOptions(durability=durable))
                prepared = [item.kind == PREPARE for vb in source.cluster.vbuckets for item in vb.log]
                assert prepared.count(True) == 2
                assert not default.exists("k1").exists
        finally:
            with_sdk.close()
