"""Write the rows of an answer as JSON, CSV, Parquet or an Arrow stream, or make them a pandas.DataFrame.

In JSON and CSV a number keeps all its digits (a decimal with a fraction and more than `DOUBLE_DIGITS` digits becomes
text); bytes become base64, a time its ISO 8601 text, NaN and infinities null.
"""

from __future__ import annotations

import base64
import csv
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from mirror.errors import QueryFailed

DOUBLE_DIGITS = 15
"""Decimal digits that a double keeps."""


def plain(value: Any) -> Any:
    """Return an Arrow value as a JSON value."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, pa.MonthDayNano):
        return {"months": value.months, "days": value.days, "nanoseconds": value.nanoseconds}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, Decimal):
        if value == value.to_integral_value():
            return int(value)
        return float(value) if len(value.as_tuple().digits) <= DOUBLE_DIGITS else str(value)
    return value.total_seconds() if isinstance(value, timedelta) else str(value)


def rows(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """Yield rows of plain values. Raises QueryFailed for a value that Python cannot hold, such as the year 294247."""
    try:
        columns = [[plain(value) for value in column.to_pylist()] for column in batch.columns]
    except (ValueError, OverflowError) as error:
        raise QueryFailed(f"a value cannot be shown: {error}", hint="cast its column to VARCHAR") from None
    return zip(*columns, strict=True)


def to_pandas(answer: pa.Table | pa.RecordBatchReader) -> Any:
    """Return the rows as a pandas.DataFrame. Integers stay exact: a column of them has a nullable dtype such as Int64,
    and arrays with a null, and structs, have Python's ints.
    """
    import pandas

    signed = {getattr(pa, f"int{bits}")(): getattr(pandas, f"Int{bits}Dtype")() for bits in (8, 16, 32, 64)}
    unsigned = {getattr(pa, f"uint{bits}")(): getattr(pandas, f"UInt{bits}Dtype")() for bits in (8, 16, 32, 64)}
    dtypes = signed | unsigned | {pa.bool_(): pandas.BooleanDtype()}
    table = answer.read_all() if isinstance(answer, pa.RecordBatchReader) else answer
    return table.to_pandas(types_mapper=dtypes.get, integer_object_nulls=True)


def numeric(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def up_to(reader: pa.RecordBatchReader, rows_max: int) -> Iterator[pa.RecordBatch]:
    """Yield batches of the first `rows_max` rows, and of one further row, if any."""
    left = rows_max + 1
    for batch in reader:
        yield batch.slice(0, left)
        left -= batch.num_rows
        if left <= 0:
            return


def csv_writer(file: IO[str], schema: pa.Schema) -> Callable[[pa.RecordBatch], None]:
    """Write the header line and return a function that writes rows. Nested values become JSON."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(schema.names)

    def write(batch: pa.RecordBatch) -> None:
        for row in rows(batch):
            writer.writerow([json_text(cell) if isinstance(cell, list | dict | bool) else cell for cell in row])

    return write


@contextmanager
def parquet_writer(file: IO[bytes], schema: pa.Schema) -> Iterator[Callable[[pa.RecordBatch], None]]:
    """Yield a function that writes batches. Raises QueryFailed."""
    try:
        with pq.ParquetWriter(file, schema) as writer:
            yield writer.write_batch
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        raise QueryFailed(f"Parquet cannot hold this answer: {error}", hint="cast that column to VARCHAR") from None


class Body:
    """An answer of bounded size, as JSON or as an Arrow stream."""

    def __init__(self, bytes_max: int) -> None:
        self.pieces: list[bytes] = []
        self.is_cut = False
        self.row_count = 0
        self._bytes = 0
        self._bytes_max = bytes_max

    def _write(self, piece: bytes) -> None:
        self.pieces.append(piece)
        self._bytes += len(piece)
        self._check(self._bytes)

    def _check(self, byte_count: int) -> None:
        if byte_count > self._bytes_max:
            raise QueryFailed("the answer is too large", hint="ask for fewer rows or columns")

    def fill(self, reader: pa.RecordBatchReader, rows_max: int, *, arrow: bool) -> None:
        """Append the answer to `pieces`. Raises QueryFailed for a too large answer, and errors of the reader."""
        if arrow:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, reader.schema) as writer:
                for batch in self._counted(reader, rows_max):
                    writer.write_batch(batch)
                    self._check(sink.tell())
            self.pieces.append(sink.getvalue())
            return
        columns = [{"name": field.name, "type": str(field.type)} for field in reader.schema]
        self._write(f'{{"columns":{json_text(columns)},"rows":['.encode())
        for batch in self._counted(reader, rows_max):
            first = "" if self.row_count == batch.num_rows else ","
            text = ",".join(map(json_text, rows(batch)))
            self._write((first + text).encode(errors="surrogatepass"))
        self._write(f'],"truncated":{json_text(self.is_cut)}}}'.encode())

    def _counted(self, reader: pa.RecordBatchReader, rows_max: int) -> Iterator[pa.RecordBatch]:
        for batch in up_to(reader, rows_max):
            self.is_cut = self.row_count + batch.num_rows > rows_max
            kept = batch.slice(0, rows_max - self.row_count)
            self.row_count += kept.num_rows
            if kept.num_rows:
                yield kept
