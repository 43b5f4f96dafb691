"""The process that workers are forked from: what it has imported, and that no thread is alive in it but the memory
allocator's own, which knows about forks; what a worker says when Spark has stopped listening.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mirror.spark.daemon import work

SCRIPT = """
import gc, os, sys, threading
from mirror.spark import daemon
from pyspark import daemon as theirs
theirs.manager = lambda: None
sys.argv = ["daemon", "pyspark.worker"]
daemon.main()
tasks = {open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")}
expected = ("pyspark.worker", "mirror.spark.source.data_source", "mirror.spark.source.remote", "lmdb", "pyarrow.json")
loaded = all(name in sys.modules for name in expected)
print(threading.active_count(), len(tasks - {"jemalloc_bg_thd"}), loaded, gc.get_freeze_count() > 10_000)
"""


def test_the_daemon_has_imported_and_frozen_all_modules_without_a_thread() -> None:
    said = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["1", "1", "True", "True"]


def test_planning_does_not_import_the_clients_of_a_source() -> None:
    """Spark imports the package in a new process for each step of planning: the clients of a source double the time."""
    script = "import sys, pyspark_mirror; print(*(name for name in sys.modules if name.startswith('mirror.feed')))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "\n"


def broken(error: Exception | None, _: bool) -> int:
    try:
        if error is not None:
            raise error
    finally:
        raise BrokenPipeError("the reader has gone")


def test_a_query_that_stops_early_leaves_no_traceback_and_an_error_does(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BrokenPipeError) as raised:
        work(broken, ValueError("a real error"), True)
    assert str(raised.value.__context__) == "a real error"
    pid = os.fork()
    if pid == 0:
        work(broken, None, True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert capfd.readouterr().err == ""
