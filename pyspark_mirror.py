"""The module by which PySpark finds the data source `mirror` by itself, and users its session helper.

PySpark imports every top-level module named `pyspark_*` and registers its `DefaultSource`. Knows where things are, and
nothing else.
"""

from mirror.spark.session import register, session
from mirror.spark.source.data_source import MirrorSource as DefaultSource

__all__ = ["DefaultSource", "register", "session"]
