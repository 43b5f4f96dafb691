"""A document ends no process, and is read in the same way by Arrow and by Python: in a child, where a crash is seen.

DCP_MIRROR_FUZZ=10000000 pytest -m long -s tests/fuzz/test_documents.py
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.seeds import seed_from

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


def test_small_numbers_end_no_process() -> None:
    """Arrow's JSON reader divided by a power of ten beyond its table."""
    assert subprocess.run([sys.executable, "-c", READ, *ONCE_FATAL], check=False).returncode == 0


@pytest.mark.parametrize("executions", [3_000, pytest.param(20_000, marks=[pytest.mark.ci])])
def test_documents_are_read_in_one_way(executions: int) -> None:
    assert run(executions).startswith("done")


@pytest.mark.long
@pytest.mark.timeout(24 * 3600)
def test_documents_are_read_in_one_way_for_a_long_time(capsys: pytest.CaptureFixture[str]) -> None:
    said = run(int(os.environ.get("DCP_MIRROR_FUZZ", EXECUTIONS_LONG)))
    with capsys.disabled():
        sys.stdout.write(said)
