"""One Spark session for all tests of the run that need one: starting Java costs more than most of them.

With several pytest processes, all such tests go to one of them (tests/conftest.py). Tests that start Java themselves
do it with `java_environment`.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
import zlib
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
TOUR = """
import sys
from pyspark.sql import functions as f
from pyspark_mirror import session
spark = session(master="local[2]")
documents = spark.read.format("mirror").load(sys.argv[1])
documents.select(f.from_json(f.col("value").cast("string"), "id long").alias("o")).groupBy("o.id").count().collect()
changes = spark.readStream.format("mirror").option("table", "changes").load(sys.argv[1])
writer = changes.writeStream.format("parquet").option("checkpointLocation", sys.argv[2] + "/checkpoint")
writer.trigger(availableNow=True).start(sys.argv[2] + "/out").awaitTermination()
"""
"""A batch and a stream: most classes that a Spark job loads."""


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


@functools.cache
def java_environment() -> dict[str, str]:
    """Variables with which Java, and the Pythons that it starts, start in half the time.

    Java maps Spark's classes as an earlier start left them, verified, in an archive next to the installed packages. The
    first test of a new environment makes it. Java ignores an archive that does not fit it.
    """
    import pyspark

    from mirror.spark import java

    jars = Path(pyspark.__file__).parent / "jars"
    fits = zlib.crc32(f"{java.home()} {jars} {os.stat(jars).st_mtime_ns} {TOUR}".encode())
    place = Path(sys.prefix if os.access(sys.prefix, os.W_OK) else tempfile.gettempdir())
    archive = place / f"spark-classes-{fits:08x}.jsa"
    python = os.pathsep.join([str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])])
    names = {"JAVA_HOME": java.home(), "PYTHONPATH": python, "PYSPARK_PYTHON": sys.executable}
    with Path(f"{archive}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            for old in place.glob("spark-classes-*.jsa"):
                old.unlink()
            made = Path(f"{archive}.new")
            with tempfile.TemporaryDirectory() as folder:
                tour(
                    Path(folder), os.environ | names | {"JDK_JAVA_OPTIONS": f"{QUICK} -XX:ArchiveClassesAtExit={made}"}
                )
            made.rename(archive)
    return names | {"JDK_JAVA_OPTIONS": f"{QUICK} -XX:SharedArchiveFile={archive} -Xlog:disable"}


def tour(folder: Path, environment: dict[str, str]) -> None:
    """Run a small job. Return when its Java has ended, too: it holds the pipe that is read."""
    from tests.spark.mirrors import SmallMirror, orders

    small = SmallMirror(folder / "data")
    small.put(orders(0, 100))
    small.close()
    command = [sys.executable, "-c", TOUR, str(small.path), str(folder)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, object_store: ObjectStore) -> Iterator[SparkSession]:
    """A session as users get it, on two cores. Its executors know the object store."""
    from mirror.spark.session import session

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
