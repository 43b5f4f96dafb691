"""The handbook and docs/spark.md are run: their lines for the shell in one bash, those in Python here, in order.

Other ports and folders than they name, and the tests' session; nothing else. Their own asserts are the verdict.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import mirror.spark
from tests.docs.blocks import BLOCK, SPARK_PAGE, Shell, blocks_of, site
from tests.ports import free_port
from tests.spark.sessions import java_environment

HANDBOOK = Path(mirror.spark.__file__).with_name("HANDBOOK.md")
FOLDER, PORT = "/tmp/shop", "11310"

pytestmark = [pytest.mark.ci, pytest.mark.timeout(1200)]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path, java_environment())
    yield made
    made.end()


def test_every_block_of_the_handbook_runs(spark: SparkSession, shell: Shell, tmp_path: Path) -> None:
    text = HANDBOOK.read_text().replace(FOLDER, str(tmp_path / "shop")).replace(PORT, str(free_port()))
    blocks = [(found["language"], found["text"]) for found in BLOCK.finditer(text)]
    assert {language for language, _ in blocks} == {"sh", "python"}
    assert len(blocks) == text.count("\n```\n"), "a block in another language is not run"
    names: dict[str, Any] = {}
    for language, block in blocks:
        if language == "sh":
            shell.run(block)
        else:
            exec(compile(block, str(HANDBOOK), "exec"), names)
    assert names["spark"] is spark


def test_every_block_of_the_page_on_spark_runs(spark: SparkSession, tmp_path: Path) -> None:
    """The tests' session runs the statements in SQL."""
    found = [block for block in blocks_of(SPARK_PAGE) if block.mark != "not run: needs the package from an index"]
    assert {block.language for block in found if not block.is_run} == {"sql"}
    with site(tmp_path, java_environment()) as quick_start:
        names: dict[str, Any] = {}
        for block in found:
            if block.language == "sql":
                for statement in quick_start.placed(block.text).strip().removesuffix(";").split(";"):
                    spark.sql(statement)
                assert spark.table("orders").where("total > 0").count() > 0 < spark.table("raw").count()
            else:
                quick_start.run(block, names)
    assert names["spark"] is spark
    assert names["query"].exception() is None
    assert names["orders"].columns == ["_key", "number", "total", "customer"]
    assert names["count"] > 0
    spark.sql("DROP VIEW orders")
    spark.sql("DROP TABLE orders_columns")
