"""What executors say that lack the package."""

from __future__ import annotations

import subprocess
import sys

from pyspark import cloudpickle

from mirror.spark.source.columns import DOCUMENTS
from mirror.spark.source.data_source import DocumentsReader
from mirror.spark.source.failures import Carried
from mirror.spark.source.local import Shape
from mirror.spark.source.options import parse


def reader() -> DocumentsReader:
    return DocumentsReader(parse({"connection": "couchbase://h/b"}), Shape(DOCUMENTS, (False,) * len(DOCUMENTS)), "_")


def sent() -> bytes:
    pickled: bytes = cloudpickle.dumps(reader())  # type: ignore[no-untyped-call]
    return pickled


def test_a_reader_arrives_as_it_was_sent() -> None:
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
