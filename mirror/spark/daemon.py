"""The process that Spark forks its Python workers from, with everything that they need imported beforehand.

Spark runs it by the setting spark.python.daemon.module, with the name of the worker's module as its argument. Knows
what workers import; never what they do. PySpark collects garbage after each task: objects that are here before the
first fork are frozen, so that this costs nothing and their pages stay shared. Invariant: no thread is alive when the
first worker is forked, but the memory allocator's own, which knows about forks.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module

from pyspark import daemon

READERS = ("mirror.spark.source", "pyarrow.compute", "pyarrow.json")


def main() -> None:
    """Import, freeze, serve."""
    for name in (*READERS, *(each for each in sys.argv[1:2] if each.startswith("pyspark."))):
        import_module(name)
    gc.collect()
    gc.freeze()
    daemon.manager()


if __name__ == "__main__":
    main()
