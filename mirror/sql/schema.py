"""Infer the columns of a collection from a sample of its documents.

`mirror.typed` can read each inferred type. A field whose values have no common type becomes a `mixed` column of text.
Fields whose names differ only in case are one column with the first name, or no column if a document has two of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from mirror.typed.ddl import WORDS
from mirror.typed.rows import Documents
from mirror.typed.values import Misfit, Spelled, folded, object_of, text_of
from storage.errors import ViewInvalidated
from storage.format import seal
from storage.read.view import AsOf, View

SAMPLE_DOCUMENTS = 10_000
COLUMNS_MAX = 1_000
"""Most columns for fields. If a sample has more fields, the rarest get no column."""
NAMES_MAX = 20_000
FIELDS_MAX = 200
"""An inner object with more names becomes text: its names are probably data."""
DEPTH_MAX = 16
EXAMPLE_LENGTH_MAX = 60
_CHUNK_ROWS = 128
_NAMES = {kind: name for name, kind in reversed(WORDS.items())}


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: Any
    """An Arrow type."""
    share: float = 1.0
    """The share of the documents in the sample that have the field, 0 to 1."""
    example: str = ""
    mixed: bool = False
    """True if the field's values have no common type."""

    @property
    def field(self) -> Any:
        return pa.field(self.name, self.type)

    @property
    def ddl(self) -> str:
        """The column as text for `mirror.typed.ddl.fields_of` and Spark."""
        return f"{_quoted(self.name)} {type_ddl(self.type)}"


def _quoted(name: str) -> str:
    plain = name.isidentifier() and name.isascii()
    return name if plain else "`{}`".format(name.replace("`", "``"))


def type_ddl(kind: Any) -> str:
    """Return the text of an Arrow type in a schema, such as `array<string>`."""
    if pa.types.is_struct(kind):
        return f"struct<{','.join(f'{_quoted(each.name)}:{type_ddl(each.type)}' for each in kind)}>"
    if pa.types.is_list(kind):
        return f"array<{type_ddl(kind.value_type)}>"
    return _NAMES[kind]


class _Found:
    __slots__ = ("count", "element", "example", "fields", "kinds", "name", "twice")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.twice = False
        """True if an object has the field in two spellings."""
        self.kinds: set[str] = set()
        self.count = 0
        self.example: Any = None
        self.fields: dict[str, _Found] = {}
        """Fields by their `folded` names."""
        self.element: _Found | None = None

    def add(self, value: Any, depth: int = 0) -> None:
        self.count += 1
        if value is None:
            return
        if self.example is None:
            self.example = value
        kind = _kind(value)
        self.kinds.add("any" if depth > DEPTH_MAX else kind)
        if depth > DEPTH_MAX:
            return
        if kind == "struct":
            names_max = FIELDS_MAX + 1 if depth else NAMES_MAX
            there = set()
            for name, each in value.items():
                key = folded(name)
                if key in self.fields or len(self.fields) < names_max:
                    found = self.fields.setdefault(key, _Found(name))
                    found.add(each, depth + 1)
                    if each is not None:
                        found.twice |= key in there
                        there.add(key)
        elif kind == "list":
            self.element = self.element or _Found()
            for each in value:
                self.element.add(each, depth + 1)

    @property
    def type(self) -> Any:
        """The Arrow type of all values; None if no type fits, so the values become text."""
        if self.kinds <= {"bigint", "double"} and self.kinds:
            return pa.float64() if "double" in self.kinds else pa.int64()
        if len(self.kinds) > 1 or "any" in self.kinds:
            return None
        if self.kinds == {"struct"}:
            fields = self.fields.values()
            names = {each.name.lower() for each in fields}
            if not names or len(names) < len(fields) or len(names) > FIELDS_MAX or not all(map(_nameable, names)):
                return None
            if any(each.twice for each in fields):
                return None
            return pa.struct([(each.name, each.type or pa.string()) for each in fields])
        if self.kinds == {"list"}:
            return pa.list_((self.element.type if self.element else None) or pa.string())
        return pa.bool_() if self.kinds == {"boolean"} else pa.string()


def _kind(value: Any) -> str:
    if isinstance(value, Spelled):
        return "double" if abs(float(value)) < float("inf") else "any"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "bigint" if -(1 << 63) <= value < 1 << 63 else "any"
    return "struct" if isinstance(value, dict) else "list" if isinstance(value, list) else "string"


def _nameable(name: str) -> bool:
    return bool(name) and "\0" not in name and name.isprintable()


def sample(view: View, collection: str | int, documents: int = SAMPLE_DOCUMENTS, *, as_of: AsOf = None) -> list[Column]:
    """Return the columns of a collection's JSON objects, in the order of their first appearance in a sample.

    The sample takes some of the newest documents of every vbucket. Raises UnknownCollection and a view's errors.
    """
    found = _Found()
    for body in _bodies(view, collection, documents, as_of):
        try:
            found.add(object_of(body))
        except Misfit:
            continue
    often = set(sorted(found.fields.values(), key=lambda each: -each.count)[:COLUMNS_MAX])
    same = Counter(each.name.lower() for each in often)  # Spark ignores the case of other letters than A to Z, too
    columns = []
    for each in found.fields.values():
        if each in often and _nameable(each.name) and not each.twice and same[each.name.lower()] == 1:
            kind = each.type
            example = text_of(each.example)[:EXAMPLE_LENGTH_MAX]
            share = each.count / found.count
            columns.append(Column(each.name, kind or pa.string(), share, example, kind is None))
    return columns


def _bodies(view: View, collection: str | int, documents: int, as_of: AsOf) -> Iterator[bytes]:
    quota = -(-documents // len(view.vbids))
    reading = view.reading(as_of=as_of)
    reading.collection_id(collection)
    for vbid in view.vbids:
        left = quota
        with suppress(ViewInvalidated):  # the purger passed the boundary: the other vbuckets are enough
            for chunk in reading.rows(vbid, (collection,), rows_max=_CHUNK_ROWS):
                rows = Documents(seal.SIZE)
                step = max(1, len(chunk.stored) // left)
                frames = chunk.stored[::step][:left]
                rows.add(vbid, chunk.collection, chunk.prefix_length, frames, 0)
                rows.close()
                for body, datatype in zip(rows.values.to_pylist(), rows.datatypes, strict=True):
                    if datatype == 1:
                        yield body
                left -= len(frames)
                if left <= 0:
                    break


def joint_columns(view: View, collections: Sequence[str | int] | None, as_of: AsOf = None) -> list[Column]:
    """Return the columns of `collections` (None: all). A column with different types in two collections is text.

    Raises the errors of `sample`.
    """
    found: dict[str, Column] = {}
    for name in collections or sorted(view.reading(as_of=as_of).collections()):
        for column in sample(view, name, as_of=as_of):
            known = found.setdefault(column.name.lower(), column)
            if known.type != column.type:
                found[column.name.lower()] = replace(known, type=pa.string())
    return list(found.values())
