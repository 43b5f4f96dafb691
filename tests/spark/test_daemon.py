"""The process that workers are forked from: what it has imported, and that no thread is alive in it but the memory
allocator's own, which knows about forks.
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
loaded = all(name in sys.modules for name in ("pyspark.worker", "mirror.spark.source", "lmdb", "pyarrow.json"))
print(threading.active_count(), len(tasks - {"jemalloc_bg_thd"}), loaded, gc.get_freeze_count() > 10_000)
"""


def test_everything_is_imported_and_frozen_and_no_thread_is_alive() -> None:
    said = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["1", "1", "True", "True"]
