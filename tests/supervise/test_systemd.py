from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mirror.supervise.reports.systemd import Notifier


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "notify"))
        end.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield end


def test_the_messages_follow_the_protocol_of_systemd(manager: socket.socket) -> None:
    notifier = Notifier()
    notifier.ready()
    notifier.status("mirroring:  3 seqnos\nbehind")
    notifier.status("mirroring: 3 seqnos behind")
    notifier.status("bucket 鏡 lags")
    notifier.watchdog()
    notifier.stopping()
    received = [manager.recv(4096).decode() for _ in range(5)]
    assert received == [
        "READY=1",
        "STATUS=mirroring: 3 seqnos behind",
        "STATUS=bucket 鏡 lags",
        "WATCHDOG=1",
        "STOPPING=1",
    ]
    notifier.close()


def test_a_manager_may_have_an_abstract_name() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(f"\0dcp-mirror-{os.getpid()}")
        end.settimeout(5)
        notifier = Notifier({"NOTIFY_SOCKET": f"@dcp-mirror-{os.getpid()}"})
        notifier.ready()
        assert end.recv(4096) == b"READY=1"
        notifier.close()


def test_a_manager_that_has_ended_is_ignored(manager: socket.socket) -> None:
    notifier = Notifier()
    os.unlink(os.environ["NOTIFY_SOCKET"])
    notifier.ready()
    notifier.close()
    notifier.stopping()


def test_a_notifier_without_a_manager_does_nothing() -> None:
    notifier = Notifier()
    notifier.ready()
    notifier.close()


@pytest.mark.parametrize(
    ("environment", "interval_s"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_fed_twice_as_often_as_required(environment: dict[str, str], interval_s: float | None) -> None:
    assert Notifier(environment).watchdog_interval_s() == interval_s
