"""Read documents as Arrow batches, at one boundary of each vbucket. Memory holds at most four batches."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from mirror.errors import ConfigError
from mirror.lease import of_reading
from mirror.typed.bodies import JSON, Reading
from mirror.typed.ddl import fields_of
from mirror.typed.rows import DOCUMENTS, Maker, Shape
from storage.format import seal
from storage.read import bulk, reading
from storage.read.bulk import EVERY_KEY, KeyRange
from storage.read.view import AsOf, View

DEFAULT_COLLECTION = "_default._default"
EVERY_VBID = range(1 << 16)
MAKERS = 2
"""Threads that make batches, while one thread reads rows. More do not pay: half of a read is Python."""
TYPED = Reading(mode="permissive", corrupt_record=None, keep_numbers=True)
_HALF = r"\\u[dD][89a-fA-F]"
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F]"
"""Escapes of surrogates, and of two that are a character."""
_ESCAPE = re.compile(_PAIR + r"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL)
"""An escape in JSON; the group is a lone surrogate."""


def arrow(
    view: View,
    collection: str | None = None,
    *,
    prefix: bytes | str | None = None,
    columns: Sequence[str] | None = None,
    as_of: AsOf = None,
    schema: str | pa.Schema | None = None,
) -> pa.RecordBatchReader:
    """Return a reader of the documents, in batches, at one boundary of each vbucket.

    The columns are `mirror.typed.rows.DOCUMENTS`, or those of `schema` (which may be text, as for Spark): fields of
    JSON documents, and metadata such as `_key`. If `columns` is given, only they are read. A key, or a `_value` of type
    string, is null if it is not UTF-8. The first batch chooses the boundaries; a lease holds them until the last batch
    or until the reader is deleted. Raises ConfigError, the errors of `View.scan` and `Lease`, and DocumentDoesNotFit
    for a number that its integer column cannot hold.
    """
    fields = DOCUMENTS if schema is None else fields_of(schema) if isinstance(schema, str) else schema
    if columns is not None:
        if unknown := [name for name in columns if name not in fields.names]:
            raise ConfigError(f"no column {unknown[0]!r}", hint=f"the columns are {', '.join(fields.names)}")
        fields = pa.schema([fields.field(name) for name in columns])
    mark = "" if schema is None else "_"
    table = Columns(fields, mark)
    if collection is not None:
        view.reading(as_of=as_of).collection_id(collection)
    key_range = KeyRange(prefix=prefix.encode() if isinstance(prefix, str) else prefix or b"")

    def finished() -> Iterator[Any]:
        with view.reading(as_of=as_of, lease=of_reading(view.path, "arrow")) as of:
            yield from table.batches(of, collection, key_range=key_range)

    return pa.RecordBatchReader.from_batches(table.schema, finished())


class Columns:
    """The columns of a read. Metadata columns begin with `mark`; all others are fields of the JSON document."""

    def __init__(self, schema: pa.Schema, mark: str) -> None:
        self.schema = schema
        stored = [self._stored(field, mark) for field in schema]
        self._json = [
            field.name
            for field, kind in zip(schema, stored, strict=True)
            if kind is not None and isinstance(field.type, pa.JsonType)
        ]
        read = [field if kind is None else field.with_type(kind) for field, kind in zip(schema, stored, strict=True)]
        from_body = [kind is None for kind in stored]
        if self._json and f"{mark}datatype" not in schema.names:
            read.append(pa.field(f"{mark}datatype", DOCUMENTS.field("datatype").type))
            from_body.append(False)
        self._shape = Shape(pa.schema(read), tuple(from_body), TYPED)
        self._mark = mark

    @staticmethod
    def _stored(field: pa.Field, mark: str) -> Any:
        """Return the type that a metadata column is stored with; None for a field of the document."""
        name = field.name.removeprefix(mark)
        if name == "value" and isinstance(field.type, pa.JsonType):
            return pa.binary()
        if not field.name.startswith(mark) or name not in DOCUMENTS.names:
            return None
        stored = DOCUMENTS.field(name).type
        if field.type != stored and (name, field.type) != ("value", pa.string()):
            raise ConfigError(f"column {field.name} has type {stored}, not {field.type}")
        return stored

    def batches(
        self,
        of: reading.BoundaryRead,
        collection: str | None,
        *,
        key: bytes | None = None,
        key_range: KeyRange = EVERY_KEY,
        after_seqno: int = 0,
        vbids: range = EVERY_VBID,
    ) -> Iterator[Any]:
        """Yield record batches of the documents of a collection (None: of all). A lease holds the boundaries, except
        for a read of one key.

        The batches hold every document that has `key`, is in `key_range`, above `after_seqno`, and in a vbucket of
        `vbids`. They may also hold documents at or below `after_seqno`. Raises DocumentDoesNotFit, CorruptedError and
        the errors of `BoundaryRead.hold`.
        """
        rows_max = bulk.ROWS_MAX
        if key is not None:
            rows_max = 1
            vbids = range(of.vbid_of(key), of.vbid_of(key) + 1)
            key_range = KeyRange(key, b"", key + b"\0")
        else:
            of.hold()
        names = None if collection is None else (collection,)
        maker = Maker(self._shape, None, seal.SIZE)
        ahead = MAKERS if any(self._shape.from_body) or self._json else 0
        making: deque[Future[Any]] = deque()
        with ThreadPoolExecutor(MAKERS) as pool:
            for vbid in (each for each in of.vbids if each in vbids):
                for rows in of.rows(vbid, names, key_range, rows_max=rows_max, after_seqno=after_seqno):
                    for make in maker.add(*rows):
                        making.append(pool.submit(self._finished, make))
                        if len(making) > ahead:
                            yield making.popleft().result()
            while making:
                yield making.popleft().result()
        for make in maker.rest():  # all rows of a small read, which starts no thread
            yield self._finished(make)

    def _finished(self, make: Callable[[], Any]) -> Any:
        """Make a batch with the columns of `_shape`, and convert it to one with those of `schema`."""
        batch = make()
        arrays = []
        for field in self.schema:
            column = batch.column(field.name)
            if field.name in self._json:
                texts = json_texts(column, batch.column(f"{self._mark}datatype"))
                column = pa.ExtensionArray.from_storage(field.type, texts)
            elif pa.types.is_string(field.type) and field.name in (f"{self._mark}key", f"{self._mark}value"):
                column = utf8_or_null(column)
            arrays.append(column)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def utf8_or_null(column: Any) -> Any:
    texts = column.view(pa.string())
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        bodies = column.view(pa.binary()).to_pylist()
        decoded = [(body, body.decode(errors="replace")) for body in bodies]
        return pa.array([text if text.encode() == body else None for body, text in decoded], pa.string())
    return texts


def json_texts(values: Any, datatypes: Any) -> Any:
    """Return values as JSON. A body that is not JSON becomes a JSON string, an empty or unreadable body null. A lone
    surrogate becomes `?`, because DuckDB refuses it.
    """
    texts = values.view(pa.string())
    try:
        if pc.all(pc.equal(datatypes, JSON)).as_py() is not False:
            texts.validate(full=True)
            return _with_characters(texts)
    except pa.ArrowInvalid:
        pass
    found = []
    for body, datatype in zip(values.to_pylist(), datatypes.to_pylist(), strict=True):
        text = body.decode(errors="replace")
        found.append(None if datatype & ~JSON or not body else text if datatype else json.dumps(text))
    return _with_characters(pa.array(found, pa.string()))


def _with_characters(texts: Any) -> Any:
    halves, pairs = (pc.count_substring_regex(texts, each) for each in (_HALF, _PAIR))
    if pc.all(pc.equal(halves, pc.multiply(pairs, 2))).as_py() is not False:
        return texts
    changed = [text and _ESCAPE.sub(lambda found: "?" if found[1] else found[0], text) for text in texts.to_pylist()]
    return pa.array(changed, pa.string())
