"""The writer with a seed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from itertools import islice

from mirror.sandbox import SandboxCluster, Workload, WorkloadOptions
from mirror.sandbox.workload import order_key


def made(**options: float) -> Workload:
    return Workload(SandboxCluster(vbuckets=4).bucket, WorkloadOptions(**options))  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_writes() -> None:
    first, second, other = (list(islice(made(seed=seed).operations(), 500)) for seed in (1, 1, 2))
    assert first == second != other


def test_the_options_for_shares_keys_and_sizes_are_kept() -> None:
    workload = made(seed=3, keys=50, overwrite_share=0.3, delete_share=0.2, value_bytes=400)
    writes = list(islice(workload.operations(), 3000))
    assert len({write.key for write in writes}) == 50
    deletes = [write for write in writes if write.body is None]
    assert 450 < len(deletes) < 750
    bodies = [write.body for write in writes if write.body is not None]
    assert all(abs(len(body) - 400) < 30 for body in bodies)
    assert json.loads(bodies[0])["type"] == "order"
    alive: set[bytes] = set()
    for write in writes:
        if write.body is None:
            assert write.key in alive
            alive.remove(write.key)
        else:
            alive.add(write.key)


def test_loaded_documents_can_be_overwritten() -> None:
    cluster = SandboxCluster(vbuckets=4)
    workload = Workload(cluster.bucket, WorkloadOptions(keys=2000, overwrite_share=1.0, delete_share=0.0))
    assert workload.load(2000) == 2000
    item = cluster.bucket.get(order_key(1999))
    assert item is not None
    assert json.loads(item.value)["number"] == 1999
    workload.write(300)
    assert workload.written == 300
    assert cluster.bucket.document_count == 2000
    assert sum(vbucket.high_seqno for vbucket in cluster.vbuckets) == 2300


async def test_a_workload_writes_until_it_is_cancelled() -> None:
    workload = made(rate=2000)
    task = asyncio.create_task(workload.run())
    async with asyncio.timeout(10):
        while workload.written < 200:  # noqa: ASYNC110 (the writer sends no notice)
            await asyncio.sleep(0.01)
    workload.rate = 0
    await asyncio.sleep(0.03)
    written = workload.written
    await asyncio.sleep(0.03)
    assert workload.written == written
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
