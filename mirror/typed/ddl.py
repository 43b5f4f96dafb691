"""Parse a schema written as for Spark, `total double, items array<struct<sku:string,count:int>>`, into Arrow types.

Knows the words of Spark's types and needs no Java. Invariant: the same text means the same columns here and in
`spark.read.schema(text)`; a text that is not understood is refused with its position.
"""

from __future__ import annotations

import re

import pyarrow as pa

from mirror.errors import ConfigError

WORDS: dict[str, pa.DataType] = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "byte": pa.int8(),
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ltz": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}

_TOKEN = re.compile(r"\s*(`(?:[^`]|``)+`|[A-Za-z_][A-Za-z_0-9]*|\d+|[<>(),:])")
DEPTH_MAX = 32


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._token: str | None = None
        self.take()

    def take(self) -> str | None:
        """Return this token and go to the next."""
        taken = self._token
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            self._token = None
            if self._text[self._at :].strip():
                raise self.wrong("a name or a type", self._text[self._at :].strip()[0])
        else:
            self._at, self._token = found.end(), found[1]
        return taken

    @property
    def here(self) -> str | None:
        return self._token

    def expect(self, token: str) -> None:
        if self._token != token:
            raise self.wrong(repr(token), self._token)
        self.take()

    def wrong(self, expected: str, found: str | None) -> ConfigError:
        where = f"at {self._at}" if found is not None else "at its end"
        return ConfigError(
            f"schema {self._text!r}: expected {expected} {where}, found {found!r}",
            hint="write it as for Spark, for example: total double, items array<struct<sku:string,count:int>>",
        )

    def name(self) -> str:
        token = self._token
        if token is None or not (token[0] == "`" or token[0].isalpha() or token[0] == "_"):
            raise self.wrong("a name", token)
        self.take()
        return token[1:-1].replace("``", "`") if token[0] == "`" else token

    def not_null(self) -> bool:
        """Skip NOT NULL if it is here; return True if it was."""
        if self._token is None or self._token.lower() != "not":
            return False
        self.take()
        if self._token is None or self._token.lower() != "null":
            raise self.wrong("NULL", self._token)
        self.take()
        return True

    def number(self) -> int:
        token = self._token
        if token is None or not token.isdigit():
            raise self.wrong("a number", token)
        self.take()
        return int(token)


def fields_of(text: str) -> pa.Schema:
    """Return the columns that `text` names. Raises ConfigError."""
    reader = _Reader(text)
    found = _fields(reader, None, 0)
    return pa.schema(found)


def _fields(reader: _Reader, end: str | None, depth: int) -> list[pa.Field]:
    found: list[pa.Field] = []
    while True:
        name = reader.name()
        if reader.here == ":":
            reader.take()
        if any(each.name == name for each in found):
            raise reader.wrong("another name: this one is there already", name)
        kind = _type(reader, depth)
        found.append(pa.field(name, kind, nullable=not reader.not_null()))
        if reader.here == end:
            return found
        reader.expect(",")


def _type(reader: _Reader, depth: int) -> pa.DataType:
    if depth > DEPTH_MAX:
        raise reader.wrong(f"no more than {DEPTH_MAX} types within one another", reader.here)
    token = reader.here
    word = reader.name().lower()
    if word in WORDS:
        return WORDS[word]
    if word in ("decimal", "dec", "numeric"):
        precision, scale = 10, 0
        if reader.here == "(":
            reader.take()
            precision = reader.number()
            if reader.here == ",":
                reader.take()
                scale = reader.number()
            reader.expect(")")
        if not 1 <= precision <= 38 or scale > precision:
            raise reader.wrong("a decimal of at most 38 digits", f"{precision},{scale}")
        return pa.decimal128(precision, scale)
    if word == "array":
        reader.expect("<")
        element = _type(reader, depth + 1)
        reader.expect(">")
        return pa.list_(element)
    if word == "map":
        reader.expect("<")
        key = _type(reader, depth + 1)
        reader.expect(",")
        value = _type(reader, depth + 1)
        reader.expect(">")
        return pa.map_(key, value)
    if word == "struct":
        reader.expect("<")
        inner = _fields(reader, ">", depth + 1)
        reader.expect(">")
        return pa.struct(inner)
    raise reader.wrong(f"a type ({', '.join(sorted(WORDS))}, decimal, array, map or struct)", token)
