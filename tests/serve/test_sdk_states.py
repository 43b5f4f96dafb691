"""The official SDK's report for a vbucket in each state: never an absent document if the mirror cannot know it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from couchbase import subdocument as sd
from couchbase.exceptions import TemporaryFailException
from couchbase.options import ExistsOptions, GetAnyReplicaOptions, GetOptions, LookupInOptions

from tests.serve.kv_rig import Store, serving
from tests.serve.test_official_sdk import connect

SHORT = timedelta(milliseconds=300)
LONG = timedelta(seconds=60)
KEY = b"key"
JSON = 1

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


def write(store: Store, number: int, seqno: int, *, publish: bool = True) -> None:
    store.put(KEY, b'{"n":%d}' % number, seqno, datatype=JSON, publish=publish)


@asynccontextmanager
async def reading(store: Store) -> AsyncIterator[Any]:
    """A collection at an endpoint over the store."""
    async with serving(store.path) as endpoint:
        cluster = await asyncio.to_thread(connect, f"couchbase://127.0.0.1:{endpoint.port}")
        bucket = await asyncio.to_thread(cluster.bucket, "orders")
        yield bucket.default_collection()
        await asyncio.to_thread(cluster.close)


def accept(store: Store) -> None:
    """A stream was accepted, and has brought nothing."""
    store.log(0, (77, 0))


def backfill(store: Store) -> None:
    """The first snapshot comes in."""
    store.logs()
    write(store, 1, 5, publish=False)


def resync(store: Store) -> None:
    """Begin a resync next to the old copy."""
    store.logs()
    write(store, 1, 5)
    store.writer.vbuckets[0].begin_resync()
    store.writer.commit()


async def got(collection: Any, limit: timedelta = SHORT) -> int:
    found = await asyncio.to_thread(collection.get, "key", GetOptions(timeout=limit))
    return int(found.content_as[dict]["n"])


@pytest.mark.parametrize("happen", [None, accept, backfill, resync])
async def test_while_nobody_knows_every_read_is_a_temporary_failure(
    store: Store, happen: Callable[[Store], None] | None
) -> None:
    """Once its timeout is over: the SDK tries again until then."""
    if happen is not None:
        happen(store)
    async with reading(store) as collection:
        for read in READS.values():
            with pytest.raises(TemporaryFailException):
                await asyncio.to_thread(read, collection)


async def test_a_read_that_was_tried_again_succeeds_when_the_vbucket_is_there(store: Store) -> None:
    async with reading(store) as collection:
        waiting = asyncio.create_task(got(collection, LONG))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        store.logs()
        write(store, 1, 5)
        assert await waiting == 1


async def test_the_refusal_says_why(store: Store) -> None:
    async with serving(store.path) as endpoint:
        client = await endpoint.sdk()
        assert b"the vbucket is not published yet" in (await client.get(b"\0" + KEY)).value
        resync(store)
        assert b"the vbucket is being resynced" in (await client.get(b"\0" + KEY)).value
