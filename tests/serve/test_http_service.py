"""Waiting for writes and for news, and telling what is missing from what is absent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mirror.clock import SystemClock
from mirror.serve.http_problems import Problem
from mirror.serve.http_service import PublishWatch
from mirror.serve.http_view import Mirror
from storage.model import FailoverLog, Seqno, Vbid, Vbuuid
from storage.wait import MutationToken
from tests.serve.http_site import VBUUID, Site, Source


def test_a_rollback_between_the_wait_and_the_read_lets_no_older_value_through(site: Site) -> None:
    """The read itself sees the older value; the token is looked at again before it is given away."""
    key = site.source.key_of(4)
    site.source.put(key, b"1")
    site.source.put(key, b"2")
    service = site.server.service

    def read() -> bytes | None:
        site.source.rollback(4, 1)
        writer = site.source.writer(4)
        writer.save_failover_log(4, FailoverLog.of([(77, 1), (VBUUID, 0)]))
        writer.commit()
        found = service.view.get(key)
        return found and found.value

    token = MutationToken(Vbid(4), Vbuuid(VBUUID), Seqno(2))
    with pytest.raises(Problem) as caught:
        site.call(service.after([token], 10, read))
    assert caught.value.name == "write-lost"


async def test_one_look_wakes_every_stream_and_none_is_made_for_nobody(source: Source) -> None:
    mirror = Mirror(Path(source.path))
    watch = PublishWatch(mirror, SystemClock())
    watch.enter()
    watch.enter()
    await watch.moved.wait()  # the first look is news to everybody
    moved = watch.moved
    await asyncio.sleep(0.2)
    assert not moved.is_set()
    source.put("a")
    await moved.wait()
    assert not watch.moved.is_set()
    watch.leave()
    assert watch._task is not None
    watch.leave()
    assert watch._task is None
    mirror.close()
