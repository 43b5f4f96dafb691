"""The official Python SDK as a reader: only the connection string is another one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from couchbase import subdocument as sd
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.exceptions import (
    AuthenticationException,
    BucketNotFoundException,
    CouchbaseException,
    DocumentNotFoundException,
    InternalServerFailureException,
    PathNotFoundException,
    ServiceUnavailableException,
    TemporaryFailException,
    UnsupportedOperation,
)
from couchbase.management.options import GetAllScopesOptions
from couchbase.options import (
    ClusterOptions,
    ExistsOptions,
    GetAnyReplicaOptions,
    GetOptions,
    LookupInOptions,
    UpsertOptions,
)
from couchbase.transcoder import RawBinaryTranscoder

from mirror import MutationToken, open_view
from mirror import client as control
from mirror.messages import GetStatus
from mirror.sandbox import SandboxCluster, SandboxThread
from tests.serve.kv_rig import MirrorThread, Store, serving

RAW = RawBinaryTranscoder()
VBUCKETS = 16


def string_of(source: SandboxThread) -> str:
    """The SDK takes user and bucket elsewhere than in the string."""
    scheme, _, rest = source.connection_string.partition("://")
    return f"{scheme}://{rest.partition('@')[2].rpartition('/')[0]}"


def connect(string: str, password: str = "demo") -> Cluster:
    return Cluster(string, ClusterOptions(PasswordAuthenticator("demo", password)))


@pytest.fixture(scope="module")
def source() -> Iterator[SandboxThread]:
    with SandboxThread(SandboxCluster(vbuckets=VBUCKETS, bucket="orders")) as thread:
        thread.call(thread.cluster.bucket.create_scope, "inventory")
        thread.call(thread.cluster.bucket.create_collection, "inventory", "items")
        cluster = connect(string_of(thread))
        bucket = cluster.bucket("orders")
        default = bucket.default_collection()
        document: dict[str, object] = {"n": 1, "tags": ["x", "y"], "nested": {"p": {"q": 2}}}
        thread.call(thread.cluster.set, "a", document, xattrs={"meta": {"k": "v"}})
        default.upsert("bin", b"\x00\x01\xff", UpsertOptions(transcoder=RAW))
        default.upsert("exp", {"n": 2}, UpsertOptions(expiry=timedelta(hours=1)))
        default.upsert("huge", b"\xa5" * 10_000_000, UpsertOptions(transcoder=RAW))
        default.upsert("gone", {})
        default.remove("gone")
        bucket.scope("inventory").collection("items").upsert("i1", {"sku": 1})
        cluster.close()
        yield thread


@pytest.fixture(scope="module")
def mirror(source: SandboxThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MirrorThread]:
    with MirrorThread(source, tmp_path_factory.mktemp("mirror")) as thread:
        thread.caught_up()
        yield thread


@pytest.fixture(scope="module")
def sdk(mirror: MirrorThread) -> Iterator[Cluster]:
    cluster = connect(mirror.connection_string)
    yield cluster
    cluster.close()


def test_documents_are_read_as_from_a_cluster(sdk: Cluster) -> None:
    bucket = sdk.bucket("orders")
    default = bucket.default_collection()
    document = {"n": 1, "tags": ["x", "y"], "nested": {"p": {"q": 2}}}
    assert default.get("a").content_as[dict] == document
    assert default.get("a", GetOptions(project=["n", "nested.p.q"])).content_as[dict] == {
        "n": 1,
        "nested": {"p": {"q": 2}},
    }
    assert default.get("bin", GetOptions(transcoder=RAW)).value == b"\x00\x01\xff"
    assert default.get("huge", GetOptions(transcoder=RAW)).value == b"\xa5" * 10_000_000
    assert default.get("exp", GetOptions(with_expiry=True)).expiryTime is not None
    assert default.get_any_replica("a").content_as[dict] == document
    assert [each.content_as[dict] for each in default.get_all_replicas("a")] == [document]
    assert (default.exists("a").exists, default.exists("nope").exists, default.exists("gone").exists) == (
        True,
        False,
        False,
    )
    assert bucket.scope("inventory").collection("items").get("i1").content_as[dict] == {"sku": 1}
    found = default.get_multi(["a", "exp"]).results
    assert {key: each.content_as[dict]["n"] for key, each in found.items()} == {"a": 1, "exp": 2}
    for key in ("nope", "gone"):
        with pytest.raises(DocumentNotFoundException):
            default.get(key)
    assert '"services": {"key_value": [{"type": "key_value"' in str(bucket.ping().as_json())


def test_paths_are_looked_up_as_in_a_cluster(sdk: Cluster, mirror: MirrorThread) -> None:
    default = sdk.bucket("orders").default_collection()
    specs = [sd.get("n"), sd.get("nested.p"), sd.exists("zz"), sd.count("tags")]
    found = default.lookup_in("a", specs)
    assert (found.content_as[int](0), found.content_as[dict](1), found.exists(2), found.content_as[int](3)) == (
        1,
        {"q": 2},
        False,
        2,
    )
    assert default.lookup_in("a", [sd.get("meta", xattr=True), sd.get("n")]).content_as[dict](0) == {"k": "v"}
    about = default.lookup_in("a", [sd.get("$document", xattr=True)]).content_as[dict](0)
    with open_view(mirror.path) as view:
        stored = view.get("a")
        assert stored is not None
        assert (about["seqno"], about["CAS"]) == (f"0x{stored.seqno:016x}", f"0x{stored.cas:016x}")
    assert default.lookup_in_any_replica("a", [sd.get("n")]).content_as[int](0) == 1
    assert [each.content_as[int](0) for each in default.lookup_in_all_replicas("a", [sd.get("n")])] == [1]
    with pytest.raises(PathNotFoundException):
        default.lookup_in("a", [sd.get("zz")]).content_as[str](0)
    with pytest.raises(DocumentNotFoundException):
        default.lookup_in("nope", [sd.get("n")])


def test_every_change_is_one_clear_error_without_a_retry(sdk: Cluster) -> None:
    """An error after one try: the SDK neither retries nor waits for its timeout (2.5 s)."""
    default = sdk.bucket("orders").default_collection()
    changes: dict[str, Callable[[], Any]] = {
        "upsert": lambda: default.upsert("a", {}),
        "upsert of megabytes": lambda: default.upsert("a", b"x" * 5_000_000, UpsertOptions(transcoder=RAW)),
        "insert": lambda: default.insert("new", {}),
        "replace": lambda: default.replace("a", {}),
        "remove": lambda: default.remove("a"),
        "touch": lambda: default.touch("a", timedelta(seconds=10)),
        "get_and_touch": lambda: default.get_and_touch("a", timedelta(seconds=10)),
        "get_and_lock": lambda: default.get_and_lock("a", timedelta(seconds=10)),
        "unlock": lambda: default.unlock("a", 1),
        "mutate_in": lambda: default.mutate_in("a", [sd.upsert("x", 1)]),
        "increment": lambda: default.binary().increment("a"),
        "append": lambda: default.binary().append("a", b"x"),
    }
    for name, change in changes.items():
        with pytest.raises(UnsupportedOperation) as raised:
            change()
        context = getattr(raised.value, "error_context", None) or raised.value.context
        assert getattr(context, "retry_attempts", 0) in (0, None), name


def test_services_and_collections_that_the_mirror_lacks_are_clear_errors(sdk: Cluster, mirror: MirrorThread) -> None:
    bucket = sdk.bucket("orders")
    with pytest.raises(CouchbaseException, match="collection"):
        bucket.scope("inventory").collection("none").get("a", GetOptions(timeout=timedelta(milliseconds=300)))
    with pytest.raises(InternalServerFailureException, match="no management service"):  # at once: not a timeout
        bucket.collections().get_all_scopes(GetAllScopesOptions(timeout=timedelta(seconds=5)))
    with pytest.raises(ServiceUnavailableException):
        list(sdk.query("SELECT 1"))
    sdk.wait_until_ready(timedelta(seconds=10))  # a client that names no service does not wait for one
    with pytest.raises(AuthenticationException):
        connect(mirror.connection_string, "wrong")
    with pytest.raises(BucketNotFoundException):
        sdk.bucket("elsewhere")


def test_own_writes_are_read_with_their_tokens(source: SandboxThread, mirror: MirrorThread, sdk: Cluster) -> None:
    writer = connect(string_of(source))
    written = writer.bucket("orders").default_collection()
    read = sdk.bucket("orders").default_collection()
    with open_view(mirror.path) as view:
        for number in range(50):
            key = f"own-{number % 5}"
            token = MutationToken.of(written.upsert(key, {"n": number}).mutation_token())
            view.wait_for(token, 20)
            document = view.get(key)
            assert document is not None
            assert json.loads(document.value) == {"n": number}
            assert read.get(key).content_as[dict] == {"n": number}
    writer.close()


def listener(data: Path, kind: str = "kv") -> str | None:
    """The first address of a kind, once all servers run."""
    document = (control.ask(data, GetStatus()) or {}).get("status")
    servers = (document or {}).get("servers")
    if not document or not servers or any(row["phase"] != "running" for row in servers):
        return None
    return next(iter(document["listeners"].get(kind, ())), None)


# What is read of a vbucket in each state: never an absent document if the mirror cannot know it.

SHORT = timedelta(milliseconds=300)
READS: dict[str, Callable[[Any], Any]] = {
    "get": lambda collection: collection.get("key", GetOptions(timeout=SHORT)).content_as[dict],
    "exists": lambda collection: collection.exists("key", ExistsOptions(timeout=SHORT)).exists,
    "lookup_in": lambda collection: collection.lookup_in("key", [sd.get("n")], LookupInOptions(timeout=SHORT)),
    "get_any_replica": lambda collection: collection.get_any_replica("key", GetAnyReplicaOptions(timeout=SHORT)),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path, vbuckets=1)
    yield made
    made.close()


def write(store: Store) -> None:
    store.put(b"key", b'{"n":1}', 5, datatype=1)


@asynccontextmanager
async def reading(store: Store) -> AsyncIterator[Any]:
    """A collection at an endpoint over the store."""
    async with serving(store.path) as endpoint:
        cluster = await asyncio.to_thread(connect, f"couchbase://127.0.0.1:{endpoint.port}")
        bucket = await asyncio.to_thread(cluster.bucket, "orders")
        yield bucket.default_collection()
        await asyncio.to_thread(cluster.close)


async def test_a_read_of_a_vbucket_that_is_not_filled_is_a_temporary_failure(store: Store) -> None:
    """Once its timeout is over: the SDK tries again until then."""
    async with reading(store) as collection:
        for read in READS.values():
            with pytest.raises(TemporaryFailException):
                await asyncio.to_thread(read, collection)


async def test_a_retried_read_succeeds_once_the_vbucket_is_filled(store: Store) -> None:
    async with reading(store) as collection:
        options = GetOptions(timeout=timedelta(seconds=60))
        waiting = asyncio.create_task(asyncio.to_thread(collection.get, "key", options))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        store.logs()
        write(store)
        assert (await waiting).content_as[dict] == {"n": 1}


async def test_the_refusal_of_a_read_names_the_reason(store: Store) -> None:
    async with serving(store.path) as endpoint:
        client = await endpoint.sdk()
        assert b"not filled yet" in (await client.get(b"\0key")).value
        store.logs()
        write(store)
        store.writer.vbuckets[0].begin_resync()
        store.writer.commit()
        assert b"being resynced" in (await client.get(b"\0key")).value
