"""The process that workers are forked from: what it has imported, and that no thread is alive in it but the memory
allocator's own, which knows about forks; what a worker says when Spark has stopped listening.
"""

from __future__ import annotations

import subprocess
import sys

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


def test_everything_is_imported_and_frozen_and_no_thread_is_alive() -> None:
    said = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["1", "1", "True", "True"]


def test_planning_imports_nothing_of_the_network() -> None:
    """Spark imports the package in a new process for each step of planning: the clients of a source double the time."""
    script = "import sys, pyspark_mirror; print(*(name for name in sys.modules if name.startswith('mirror.feed')))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "\n"


BROKEN = """
import sys
from mirror.spark import daemon
from pyspark import daemon as theirs
def worker(sock, authenticated):
    try:
        if sock is not None:
            raise sock
    finally:
        raise BrokenPipeError("nobody listens")
theirs.worker = worker
theirs.manager = lambda: theirs.worker(ValueError("a real error") if sys.argv[1:] else None, True)
daemon.main()
"""


def test_a_query_that_stops_early_leaves_no_trace_but_an_error_does() -> None:
    early = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True)
    assert (early.returncode, early.stderr) == (1, "")
    failed = subprocess.run([sys.executable, "-c", BROKEN, "fail"], capture_output=True, text=True)
    assert failed.returncode == 1
    assert "ValueError: a real error" in failed.stderr
    assert "BrokenPipeError: nobody listens" in failed.stderr
