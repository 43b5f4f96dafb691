"""A writer with a seed: creates, changes and deletes the orders of a shop.

The writer deletes and overwrites only keys that it has created.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from mirror.sandbox.data.bucket import Bucket

TICK_SECONDS = 0.01
WRITES_AT_ONCE_MAX = 5_000
"""If the writer is late, it drops all but this many due writes."""

_FIRST = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo", "Ines", "Jan", "Kaya", "Leo", "Mia", "Nils")
_LAST = ("Abel", "Berg", "Costa", "Dietz", "Evans", "Frost", "Greco", "Holm", "Ito", "Juhl", "Kraft", "Lange")
_CITIES = ("Berlin", "Lyon", "Oslo", "Porto", "Riga", "Turin", "Utrecht", "Vienna", "Zagreb")
_GOODS = ("lamp", "chair", "desk", "kettle", "mug", "scarf", "atlas", "globe", "clock", "radio", "tent", "rope")
_STATES = ("new", "paid", "packed", "sent", "delivered", "returned")


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    seed: int = 0
    rate: float = 1000.0
    keys: int = 100_000
    overwrite_share: float = 0.5
    delete_share: float = 0.05
    value_bytes: int = 300
    """The approximate size of a document."""


@dataclass(frozen=True, slots=True)
class Write:
    key: bytes
    body: bytes | None
    """None: delete."""


class Workload:
    def __init__(self, bucket: Bucket, options: WorkloadOptions) -> None:
        self.options = options
        self.rate = options.rate
        self.written = 0
        self._bucket = bucket
        self._rng = Random(options.seed)
        self._alive: list[int] = []
        self._free: list[int] = []
        self._next = 0

    def operations(self) -> Iterator[Write]:
        rng, options = self._rng, self.options
        while True:
            share = rng.random()
            full = self._next >= options.keys and not self._free
            if self._alive and share < options.delete_share:
                number = self._take(rng.randrange(len(self._alive)))
                yield Write(order_key(number), None)
            elif self._alive and (full or share < options.delete_share + options.overwrite_share):
                number = rng.choice(self._alive)
                yield self._put(number)
            else:
                number = self._free.pop() if self._free else self._next
                self._next = max(self._next, number + 1)
                self._alive.append(number)
                yield self._put(number)

    def write(self, count: int) -> None:
        bucket = self._bucket
        for _, write in zip(range(count), self.operations(), strict=False):
            if write.body is not None:
                bucket.set(write.key, write.body)
            elif bucket.get(write.key) is not None:
                bucket.delete(write.key)
            self.written += 1

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        last, owed = loop.time(), 0.0
        while True:
            now = loop.time()
            owed = min(owed + (now - last) * self.rate, WRITES_AT_ONCE_MAX)
            last = now
            self.write(int(owed))
            owed -= int(owed)
            await asyncio.sleep(TICK_SECONDS)

    def load(self, count: int, *, vbid: int | None = None) -> int:
        """Add orders, as if already on disk; return their number. Without `vbid`, later writes change these orders."""
        first = self._next
        self._next += count
        if vbid is None:
            self._alive.extend(range(first, first + count))
        template = Orders(self._rng, self.options.value_bytes)
        return self._bucket.load(
            ((order_key(number), template.quick(number)) for number in range(first, first + count)), vbid=vbid
        )

    def _put(self, number: int) -> Write:
        return Write(order_key(number), Orders(self._rng, self.options.value_bytes).order(number))

    def _take(self, position: int) -> int:
        number = self._alive[position]
        self._alive[position] = self._alive[-1]
        self._alive.pop()
        self._free.append(number)
        return number


def order_key(number: int) -> bytes:
    return b"order::%08d" % number


class Orders:
    def __init__(self, rng: Random, value_bytes: int) -> None:
        self._rng = rng
        self._bytes = value_bytes
        self._pool: list[bytes] = []

    def order(self, number: int) -> bytes:
        rng = self._rng
        items = [
            {"sku": f"{rng.choice(_GOODS)}-{rng.randrange(1000):03d}", "count": rng.randint(1, 5)}
            for _ in range(rng.randint(1, 3))
        ]
        order: dict[str, object] = {
            "type": "order",
            "number": number,
            "customer": {"name": f"{rng.choice(_FIRST)} {rng.choice(_LAST)}", "city": rng.choice(_CITIES)},
            "state": rng.choice(_STATES),
            "items": items,
            "total": rng.randint(100, 99_999) / 100,
        }
        body = json.dumps(order, separators=(",", ":"))
        missing = self._bytes - len(body) - len(',"note":""')
        if missing > 0:
            words: list[str] = []
            length = 0
            while length < missing:
                words.append(rng.choice(_GOODS))
                length += len(words[-1]) + 1
            body = f'{body[:-1]},"note":"{" ".join(words)[:missing]}"}}'
        return body.encode()

    def quick(self, number: int) -> bytes:
        """Return one of a thousand prepared orders, with this number."""
        if len(self._pool) < 1000:
            self._pool.append(self.order(0)[len(b'{"type":"order","number":0') :])
        return b'{"type":"order","number":%d%b' % (number, self._pool[number % len(self._pool)])
