"""Read one JSON document into values of a user's schema, value by value, as Spark's from_json does.

bodies.py uses this module for documents that Arrow's reader refuses; both must give the same results. A value that its
column's type cannot take is a misfit: it becomes null, and the rest of the document stays. A misfit in an array or map
makes the whole array or map null. A misfit in a struct makes only the struct's field null. A text column keeps the
document's spelling of a number with a fraction or exponent.

Names of columns ignore the case of A to Z, as DuckDB and Spark do: a column has the values of its field in every
spelling. A document with two spellings of one field does not fit.

tests/typed/differences.md lists the differences from from_json.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterable, Mapping
from decimal import ROUND_HALF_UP, Context, Decimal, DecimalException
from functools import lru_cache, partial
from typing import Any

import pyarrow as pa

from mirror.errors import ConfigError
from mirror.typed.times import EPOCH_UNITS, day_of, micros_of, micros_of_number, zone_of


class Problems(list[str]):
    lost_number = False
    """True if a misfit is a number that its column of numbers cannot hold: sums would lack it."""


Reader = Callable[[Any, Problems], Any]
"""Turns a JSON value other than null into Arrow's input for a type. Raises Misfit, and adds misfits of inner fields to
the Problems.
"""

SHOWN_LENGTH_MAX = 40
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_EXACT = Context(prec=200, Emax=10_000, Emin=-10_000)
_TOO_LARGE = {16: 65_520.0, 32: float.fromhex("0x1.ffffffp+127"), 64: float("inf")}
"""Bits of a floating-point type -> the least number that it rounds to infinity."""
_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


class Misfit(Exception):
    """A JSON value that its type cannot take, with the reason as text."""


class Spelled(str):
    """A number with a fraction or exponent, or with more digits than Python's int, as the document spells it."""


INT_LENGTH_MAX = 4_000
"""Longest integer that becomes an int in a document with an integer of more than 4,300 digits, which Python refuses."""


def _integer(text: str) -> int | Spelled:
    return int(text) if len(text) <= INT_LENGTH_MAX else Spelled(text)


_DECODER = json.JSONDecoder(parse_float=Spelled, parse_constant=Spelled)
_LONG_DECODER = json.JSONDecoder(parse_float=Spelled, parse_constant=Spelled, parse_int=_integer)
"""Slower, because it calls Python for each integer."""


@lru_cache(maxsize=100_000)
def folded(name: str) -> str:
    """Return the name in lower case, A to Z only: two names that are equal then are one column."""
    return name.translate(_LOWER)


def by_folded(names: Iterable[str]) -> dict[str, str]:
    """Return the names by their `folded` form. Raises ConfigError for two that differ only in case."""
    found: dict[str, str] = {}
    for name in names:
        other = found.setdefault(folded(name), name)
        if other is not name:
            raise ConfigError(
                f"columns {other} and {name} are one column: names ignore case", hint="name it once, in any spelling"
            )
    return found


def _decoded(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer of more than 4,300 digits
        return _LONG_DECODER.decode(text)


def object_of(body: bytes) -> dict[str, Any]:
    try:
        found = _decoded(body.decode(errors="replace"))
    except RecursionError:
        raise Misfit("nested too deep") from None
    except ValueError as error:
        raise Misfit(f"malformed JSON: {error}") from None
    if not isinstance(found, dict):
        raise Misfit(f"not a JSON object, but {_shown(found)}")
    return found


def text_of(value: Any) -> str:
    """Return compact JSON. Not recursive, because a value may be nested deeply."""
    found: list[str] = []
    left = [value]
    while left:
        each = left.pop()
        if type(each) is Spelled:
            found.append(each)
        elif type(each) is dict:
            found.append("{")
            left.append(Spelled("}"))
            for at, (name, member) in enumerate(reversed(each.items()), 1):
                left += (member, Spelled(f"{',' if at < len(each) else ''}{_quoted(name)}:"))
        elif type(each) is list:
            found.append("[")
            left.append(Spelled("]"))
            for at, member in enumerate(reversed(each), 1):
                left += (member, Spelled("," if at < len(each) else ""))
        else:
            found.append(_quoted(each))
    return "".join(found)


_quoted = json.JSONEncoder(ensure_ascii=False).encode


def _shown(value: Any) -> str:
    text = text_of(value)
    return text if len(text) <= SHOWN_LENGTH_MAX else text[: SHOWN_LENGTH_MAX - 3] + "..."


def is_variant(kind: pa.DataType) -> bool:
    """Return True for the struct that stands for Spark's type variant in Arrow schemas."""
    if not pa.types.is_struct(kind) or [each.name for each in kind] != ["value", "metadata"]:
        return False
    return (kind.field("metadata").metadata or {}).get(b"variant") == b"true"


def struct_reader(fields: Any, zone: str, epoch: str | None, path: str = "") -> Reader:
    """Return a reader that turns a JSON object into a dict with all `fields`. Raises ConfigError for a field that is
    NOT NULL, of a type that JSON cannot be read as, or in two spellings.
    """
    readers = [(field.name, _reader(field, f"{path}{field.name}", zone, epoch)) for field in fields]
    columns = by_folded(name for name, _ in readers)
    names = set(columns.values())

    def read(value: Any, problems: Problems) -> dict[str, Any]:
        if type(value) is not dict:
            raise Misfit(f"{_shown(value)} is not an object")
        if not columns.keys().isdisjoint(map(folded, value.keys() - names)):
            value = in_columns(value, columns, problems, path)
        found = {}
        for name, reader in readers:
            each = value.get(name)
            if each is not None:
                try:
                    each = reader(each, problems)
                except Misfit as error:
                    problems.append(f"{path}{name}: {error}")
                    each = None
            found[name] = each
        return found

    return read


def in_columns(value: Mapping[str, Any], columns: Mapping[str, str], problems: Problems, path: str) -> dict[str, Any]:
    """Return the object's fields by the names of their columns. A field in two spellings is a misfit, and left out."""
    found: dict[str, tuple[str, Any]] = {}
    twice = set()
    for name, each in value.items():
        column = columns.get(folded(name))
        if column is not None and each is not None:
            other, first = found.setdefault(column, (name, each))
            if other is not name:
                twice.add(column)
                problems.append(f"{path}{column}: the document has both {other} and {name}")
                problems.lost_number |= _is_number(first) or _is_number(each)
    return {column: each for column, (_, each) in found.items() if column not in twice}


def _is_number(value: Any) -> bool:
    return type(value) in (int, Spelled)


def _reader(field: Any, path: str, zone: str, epoch: str | None) -> Reader:
    if not field.nullable:
        raise ConfigError(
            f"column {path}: NOT NULL cannot be promised, a document may be without it", hint="leave NOT NULL out"
        )
    kind, types = field.type, pa.types
    if is_variant(kind):
        return _variant
    if types.is_struct(kind):
        return struct_reader(kind, zone, epoch, f"{path}.")
    if types.is_list(kind):
        return _list_reader(_reader(kind.value_field, f"{path}[]", zone, epoch))
    if types.is_map(kind):
        if not types.is_string(kind.key_type):
            raise ConfigError(f"column {path}: the names in a JSON object are text, not {kind.key_type}")
        return _map_reader(_reader(kind.item_field, f"{path}{{}}", zone, epoch))
    if types.is_integer(kind):
        return _integer_reader(kind)
    if types.is_decimal(kind):
        return _decimal_reader(kind)
    if types.is_timestamp(kind):
        return _time_reader(kind, zone, epoch)
    if types.is_string(kind):
        return _text
    if isinstance(kind, pa.JsonType):
        return _json
    if types.is_boolean(kind):
        return _scalar_reader("a boolean", {bool: bool})
    if types.is_floating(kind):
        return _float_reader(kind)
    if types.is_date32(kind):
        return _scalar_reader("a date", {str: day_of})
    if types.is_binary(kind):
        raise ConfigError(f"column {path}: JSON has no binary values", hint="read it as string")
    raise ConfigError(f"column {path}: JSON cannot be read as {kind}", hint="read it as string")


def _list_reader(element: Reader) -> Reader:
    def read(value: Any, problems: Problems) -> list[Any]:
        if type(value) is not list:
            raise Misfit(f"{_shown(value)} is not an array")
        return [None if each is None else element(each, problems) for each in value]

    return read


def _map_reader(item: Reader) -> Reader:
    def read(value: Any, problems: Problems) -> list[tuple[str, Any]]:
        if type(value) is not dict:
            raise Misfit(f"{_shown(value)} is not an object")
        return [(_clean(name), None if each is None else item(each, problems)) for name, each in value.items()]

    return read


def _integer_reader(kind: pa.DataType) -> Reader:
    bound = 1 << (kind.bit_width - 1)

    def read(value: Any, problems: Problems) -> int:
        if type(value) is not int or not -bound <= value < bound:
            problems.lost_number |= _is_number(value)
            raise Misfit(f"{_shown(value)} is not an integer of {kind.bit_width} bits")
        return value

    return read


def _float_reader(kind: pa.DataType) -> Reader:
    too_large = _TOO_LARGE[kind.bit_width]

    def read(value: Any, problems: Problems) -> float:
        if not _is_number(value):
            raise Misfit(f"{_shown(value)} is not a number")
        found = float(str(value))
        if not abs(found) < too_large:
            problems.lost_number = True
            raise Misfit(f"{_shown(value)} is not a number of {kind.bit_width} bits")
        return found

    return read


def _decimal_reader(kind: Any) -> Reader:
    step, limit = Decimal(1).scaleb(-kind.scale), 10**kind.precision

    def read(value: Any, _: Problems) -> Decimal:
        text = str(value).replace(",", "") if isinstance(value, str) else str(value)
        if isinstance(value, bool) or not _DECIMAL.fullmatch(text):
            raise Misfit(f"{_shown(value)} is not a decimal number")
        try:
            found = _EXACT.quantize(_EXACT.create_decimal(text), step)
        except DecimalException:
            raise Misfit(f"{_shown(value)} has too many digits for {kind}") from None
        if found.scaleb(kind.scale, _EXACT).copy_abs() >= limit:
            raise Misfit(f"{_shown(value)} has too many digits for {kind}")
        return found

    return read


_EXACT.rounding = ROUND_HALF_UP


def _scalar_reader(expected: str, readers: Mapping[type, Callable[[Any], Any]]) -> Reader:
    """Return a reader that calls one of `readers` by the JSON value's type. An error of theirs becomes a Misfit."""

    def read(value: Any, _: Problems) -> Any:
        try:
            return readers[type(value)](value)
        except (ValueError, OverflowError, LookupError):
            raise Misfit(f"{_shown(value)} is not {expected}") from None

    return read


def _time_reader(kind: Any, zone_name: str, epoch: str | None) -> Reader:
    if kind.tz is None:
        return _scalar_reader("a time without a zone", {str: partial(micros_of, zone=None)})
    unit = EPOCH_UNITS[epoch or "seconds"]
    readers = {int: partial(micros_of_number, unit=unit), str: partial(micros_of, zone=zone_of(zone_name))}
    return _scalar_reader("a time", readers)


def _text(value: Any, _: Problems) -> str:
    return _clean(value) if type(value) is str else _clean(text_of(value))


def _clean(text: str) -> str:
    """Replace a lone surrogate, which is no character, by `?`, as Java does."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _json(value: Any, _: Problems) -> str:
    return _clean(text_of(value))


def _variant(value: Any, _: Problems) -> dict[str, bytes]:
    from pyspark.sql.variant_utils import VariantUtils

    try:
        content, names = VariantUtils.parse_json(_clean(text_of(value)))
    except Exception as error:  # PySpark has a class for each limit
        raise Misfit(f"cannot be a variant: {error}") from None
    return {"value": content, "metadata": names}
