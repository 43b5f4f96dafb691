"""Start a Spark session with nothing but pip's packages: find Java, and set defaults for Python workers.

An existing session is used unchanged. Settings of spark-submit and of the caller override the defaults.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from mirror.errors import ConfigError
from mirror.spark import java

WORKERS: dict[str, str] = {
    # Workers are forked from a process that has done their imports. With TCP instead of Unix sockets, each task takes
    # 20 ms longer.
    "spark.python.daemon.module": "mirror.spark.daemon",
    "spark.python.unix.domain.socket.enabled": "true",
}
LOCAL: dict[str, str] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "localhost",
    "spark.driver.bindAddress": "127.0.0.1",
}
GATEWAY = "PYSPARK_GATEWAY_PORT"
"""An environment variable that spark-submit sets after it has started Java."""


def session(
    name: str = "dcp-mirror", master: str | None = None, settings: Mapping[str, str] | None = None
) -> SparkSession:
    """Return the active session, or a new one on `master` (default: all cores; under spark-submit: the job's).

    `settings` are Spark's, and override the defaults. Raises ConfigError if there is no Java.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    conf = dict(settings or {})
    submitted = GATEWAY in os.environ
    if submitted:
        SparkContext._ensure_initialized()
        given = {key for key, _ in SparkConf().getAll()}
    else:
        os.environ["JAVA_HOME"] = java.home()
        given = set()
        conf["spark.master"] = master or conf.get("spark.master") or f"local[{len(os.sched_getaffinity(0))}]"
    local = conf.get("spark.master", "").startswith("local")
    if local:
        defaults = WORKERS | LOCAL | {"spark.sql.shuffle.partitions": str(len(os.sched_getaffinity(0)))}
    else:
        defaults = WORKERS
    builder = SparkSession.builder.appName(name)
    for key, value in (defaults | conf).items():
        if key not in given or key in conf:
            builder = builder.config(key, value)
    made = builder.getOrCreate()
    if local:
        # Errors are raised to the caller; Spark's log would repeat them with the stack of each task.
        made.sparkContext.setLogLevel("FATAL")
    return made


def register(spark: SparkSession, path: str) -> list[str]:
    """Make a temporary view of each collection with the columns of a sample, and return the views' names.

    The view of `scope.name` is called `scope_name`, and the view of the default collection `documents`. Raises
    ConfigError if two views would have one name, and StorageError.
    """
    from mirror.sql.read import DEFAULT_COLLECTION
    from storage.read.view import open_view

    with open_view(path) as view:
        names = sorted(view.reading().collections())
    views = {name: "documents" if name == DEFAULT_COLLECTION else re.sub(r"\W", "_", name) for name in names}
    collections: dict[str, str] = {}
    for name, made in views.items():
        other = collections.setdefault(made.lower(), name)  # Spark ignores the case of a view's name
        if other != name:
            raise ConfigError(f"{other} and {name} would be one view", hint="load each with option collection")
    for name, made in views.items():
        reader = spark.read.format("mirror").option("collection", name).option("inferSchema", True)
        reader.load(path).createOrReplaceTempView(made)
    return list(views.values())


@contextmanager
def lasting(name: str) -> Iterator[SparkSession]:
    """Yield the active session, or start one and stop it afterwards. Raises ConfigError if there is no Java."""
    found = SparkSession.getActiveSession()
    used = found or session(name)
    try:
        yield used
    finally:
        if found is None:
            used.stop()
