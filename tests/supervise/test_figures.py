from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from typing import Any

import psutil
import pytest

from mirror.supervise.processes.figures import UNKNOWN, Gauge, private_bytes


def test_a_living_process_has_figures() -> None:
    figures: dict[str, Any] = {**Gauge(os.getpid()).read()}
    assert figures["cpu_percent"] >= 0
    assert figures["private_bytes"] is not None
    assert 1_000_000 < figures["private_bytes"] <= figures["resident_bytes"]
    assert figures["threads"] >= 1
    assert figures["open_files"] >= 3


def test_private_memory_counts_what_the_process_holds_and_not_what_is_mapped(tmp_path: object) -> None:
    before = private_bytes(os.getpid())
    held = bytearray(os.urandom(32 * 1024 * 1024))
    after = private_bytes(os.getpid())
    assert before is not None
    assert after is not None
    assert after - before > 30 * 1024 * 1024
    path = os.path.join(str(tmp_path), "file")
    with open(path, "wb+") as file:
        file.write(held)
        file.flush()
        with mmap.mmap(file.fileno(), len(held), prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == held  # pages in
            mapped_too = private_bytes(os.getpid())
    assert mapped_too is not None
    assert mapped_too - after < 16 * 1024 * 1024


def test_a_process_that_is_gone_has_none() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        gauge = Gauge(process.pid)
        process.wait()
    assert gauge.read() == UNKNOWN
    assert private_bytes(process.pid) is None
    assert Gauge(process.pid).read() == UNKNOWN


def test_without_a_descriptor_to_look_with_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A status command failed when the limit of open files was reached."""
    gauge = Gauge(os.getpid())

    def refuse(_: object) -> float:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(psutil.Process, "cpu_percent", refuse)
    assert gauge.read() == UNKNOWN
