"""The process from which Spark forks its Python workers. It imports the workers' modules before the first fork.

The setting spark.python.daemon.module names this module; Spark passes the name of the worker's module as an argument.
PySpark runs garbage collection after each task. Objects made before the first fork are frozen: garbage collection skips
them, so workers share their memory. At the first fork no thread is alive, except those of the memory allocator, which
is safe in a fork.
"""

from __future__ import annotations

import gc
import os
import sys
from functools import partial
from importlib import import_module
from typing import Any

from pyspark import daemon

READERS = ("mirror.spark.source.data_source", "mirror.spark.source.remote", "pyarrow.compute", "pyarrow.json")


def main() -> None:
    for name in (*READERS, *(each for each in sys.argv[1:2] if each.startswith("pyspark."))):
        import_module(name)
    daemon.worker = partial(work, daemon.worker)
    gc.collect()
    gc.freeze()
    daemon.manager()


def work(worker: Any, sock: Any, authenticated: bool) -> int:
    """Run PySpark's worker. If Spark has closed the connection, for example because a `limit` is reached, end without a
    traceback.

    PySpark's worker reports a task's error to Spark. If the connection breaks during the report, raise BrokenPipeError.
    """
    try:
        return int(worker(sock, authenticated))
    except BrokenPipeError as error:
        if error.__context__ is not None:
            raise
        os._exit(1)


if __name__ == "__main__":
    main()
