"""One Spark session for all tests of the run that need one: starting Java costs more than most of them.

With several pytest processes, all such tests go to one of them (`--dist=loadgroup` in pyproject.toml).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from mirror.spark.session import session

FAST = {
    # Less code is compiled, and simpler: tests are over before the better compiler pays.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "1",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever needs the session runs where it is."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session as users get it, on two cores."""
    patch = pytest.MonkeyPatch()
    patch.chdir(tmp_path_factory.mktemp("spark"))  # where Spark would leave its warehouse
    patch.setenv("DCP_MIRROR_PASSWORD", "demo")
    patch.setenv("SPARK_LOCAL_DIRS", str(tmp_path_factory.mktemp("spark-local")))
    made = session("tests", "local[2]", FAST)
    patch.undo()
    yield made
    made.stop()
