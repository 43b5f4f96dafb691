"""One Spark session for all tests of a run: starting Java costs more than most of them.

With several pytest processes, all such tests go to one of them (tests/conftest.py). Tests that start Java themselves
do it with `java_environment`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.crash.service import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FAST = {"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "1"}
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+IgnoreUnrecognizedVMOptions"
"""Less code is compiled, and simpler: tests are over before the better compiler pays."""
STARTUP = Path(__file__).with_name("startup")


class ObjectStore(NamedTuple):
    """An S3 server on loopback with a bucket `lake`, and the environment in which both libraries find it."""

    endpoint: str
    env: dict[str, str]


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """moto's server in a process of its own: delta-rs holds the interpreter's lock while it waits for an answer."""
    log = tmp_path_factory.mktemp("s3") / "log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=log.parent)
    try:
        found = until("an address", lambda: re.search(r"http://127\.0\.0\.1:\d+", Path(log).read_text()))
        urllib.request.urlopen(urllib.request.Request(f"{found[0]}/lake", method="PUT")).close()
        names = {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": found[0],
            "AWS_ALLOW_HTTP": "true",
        }
        yield ObjectStore(found[0], names)
    finally:
        process.kill()
        process.wait()


def java_environment() -> dict[str, str]:
    """Variables with which Java, and the Pythons that it starts, start fast."""
    from mirror.spark import java

    python = os.pathsep.join([str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"JAVA_HOME": java.home(), "JDK_JAVA_OPTIONS": QUICK, "PYTHONPATH": python, "PYSPARK_PYTHON": sys.executable}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, object_store: ObjectStore) -> Iterator[SparkSession]:
    """A session as users get it, on two cores. Its executors know the object store."""
    from mirror.spark.spark_session import session

    patch = pytest.MonkeyPatch()
    for name, value in (object_store.env | java_environment()).items():
        patch.setenv(name, value)
    patch.chdir(tmp_path_factory.mktemp("spark"))  # where Spark would leave its warehouse
    patch.setenv("DCP_MIRROR_PASSWORD", "demo")
    patch.setenv("SPARK_LOCAL_DIRS", str(tmp_path_factory.mktemp("spark-local")))
    made = session("tests", "local[2]", FAST)
    patch.undo()
    yield made
    made.stop()
