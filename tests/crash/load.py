"""A seeded load for the embedded source: everything that can happen to a document, without end.

Knows the sandbox's direct data calls; never who mirrors it. Overwrites, deletes, expirations, groups that must land in
one snapshot, xattrs, compressed and binary values, a named collection that is dropped and recreated, and vbuckets that
forget their memory, so that anyone who lags is filled from disk. It runs in the sandbox's own loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from random import Random

from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.data.bucket import vbucket_of
from tests.sandbox.past import expire

TICK_S = 0.01
COLLECTION = "shop.carts"


class Load:
    """`run` it as a task of the sandbox's loop, or do some operations at once by `write`."""

    def __init__(self, cluster: SandboxCluster, seed: int, *, rate: float, keys: int, collections: bool = True) -> None:
        self.rate = rate
        self.written = 0
        self._cluster = cluster
        self._bucket = cluster.bucket
        self._rng = Random(seed)
        self._keys = [b"order::%06d" % number for number in range(keys)]
        count = len(cluster.vbuckets)
        self._by_vbid: list[list[bytes]] = [[] for _ in range(count)]
        for key in self._keys:
            self._by_vbid[vbucket_of(key, count)].append(key)
        operations: tuple[tuple[Callable[[], None], float], ...] = (
            (self._set, 60),
            (self._delete, 12),
            (self._expire, 6),
            (self._multi_write, 12),
            (self._forget_memory, 0.3),
        )
        self._operations = operations + (
            ((self._collection_write, 10), (self._new_collection, 0.1)) if collections else ()
        )

    async def run(self) -> None:
        """Write at the rate until cancelled."""
        owed = 0.0
        while True:
            owed += self.rate * TICK_S
            self.write(int(owed))
            owed -= int(owed)
            await asyncio.sleep(TICK_S)

    def write(self, count: int) -> None:
        """Do the next operations now."""
        operations, weights = zip(*self._operations, strict=True)
        for operation in self._rng.choices(operations, weights, k=count):
            operation()
            self.written += 1

    def _body(self) -> bytes:
        rng = self._rng
        if rng.random() < 0.1:
            return rng.randbytes(rng.randrange(400))
        return json.dumps({"written": self.written, "note": "kettle " * rng.randrange(40)}).encode()

    def _set(self) -> None:
        rng = self._rng
        self._bucket.set(
            rng.choice(self._keys),
            self._body(),
            flags=rng.getrandbits(32),
            expiry=rng.choice((0, 0, 0, 2_000_000_000)),
            xattrs={"_sync": {"rev": self.written}, "seen": True} if rng.random() < 0.05 else None,
            compressed=rng.random() < 0.2,
        )

    def _present(self) -> bytes | None:
        key = self._rng.choice(self._keys)
        return key if self._bucket.get(key) is not None else None

    def _delete(self) -> None:
        if key := self._present():
            self._bucket.delete(key)

    def _expire(self) -> None:
        if key := self._present():
            expire(self._bucket, key)

    def _multi_write(self) -> None:
        rng = self._rng
        vbid = rng.randrange(len(self._by_vbid))
        keys = rng.sample(self._by_vbid[vbid], min(len(self._by_vbid[vbid]), rng.randint(2, 6)))
        self._bucket.multi_write(
            vbid,
            [(key, None if self._bucket.get(key) is not None and rng.random() < 0.2 else self._body()) for key in keys],
        )

    def _collection_write(self) -> None:
        if self._bucket.manifest.collection(COLLECTION) is None:
            self._make_collection()
        key = b"cart::%d" % self._rng.randrange(200)
        if self._bucket.get(key, collection=COLLECTION) is not None and self._rng.random() < 0.3:
            self._bucket.delete(key, collection=COLLECTION)
        else:
            self._bucket.set(key, self._body(), collection=COLLECTION)

    def _make_collection(self) -> None:
        scope, _, name = COLLECTION.partition(".")
        if scope not in self._bucket.manifest.scopes.values():
            self._bucket.create_scope(scope)
        self._bucket.create_collection(scope, name)

    def _new_collection(self) -> None:
        if self._bucket.manifest.collection(COLLECTION) is not None:
            self._bucket.drop_collection(COLLECTION)

    def _forget_memory(self) -> None:
        self._bucket.to_disk(self._rng.randrange(len(self._by_vbid)))
