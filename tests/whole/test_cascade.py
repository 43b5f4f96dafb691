"""A mirror of a mirror, as processes: whichever is killed under load, source and both mirrors agree at the end."""

from __future__ import annotations

import asyncio
import socket
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mirror.sandbox import SandboxCluster, SandboxThread
from storage.check import check
from storage.view import View, open_view
from tests.cli.conftest import call
from tests.crash.load import Load
from tests.crash.service import Service, until

VBUCKETS, RATE, KEYS = 16, 200, 1000
KILLS = ("dcp server", "worker", "supervisor", "worker of the second", "dcp server")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def published(service: Service) -> dict[int, int]:
    with open_view(str(service.data)) as view:
        return {int(state.vbid): int(state.published_seqno) for state in view.states()}


def documents(view: View, vbid: int) -> dict[tuple[int, bytes], tuple[Any, ...]]:
    return {
        (each.collection_id, each.key): (each.seqno, each.cas, each.rev_seqno, each.flags, each.expiry, each.value)
        for each in view.scan(vbid, now=0, raw=True)
    }


def kill(what: str, middle: Service, second: Service) -> None:
    if what == "supervisor":
        middle.kill_supervisor()
        middle.start()
        return
    service = second if what == "worker of the second" else middle

    def pid() -> int | None:
        rows = (service.status() or {}).get("servers" if what == "dcp server" else "workers") or ()
        return next((row["pid"] for row in rows if row["phase"] == "running" and row["pid"]), None)

    service.kill(until(f"a {what}", pid))


def has_news(service: Service, before: dict[int, int]) -> bool:
    return safely_published(service) != before


@pytest.mark.ci
def test_a_cascade_agrees_with_its_source_whoever_is_killed(tmp_path: Path) -> None:
    port = free_port()
    cluster = SandboxCluster(nodes=2, vbuckets=VBUCKETS, seed=11)
    url = f"couchbase://demo@127.0.0.1:{port}/{cluster.bucket.name}"
    with (
        SandboxThread(cluster) as source,
        Service(source.connection_string, tmp_path / "a", "--workers", "1", "--dcp", str(port), log=tmp_path / "a.log")
        as middle,
        Service(url, tmp_path / "b", "--workers", "1", log=tmp_path / "b.log") as second,
    ):  # fmt: skip
        load = source.call(Load, cluster, 5, rate=RATE, keys=KEYS)
        source.call(load.write, 2000)
        middle.start()
        second.start()

        async def begin() -> asyncio.Task[None]:
            return asyncio.create_task(load.run())

        writing = source.run(begin())
        until("the second mirror to publish", lambda: second.data.exists() and any(safely_published(second).values()))
        rng = Random(3)
        for number, what in enumerate(KILLS):
            before = safely_published(second)
            kill(what, middle, second)
            if number % 2:
                for vbid in rng.sample(range(VBUCKETS), 3):
                    source.call(cluster.failover, vbid, lose=rng.randrange(1, 5))
            until(f"news after the {what} died", partial(has_news, second, before))
            time.sleep(0.5)
        source.call(writing.cancel)

        def level() -> dict[int, int]:
            wanted = source.call(lambda: {vbid: cluster.vbucket(vbid).high_seqno for vbid in range(VBUCKETS)})
            until("the middle to be level", lambda: published(middle) == wanted)
            until("the second to be level", lambda: published(second) == wanted)
            return wanted

        level()
        for vbid in range(VBUCKETS):
            source.call(cluster.failover, vbid, lose=3)
            source.call(cluster.set, "instead", {"of": "what was lost"}, vbid=vbid)
        wanted = level()
        result = call("verify", "--data", second.data, "--source", url)
        assert result.code == 0, result.err
        source_states = source.call(
            lambda: {
                vbid: {key: (item.seqno, item.cas) for key, item in cluster.vbucket(vbid).state_at(seqno).items()}
                for vbid, seqno in wanted.items()
            }
        )
        with open_view(str(middle.data)) as a, open_view(str(second.data)) as b:
            for vbid in range(VBUCKETS):
                one, two = documents(a, vbid), documents(b, vbid)
                assert one == two, f"vb {vbid}"
                assert len(two) == len(source_states[vbid])
                assert {found[:2] for found in two.values()} == set(source_states[vbid].values())
                assert a.state(vbid).failover_log == b.state(vbid).failover_log
                assert a.rollbacks(vbid)
                assert b.rollbacks(vbid)
        assert second.terminate() == 0
        assert middle.terminate() == 0
        assert not middle.tracebacks()
        assert not second.tracebacks()
        assert check(str(second.data), deep=True).problems == []


def safely_published(service: Service) -> dict[int, int]:
    """Nothing while the directory is being made."""
    if not (service.data / "mirror.json").exists():
        return {}
    return published(service)
