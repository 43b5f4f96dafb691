"""Requests that wait for writes: one look for all of them, when their vbucket changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from mirror.serve.http import waits as http_waits
from mirror.serve.http.waits import WriteWaits
from storage.errors import CorruptedError
from storage.model import FailoverLog, Seqno, Vbuuid
from storage.read.vbucket_reader import VbucketReader
from storage.read.view import View, open_view
from storage.read.wait import MutationToken, WriteState, WriteStatus
from tests.serve.http_site import VBUUID, Source

WAIT_S = 10.0


def token(seqno: int, vbid: int = 4, vbuuid: int = VBUUID) -> MutationToken:
    return MutationToken(vbid, Vbuuid(vbuuid), Seqno(seqno))


@pytest.fixture
def view(source: Source) -> Iterator[View]:
    with open_view(source.path) as opened:
        yield opened


@pytest.fixture
async def waits(view: View) -> AsyncIterator[WriteWaits]:
    made = WriteWaits(lambda: view)
    yield made
    assert made._waiting == {}


def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The vbuckets that are looked at from now on."""
    seen: list[int] = []
    look = WriteState.of

    def counted(reader: VbucketReader) -> WriteState:
        seen.append(reader.vbid)
        return look(reader)

    monkeypatch.setattr(http_waits, "WriteState", type("Counted", (), {"of": staticmethod(counted)}))
    return seen


async def test_all_waiting_requests_share_one_look_when_their_vbucket_changes(
    source: Source, waits: WriteWaits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 requests of 64 tokens each once looked at 12,800 vbuckets every 25 ms."""
    key, other = source.key_of(4), source.key_of(5)
    waiting = [asyncio.create_task(waits.wait(token(2 + number % 2), WAIT_S)) for number in range(200)]
    await asyncio.sleep(0.1)
    seen = looks(monkeypatch)
    source.put(other)
    source.put(key)
    await asyncio.sleep(0.1)
    assert seen == [4]
    assert not any(each.done() for each in waiting)
    source.put(key)
    done, left = await asyncio.wait(waiting, timeout=0.5)
    assert (len(done), len(left), seen) == (100, 100, [4, 4])
    source.put(key)
    await asyncio.wait_for(asyncio.gather(*left), WAIT_S)
    assert seen == [4, 4, 4]


async def test_a_write_that_was_published_just_before_is_not_waited_for(source: Source, waits: WriteWaits) -> None:
    source.put(source.key_of(4))
    await asyncio.wait_for(waits.wait(token(1), 60), WAIT_S)


async def test_a_wait_ends_at_its_timeout_a_lost_write_an_error_or_a_stop(
    source: Source, waits: WriteWaits, monkeypatch: pytest.MonkeyPatch
) -> None:
    await waits.wait(token(9), 0.01)
    for _ in range(2):
        source.put(source.key_of(4))
    lost = asyncio.create_task(waits.wait(token(3), 60))
    stopped = asyncio.create_task(waits.wait(token(1, 5), 60))
    await asyncio.sleep(0.05)
    assert not any(each.done() for each in (lost, stopped))
    source.rollback(4, 1)
    writer = source.writer(4)
    writer.vbuckets[4].save(failover_log=FailoverLog.of([(77, 1), (VBUUID, 0)]))
    writer.commit()
    await asyncio.wait_for(lost, WAIT_S)
    assert waits.look([token(1), token(3)]) == (token(3), WriteStatus.LOST)
    waits.wake()
    await asyncio.wait_for(stopped, WAIT_S)
    broken = asyncio.create_task(waits.wait(token(9, 5), 60))
    await asyncio.sleep(0.05)

    def damaged(_: VbucketReader) -> WriteState:
        raise CorruptedError("damaged")

    monkeypatch.setattr(WriteState, "of", staticmethod(damaged))
    source.put(source.key_of(5))
    await asyncio.wait_for(broken, WAIT_S)
    with pytest.raises(CorruptedError):
        waits.look([token(9, 5)])
