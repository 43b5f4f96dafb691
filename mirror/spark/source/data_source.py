"""The data source `mirror` of PySpark: which reader answers which options.

Knows PySpark's interface alone; what is read is decided by `local`, `stream` and `remote`. Readers are pickled and sent
to where tasks run: they hold options and plans, and open stores and connections inside of `read` only. Invariants:
whatever can be known at planning is refused there, in one line (`failures`); filters are taken only by a reader of
their own, since defining `pushFilters` makes every query fail while the session's setting is off.

`remote` takes as long to import as all the rest, and Spark imports this module in a new process for each step of
planning: it is imported where a connection is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    Filter,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from mirror.errors import ConfigError
from mirror.spark.source import local
from mirror.spark.source.carry import Carried
from mirror.spark.source.columns import DOCUMENTS, TABLES
from mirror.spark.source.failures import clear_errors, hide_tracebacks, show_tracebacks, with_clear_errors
from mirror.spark.source.filters import accept
from mirror.spark.source.local import Restriction, Shape
from mirror.spark.source.options import Options, parse
from mirror.spark.source.stream import ChangesReader, ChangesStream
from mirror.typed.bodies import Bodies
from mirror.typed.times import machine_zone

if TYPE_CHECKING:
    from mirror.spark.source import remote

MARK = "_"
"""In front of the names of columns that are not of the body, in a schema that a user gave."""

OWN_COLUMNS = ConfigError(
    "table=changes has columns of its own",
    hint="choose some of them with option columns, and take value apart with from_json",
)


READ_ONLY = ConfigError(
    "a mirror cannot be written",
    hint="write to the cluster, for example with the couchbase-spark-connector; the mirror follows it",
)


class MirrorSource(DataSource):
    """`spark.read.format("mirror")` and `spark.readStream.format("mirror")`; options: `mirror.spark.source.options`."""

    @with_clear_errors
    def __init__(self, options: Mapping[str, str]) -> None:
        """Refuses options that are wrong in themselves."""
        super().__init__(dict(options))
        self._options = parse(options)
        if self._options.path is not None:
            local.opened(self._options.path).close()
        self._own_schema = True

    @classmethod
    def name(cls) -> str:
        """`mirror`."""
        return "mirror"

    @with_clear_errors
    def schema(self) -> StructType:
        """The columns of the table, as far as requested. Only called where the user gives no schema to Spark."""
        self._own_schema = False
        schema = TABLES[self._options.table]
        return from_arrow_schema(pa.schema([schema.field(name) for name in self._options.names]))

    @with_clear_errors
    def reader(self, schema: StructType) -> DataSourceReader:
        """For a batch."""
        options = self._options
        fields = to_arrow_schema(schema, timezone="UTC")
        own_schema = self._own_schema and not of_table(fields, options)
        if options.table == "changes":
            if own_schema:
                raise OWN_COLUMNS
            return ChangesReader(replace(options, columns=tuple(fields.names)))
        shape = shape_of(fields, options, own_schema)
        mark = MARK if own_schema else ""
        if options.pushdown:
            hide_tracebacks()  # PySpark refuses such a reader while its setting is off, and says so in one line
            return PushdownDocumentsReader(options, shape, mark)
        return DocumentsReader(options, shape, mark)

    @with_clear_errors
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """None."""
        raise READ_ONLY

    @with_clear_errors
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """None."""
        raise READ_ONLY

    @with_clear_errors
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """For a stream."""
        refusal = None
        if self._options.table != "changes":
            refusal = ConfigError("documents cannot be streamed", hint="set option table=changes")
        elif self._own_schema:
            refusal = OWN_COLUMNS
        return ChangesStream(self._options, refusal)


def of_table(fields: Any, options: Options) -> bool:
    """True for columns that are the table's own, as a catalog gives back what was put into it: nobody else says so,
    since JSON has neither a binary `value` nor a change's columns.
    """
    table = TABLES[options.table]
    known = all(field.name in table.names and field.type == table.field(field.name).type for field in fields)
    return known and (options.table == "changes" or "value" in fields.names)


def shape_of(schema: Any, options: Options, own_schema: bool) -> Shape:
    """What makes each column. Raises ConfigError for a type that a column cannot have."""
    if not own_schema:
        return Shape(schema, (False,) * len(schema), options.reading)
    if options.columns is not None:
        raise ConfigError("option columns and a schema were both given", hint="name the columns in the schema")
    from_body = []
    for field in schema:
        name = field.name.removeprefix(MARK)
        ours = field.name.startswith(MARK) and name in DOCUMENTS.names
        if ours and field.type != DOCUMENTS.field(name).type:
            raise ConfigError(f"column {field.name} is of type {DOCUMENTS.field(name).type}, not {field.type}")
        from_body.append(not ours)
    Bodies(pa.schema([field for field, of_body in zip(schema, from_body, strict=True) if of_body]), options.reading)
    return Shape(schema, tuple(from_body), options.reading)


@dataclass(repr=False)
class Share(InputPartition):
    """What one task reads. The reader itself is pickled before anything is planned."""

    job: local.Job | remote.ReadJob
    vbids: list[int]


def in_session(shape: Shape) -> Shape:
    """The same with the session's time zone where the options name none: in a task, which has the session's settings.

    One that was not set is the zone of Java, and so of the machine.
    """
    if shape.reading.time_zone is not None:
        return shape
    context = TaskContext.get()
    zone = context.getLocalProperty("spark.sql.session.timeZone") if context is not None else None
    return replace(shape, reading=replace(shape.reading, time_zone=zone or machine_zone()))


class DocumentsReader(Carried, DataSourceReader):
    """Documents."""

    def __init__(self, options: Options, shape: Shape, mark: str) -> None:
        """Nothing is opened."""
        self._options = options
        self._shape = shape
        self._mark = mark
        self._restriction = Restriction()

    @with_clear_errors
    def partitions(self) -> Sequence[InputPartition]:
        """Choose the boundaries that the job reads, and deal them out."""
        if self._options.connection is not None:
            from mirror.spark.source import remote

            far, shares = remote.plan(self._options, self._restriction)
            return [Share(far, vbids) for vbids in shares]
        near, shares = local.plan(self._options, self._restriction)
        return [Share(near, vbids) for vbids in shares]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The batches of a task."""
        assert isinstance(partition, Share)
        with clear_errors():
            if isinstance(partition.job, local.Job):
                yield from local.read(partition.job, partition.vbids, in_session(self._shape))
            else:
                from mirror.spark.source import remote

                yield from remote.read_documents(self._options, partition.job, partition.vbids, in_session(self._shape))


class PushdownDocumentsReader(DocumentsReader):
    """The same, with filters."""

    def partitions(self) -> Sequence[InputPartition]:
        """The reader was not refused."""
        show_tracebacks()
        return super().partitions()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take those whose answer is exact; give the others back."""
        show_tracebacks()
        return list(accept(filters, self._mark, self._restriction))
