"""Answer SQL over a view: each collection is a table of a DuckDB connection that can read nothing else.

This module first reads a query's syntax tree. It makes a table for each collection that the query names, and refuses
table functions other than TABLE_FUNCTIONS. Then DuckDB runs the query, and requests from each table the needed columns,
and the rows that pass a filter. The connection's configuration is locked before the first query.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from weakref import proxy

import pyarrow as pa
import pyarrow.dataset as ds

from mirror.errors import ConfigError, QueryCancelled, QueryFailed
from mirror.lease import of_reading
from mirror.sql.read import DEFAULT_COLLECTION, EVERY_VBID, Columns
from mirror.sql.schema import Column, sample
from mirror.typed.rows import DOCUMENTS
from mirror.typed.values import folded
from storage.model import collection_named
from storage.read.bulk import KeyRange
from storage.read.reading import BoundaryRead
from storage.read.view import AsOf, View

BATCH_ROWS = 10_000
VALUE = "value"
DEFAULT_TABLE = "documents"
TABLE_FUNCTIONS = frozenset({"range", "generate_series", "unnest", "json_each", "json_tree", "repeat"})
"""Functions that make tables only from their arguments."""
QUERY_NODES = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
"""Nodes of a syntax tree that only read. Other nodes are INSERT_QUERY_NODE, COPY_QUERY_NODE and the like."""
ONLY_SELECT = "only SELECT can be run: a mirror is read only"
_METADATA = [pa.field(f"_{each.name}", each.type) for each in DOCUMENTS if each.name != VALUE]
_JSON = pa.json_()
_VALUE = pa.field(VALUE, _JSON)
_TERM = re.compile(r'\((_key|_seqno|_vbid) (>=|>|<=|<|==) (?:"((?:[^"\\]|\\["\\])*)"|(\d+))\)')
_AMBIGUOUS = re.compile(r'[()"\\]')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_LIST = re.compile(r'value_set=\w+:\[\n(?:  (?:"[^"\n\\]*"|[\w.+-]+),?\n)*\]')
"""A list of values in an Arrow expression's text. A value with a quote inside does not match, because Arrow does not
escape quotes in lists.
"""
_HINTS = {
    "Out of Memory": "read fewer columns or groups, or give it more memory",
    "Malformed JSON": "json_valid(value) tells which documents are JSON",
    "not found in FROM clause": "a field without a column is value->>'$.field'",
    "Could not find key": "a member that the sample lacks is value->>'$.field.member'",
}
FILTER_LENGTH_MAX = 4096
"""Longest filter that is parsed for bounds, in characters. Parsing a longer one costs more than the bounds save."""
NESTED_MAX = 500
"""Greatest depth of parentheses. A deeper query is refused: DuckDB's parser takes minutes for thousands."""
_CONFIG: dict[str, Any] = {
    "enable_external_access": "false",
    "python_enable_replacements": "false",
    "autoload_known_extensions": "false",
    "autoinstall_known_extensions": "false",
    "allow_community_extensions": "false",
    "temp_directory": "",
}


class SqlSession:
    """Runs queries on one connection, for one thread at a time. Other threads may call `interrupt`."""

    def __init__(
        self,
        view: View,
        *,
        as_of: AsOf = None,
        memory_bytes: int | None = None,
        threads: int | None = None,
        collections_allowed: frozenset[str] | None = None,
    ) -> None:
        """Queries see only `collections_allowed` (`scope.collection`; None: all)."""
        try:
            import duckdb
        except ImportError as error:
            raise ConfigError("SQL needs DuckDB", hint="pip install 'dcp-mirror[sql]'") from error
        self._duckdb = duckdb
        self._view = view
        self._as_of = as_of
        self._allowed = collections_allowed
        limits = {"memory_limit": memory_bytes and f"{memory_bytes}B", "threads": threads}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        self._connection = duckdb.connect(config=_CONFIG | given)
        self._connection.execute("SET enable_progress_bar = false")  # in a shell DuckDB prints one to stdout
        self._connection.execute("SET lock_configuration = true")
        self._columns: dict[str, list[Column]] = {}
        self._views: dict[tuple[str, ...], str] = {}
        self.reading: BoundaryRead | None = None
        """The read of the running query."""
        self.failure: BaseException | None = None
        """The error that ended the read of a table. It is kept because DuckDB passes on only its text."""
        self._result: Result | None = None

    def __enter__(self) -> SqlSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._result is not None:
            self._result.close()
        self._connection.close()

    def release(self) -> None:
        reading, self.reading = self.reading, None
        if reading is not None:
            reading.close()

    def interrupt(self) -> None:
        """End the running query with QueryCancelled."""
        self._connection.interrupt()

    def tables(self) -> dict[str, list[Column]]:
        names = sorted(self._collections(), key=lambda name: (name != DEFAULT_COLLECTION, name))
        return {DEFAULT_TABLE if name == DEFAULT_COLLECTION else name: self.columns(name) for name in names}

    def columns(self, collection: str) -> list[Column]:
        if collection not in self._columns:
            taken = {field.name for field in (*_METADATA, _VALUE)}
            found = sample(self._view, collection, as_of=self._as_of)
            fields = [each for each in found if folded(each.name) not in taken]
            key, *others = [Column(field.name, field.type) for field in _METADATA]
            self._columns[collection] = [key, *fields, *others, Column(VALUE, _VALUE.type)]
        return self._columns[collection]

    def run(self, query: str) -> Result:
        """Close the earlier answer, run a SELECT and return its answer. Raises QueryFailed, QueryCancelled,
        DocumentDoesNotFit and the errors of a view.
        """
        if self._result is not None:
            self._result.close()
        self.failure = None
        self.reading = self._view.reading(as_of=self._as_of, lease=of_reading(self._view.path, "sql"))
        try:
            reader = self.guarded(lambda: self._answered(query))
        except BaseException:
            self.release()
            raise
        self._result = Result(self, reader)
        return self._result

    def _answered(self, query: str) -> Any:
        self._prepare(self._tree(query))
        relation = self._connection.sql(query)
        for name, kind in zip(relation.columns, relation.types, strict=True):
            if _is_lost(kind):
                raise QueryFailed(f"column {name} has the type {kind}", hint="cast it to VARCHAR")
        return relation.to_arrow_reader(BATCH_ROWS)

    def guarded(self, call: Callable[[], Any]) -> Any:
        """Call DuckDB. After its error raise `failure` if a table's read failed, else QueryFailed or QueryCancelled."""
        try:
            return call()
        except (self._duckdb.Error, pa.ArrowException, RuntimeError, OSError) as error:
            if isinstance(error, OSError) and error.filename is not None and self.failure is None:
                raise  # of this program, with a path
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> BaseException:
        if self.failure is not None:
            return self.failure
        line = next(iter(str(error).splitlines()), type(error).__name__)
        if "INTERRUPT Error" in line:
            return QueryCancelled("the query was cancelled")
        return QueryFailed(line, hint=next((hint for words, hint in _HINTS.items() if words in line), ""))

    def _known(self) -> str:
        names = sorted(DEFAULT_TABLE if each == DEFAULT_COLLECTION else each for each in self._collections())
        return f"tables: {', '.join(names[:20]) or 'none'}{' ...' if len(names) > 20 else ''}"

    def _collections(self, *, all_vbuckets: bool = True) -> set[str]:
        reading = self.reading or self._view.reading(as_of=self._as_of)
        names = reading.collections(None if all_vbuckets else self._view.vbids[:1])
        return names if self._allowed is None else names & self._allowed

    # -- before DuckDB runs a query -------------------------------------------------------------------------------

    def _tree(self, query: str) -> Any:
        if query.count("(") > NESTED_MAX:
            depths = accumulate((sign == "(") - (sign == ")") for sign in query)
            if max(depths) > NESTED_MAX:
                raise QueryFailed("the query is nested too deep", hint=f"{NESTED_MAX} levels are allowed")
        ((text,),) = self._connection.execute("SELECT json_serialize_sql(?)", [query]).fetchall()
        try:
            found = json.loads(text)
        except RecursionError:
            raise QueryFailed("the query is nested too deep") from None
        if found["error"]:
            is_other = found["error_type"] == "not implemented"
            raise QueryFailed(ONLY_SELECT if is_other else found["error_message"])
        if len(found["statements"]) != 1:
            raise QueryFailed("one statement at a time")
        return found["statements"][0]["node"]

    def _prepare(self, tree: Any) -> None:
        nodes = list(_nodes(tree))
        own = {entry["key"].lower() for node in nodes for entry in node.get("cte_map", {}).get("map", ())}
        meant: dict[tuple[str, ...], str] = {}
        for node in nodes:
            kind = str(node.get("type"))
            if kind.endswith("_NODE") and kind not in QUERY_NODES:  # `WITH x AS (INSERT ...)`
                raise QueryFailed(ONLY_SELECT)
            if kind == "TABLE_FUNCTION" and (name := node["function"]["function_name"].lower()) not in TABLE_FUNCTIONS:
                raise QueryFailed(f"table function {name} is not available", hint=self._known())
            if kind == "BASE_TABLE":
                path = tuple(part.lower() for part in node["qualified_name"]["path"])
                path = path[1:] if path[0] == "main" and len(path) == 2 else path  # DuckDB's default schema
                # A query's own table (WITH) hides a collection only in its scope, which DuckDB knows.
                with suppress(_NoTable) if len(path) == 1 and path[0] in own else nullcontext():
                    collection = self._make(path, node["qualified_name"]["path"])
                    if meant.setdefault(path, collection) != collection:
                        hint = f'name one of them "{collection}"'
                        raise QueryFailed(f"tables {meant[path]} and {collection} have one name in SQL", hint=hint)

    def _make(self, path: tuple[str, ...], spelled: Sequence[str]) -> str:
        """Make the table that a query names, and return its collection."""
        collection = self._named(spelled)
        if self._views.get(path) == collection:
            return collection
        columns = self.columns(collection)
        table = _Table(self, collection, columns)
        source = f"source {collection.encode().hex()}"  # in hex, because DuckDB's names ignore case
        self._connection.register(source, table)
        shown = ", ".join(_identifier(each.name) for each in columns)
        if len(path) == 2:
            self._connection.execute(f"CREATE SCHEMA IF NOT EXISTS {_identifier(path[0])}")
        name = ".".join(map(_identifier, path))
        self._connection.execute(f"CREATE OR REPLACE VIEW {name} AS SELECT {shown} FROM {_identifier(source)}")
        self._views[path] = collection
        return collection

    def _named(self, path: Sequence[str]) -> str:
        """Return the collection that a table's name means. Raises QueryFailed."""
        shown = ".".join(path)
        if isinstance(collection_named(shown), int):
            raise _NoTable(f"table {shown} is a collection's id", hint=f'the collection named so is "_default.{shown}"')
        requested = DEFAULT_COLLECTION if shown.lower() == DEFAULT_TABLE else shown
        for all_vbuckets in (False, True):
            names = self._collections(all_vbuckets=all_vbuckets)
            if requested in names:
                return requested
            folded = [name for name in names if name.lower() == requested.lower()]
            if len(path) == 1 and not folded:
                folded = [name for name in names if name.split(".")[1].lower() == requested.lower()]
            if len(folded) > 1:
                raise _NoTable(f"table {shown} is ambiguous", hint=f"it may be {' or '.join(sorted(folded)[:20])}")
            if folded:
                return folded[0]
        raise _NoTable(f"table {shown} does not exist", hint=self._known())


class _NoTable(QueryFailed):
    """A name means no collection, or several."""


class Result:
    """An answer: `reader` yields its batches, and `names` are its columns."""

    def __init__(self, session: SqlSession, reader: Any) -> None:
        self._session, self._reading, self._reader = session, session.reading, reader
        self.names: list[str] = reader.schema.names
        self.reader = pa.RecordBatchReader.from_batches(reader.schema, self._batches())

    def _batches(self) -> Iterator[Any]:
        try:
            while (batch := self._session.guarded(lambda: next(self._reader, None))) is not None:
                yield batch
        finally:
            self.close()

    def close(self) -> None:
        with suppress(Exception):
            self._reader.close()
        if self._session.reading is self._reading:
            self._session.release()


class _Table(ds.Dataset):  # type: ignore[misc]
    """A collection as a dataset: DuckDB calls `scanner` with the columns it needs, and a filter of the rows."""

    def __init__(self, session: SqlSession, collection: str, columns: Sequence[Column]) -> None:
        self._session: SqlSession = proxy(session)  # the session's connection has this table: no cycle through DuckDB
        self._collection = collection
        # DuckDB reads the first column if a query needs none, so `_vbid`, which costs least, is the first.
        ordered = sorted(columns, key=lambda each: each.name != "_vbid")
        self._fields = {each.name: pa.field(each.name, _JSON if each.mixed else each.type) for each in ordered}

    @property
    def schema(self) -> pa.Schema:
        return pa.schema(self._fields.values())

    def scanner(self, columns: Sequence[str] | None = None, filter: Any = None, **_: Any) -> Any:
        names = list(self._fields) if columns is None else columns
        schema = pa.schema([self._fields[name] for name in names])
        reader = pa.RecordBatchReader.from_batches(schema, self._batches(names, filter))
        return SimpleNamespace(projected_schema=schema, to_reader=lambda: reader)

    def _is_tested(self, name: str, condition: Any) -> bool:
        """Return True if a filter needs the column: the filter's text may have its name in a value or a longer name."""
        others = pa.schema([each for other, each in self._fields.items() if other != name])
        try:
            others.empty_table().filter(condition)
        except pa.ArrowInvalid:
            return True
        return False

    def _batches(self, names: Sequence[str], condition: Any) -> Iterator[Any]:
        session = self._session
        try:
            reading = session.reading
            if reading is None:
                raise QueryFailed("the query has ended")
            tested = "" if condition is None else str(condition)
            conditions = [name for name in self._fields if name in tested and self._is_tested(name, condition)]
            read = [*names, *(name for name in conditions if name not in names)]
            table = Columns(pa.schema([self._fields[name] for name in read]), "_")
            shown = "".join(f"{name}{self._fields[name].type}" for name in conditions)
            bounds = {} if _AMBIGUOUS.search(shown) else _bounds(tested)
            for found in table.batches(reading, self._collection, **bounds):
                if condition is not None:
                    found = found.filter(condition)
                yield found.select(names)
        except GeneratorExit:
            raise
        except BaseException as error:  # Ctrl-C included
            session.failure = session.failure or error
            raise


def _is_lost(kind: Any) -> bool:
    """Return True for a DuckDB type with values that Arrow or Python changes: large unsigned numbers of 128 bits become
    negative, 24:00:00 becomes 00:00:00, and times lose their zone.
    """
    if kind.id in ("list", "array", "struct", "map", "union"):
        return any(_is_lost(child) for _, child in kind.children if not isinstance(child, int))
    return kind.id in ("uhugeint", "time", "time_ns", "time with time zone")


def _nodes(tree: Any) -> Iterator[Mapping[str, Any]]:
    left = [tree]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            yield each
            left += each.values()
        elif isinstance(each, list):
            left += each


def _bounds(text: str) -> dict[str, Any]:
    """Return bounds on the keys, seqnos and vbuckets of the rows that pass a filter. The caller also filters the rows.

    `text` is an Arrow expression. Its column names and types must have no parenthesis, quote or backslash.
    """
    text = _LIST.sub("", text)
    if "value_set" in text or len(text) > FILTER_LENGTH_MAX:
        return {}
    found: dict[str, Any] = {}
    start, end = b"", None
    for column, sign, word, number in _terms(text):
        key = re.sub(r'\\(["\\])', r"\1", word or "").encode()
        if column == "_seqno" and number and sign in (">", ">=", "=="):
            found["after_seqno"] = max(found.get("after_seqno", 0), int(number) - (sign != ">"))
        elif column == "_vbid" and number:
            vbids = found.get("vbids", EVERY_VBID)
            first = int(number) + (sign == ">") if sign[0] in "=>" else 0
            stop = int(number) + (sign != "<") if sign[0] in "=<" else EVERY_VBID.stop
            found["vbids"] = range(max(vbids.start, first), min(vbids.stop, stop))
        elif column == "_key" and not number and sign == "==":
            return {"key": key}
        elif column == "_key" and not number and sign[0] == ">":
            start = max(start, key)
        elif column == "_key" and not number:
            following = key if sign == "<" else key + b"\0"
            end = following if end is None else min(end, following)
    if start or end is not None:
        found["key_range"] = KeyRange(start, b"", end)
    return found


def _terms(text: str) -> list[tuple[str, ...]]:
    """Return the comparisons that an Arrow expression's text joins by `and`; none if it has another form."""
    if term := _TERM.fullmatch(text):
        return [term.groups()]
    depth = 0
    for at, sign in enumerate(_STRING.sub(lambda found: " " * len(found[0]), text) if text.startswith("(") else ""):
        depth += (sign == "(") - (sign == ")")
        if depth == 1 and text.startswith(" and ", at):
            return _terms(text[1:at]) + _terms(text[at + 5 : -1])
    return []


def _identifier(name: str) -> str:
    return '"{}"'.format(name.replace('"', '""'))
