"""Write a data frame as parts (parts.py) on the executors. Rows stay out of pandas and out of the driver.

Knows Spark's interface for writers in Python; never the use of the parts. Each task returns a message that names its
parts. Spark passes the messages of the successful tasks to `commit`, in another Python process on the driver's machine.
`commit` writes them to a file, which `write_parts` reads. Invariant: parts of failed or duplicate attempts are not
reported.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage

from mirror.errors import MirrorError
from mirror.spark.places import Folder, folder_at
from mirror.spark.runner import as_text, error_of
from mirror.spark.source.columns import CHANGES
from mirror.spark.tables.parts import Part, PartWriter, text_keys

NAME = "dcp_mirror_parts"
GROUP_ROWS = 16 * 1024
"""Rows of a row group in `changes`. A merge reads only the row groups that have vbuckets of its part."""


@dataclass
class PartsWritten(WriterCommitMessage):
    parts: list[Part]
    problem: str | None = None


class PartsSink(DataSource):
    @classmethod
    def name(cls) -> str:
        return NAME

    def writer(self, schema: Any, overwrite: bool) -> Writer:
        return Writer(self.options["folder"], self.options["prefix"], self.options["result_file"])


class Writer(DataSourceArrowWriter):
    def __init__(self, folder: str, prefix: str, result_file: str) -> None:
        self._folder = folder
        self._prefix = prefix
        self._result_file = result_file

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartsWritten:
        """Write a task's parts. An error is returned: if it were raised, Spark would try the task four times."""
        try:
            with PartWriter(self._folder, self._prefix, CHANGES, group_rows=GROUP_ROWS) as parts:
                for batch in iterator:
                    parts.write(text_keys(batch.cast(CHANGES)))  # Spark sends times in the session's zone
        except MirrorError as error:
            return PartsWritten([], as_text(error))
        return PartsWritten(parts.finished)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        written = [each for each in messages if isinstance(each, PartsWritten)]
        problem = next((each.problem for each in written if each.problem is not None), None)
        parts = [part for each in written for part in each.parts]
        Path(self._result_file).write_text(json.dumps({"problem": problem, "parts": parts}))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Remove the parts of the other tasks when a task has failed for good."""
        folder = folder_at(self._folder)
        for message in messages:
            for part in message.parts if isinstance(message, PartsWritten) else ():
                folder.remove(part.name)


def write_parts(frame: Any, folder: Folder, prefix: str) -> list[Part]:
    """Write a data frame with the columns of CHANGES as parts. Raises a task's error."""
    frame.sparkSession.dataSource.register(PartsSink)
    with tempfile.TemporaryDirectory(prefix="dcp-mirror-") as scratch:
        result_file = Path(scratch) / "result.json"
        options = {"folder": folder.url, "prefix": prefix, "result_file": str(result_file)}
        frame.write.format(NAME).mode("append").options(**options).save()
        found = json.loads(result_file.read_text())
    if found["problem"] is not None:
        raise error_of(RuntimeError(found["problem"]))
    return [Part(*each) for each in found["parts"]]
