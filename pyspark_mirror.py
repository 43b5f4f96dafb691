"""The data source `mirror` for PySpark, and the session helpers for users.

PySpark imports every top-level module named `pyspark_*` and registers its `DefaultSource`.
"""

from mirror.spark.session import register, session
from mirror.spark.source.data_source import MirrorSource as DefaultSource

__all__ = ["DefaultSource", "register", "session"]
