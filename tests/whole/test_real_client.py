"""A real client at one end, every reader at the other: what the official SDK wrote is what the mirror gives.

The SDK writes into the embedded source as it would into a cluster; the mirror runs as a process; `open_view`, `get` and
`scan` are called. What the SDK itself said of each write (CAS, mutation token) is the measure; what it does not say
(revision, flags, expiry) comes from the source's own record.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.collection import Collection
from couchbase.options import (
    ClusterOptions,
    InsertOptions,
    ReplaceOptions,
    UpsertOptions,
)
from couchbase.transcoder import RawBinaryTranscoder, RawStringTranscoder

from mirror.sandbox import SandboxCluster, SandboxThread, vbucket_of
from mirror.sandbox.data.item import Item
from storage.read.view import open_view
from tests.cli.conftest import call
from tests.crash.judge import published_seqnos
from tests.crash.service import Service, until

BINARY, TEXT = RawBinaryTranscoder(), RawStringTranscoder()
JSON_FLAGS, BINARY_FLAGS, TEXT_FLAGS = 0x0200_0000, 0x0300_0002, 0x0400_0004
REMOVED = object()
THERE_BEFORE = "there before::"
"""Written into each vbucket before anything else: tombstones of the first snapshot a mirror need not keep."""
DEFAULT, CARTS, ITEMS = "_default._default", "shop.carts", "shop.items"


@dataclass
class Written:
    result: Any
    value: Any
    """A Python value for JSON, bytes for the rest, or REMOVED."""
    flags: int = JSON_FLAGS
    expires: bool = False


def write_everything(bucket: Any) -> dict[tuple[str, str], Written]:
    default: Collection = bucket.default_collection()
    carts: Collection = bucket.scope("shop").collection("carts")
    items: Collection = bucket.scope("shop").collection("items")
    hour = timedelta(hours=1)
    as_binary, as_text = UpsertOptions(transcoder=BINARY), UpsertOptions(transcoder=TEXT)
    done: dict[tuple[str, str], Written] = {}

    nested = {"n": 1, "tags": ["x", "ü", None], "nested": {"p": {"q": 2.5}}, "yes": True}
    for key, value in {
        "json::object": nested,
        "json::list": [1, "two", {"three": 3}],
        "json::text": "only text",
        "json::number": 42,
        "json::null": None,
        "json::empty": {},
        "schlüssel mit leerzeichen / ☃": {"snow": "☃" * 100},
        "k" * 240: {"key": "long"},
        "json::compressible": {"pad": "abc " * 5000},
        "json::big": {"rows": [{"number": number, "text": "lamp " * 20} for number in range(20_000)]},
    }.items():
        done[DEFAULT, key] = Written(default.upsert(key, value), value)
    for key, data in {
        "binary::bytes": bytes(range(256)),
        "binary::empty": b"",
        "binary::big": bytes(range(251)) * 40_000,
        "binary::looks-like-json": b'{"n": 1}',
    }.items():
        done[DEFAULT, key] = Written(default.upsert(key, data, as_binary), data, BINARY_FLAGS)
    done[DEFAULT, "text"] = Written(default.upsert("text", "gewöhnlich", as_text), "gewöhnlich".encode(), TEXT_FLAGS)

    done[DEFAULT, "expiry::upsert"] = Written(
        default.upsert("expiry::upsert", {"e": 1}, UpsertOptions(expiry=hour)), {"e": 1}, expires=True
    )
    default.upsert("expiry::lost", {"e": 3}, UpsertOptions(expiry=hour))
    done[DEFAULT, "expiry::lost"] = Written(default.replace("expiry::lost", {"e": 4}), {"e": 4})

    first = default.insert("replaced", {"v": 1}, InsertOptions())
    done[DEFAULT, "replaced"] = Written(default.replace("replaced", {"v": 2}, ReplaceOptions(cas=first.cas)), {"v": 2})
    default.upsert("removed", {"v": 1})
    done[DEFAULT, "removed"] = Written(default.remove("removed"), REMOVED)
    default.upsert("removed and back", {"v": 1})
    default.remove("removed and back")
    done[DEFAULT, "removed and back"] = Written(default.insert("removed and back", {"v": 3}), {"v": 3})
    for number in range(50):
        key = f"cart::{number}"
        done[CARTS, key] = Written(carts.upsert(key, {"cart": number}), {"cart": number})
    for number in range(0, 50, 7):
        key = f"cart::{number}"
        done[CARTS, key] = Written(carts.remove(key), REMOVED)
    done[ITEMS, "json::object"] = Written(items.upsert("json::object", {"same": "key"}), {"same": "key"})
    return done


@pytest.fixture(scope="module")
def source() -> Iterator[SandboxThread]:
    with SandboxThread(SandboxCluster(nodes=2, vbuckets=16)) as thread:
        thread.call(thread.cluster.bucket.create_scope, "shop")
        for name in ("carts", "items"):
            thread.call(thread.cluster.bucket.create_collection, "shop", name)
        for vbid in range(16):
            thread.call(thread.cluster.set, f"{THERE_BEFORE}{vbid}", {}, vbid=vbid)
        yield thread


@pytest.fixture(scope="module")
def written(source: SandboxThread, data: Path) -> Iterator[dict[tuple[str, str], Written]]:
    """Everything written while the mirror runs, and mirrored."""
    address = source.connection_string.partition("@")[2].rpartition("/")[0]
    with Service(source.connection_string, data, "--groups", "4") as service:
        service.start()
        until("the mirror to follow", lambda: [*published_seqnos(data).values()] == high_seqnos(source))
        sdk = Cluster(f"couchbase://{address}", ClusterOptions(PasswordAuthenticator("demo", "demo")))
        try:
            done = write_everything(sdk.bucket("demo"))
        finally:
            sdk.close()
        until(
            "all that the SDK wrote to be published", lambda: [*published_seqnos(data).values()] == high_seqnos(source)
        )
        yield done
        assert service.terminate() == 0
        assert not service.tracebacks()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("client") / "data"


def high_seqnos(source: SandboxThread) -> list[int]:
    return source.call(lambda: [vbucket.high_seqno for vbucket in source.cluster.vbuckets])


def collection_id_of(source: SandboxThread, path: str) -> int:
    entry = source.cluster.bucket.manifest.collection(path)
    assert entry is not None
    return entry.collection_id


def item_of(source: SandboxThread, where: tuple[str, str]) -> Item:
    """The newest version of a document at the source, a tombstone perhaps."""
    bucket = source.cluster.bucket
    wire_key = bucket.wire_key(where[1], where[0])
    vbucket = bucket.vbuckets[vbucket_of(where[1].encode(), len(bucket.vbuckets))]
    return source.call(lambda: vbucket.newest[collection_id_of(source, where[0])][wire_key])


def token_of(done: Written) -> dict[str, Any]:
    token: dict[str, Any] = done.result.mutation_token().as_dict()
    return token


def test_open_view_gives_every_document_as_the_client_wrote_it(
    source: SandboxThread, written: dict[tuple[str, str], Written], data: Path
) -> None:
    with open_view(str(data), partial=True) as view:
        for where, done in written.items():
            collection, key = where
            found = view.get(key, collection)
            if done.value is REMOVED:
                assert found is None, where
                continue
            check_value(where, done, found)
            assert found is not None
            item = item_of(source, where)
            assert found.key == key.encode()
            assert (found.cas, found.flags) == (done.result.cas, done.flags), where
            assert (found.cas, found.flags, found.expiry, found.rev_seqno, found.seqno) == (
                item.cas,
                item.flags,
                item.expiry,
                item.rev_seqno,
                item.seqno,
            ), where
            assert bool(found.expiry) == done.expires, where
            token = token_of(done)
            assert (found.vbid, found.seqno) == (token["partition_id"], token["sequence_number"]), where
            assert view.state(found.vbid).failover_log[0].vbuuid == token["partition_uuid"], where


def check_value(where: tuple[str, str], done: Written, found: Any) -> None:
    assert found is not None, where
    if isinstance(done.value, bytes):
        assert found.value == done.value, where
    else:
        assert (json.loads(found.value), found.datatype) == (done.value, 1), where


def test_scan_prints_every_document_and_every_tombstone(
    source: SandboxThread, written: dict[tuple[str, str], Written], data: Path
) -> None:
    result = call("scan", "--data", data, "--json", "--deletions")
    assert result.code == 0, result.err
    lines = [row for row in result.lines if not row["key"].startswith(THERE_BEFORE)]
    rows = {(row["collection_id"], row["key"]): row for row in lines}
    assert len(rows) == len(lines) == len(written)
    for where, done in written.items():
        row = rows[collection_id_of(source, where[0]), where[1]]
        item = item_of(source, where)
        assert (row["cas"], row["rev_seqno"], row["seqno"]) == (item.cas, item.rev_seqno, item.seqno), where
        assert row["cas"] == done.result.cas
        token = token_of(done)
        assert (row["vbid"], row["seqno"]) == (token["partition_id"], token["sequence_number"])
        assert row["deleted"] == (done.value is REMOVED)
        if row["deleted"]:
            assert row["value"] is None
            continue
        assert (row["flags"], row["expiry"]) == (item.flags, item.expiry)
        if isinstance(done.value, bytes) and "value_b64" in row:
            assert base64.b64decode(row["value_b64"]) == done.value
        elif isinstance(done.value, bytes):
            assert row["value"] == json.loads(done.value)
        else:
            assert row["value"] == done.value


@pytest.mark.parametrize(
    "where",
    [
        (DEFAULT, "binary::big"),
        pytest.param((DEFAULT, "schlüssel mit leerzeichen / ☃"), marks=pytest.mark.ci),
        (CARTS, "cart::1"),
    ],
)
def test_get_prints_the_value_byte_for_byte(
    source: SandboxThread, written: dict[tuple[str, str], Written], data: Path, where: tuple[str, str]
) -> None:
    done = written[where]
    result = call("get", "--data", data, "--collection", where[0], where[1])
    assert result.code == 0, result.err
    assert (result.raw if isinstance(done.value, bytes) else json.loads(result.raw)) == done.value
    reported = call("get", "--data", data, "--collection", where[0], where[1], "--json").json
    item = item_of(source, where)
    assert (reported["cas"], reported["seqno"], reported["rev_seqno"], reported["flags"], reported["expiry"]) == (
        done.result.cas,
        token_of(done)["sequence_number"],
        item.rev_seqno,
        done.flags,
        item.expiry,
    )


def test_a_removed_document_is_absent(written: dict[tuple[str, str], Written], data: Path) -> None:
    assert written[CARTS, "cart::7"].value is REMOVED
    result = call("get", "--data", data, "--collection", CARTS, "cart::7")
    assert (result.code, result.out) == (5, "")
