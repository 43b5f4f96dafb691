"""Read JSON bodies into the columns of a user's schema: with Arrow's JSON reader, or with values.py if Arrow refuses.

Fields that a document lacks are null, fields that the schema does not name are left out, and an empty body has no
fields. A misfit is a body that is not one JSON object, or that has a value which its column's type cannot take.
`Reading.mode` decides what becomes of misfits.

Arrow reads many bodies at once, and refuses all of them for one misfit. Refused batches are halved until they are
small; then values.py reads their bodies. values.py also reads all columns whose types Arrow's reader lacks or reads
wrongly (map, decimal, variant, JSON), and fields in another spelling than their column: Arrow compares names exactly.
Arrow and values.py give the same values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from mirror.errors import ConfigError, ExitCode, MirrorError
from mirror.typed.times import EPOCH_UNITS, arrow_name, check_zone
from mirror.typed.values import Misfit, Problems, Reader, folded, is_variant, object_of, struct_reader

JSON = 0x01  # a bit of a datatype
_ONE_JSON = bytes((JSON,))
_BLANKS = b" \t\n\r"
_LINE_END, _BEHIND_ALL = b"\n", 2**31 - 1
ONE_BY_ONE_MAX = 16
"""A refused batch of at most this many bodies is not halved: reading them one by one costs less."""
DEEP_LENGTH = 1_000
"""A longer body (in bytes) may be nested deeper than Python reads, in a field that Arrow skips. So a refused batch with
a longer body is halved to single bodies: Arrow may accept the body that values.py cannot read.
"""
_NEGATIVE_ZERO = r"-0[],}\s]"
"""The integer -0: Arrow reads it as the double -0.0, values.py and from_json read it as 0.0."""
_ESCAPED_LETTER = r"\\u00[4-7]"
"""A letter A to Z as an escape."""
_MAY_BE_ESCAPED = r'(?:\\"|[^"]{1,12})'
"""A character that JSON may spell as one or two escapes. The pattern matches more: values.py then finds no spelling."""
_NO_TIME = r"^0000|[ T][0-9]{2}[^:]|:[0-9.]*[-+](1[89]|2)"
"""Finds texts that Arrow reads as times and values.py may refuse: the year 0000, an hour without minutes before a zone,
and offsets from 18 hours on.
"""

SPELLINGS_LENGTH_MAX = 10_000
"""Longest pattern of other spellings. Compiling a longer one for each batch costs more than counting names twice."""

Mode = Literal["failfast", "permissive", "dropmalformed"]
MODES: tuple[Mode, ...] = ("failfast", "permissive", "dropmalformed")


@dataclass(frozen=True, slots=True)
class Reading:
    mode: Mode = "failfast"
    """`failfast`: a misfit is an error. `permissive`: its bad fields are null. `dropmalformed`: its row is left out."""
    corrupt_record: str | None = "_corrupt_record"
    """The name of the column for the text of misfits, if the schema has it. None: every column is a field."""
    time_zone: str | None = None
    """The zone of times whose text names no zone. None: UTC; in Spark the session's zone."""
    epoch: str | None = None
    """The unit of times that are numbers. None: seconds, which only values.py reads: Arrow then expects texts."""
    keep_numbers: bool = False
    """True if a number that its column of numbers cannot hold is an error in every mode."""


AS_DECLARED = Reading()
MISFITS_MAX = 0.01


class DocumentDoesNotFit(MirrorError):
    exit_code = ExitCode.DATA


class TooManyMisfits(MirrorError):
    exit_code = ExitCode.DATA


def check_misfits(misfits: int, documents: int, share_max: float) -> None:
    if misfits > documents * share_max:
        raise TooManyMisfits(
            f"{misfits:,} of {documents:,} documents do not fit the schema, more than {share_max:.3%} of them: "
            "nothing was written",
            hint="give the columns other types (a column `_corrupt_record string` shows the documents), or allow "
            "them with --max-misfits",
        )


class Parsed(NamedTuple):
    columns: list[Any]
    misfits: dict[int, str]
    """Row of a misfit -> reason, in the order of rows."""


class Bodies:
    """A parser for one schema. Raises ConfigError for an unknown time zone or a type that JSON cannot be read as."""

    def __init__(self, schema: Any, reading: Reading = AS_DECLARED) -> None:
        self._reading = reading
        self._zone = self._reading.time_zone or "UTC"
        check_zone(self._zone)
        name = self._reading.corrupt_record
        self._corrupt_at = -1 if name is None else schema.get_field_index(name)
        if self._corrupt_at >= 0 and schema.field(self._corrupt_at).type != pa.string():
            raise ConfigError(
                f"column {self._reading.corrupt_record} holds the text of a document, so its type must be string"
            )
        self._schema = pa.schema([each for at, each in enumerate(schema) if at != self._corrupt_at])
        self._read_one = struct_reader(self._schema, self._zone, self._reading.epoch)
        slow = [field for field in self._schema if _contains(field.type, _one_by_one)]
        self._slow = pa.schema(slow)
        self._read_slow = struct_reader(self._slow, self._zone, self._reading.epoch)
        fast = pa.schema([field for field in self._schema if field not in slow])
        names = set(names_of(fast))
        in_one_spelling = len(names) == len({folded(name) for name in names})
        self._arrow = _ArrowReader(fast, self._zone, self._reading.epoch) if names and in_one_spelling else None

    def columns(self, bodies: Any, datatypes: bytes, keys: Any) -> Parsed:
        """Return the schema's columns. Bodies and keys are binary arrays; `datatypes` has a byte for each body. Raises
        DocumentDoesNotFit.
        """
        problems: dict[int, Problems] = {}
        objects, enclosed = bodies, datatypes == _ONE_JSON * len(bodies) and _enclosed(bodies)
        if not enclosed:
            stripped = []
            for row, (body, datatype) in enumerate(zip(bodies.to_pylist(), datatypes, strict=True)):
                text = body.strip(_BLANKS)
                if datatype & ~JSON:
                    problems[row] = Problems(["the value cannot be decompressed, or its xattrs are longer than it"])
                    text = b""
                elif text and not (datatype & JSON and text[:1] == b"{"):
                    problems[row] = Problems(["the body is not a JSON object"])
                    text = b""
                stripped.append(text or b"{}")
            objects = pa.array(stripped, pa.binary())
        found = self._found(objects, enclosed, problems)
        misfits = {row: "; ".join(noted) for row, noted in sorted(problems.items())}
        all_fail, numbers_fail = self._reading.mode == "failfast", self._reading.keep_numbers
        failed = [row for row in misfits if all_fail or (numbers_fail and problems[row].lost_number)]
        if failed:
            row, problem = failed[0], misfits[failed[0]]
            key = keys[row].as_py().decode(errors="replace")
            raise DocumentDoesNotFit(
                f"document {key!r} does not fit the schema: {problem}",
                hint="give the column another type, or read with mode=permissive (null in fields that do not fit) or "
                "mode=dropmalformed (without such documents)"
                if all_fail
                else "read it as a double or a text: in SQL, CAST(value->>'$.field' AS DOUBLE)",
            )
        if self._corrupt_at >= 0:
            texts: list[str | None] = [None] * len(bodies)
            for row in misfits:
                texts[row] = bodies[row].as_py().decode(errors="replace")
            found.insert(self._corrupt_at, pa.array(texts, pa.string()))
        return Parsed(found, misfits)

    def _found(self, objects: Any, enclosed: bool, problems: dict[int, Problems]) -> list[Any]:
        odd = None if self._arrow is None else self._arrow.spelled_otherwise(objects)
        if odd is None:
            return self._joined(list(self._pieces(objects, enclosed, 0, problems)))
        rows = pa.concat_arrays([pc.indices_nonzero(pc.invert(odd)), pc.indices_nonzero(odd)])
        count = len(objects) - odd.true_count
        plain, others = objects.take(rows[:count]), objects.take(rows[count:])
        noted: dict[int, Problems] = {}
        pieces = list(self._pieces(plain, enclosed, 0, noted))
        pieces.append(self._one_by_one(others, self._schema, self._read_one, count, noted))
        problems.update((rows[at].as_py(), each) for at, each in noted.items())
        order = pc.sort_indices(rows)
        return [each.take(order) for each in self._joined(pieces)]

    def _joined(self, pieces: list[list[Any]]) -> list[Any]:
        if len(pieces) == 1:
            return pieces[0]
        if not pieces:
            return [pa.array([], each.type) for each in self._schema]
        return [pa.concat_arrays([piece[at] for piece in pieces]) for at in range(len(self._schema))]

    def _pieces(self, objects: Any, enclosed: bool, first: int, problems: dict[int, Problems]) -> Iterator[list[Any]]:
        """Yield columns of the bodies, some rows at a time. The first body is row `first`. `enclosed` is True if all
        bodies are known to begin with `{` and end with `}`.
        """
        if self._arrow is not None:
            try:
                if not enclosed and not _enclosed(objects):
                    raise pa.ArrowInvalid("a body that does not end as an object")
                columns = iter(self._arrow.parse(objects))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                pass
            else:
                slow = iter(self._one_by_one(objects, self._slow, self._read_slow, first, problems))
                yield [next(slow if field.name in self._slow.names else columns) for field in self._schema]
                return
            if len(objects) > (1 if _longest(objects) > DEEP_LENGTH else ONE_BY_ONE_MAX):
                half = len(objects) // 2
                yield from self._pieces(objects[:half], enclosed, first, problems)
                yield from self._pieces(objects[half:], enclosed, first + half, problems)
                return
        if len(objects):
            yield self._one_by_one(objects, self._schema, self._read_one, first, problems)

    @staticmethod
    def _one_by_one(objects: Any, schema: Any, read: Reader, first: int, problems: dict[int, Problems]) -> list[Any]:
        if not len(schema):
            return []
        rows = []
        for row, body in enumerate(objects.to_pylist(), first):
            noted = Problems()
            try:
                rows.append(read(object_of(body), noted))
            except Misfit as error:
                noted.append(str(error))
                rows.append({})
            if noted:
                problems.setdefault(row, noted)
        return [pa.array([row.get(each.name) for row in rows], each.type) for each in schema]


class _ArrowReader:
    def __init__(self, schema: Any, zone: str, epoch: str | None) -> None:
        self._schema = schema
        self._zone = arrow_name(zone)
        self._unit = None if epoch is None else EPOCH_UNITS[epoch]
        self._names = sorted(set(names_of(schema)))
        self._other_spellings = "|".join(filter(None, map(_spelled_otherwise, self._names)))
        self._options = pj.ParseOptions(
            explicit_schema=pa.schema([pa.field(each.name, self._readable(each.type)) for each in schema]),
            newlines_in_values=True,
            unexpected_field_behavior="ignore",
        )

    def parse(self, objects: Any) -> list[Any]:
        """Return the columns of bodies that are all `_enclosed`. Raises ArrowInvalid, ArrowNotImplementedError.

        Arrow reads all bodies as one text, with a line end after each body. If Arrow finds as many values as bodies,
        each body is one value. A damaged body cannot continue in the next body: the line end is an error in a string,
        and the next body's `{` is an error after an inner object.
        """
        lines = pc.binary_replace_slice(objects, _BEHIND_ALL, _BEHIND_ALL, _LINE_END)
        lines.view(pa.string()).validate(full=True)  # Arrow's reader accepts bytes that are not UTF-8
        text = lines.buffers()[2]
        options = pj.ReadOptions(use_threads=False, block_size=len(text) + 1)
        table = pj.read_json(pa.BufferReader(text), read_options=options, parse_options=self._options)
        if table.num_rows != len(objects):  # a body with more than one JSON value in it
            raise pa.ArrowInvalid(f"{table.num_rows - len(objects) + 1} JSON values in one body")
        columns = [column.combine_chunks() for column in table.columns]
        if not all(_all_doubles(column, pc.is_finite) for column in columns):
            raise pa.ArrowInvalid("NaN, or a number that is too large")
        if not all(_all_doubles(column, _is_no_negative_zero) for column in columns) and _any_matches(
            objects, _NEGATIVE_ZERO
        ):
            raise pa.ArrowInvalid("an integer -0")
        return [self._converted(column, field.type) for column, field in zip(columns, self._schema, strict=True)]

    def spelled_otherwise(self, objects: Any) -> Any:
        """Return a mask of the objects that may have a field in another spelling than its column; None for no one."""
        if not self._other_spellings:
            return None
        if len(self._other_spellings) <= SPELLINGS_LENGTH_MAX:
            odd = pc.match_substring_regex(objects, self._other_spellings)
        elif any(_MAY_BE_ESCAPED in _signs(name) for name in self._names):
            odd = pc.is_valid(objects)  # every one
        else:
            names = "|".join(f'"{name}"' for name in self._names)
            exact, any_case = (pc.count_substring_regex(objects, names, ignore_case=each) for each in (False, True))
            odd = pc.not_equal(exact, any_case)
        odd = pc.or_(odd, pc.match_substring_regex(objects, _ESCAPED_LETTER))  # the letter may be in a name
        return odd if pc.any(odd).as_py() else None

    def _readable(self, kind: Any) -> Any:
        """Return a type that Arrow's JSON reader can make and `_converted` turns into `kind`."""
        if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
            return pa.int64() if self._is_number(kind) else pa.string()
        if pa.types.is_struct(kind):
            return pa.struct([pa.field(each.name, self._readable(each.type)) for each in kind])
        if pa.types.is_list(kind):
            return pa.list_(pa.field(kind.value_field.name, self._readable(kind.value_type)))
        return kind

    def _is_number(self, kind: Any) -> bool:
        return self._unit is not None and pa.types.is_timestamp(kind) and kind.tz is not None

    def _converted(self, found: Any, kind: Any) -> Any:
        if found.type == kind:
            return found
        if pa.types.is_struct(kind):
            fields = [self._converted(found.field(at), each.type) for at, each in enumerate(kind)]
            return pa.StructArray.from_arrays(fields, fields=list(kind), mask=found.is_null())
        if pa.types.is_list(kind):
            values = self._converted(found.values, kind.value_type)
            return pa.ListArray.from_arrays(found.offsets, values, kind, mask=found.is_null())
        if found.type == pa.string() and _any_matches(found, _NO_TIME):
            raise pa.ArrowInvalid("no time, or a time that is to be looked at")
        if pa.types.is_timestamp(kind) and kind.tz is not None:
            return self._times(found).cast(kind)
        return found.cast(kind)

    def _times(self, found: Any) -> Any:
        if self._unit is not None:
            return pc.multiply_checked(found, self._unit).cast(pa.timestamp("us", "UTC"))
        try:
            return found.cast(pa.timestamp("us", "UTC"))  # every text has a zone
        except pa.ArrowInvalid:  # some text has no zone
            return pc.assume_timezone(found.cast(pa.timestamp("us")), self._zone, ambiguous="earliest")


def _contains(kind: Any, what: Any) -> bool:
    if what(kind):
        return True
    return any(_contains(kind.field(at).type, what) for at in range(kind.num_fields))


def _any_matches(texts: Any, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(texts, pattern)).as_py())


def _all_doubles(found: Any, test: Any) -> bool:
    if pa.types.is_struct(found.type) or pa.types.is_list(found.type):
        inner = found.flatten()
        return all(_all_doubles(each, test) for each in (inner if pa.types.is_struct(found.type) else [inner]))
    return not pa.types.is_floating(found.type) or pc.all(test(found)).as_py() is not False


def _is_no_negative_zero(found: Any) -> Any:
    return pc.not_equal(pc.divide(1.0, found), -math.inf)


def names_of(fields: Any) -> Iterator[str]:
    """Yield the names of fields, and of the fields of their objects."""
    for field in fields:
        yield field.name
        kind = field.type
        while pa.types.is_list(kind) or pa.types.is_map(kind):
            kind = kind.value_type if pa.types.is_list(kind) else kind.item_type
        if pa.types.is_struct(kind):
            yield from names_of(kind)


def _signs(name: str) -> list[str]:
    """Return a pattern for each character of a name in JSON."""
    return [sign if sign.isascii() and (sign.isalnum() or sign in "_- ") else _MAY_BE_ESCAPED for sign in name]


def _spelled_otherwise(name: str) -> str:
    """Return a pattern for the name in any other spelling; empty if it has no letter A to Z."""
    pattern, rest = "", ""  # of the signs that were looked at: in another spelling, in any one
    for sign in reversed(_signs(name)):
        other = sign.swapcase()
        if sign.isalpha():
            pattern = f"(?:{other}{rest}|{sign}{pattern})" if pattern else f"{other}{rest}"
            rest = f"[{sign}{other}]{rest}"
        else:
            pattern, rest = pattern and sign + pattern, sign + rest
    return pattern and f'"{pattern}"'


def _one_by_one(kind: Any) -> bool:
    """Return True for a type that Arrow's reader lacks, or reads wrongly: it rounds some decimals by one or two, and
    ends the process for some large ones (pyarrow 26).
    """
    types = pa.types
    return types.is_map(kind) or types.is_decimal(kind) or is_variant(kind) or isinstance(kind, pa.JsonType)


def _longest(bodies: Any) -> int:
    longest: int | None = pc.max(pc.binary_length(bodies)).as_py()
    return longest or 0


def _enclosed(bodies: Any) -> bool:
    firsts, lasts = pc.binary_slice(bodies, 0, 1), pc.binary_slice(bodies, -1, None)
    return bool(firsts.buffers()[2] == b"{" * len(bodies) and lasts.buffers()[2] == b"}" * len(bodies))
