"""A document ends no process, and every reader gives what plain Python finds in it: in a child, where a crash is seen.

DCP_MIRROR_FUZZ=10000000 pytest -m long -s tests/fuzz/test_documents.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from mirror import open_view
from mirror.sql import sample
from tests.fuzz.documents import NAMES, ODD_NAMES, Documents
from tests.fuzz.readers import METADATA, Mirror, folded, quoted
from tests.seeds import seed_from
from tests.serve.http_site import Source, running

EXECUTIONS_LONG = 1_000_000
ONCE_FATAL = ('{"v":1e-999999999}', '{"v":"1e-2000000"}', '{"v":"1\\u0065-999999999"}', '{"v":"1e\\u002d999999999"}')
READ = """
import sys, pyarrow as pa
from mirror.typed.bodies import Bodies, Reading
from mirror.typed.ddl import fields_of
kinds = ("decimal(10,2)", "decimal(38,18)", "double", "string", "int", "map<string,decimal(5,1)>")
for kind, text in ((kind, text) for kind in kinds for text in sys.argv[1:]):
    body = pa.array([text.encode()], pa.binary())
    Bodies(fields_of("v " + kind), Reading("permissive")).columns(body, b"\\1", body)
"""


def run(executions: int) -> str:
    seed = seed_from("DCP_MIRROR_FUZZ_SEED")
    command = [sys.executable, "-m", "tests.fuzz.documents", str(executions), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = "\n".join([*done.stdout.splitlines()[-1:], done.stderr[-4000:]])
    assert done.returncode == 0, f"ended with {done.returncode} (seed {seed}): {said}"
    return said


def test_a_tiny_number_does_not_end_the_process() -> None:
    """Arrow's JSON reader divided by a power of ten beyond its table."""
    assert subprocess.run([sys.executable, "-c", READ, *ONCE_FATAL], check=False).returncode == 0


def test_all_readers_agree_on_random_documents() -> None:
    assert run(4_000).startswith("done")


@pytest.mark.ci
def test_spark_and_an_http_server_agree_with_plain_python(spark: SparkSession, tmp_path: Path) -> None:
    rng = Random(seed_from("DCP_MIRROR_FUZZ_SEED"))
    documents = Documents(rng)
    mirror = Mirror(tmp_path, Counter(), rng)
    fields = {name: documents.kind() for name in rng.sample(NAMES + ODD_NAMES, 20)}
    mirror.put({f"k{at}": documents.document(fields) for at in range(300)})
    with open_view(mirror.made.path) as view:
        found = [each for each in sample(view, "_default._default") if folded(each.name) not in METADATA]
    columns = [each.field for each in found]
    typed = from_arrow_schema(pa.schema([pa.field("_key", pa.string()), *columns]))
    path = str(mirror.made.path)
    reader = spark.read.format("mirror").option("mode", "permissive").option("columnNameOfCorruptRecord", "misfit")
    mirror.check("Spark", reader.schema(typed).load(path).toArrow().to_pylist(), columns)
    inferred = spark.read.format("mirror").option("inferSchema", True).load(path)
    assert set(inferred.columns) >= set(typed.names)
    mirror.check("Spark, inferred", inferred.toArrow().to_pylist(), columns)
    with running(mirror.made.path, Source(path), sql=True) as site:
        names = ", ".join(["_key", *(quoted(each.name) for each in columns)])
        answer = site.client.post("/v1/query", json={"sql": f"SELECT {names} FROM documents"})
        assert answer.status_code == 200, answer.text
        own = [each["name"] for each in answer.json()["columns"]]
        rows = [dict(zip(own, row, strict=True)) for row in answer.json()["rows"]]
        mirror.check("HTTP", rows, [each.field.with_type(pa.json_()) if each.mixed else each.field for each in found])
    mirror.made.close()


@pytest.mark.long
@pytest.mark.timeout(24 * 3600)
def test_all_readers_agree_on_random_documents_for_a_long_time(capsys: pytest.CaptureFixture[str]) -> None:
    said = run(int(os.environ.get("DCP_MIRROR_FUZZ", EXECUTIONS_LONG)))
    with capsys.disabled():
        sys.stdout.write(said)
