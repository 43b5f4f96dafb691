"""The data source `mirror` of PySpark: chooses the reader for the options.

Spark pickles readers and sends them to the tasks. So readers hold options and plans, and open stores and connections
only inside `read`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from mirror.errors import ConfigError
from mirror.spark.source import local
from mirror.spark.source.changes_stream import ChangesReader, ChangesStream
from mirror.spark.source.columns import DOCUMENTS, TABLES
from mirror.spark.source.failures import Carried, clear_errors, with_clear_errors
from mirror.spark.source.options import Options, parse
from mirror.typed.bodies import Bodies
from mirror.typed.rows import Shape
from mirror.typed.times import machine_zone
from mirror.typed.values import folded
from storage.read.view import Time, open_view

MARK = "_"
"""Prefix of metadata columns in a user's schema."""

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
        super().__init__(dict(options))
        self._options = parse(options)
        if self._options.path is not None:
            open_view(self._options.path).close()
        self._own_schema = True

    @classmethod
    def name(cls) -> str:
        return "mirror"

    @with_clear_errors
    def schema(self) -> StructType:
        """Spark calls this only if the user gives no schema."""
        if self._options.infer_schema:
            return from_arrow_schema(inferred(self._options))
        self._own_schema = False
        schema = TABLES[self._options.table]
        return from_arrow_schema(pa.schema([schema.field(name) for name in self._options.names]))

    @with_clear_errors
    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._options
        fields = to_arrow_schema(schema, timezone="UTC")
        own_schema = self._own_schema and not of_table(fields, options)
        if options.table == "changes":
            if own_schema:
                raise OWN_COLUMNS
            return ChangesReader(replace(options, columns=tuple(fields.names)))
        return DocumentsReader(options, shape_of(fields, options, own_schema))

    @with_clear_errors
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        raise READ_ONLY

    @with_clear_errors
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        raise READ_ONLY

    @with_clear_errors
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        refusal = None
        if self._options.table != "changes":
            refusal = ConfigError("documents cannot be streamed", hint="set option table=changes")
        elif self._own_schema:
            refusal = OWN_COLUMNS
        return ChangesStream(self._options, refusal)


def inferred(options: Options) -> pa.Schema:
    """Return the key column, and columns for the fields in a sample. Raises StorageError, ConfigError."""
    from mirror.sql.schema import joint_columns

    assert options.path is not None
    as_of = None if options.as_of_ms is None else Time(options.as_of_ms)
    with open_view(options.path) as view:
        columns = joint_columns(view, options.collections, as_of)
    taken = {f"{MARK}{name}" for name in DOCUMENTS.names}
    fields = [each.field for each in columns if folded(each.name) not in taken]
    return pa.schema([pa.field(f"{MARK}key", pa.string()), *fields])


def of_table(fields: Any, options: Options) -> bool:
    """Return True if `fields` are the table's own columns, which a catalog passes like a user's schema. A user's schema
    has no binary `value`, and no columns of changes.
    """
    table = TABLES[options.table]
    known = all(field.name in table.names and field.type == table.field(field.name).type for field in fields)
    return known and (options.table == "changes" or "value" in fields.names)


def shape_of(schema: Any, options: Options, own_schema: bool) -> Shape:
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
    """The vbuckets that one task reads. The share has the job, because Spark pickles the reader before planning."""

    job: local.Job
    vbids: list[int]


def in_session(shape: Shape) -> Shape:
    """Fill in the session's time zone if the options name none. Only tasks have the session's settings. A session
    without the setting uses the machine's zone.
    """
    if shape.reading.time_zone is not None:
        return shape
    context = TaskContext.get()
    zone = context.getLocalProperty("spark.sql.session.timeZone") if context is not None else None
    return replace(shape, reading=replace(shape.reading, time_zone=zone or machine_zone()))


class DocumentsReader(Carried, DataSourceReader):
    def __init__(self, options: Options, shape: Shape) -> None:
        self._options = options
        self._shape = shape

    @with_clear_errors
    def partitions(self) -> Sequence[InputPartition]:
        job, shares = local.plan(self._options)
        return [Share(job, vbids) for vbids in shares]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Share)
        with clear_errors():
            yield from local.read(partition.job, partition.vbids, in_session(self._shape))
