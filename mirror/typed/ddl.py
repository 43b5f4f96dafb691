"""Parse a schema written as for Spark, `total double, items array<struct<sku:string,count:int>>`, into Arrow types.

It needs no Java. A text that this module accepts means the same columns in `spark.read.schema(text)`.
"""

from __future__ import annotations

import re

import pyarrow as pa

from mirror.errors import ConfigError
from mirror.typed.values import folded

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


def fields_of(text: str) -> pa.Schema:
    """Return the columns that `text` names. Raises ConfigError."""
    return pa.schema(_Reader(text).fields(None))


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._token: str | None = None
        self._go_on()

    def _go_on(self) -> None:
        found = _TOKEN.match(self._text, self._at)
        rest = self._text[self._at :].strip()
        self._token = None
        if found is not None:
            self._at, self._token = found.end(), found[1]
        elif rest:
            raise self._wrong("a name or a type", rest[0])

    def _wrong(self, expected: str, found: str | None) -> ConfigError:
        where = f"at {self._at}" if found is not None else "at its end"
        return ConfigError(
            f"schema {self._text!r}: expected {expected} {where}, found {found!r}",
            hint="write it as for Spark, for example: total double, items array<struct<sku:string,count:int>>",
        )

    def _skip(self, token: str) -> bool:
        """Skip the current token if it is `token`, in upper or lower case, and return True."""
        is_here = self._token is not None and self._token.lower() == token
        if is_here:
            self._go_on()
        return is_here

    def _expect(self, token: str, shown: str = "") -> None:
        if not self._skip(token):
            raise self._wrong(shown or repr(token), self._token)

    def _take(self, expected: str, pattern: str) -> str:
        """Return the current token and go to the next. Raises ConfigError if its beginning does not match `pattern`."""
        token = self._token
        if token is None or not re.match(pattern, token):
            raise self._wrong(expected, token)
        self._go_on()
        return token

    def _name(self) -> str:
        token = self._take("a name", "[`A-Za-z_]")
        return token[1:-1].replace("``", "`") if token[0] == "`" else token

    def fields(self, end: str | None, depth: int = 0) -> list[pa.Field]:
        found: list[pa.Field] = []
        while True:
            name = self._name()
            self._skip(":")
            if any(folded(each.name) == folded(name) for each in found):
                raise self._wrong("another name: this one is there already, and names ignore case", name)
            kind = self._type(depth)
            is_nullable = not self._skip("not")
            if not is_nullable:
                self._expect("null", "NULL")
            found.append(pa.field(name, kind, nullable=is_nullable))
            if self._token == end:
                return found
            self._expect(",")

    def _type(self, depth: int) -> pa.DataType:
        if depth > DEPTH_MAX:
            raise self._wrong(f"no more than {DEPTH_MAX} types within one another", self._token)
        token = self._token
        word = self._name().lower()
        if word in WORDS:
            return WORDS[word]
        if word in ("decimal", "dec", "numeric"):
            precision, scale = 10, 0
            if self._skip("("):
                precision = int(self._take("a number", r"\d"))
                if self._skip(","):
                    scale = int(self._take("a number", r"\d"))
                self._expect(")")
            if not 1 <= precision <= 38 or scale > precision:
                raise self._wrong("a decimal of at most 38 digits", f"{precision},{scale}")
            return pa.decimal128(precision, scale)
        if word not in ("array", "map", "struct"):
            raise self._wrong(f"a type ({', '.join(sorted(WORDS))}, decimal, array, map or struct)", token)
        self._expect("<")
        if word == "struct":
            found = pa.struct(self.fields(">", depth + 1))
        else:
            found = self._type(depth + 1)
            if word == "map":
                self._expect(",")
            found = pa.list_(found) if word == "array" else pa.map_(found, self._type(depth + 1))
        self._expect(">")
        return found
