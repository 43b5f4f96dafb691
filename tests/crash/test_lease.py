"""A lease on history is kept by the running service, through SIGKILL of a worker and of the whole, and no longer than
it was granted for.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from mirror.client import ServiceSaidNo, ask
from mirror.lease import Lease, hold
from mirror.messages import GrantLease
from mirror.sandbox import SandboxCluster, SandboxThread
from storage.read.view import View, open_view
from tests.crash.service import Service, until
from tests.processes import in_child

VBUCKETS = 4


@pytest.fixture
def source() -> Iterator[SandboxThread]:
    with SandboxThread(SandboxCluster(vbuckets=VBUCKETS)) as thread:
        yield thread


def is_published(view: View, vbid: int, seqno: int) -> bool:
    return view.state(vbid).published_seqno >= seqno


def write(source: SandboxThread, view: View, value: int) -> None:
    """Write and publish another version in each vbucket."""
    for vbid in range(VBUCKETS):
        seqno = source.call(source.cluster.set, f"key::{vbid}", {"v": value}, vbid=vbid).seqno
        until(f"seqno {seqno} of vb {vbid}", partial(is_published, view, vbid, seqno))


def positions(view: View) -> list[list[int]]:
    return [[vbid, *map(int, each.pub[:2])] for vbid, each in sorted(view.published().items())]


def floors(view: View) -> list[int]:
    return [int(each.pub.floor_seqno) for _, each in sorted(view.published().items())]


def versions(view: View, as_of: dict[int, tuple[int, int]]) -> list[bytes]:
    return [document.value for vbid, (_, seqno) in as_of.items() for document in view.scan(vbid, as_of=seqno)]


@pytest.mark.ci
def test_a_lease_keeps_history_through_kills_until_its_release(source: SandboxThread, tmp_path: Path) -> None:
    data = tmp_path / "data"
    flags = ("--groups", "2", "--workers", "2", "--set", "history_boundaries=1", "--set", "lease_max_s=60")
    with Service(source.connection_string, data, *flags) as service:
        service.start()
        until("the mirror", lambda: (data / "mirror.json").exists())
        with open_view(str(data), partial=True) as view:
            write(source, view, 1)
            *held_ones, free = (
                (int(each.pub.branch), int(each.pub.seqno)) for _, each in sorted(view.published().items())
            )
            held = dict(enumerate(held_ones))
            with hold(data, held, name="a job", seconds=60) as lease:
                workers = service.wait_workers(2)
                status = service.status()
                assert status is not None
                assert [(row["name"], row["vbuckets"]) for row in status["leases"]] == [("a job", VBUCKETS - 1)]
                for value in (2, 3):
                    write(source, view, value)
                service.kill(workers[0]["pid"])
                write(source, view, 4)
                service.kill_supervisor()
                service.start()
                write(source, view, 5)
                write(source, view, 6)
                newest = [int(each.pub.seqno) for _, each in sorted(view.published().items())]
                until("the floor of what is not held to rise", lambda: floors(view)[-1] == newest[-1] > free[1])
                assert versions(view, held) == [b'{"v":1}'] * len(held)
                assert floors(view)[:-1] == [seqno for _, seqno in held_ones]
                assert lease.lost is None
            with pytest.raises(AssertionError, match="in vain"):
                until("a lease that was released", lambda: leases(service), limit_s=0.5)
            until("the floor to rise", lambda: floors(view) == newest)
            with pytest.raises(ServiceSaidNo, match="is not kept; history begins at"):
                Lease(data, held, name="late", seconds=3)
        assert service.terminate() == 0
        assert not service.tracebacks()


def leases(service: Service) -> list[object]:
    status = service.status()
    return list(status["leases"]) if status else []


@pytest.mark.ci
def test_a_lease_of_a_dead_holder_keeps_history_only_until_it_expires(source: SandboxThread, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Service(source.connection_string, data, "--set", "history_boundaries=1", "--workers", "1") as service:
        service.start()
        service.wait_workers(1)
        with open_view(str(data), partial=True) as view:
            write(source, view, 1)
            answer = ask(data, GrantLease("x", "never renewed", 2, positions(view)))
            assert answer is not None
            write(source, view, 2)
            newest = [int(each.pub.seqno) for _, each in sorted(view.published().items())]
            until("the floor to rise once the lease ended", lambda: floors(view) == newest)
            assert leases(service) == []
        assert service.terminate() == 0


@pytest.mark.ci
def test_a_lease_refused_by_one_worker_holds_nothing_at_the_other(source: SandboxThread, tmp_path: Path) -> None:
    data = tmp_path / "data"
    flags = ("--groups", "2", "--workers", "2", "--set", "history_boundaries=1")
    with Service(source.connection_string, data, *flags) as service:
        service.start()
        service.wait_workers(2)
        with open_view(str(data), partial=True) as view:
            write(source, view, 1)
            old = positions(view)
            write(source, view, 2)
            new = positions(view)
            until("the floor to rise", lambda: floors(view) == [seqno for _, _, seqno in new])
            with pytest.raises(ServiceSaidNo, match="is not kept; history begins at"):
                ask(data, GrantLease("x", "of both workers", 600, [new[0], old[1]]))
            write(source, view, 3)
            newest = [seqno for _, _, seqno in positions(view)]
            until("the floor to rise where something was held", lambda: floors(view) == newest)
        assert service.terminate() == 0


def test_a_lease_without_a_service_is_never_lost(source: SandboxThread, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Service(source.connection_string, data, "--until-caught-up") as service:
        service.start()
        until("the service to end", lambda: service.ended() is not None)
        assert service.ended() == 0
    with hold(data, {0: (1, 0)}, name="alone") as lease:
        assert lease.lost is None


def test_a_forked_child_that_leaves_the_block_does_not_end_its_parents_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sys.exit does in a child."""
    requests = tmp_path / "requests"

    def record(_: Path, message: object) -> None:
        with requests.open("a") as file:
            file.write(type(message).__name__ + " ")

    monkeypatch.setattr("mirror.lease.ask", record)
    holding = hold(tmp_path, {0: (1, 1)}, name="test")
    holding.__enter__()
    in_child(lambda: holding.__exit__(None, None, None))
    assert requests.read_text() == "GrantLease "
    holding.__exit__(None, None, None)
    assert requests.read_text() == "GrantLease ReleaseLease "
