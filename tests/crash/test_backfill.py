"""Kills in the middle of a large backfill: staged rows are gone on with, or given up where the source says so.

A disk snapshot far larger than what the worker may hold in memory is written down as it comes, above everything that a
view can see. The kill finds it half staged, or whole and without its key rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import pytest

from mirror.sandbox import SandboxCluster, SandboxThread
from mirror.sandbox.data.streams import AcceptedStream
from storage.admin.check import check
from storage.errors import ViewInvalidated
from storage.model import VbucketState
from storage.read.view import open_view
from tests.crash.judge import judge
from tests.crash.service import Service, until

pytestmark = pytest.mark.ci
DOCUMENTS = 60_000
SMALL_BATCHES = ("--groups", "1", "--workers", "1", "--set", "batch_bytes_max=65536")


def fill(cluster: SandboxCluster) -> None:
    """Write many documents into one vbucket, and leave them on the source's disk only."""
    cluster.bucket.load(
        ((b"order::%06d" % number, b'{"number":%d,"note":"%0200d"}' % (number, number)) for number in range(DOCUMENTS)),
        vbid=0,
    )


def stored(data: Path) -> VbucketState:
    """Return the stored state of vbucket 0. While nothing is published, no row of it may be visible."""
    with open_view(str(data), partial=True) as view:
        try:
            seen = next(view.scan(0, deletions=True), None) or view.get(b"order::000000")
        except ViewInvalidated:
            seen = None  # it was published under the scan's hands
        state = view.state(0)
        assert state.published_seqno or seen is None, "rows of an unfinished snapshot are visible"
        return state


def half_staged(service: Service, least: int) -> VbucketState | None:
    """The state, once more than `least` rows are staged; None before, and before the mirror is made."""
    if not (service.data / "mirror.json").exists():
        return None
    state = stored(service.data)
    assert not state.published_seqno, "the source is slow, and yet all came before the kill"
    return state if state.staged_seqno > least else None


def requests_of(source: SandboxThread) -> list[AcceptedStream]:
    return source.call(lambda: list(source.cluster.sent(0).stream_requests))


def more_requests(source: SandboxThread, requested: int) -> bool:
    return len(requests_of(source)) > requested


@pytest.fixture
def source() -> Iterator[SandboxThread]:
    with SandboxThread(SandboxCluster(vbuckets=1)) as thread:
        thread.call(fill, thread.cluster)
        thread.call(thread.cluster.faults.slow, 25 * DOCUMENTS, future=True)  # for ten seconds
        yield thread


@pytest.fixture
def service(source: SandboxThread, tmp_path: Path) -> Iterator[Service]:
    with Service(source.connection_string, tmp_path / "data", *SMALL_BATCHES) as started:
        started.start()
        yield started


def full_speed(source: SandboxThread) -> None:
    source.call(source.cluster.faults.clear)
    source.call(source.cluster.faults.slow, 0)


def wait_published(service: Service, seqno: int) -> None:
    until(f"seqno {seqno} to be published", lambda: stored(service.data).published_seqno == seqno, poll_s=0.1)


def test_a_backfill_resumes_at_its_staged_rows_after_each_kill(
    source: SandboxThread, service: Service, seed: int
) -> None:
    rng = Random(seed)
    staged = 0
    for number in range(4):
        least = staged + rng.randrange(2_000, 9_000)
        until(f"more than {least} rows to be staged", partial(half_staged, service, least))
        workers = service.wait_workers(1)
        if number % 2:
            service.kill(workers[0]["pid"])
        else:
            service.kill_supervisor()
        report = check(str(service.data))
        assert not report.problems, report.problems
        state = stored(service.data)
        assert state.staged_seqno > staged
        if number % 2 == 0:
            requested = len(requests_of(source))
            assert state.open_snapshot is not None
            assert (state.open_snapshot.start_seqno, state.open_snapshot.end_seqno) == (0, DOCUMENTS)
            service.start()
            until("a stream after the kill", partial(more_requests, source, requested))
            request = requests_of(source)[requested]
            assert request.start_seqno == state.staged_seqno, "staged rows were requested again"
            assert (request.snap_start_seqno, request.snap_end_seqno) == (0, DOCUMENTS)
        staged = int(state.staged_seqno)
    full_speed(source)
    wait_published(service, DOCUMENTS)
    starts = [request.start_seqno for request in requests_of(source)]
    assert starts == sorted(starts), "a later stream began before an earlier one"
    assert len(starts) == 5
    assert judge(source.cluster, service.data, live=True) == {0: DOCUMENTS}
    assert service.terminate() == 0


def test_staged_rows_of_a_history_that_the_source_lost_are_never_published(
    source: SandboxThread, service: Service
) -> None:
    """The source loses changes and fails over while the mirror is dead: what was staged of them would be phantoms."""
    until("rows to be staged", lambda: half_staged(service, DOCUMENTS // 4))
    service.kill_supervisor()
    staged = stored(service.data).staged_seqno
    cluster = source.cluster
    high_seqno = staged + 5_000

    def fail_over() -> None:
        assert cluster.vbucket(0).failover(lose=DOCUMENTS - 2_000) == 2_000
        for number in range(2_000, high_seqno):  # the new history passes the point where the mirror stood
            cluster.set(b"other::%06d" % number, b"{}", vbid=0)
        cluster.bucket.to_disk()

    source.call(fail_over)
    full_speed(source)
    requested = len(requests_of(source))
    service.start()
    wait_published(service, high_seqno)
    later = requests_of(source)[requested:]
    assert all(request.start_seqno <= 2_000 for request in later), (staged, later)
    assert judge(source.cluster, service.data, live=True) == {0: high_seqno}
    with open_view(str(service.data), partial=True) as view:
        assert view.count(0) == high_seqno
        assert view.get(b"order::001999") is not None
        assert view.get(b"order::002000") is None, "a document of the lost history came out"
    assert service.terminate() == 0
    assert judge(source.cluster, service.data, live=False) == {0: high_seqno}


def test_a_kill_between_the_last_row_and_the_key_rows_requests_no_row_again(
    source: SandboxThread, service: Service
) -> None:
    """A snapshot that is complete on disk needs its key rows before it may be seen; they are made after a kill."""
    full_speed(source)

    def complete() -> VbucketState | None:
        if not (service.data / "mirror.json").exists():
            return None
        state = stored(service.data)
        return state if state.staged_seqno == DOCUMENTS else None

    while True:  # on a busy machine the kill may come after the publish
        until("the whole snapshot to be staged", complete, poll_s=0.001)
        service.kill_supervisor()
        report = check(str(service.data))
        assert not report.problems, report.problems
        if stored(service.data).published_seqno == 0:
            break
        shutil.rmtree(service.data)
        service.start()
    sent = source.call(lambda: source.cluster.sent(0).bytes)
    service.start()
    wait_published(service, DOCUMENTS)
    assert source.call(lambda: source.cluster.sent(0).bytes) == sent, "rows that were staged were sent again"
    assert judge(source.cluster, service.data, live=True) == {0: DOCUMENTS}
    assert service.terminate() == 0
