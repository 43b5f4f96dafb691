"""A user's mistake is one clear error; a programmer's mistake keeps its traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from pyspark import cloudpickle

from mirror.errors import ConfigError
from mirror.spark.source.columns import DOCUMENTS
from mirror.spark.source.data_source import DocumentsReader
from mirror.spark.source.failures import Carried, MirrorSourceError, clear_errors, with_clear_errors
from mirror.spark.source.options import parse
from mirror.typed.rows import Shape
from storage.errors import CorruptedError


@pytest.fixture(autouse=True)
def tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset before, and after."""
    monkeypatch.setenv("SPARK_HIDE_TRACEBACK", "")


def test_a_foreseen_error_is_one_line_without_a_traceback() -> None:
    with pytest.raises(MirrorSourceError) as raised, clear_errors():
        raise CorruptedError("a row\nis damaged", path="/data", vbid=3, hint="run check")
    assert str(raised.value) == "/data: vbucket 3: a row is damaged (run check)"
    assert os.environ["SPARK_HIDE_TRACEBACK"] == "1"


def test_a_decorated_function_reports_its_error_in_one_line() -> None:
    @with_clear_errors
    def fails(what: str) -> None:
        raise ConfigError(what, hint="fix it")

    with pytest.raises(MirrorSourceError, match=r"^this is wrong \(fix it\)$"):
        fails("this is wrong")


def test_an_unforeseen_error_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), clear_errors():
        divmod(1, 0)
    assert not os.environ["SPARK_HIDE_TRACEBACK"]


def reader() -> DocumentsReader:
    return DocumentsReader(parse({"path": "/data"}), Shape(DOCUMENTS, (False,) * len(DOCUMENTS)))


def sent() -> bytes:
    pickled: bytes = cloudpickle.dumps(reader())  # type: ignore[no-untyped-call]
    return pickled


def test_a_reader_is_unchanged_after_pickling() -> None:
    arrived = cloudpickle.loads(sent())
    assert type(arrived) is DocumentsReader
    assert arrived.__dict__.keys() == reader().__dict__.keys()
    assert issubclass(DocumentsReader, Carried)


def test_a_missing_package_is_named_in_one_line_with_its_place_and_remedy() -> None:
    script = "\n".join(
        (
            "import sys, pickle",
            "from pyspark import cloudpickle",
            "assert 'mirror' not in sys.modules",
            "sys.modules['mirror'] = None",
            "try: pickle.loads(sys.stdin.buffer.read())",
            "except Exception as error: print(type(error).__name__, error, sep=': ')",
        )
    )
    done = subprocess.run([sys.executable, "-c", script], input=sent(), capture_output=True, check=True)
    said = done.stdout.decode()
    assert said.startswith(f"MirrorSourceError: the Python of an executor ({sys.executable} on ")
    assert "has no package mirror (pip install 'dcp-mirror[spark]' on every executor" in said
    assert said.count("\n") == 1
