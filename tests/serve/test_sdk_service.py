"""The official Python SDK and whole services: scans, replicas, several mirrors of one bucket, and vbuckets in trouble.

The mirrors are processes: the SDK holds the interpreter while it begins a scan, so nothing of a mirror could answer it
from this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from couchbase.cluster import Cluster
from couchbase.exceptions import CouchbaseException, DocumentNotFoundException, UnAmbiguousTimeoutException
from couchbase.kv_range_scan import PrefixScan, RangeScan, SamplingScan, ScanTerm
from couchbase.mutation_state import MutationState
from couchbase.options import GetOptions, ScanOptions

from mirror import open_view
from mirror.sandbox import SandboxCluster, SandboxThread
from storage.format.keys import vbid_of
from tests.crash.service import Service, until
from tests.ports import fetched, free_ports
from tests.serve.test_official_sdk import VBUCKETS, connect, listener, string_of

pytestmark = pytest.mark.xdist_group("sdk_service")  # the mirror is started once

DOCUMENTS: dict[str, dict[str, object]] = {f"doc-{number:03}": {"n": number} for number in range(200)}
HALF = VBUCKETS // 2
SHORT = timedelta(milliseconds=500)


@pytest.fixture(scope="module")
def source() -> Iterator[SandboxThread]:
    with SandboxThread(SandboxCluster(vbuckets=VBUCKETS, bucket="orders")) as thread:
        bucket = thread.cluster.bucket
        for name, value in DOCUMENTS.items():
            thread.call(bucket.set, name, value)
        thread.call(bucket.create_scope, "inventory")
        thread.call(bucket.create_collection, "inventory", "items")
        yield thread


@pytest.fixture(scope="module")
def writing(source: SandboxThread) -> Iterator[Any]:
    cluster = connect(string_of(source))
    yield cluster.bucket("orders").default_collection()
    cluster.close()


def caught_up(source: SandboxThread, data: Path) -> None:
    """Wait until everything that the source has now is published."""
    vbuckets = source.cluster.bucket.vbuckets
    expected = source.call(lambda: [each.high_seqno for each in vbuckets])
    with open_view(str(data)) as view:
        until("everything", lambda: all(each.published_seqno >= expected[each.vbid] for each in view.states()))


@contextmanager
def mirror(source: SandboxThread, data: Path, *flags: str) -> Iterator[tuple[Service, str]]:
    """A service, and its KV address as an SDK takes it."""
    with Service(source.connection_string, data, "--workers", "1", "--groups", "2", *flags) as service:
        service.start()
        string = until("the KV port", lambda: listener(data))
        caught_up(source, data)
        yield service, string


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mirror") / "data"


@pytest.fixture(scope="module")
def sdk(source: SandboxThread, data: Path) -> Iterator[Cluster]:
    with mirror(source, data, "--kv", "0") as (_, string):
        cluster = connect(string)
        yield cluster
        cluster.close()


@pytest.fixture
def reading(sdk: Cluster) -> Any:
    return sdk.bucket("orders").default_collection()


def ids(found: Any) -> list[str]:
    return sorted(item.id for item in found)


def test_scans_find_the_documents_of_their_range(sdk: Cluster, reading: Any) -> None:
    found = {item.id: item.content_as[dict] for item in reading.scan(RangeScan())}
    assert found == DOCUMENTS
    some = RangeScan(ScanTerm("doc-010"), ScanTerm("doc-020", exclusive=True))
    assert ids(reading.scan(some)) == [f"doc-{number:03}" for number in range(10, 20)]
    assert ids(reading.scan(PrefixScan("doc-15"), ScanOptions(ids_only=True))) == [f"doc-15{n}" for n in range(10)]
    assert ids(reading.scan(RangeScan(), ScanOptions(batch_item_limit=3, concurrency=8))) == sorted(DOCUMENTS)
    assert list(reading.scan(PrefixScan("nothing"))) == []
    sampled = ids(reading.scan(SamplingScan(30, seed=7)))
    assert len(sampled) == 30
    assert set(sampled) < set(DOCUMENTS)
    assert list(sdk.bucket("orders").scope("inventory").collection("items").scan(RangeScan())) == []
    with pytest.raises(CouchbaseException, match="Unable to start"):
        list(sdk.bucket("orders").scope("inventory").collection("none").scan(RangeScan(), ScanOptions(timeout=SHORT)))


def test_a_scan_sees_the_writes_that_its_request_names(writing: Any, reading: Any) -> None:
    for number in range(20):
        written = [writing.upsert(f"own-{each}", {"n": number}) for each in range(8)]
        found = reading.scan(PrefixScan("own-"), ScanOptions(consistent_with=MutationState(*written)))
        assert {item.id: item.content_as[dict] for item in found} == {f"own-{each}": {"n": number} for each in range(8)}
    for each in range(8):
        writing.remove(f"own-{each}")


# Several mirrors of one bucket, each with its own vbuckets.


def read_all(collection: Any, names: Sequence[str], timeout: timedelta = timedelta(seconds=60)) -> None:
    for name in names:
        assert collection.get(name, GetOptions(timeout=timeout)).content_as[dict] == DOCUMENTS[name]


@pytest.mark.ci
def test_mirrors_of_parts_are_one_bucket_to_clients(source: SandboxThread, tmp_path: Path) -> None:
    """An SDK reads everything by way of either, goes on with the rest while one is killed, and has it back after."""
    ports = free_ports(2)
    parts = [f"0-{HALF - 1}", f"{HALF}-{VBUCKETS - 1}"]
    nodes = ",".join(f"127.0.0.1:{port}={part}" for port, part in zip(ports, parts, strict=True))
    folders = [tmp_path / str(number) / "data" for number in range(2)]
    with ExitStack() as stack:
        services = []
        for folder, port, part in zip(folders, ports, parts, strict=True):
            folder.parent.mkdir()
            flags = ("--kv", str(port), "--set", f"vbuckets={part}", "--set", f"kv_nodes={nodes}")
            services.append(stack.enter_context(mirror(source, folder, *flags)))
        for number, folder in enumerate(folders):
            with open_view(str(folder)) as view:
                assert [int(state.vbid) for state in view.states()] == list(range(number * HALF, (number + 1) * HALF))
        clusters = [connect(string) for _, string in services]
        collections = [cluster.bucket("orders").default_collection() for cluster in clusters]
        for collection in collections:
            read_all(collection, list(DOCUMENTS))
            assert ids(collection.scan(RangeScan(), ScanOptions(ids_only=True))) == sorted(DOCUMENTS)
        first = [name for name in DOCUMENTS if vbid_of(name.encode(), VBUCKETS) < HALF]
        rest = [name for name in DOCUMENTS if name not in first]
        services[1][0].kill_supervisor()
        for collection in collections:
            read_all(collection, first)
            with pytest.raises(UnAmbiguousTimeoutException):
                collection.get(rest[0], GetOptions(timeout=SHORT))
        services[1][0].start()
        for collection in collections:
            read_all(collection, list(DOCUMENTS))
        for cluster in clusters:
            cluster.close()


@pytest.mark.ci
def test_a_missing_key_is_absent_only_at_the_mirror_of_its_vbucket(source: SandboxThread, tmp_path: Path) -> None:
    """And a vbucket that no mirror holds is an error, never an absent document."""
    data = tmp_path / "data"
    with mirror(source, data, "--kv", "0", "--http", "0", "--set", f"vbuckets=0-{HALF - 1}") as (_, string):
        cluster = connect(string)
        collection = cluster.bucket("orders").default_collection()
        names = [f"none-{number}" for number in range(64)]
        here = next(name for name in names if vbid_of(name.encode(), VBUCKETS) < HALF)
        elsewhere = next(name for name in names if vbid_of(name.encode(), VBUCKETS) >= HALF)
        with pytest.raises(DocumentNotFoundException):
            collection.get(here)
        with pytest.raises(UnAmbiguousTimeoutException):
            collection.get(elsewhere, GetOptions(timeout=SHORT))
        cluster.close()
        url = until("the HTTP port", lambda: listener(data, "http"))
        until("readiness, with half of the vbuckets", lambda: fetched(f"{url}/readyz")[0] == 200)
        documents = f"{url}/v1/collections/_default._default/documents"
        assert [fetched(f"{documents}/{name}")[0] for name in (here, elsewhere)] == [404, 421]
        assert fetched(documents)[0] == 200
