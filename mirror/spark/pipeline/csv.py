"""Documents as CSV, a vbucket at a time.

Null is an empty field. A body, or a key, that is not UTF-8 is written as text with U+FFFD. Lists, structs and maps have
no spelling in CSV: a `string` column has their JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from mirror.errors import ConfigError
from mirror.spark.pipeline.export import shape_of
from mirror.spark.tables.parts import text_keys
from mirror.typed.bodies import Reading, check_misfits
from mirror.typed.rows import Counts, Maker
from storage.format import seal
from storage.read.reading import BoundaryRead


class CsvText:
    suffix = "csv"

    def __init__(
        self,
        reading: BoundaryRead,
        collections: tuple[str, ...] | None,
        fields: pa.Schema | None,
        reading_of_bodies: Reading,
        misfits_max: float,
    ) -> None:
        """Raises ConfigError."""
        self._reading = reading
        self._collections = collections
        self._shape = shape_of(fields, reading_of_bodies)
        for field in self._shape.schema:
            if pa.types.is_nested(field.type):
                raise ConfigError(
                    f"--format csv: column {field.name} is {field.type}, which CSV cannot have",
                    hint="give it as string, which has its JSON",
                )
        self._counts = Counts()
        self._misfits_max = misfits_max
        self.header = _csv(self._shape.schema.empty_table(), header=True)

    def pieces(self, vbid: int) -> Iterator[tuple[bytes, int]]:
        maker = Maker(self._shape, self._counts, seal.SIZE)
        batches = (batch for rows in self._reading.rows(vbid, self._collections) for batch in maker.add(*rows))
        for batch in chain(batches, maker.rest()):
            yield _csv(pa.Table.from_batches([text_keys(batch)]), header=False), len(batch)

    def check(self) -> None:
        check_misfits(self._counts.misfits, self._counts.documents, self._misfits_max)


def _csv(rows: pa.Table, *, header: bool) -> bytes:
    for at, field in enumerate(rows.schema):
        if pa.types.is_binary(field.type):
            texts = [None if each is None else each.decode(errors="replace") for each in rows[at].to_pylist()]
            rows = rows.set_column(at, pa.field(field.name, pa.string()), pa.array(texts, pa.string()))
        elif pa.types.is_timestamp(field.type):
            rows = rows.set_column(at, field.name, pc.cast(rows[at], pa.string()))
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(rows, sink, pyarrow.csv.WriteOptions(include_header=header, quoting_style="needed"))
    return bytes(sink.getvalue())
