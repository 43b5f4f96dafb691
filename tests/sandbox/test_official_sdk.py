"""The official Python SDK as a client of the sandbox: each call of the recorded session has the recorded outcome."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from couchbase import subdocument as sd
from couchbase.cluster import Cluster
from couchbase.durability import Durability, ServerDurability
from couchbase.exceptions import CouchbaseException
from couchbase.kv_range_scan import RangeScan
from couchbase.options import GetOptions, RemoveOptions, UpsertOptions
from couchbase.transcoder import RawBinaryTranscoder

from mirror.sandbox import SandboxCluster, SandboxThread
from mirror.sandbox.data.item import PREPARE
from tests import recordings
from tests.serve.test_official_sdk import connect, string_of

DIGITS = re.compile(r"\d+")


@pytest.fixture
def source() -> Iterator[SandboxThread]:
    with SandboxThread(SandboxCluster(vbuckets=16, bucket="orders")) as thread:
        thread.call(thread.cluster.bucket.create_scope, "inventory")
        thread.call(thread.cluster.bucket.create_collection, "inventory", "items")
        yield thread


@pytest.fixture
def sdk(source: SandboxThread) -> Iterator[Cluster]:
    cluster = connect(string_of(source))
    yield cluster
    cluster.close()


def calls(sdk: Cluster) -> dict[str, Callable[[], Any]]:
    bucket = sdk.bucket("orders")
    default = bucket.default_collection()
    items = bucket.scope("inventory").collection("items")
    nowhere = bucket.scope("inventory").collection("nothere")
    document = {"n": 1, "tags": ["x", "y"], "nested": {"p": {"q": 2}}}
    binary = RawBinaryTranscoder()
    return {
        "upsert a": lambda: default.upsert("a", document).mutation_token(),
        "upsert with expiry": lambda: default.upsert("exp", {"n": 2}, UpsertOptions(expiry=timedelta(hours=1))).cas,
        "upsert binary": lambda: default.upsert("bin", b"\x00\x01\xff", UpsertOptions(transcoder=binary)).cas,
        "upsert compressible": lambda: default.upsert("big", {"pad": "abc " * 5000}).cas,
        "get a": lambda: (default.get("a").content_as[dict], default.get("a").cas),
        "get missing": lambda: default.get("nope"),
        "get binary": lambda: default.get("bin", GetOptions(transcoder=binary)).value,
        "get big": lambda: len(default.get("big").content_as[dict]["pad"]),
        "get with_expiry": lambda: str(default.get("exp", GetOptions(with_expiry=True)).expiryTime),
        "get project": lambda: default.get("a", GetOptions(project=["n", "nested.p.q"])).content_as[dict],
        "exists yes": lambda: default.exists("a").exists,
        "exists no": lambda: default.exists("nope").exists,
        "lookup_in": lambda: [
            default.lookup_in("a", [sd.get("n"), sd.get("nested.p"), sd.exists("zz"), sd.count("tags")]).content_as[
                dict
            ](1)
        ],
        "lookup_in missing path": lambda: default.lookup_in("a", [sd.get("zz")]).content_as[str](0),
        "lookup_in missing doc": lambda: default.lookup_in("nope", [sd.get("n")]),
        "lookup_in $document": lambda: default.lookup_in("a", [sd.get("$document", xattr=True)]).content_as[dict](0),
        "get_any_replica": lambda: default.get_any_replica("a").content_as[dict],
        "get_all_replicas": lambda: [found.content_as[dict] for found in default.get_all_replicas("a")],
        "insert conflict": lambda: default.insert("a", {}),
        "replace": lambda: default.replace("a", {"n": 3}).cas,
        "remove": lambda: default.remove("bin").mutation_token(),
        "get removed": lambda: default.get("bin"),
        "items upsert": lambda: items.upsert("i1", {"sku": 1}).mutation_token(),
        "items get": lambda: items.get("i1").content_as[dict],
        "unknown collection": lambda: nowhere.get("i1", GetOptions(timeout=timedelta(milliseconds=500))),
        "ping": lambda: str(bucket.ping().as_json())[:200],
        "get_multi": lambda: {
            key: found.content_as[dict] for key, found in default.get_multi(["a", "exp"]).results.items()
        },
        "range scan": lambda: list(default.scan(RangeScan())),
    }


NOT_HERE = {"mutate_in xattr", "lookup_in xattr", "touch", "get_and_touch", "get_and_lock", "counter"}
"""Calls that change a document without writing the whole, and the look at the effect of one."""


def test_each_recorded_call_has_the_recorded_outcome(sdk: Cluster) -> None:
    recorded = {name: (outcome, text) for name, outcome, text in recordings.notes("sdk_72")}
    ours = calls(sdk)
    assert ours.keys() == recorded.keys() - NOT_HERE
    for name, call in ours.items():
        outcome, text = recorded[name]
        if outcome != "ok":
            with pytest.raises(CouchbaseException) as raised:
                call()
            assert raised.type.__name__ == outcome, name
            continue
        value = call()
        got = str(value) if not isinstance(value, str) else repr(value)
        if name == "ping":
            assert '"services": {"key_value": [{"type": "key_value"' in got
        elif name == "lookup_in $document":
            assert {key: type(found) for key, found in value.items()} == {
                key: type(found) for key, found in eval(text).items()
            }
            same = ("datatype", "deleted", "exptime", "flags", "revid", "value_bytes", "value_crc32c")
            assert {key: value[key] for key in same} == {key: eval(text)[key] for key in same}
        elif name in ("upsert a", "remove", "items upsert"):
            assert DIGITS.sub("N", got) == DIGITS.sub("N", text), name
            assert value.as_dict()["partition_id"] == int(re.findall(r"partition_id': (\d+)", text)[0])
        elif DIGITS.fullmatch(text) and len(text) > 15:
            assert isinstance(value, int), name
        elif name in ("get with_expiry",):
            assert DIGITS.sub("N", got) == DIGITS.sub("N", text), name
        elif name == "get a":
            assert value[0] == eval(text)[0]
        else:
            assert got == text, name


def test_a_client_finds_its_way_after_a_failover(source: SandboxThread) -> None:
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


@pytest.mark.parametrize("profile", ["5.0", "5.5", "6.0", "6.5", "6.6", "7.0", "7.2", "7.6", "8.0"])
def test_a_current_client_reads_and_writes_at_servers_of_every_release(profile: str) -> None:
    """Durable writes, too, where the server has them: they are prepares and commits in the vbucket's log."""
    durable = ServerDurability(Durability.MAJORITY)
    with SandboxThread(SandboxCluster(nodes=2, vbuckets=16, replicas=1, profile=profile)) as source:
        with_sdk = connect(string_of(source))
        try:
            default = with_sdk.bucket("demo").default_collection()
            for index in range(8):
                default.upsert(f"k{index}", {"n": index})
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
