"""Large documents over HTTP: the same answers as for small ones, read and sent in pieces, with others in between."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from mirror.serve.large import LARGE_BYTES, Block, LargeReads, drop, let_go
from mirror.serve.turns import Budget, Turns
from storage.read.large import PIECE_BYTES, LargeDocument
from storage.read.view import open_view
from tests.serve.http_site import Site, Source
from tests.serve.test_kv_large import BODY, DAMAGED, VALUES, XATTRS, compressed
from tests.supervise.conftest import eventually_now

LONG = b'{"a":"' + random.Random(8).randbytes(5 * PIECE_BYTES).hex().encode() + b'"}'

T = TypeVar("T")


@pytest.mark.parametrize(("value", "datatype", "body"), VALUES.values(), ids=VALUES)
def test_a_large_document_is_answered_as_a_small_one(site: Site, value: bytes, datatype: int, body: bytes) -> None:
    site.source.put("large", value, datatype=datatype)
    answer = site.get(site.document("large"))
    assert answer.content == body
    assert answer.headers["mirror-datatype"] == str(datatype & 1)
    assert answer.headers["content-type"] == ("application/json" if datatype & 1 else "application/octet-stream")
    assert answer.headers["content-length"] == str(len(body))
    head = site.client.head(site.document("large"))
    assert {**head.headers, "date": ""} == {**answer.headers, "date": ""}
    stored = site.get(site.document("large"), params={"form": "stored"})
    assert (stored.content, stored.headers["mirror-datatype"]) == (value, str(datatype))
    tag = answer.headers["etag"]
    assert site.client.get(site.document("large"), headers={"If-None-Match": tag}).status_code == 304
    eventually_now(lambda: site.server.service.budget.out_bytes == 0)


@pytest.mark.parametrize(("value", "datatype"), DAMAGED.values(), ids=DAMAGED)
def test_one_that_cannot_be_taken_apart_is_an_error_and_holds_nothing(site: Site, value: bytes, datatype: int) -> None:
    site.source.put("large", value, datatype=datatype)
    problem = site.get(site.document("large"), 500).json()
    assert problem["type"] == "urn:dcp-mirror:damaged"
    section, snappy = (
        "the xattr section of a value is longer than the value",
        "a compressed value cannot be decompressed",
    )
    assert (snappy if datatype == 3 else section) in problem["detail"]
    assert site.get(site.document("large"), params={"form": "stored"}).content == value
    eventually_now(lambda: site.server.service.budget.out_bytes == 0)


def test_there_is_budget_for_it_before_it_is_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.source.put("large", BODY)
    budget = site.server.service.budget = Budget(len(BODY))
    assert budget.try_take(1)
    monkeypatch.setattr(LargeDocument, "pieces", lambda _: pytest.fail("it was read"))
    assert site.get(site.document("large"), 503).json()["type"] == "urn:dcp-mirror:too-busy"
    assert budget.out_bytes == 1


async def test_one_value_is_read_at_a_time_and_one_piece_in_each_turn_of_the_loop(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = source.key_of(2)
    source.put(key, BODY)
    plain, reading, turn, pieces = LargeDocument.pieces, 0, 0, list[int]()

    def counted(self: LargeDocument) -> Iterator[bytes]:
        nonlocal reading
        reading += 1
        assert reading == 1, "another one is read"
        for piece in plain(self):
            pieces.append(turn)
            yield piece
        reading -= 1

    monkeypatch.setattr(LargeDocument, "pieces", counted)
    with open_view(source.path) as view:
        large = view.get_or_large(key, bytes_max=LARGE_BYTES)
        assert isinstance(large, LargeDocument)
        reads = LargeReads(Turns())
        tasks = [asyncio.create_task(reads.pieces(large, decompress=True)) for _ in range(4)]
        while not all(each.done() for each in tasks):
            turn += 1
            await asyncio.sleep(0)
        for task in tasks:
            found, datatype = task.result()
            assert (b"".join(found), datatype) == (BODY, 1)
    assert len(set(pieces)) == len(pieces) == 4 * 3


@pytest.mark.parametrize("is_sent", [True, False], ids=["sent", "looked at"])
@pytest.mark.parametrize(
    ("value", "datatype"),
    [(LONG, 1), (compressed(LONG), 3), (XATTRS + LONG, 5), (compressed(XATTRS + LONG), 7)],
    ids=["json", "compressed", "xattrs", "both"],
)
async def test_a_turn_of_the_loop_takes_and_gives_back_little_memory(
    source: Source, monkeypatch: pytest.MonkeyPatch, value: bytes, datatype: int, is_sent: bool
) -> None:
    """Clearing 20 MiB once took 16 ms in one step, and giving them back 2 ms."""
    made, released = list[Block](), list[Block]()

    class Noted(Block):
        def __init__(self, byte_count: int) -> None:
            super().__init__(byte_count)
            made.append(self)

        def release(self) -> bool:
            released.append(self)
            return super().release()

    monkeypatch.setattr("mirror.serve.large.Block", Noted)
    key = source.key_of(2)
    source.put(key, value, datatype=datatype)

    async def in_small_steps(work: Coroutine[Any, Any, T], has_ended: Callable[[], bool]) -> T:
        task = asyncio.create_task(work)
        held_bytes = tracemalloc.get_traced_memory()[0]
        while not (task.done() and has_ended()):
            released.clear()
            await asyncio.sleep(0)
            before, held_bytes = held_bytes, tracemalloc.get_traced_memory()[0]
            assert abs(held_bytes - before) <= 2 * PIECE_BYTES + 64 * 1024
            assert len(released) <= 2
        return task.result()

    turns, ended = Turns(), list[bool]()
    with open_view(source.path) as view:
        large = view.get_or_large(key, raw=True, bytes_max=LARGE_BYTES)
        assert isinstance(large, LargeDocument)
        reads = LargeReads(turns)

        async def end(give_back: Callable[[], bool]) -> None:
            let_go(turns, give_back, lambda: ended.append(True))

        tracemalloc.start()
        try:
            if is_sent:
                pieces, _ = await in_small_steps(reads.pieces(large, decompress=True), lambda: True)
                assert b"".join(pieces).endswith(LONG)
                await in_small_steps(end(lambda: drop(pieces)), lambda: bool(ended))
            else:
                section, body = await in_small_steps(reads.body(large), lambda: True)
                assert section == (XATTRS if datatype & 4 else b"")
                assert body.data[:] == LONG
                await in_small_steps(end(body.release), lambda: bool(ended))
            for _ in range(1000):
                await asyncio.sleep(0)
            assert not any(any(block.data[:]) for block in made), "they were given back in steps, to the end"
        finally:
            tracemalloc.stop()
