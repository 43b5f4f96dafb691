"""The data source `mirror` for PySpark, and the session helpers for users.

PySpark imports every top-level module named `pyspark_*` and registers its `DefaultSource`.
"""

from mirror.spark.source.data_source import MirrorSource as DefaultSource
from mirror.spark.spark_session import register, session

__all__ = ["DefaultSource", "register", "session"]
