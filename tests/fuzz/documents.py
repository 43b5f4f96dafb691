"""JSON documents at every edge, against the types and modes of a typed read. Run as a program, so that a crash is seen:

    python -m tests.fuzz.documents COUNT SEED

It prints a line of figures. A document may end the reading in `DocumentDoesNotFit` of mode=failfast alone; in the other
modes it has the same columns whether Arrow reads it with others or Python reads it by itself. As many documents as
people have them are in mirrors, where every reader gives what `readers` finds in them.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pyarrow as pa

from mirror.typed.bodies import MODES, Bodies, DocumentDoesNotFit, Parsed, Reading, _ArrowReader
from mirror.typed.ddl import WORDS, fields_of
from mirror.typed.values import Misfit, object_of

TYPES = (
    *sorted(WORDS),
    *("decimal(10,2)", "decimal(38,0)", "decimal(38,18)", "decimal(38,38)", "decimal(1,1)"),
    *("array<int>", "array<array<double>>", "array<timestamp>", "array<decimal(10,2)>", "map<string,string>"),
    *("map<string,decimal(5,1)>", "struct<a:int,b:string>", "struct<a:struct<b:decimal(5,1)>>"),
    *("array<struct<a:date>>",),
)
BODIES_AT_ONCE = 64
ZONES = ("UTC", "Europe/Berlin", "+05:30")
EPOCHS = (None, None, "seconds", "millis", "micros")

LENGTH_MAX = 100_000

_DIGITS = ("0", "1", "9", "00", "12", "9" * 18, "9" * 19, "9" * 20, "1" * 38, "1" * 39, "1" * 76, "1" * 77, "7" * 400)
_EXPONENTS = (
    *(0, 1, 2, 9, 10, 38, 39, 76, 77, 308, 309, 9_999, 10_000, 10_001, 20_000, 2_000_000),
    *(2**31, 10**9 - 1, 10**18, 10**19, 10**40),
)
_TIMES = (
    *("2026-01-31", "2026-07-01T12:00:00", "2026-07-01 12:00:00.1234567Z", "9999-12-31T23:59:59+18:00", "+10000-1-1"),
    *("0000-01-01", "0001-01-01", "20260701", "1", "2026-02-30", "2026-07-01T12", "2026-07-01T24:00", "-2026-01-01"),
    *("2026-10-25 02:30", "2026-03-29 02:30", "2026-07-01T12:00 Mars/Base", "294247-01-10T04:00:54.775808Z", "12:30"),
)
_TEXTS = (
    *("", "x", "NaN", "INF", "-Infinity", "true", "null", "{}", "[", "1,234.5", " 1", "\\u0000", "\\ud800", "\\udc00"),
    *("\\ud83d\\ude00", "\\q", "\\", "\\u12", "é", "\x7f", "\x01", "\t", "0x1F", "1_000", "١٢"),
)
_DEPTHS = (1, 2, 32, 100, 400, 499, 500, 501, 800, 1_001, 5_000)
_LENGTHS = (0, 1, 255, 4_096, 70_000)
_ENCODINGS = (b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\0", b"\xef\xbb\xbf", b"\xe2\x82")


Value = Callable[[], str]
"""Makes values as JSON."""
Collection = dict[str, Value]

NAMES = (
    *("id", "ID", "Id", "amount", "Amount", "AMOUNT", "total", "state", "tags", "customer", "createdAt", "_id"),
    *("_class", "order", "select", "from", "group", "key", "KEY", "NULL", "true", "documents", "0", "1", "value"),
    *("Value", "_key", "_KEY", "_value", "_vbid", "_corrupt_record", "é", "É", "naïve", "日本", "ß"),
    *("a" * 300, "A" * 300, "B" * 64, "\ud83d\ude00"),
)
ODD_NAMES = (
    *("a.b", "-1", "\ufb03", "\u212a", "a`b", "a/b", "~0", "*", "$", "$.x", "[0]", "a,b", "a;b", "{a}", "a=b", "a:b"),
    *("", " ", "a b", "US Gross", 'a"b', "a'b", "a\\b", "(_seqno > 5)", "line\u2028", "zero\0", "tab\t"),
    *("x" * 299 + " ",),
)
INTEGERS = (0, 1, -1, 7, 2**31, 2**53 - 1, 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63), 10**15)
LARGE_INTEGERS = ("9223372036854775808", "-9223372036854775809", "1" + "0" * 400, "9" * 5_000, "-0")
DOUBLES = (
    *("0.1", "0.5", "1e3", "1E-7", "-0.0", "1.0", "12345678.5", "5e-324", "1.7976931348623157e308"),
    *("9007199254740993.0", "1e22", "123456789.123456789", "0.30000000000000004"),
    *("0." + "1" * 60,),
)
LARGE_DOUBLES = ("1e400", "-1e400", "1e309", "1" * 400 + ".5")
TEXTS = (
    *("x", "é", "日本", "new", "9007199254740993", "1.5", "1e5", "NaN", "Infinity", "-Infinity", "true", "null", "{}"),
    *("[1]", "2026-01-31", "2026-07-01T12:00:00Z", "0001-01-01", "a,b", "<b>", "\ufffd", "?", "NULL"),
    *("", " blank ", "line\nfeed", "tab\t", 'say "x"', "it's", "back\\slash", "\u2028", "\u2029", "\0"),
    *("zero\0inside", "\ud83d", "\ude00", "cut \ud83d", "\ude00\ud83d", "\ud83d\ude00", "x" * 300),
    *("\ufeff", "\x7f", "\uffff", "\\ud83d"),
)


class Documents:
    """A generator of bodies."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.odd_one_in = 300
        """A value in how many is of any kind, or at an edge."""

    def number(self) -> str:
        pick = self._rng.choice
        text = pick(("", "", "-", "+")) + pick(_DIGITS)
        if pick((True, False)):
            text += "." + pick((*_DIGITS, ""))
        if pick((True, False)):
            text += pick("eE") + pick(("", "+", "-")) + str(max(0, pick(_EXPONENTS) + pick((-1, 0, 1))))
        return text

    def text(self) -> str:
        what = self._rng.randrange(6)
        if what == 0:
            found = self.number()
        elif what == 1:
            found = self._rng.choice(_TIMES)
        elif what == 2:
            found = self._rng.choice("xé1") * self._rng.choice(
                _LENGTHS if self._rng.randrange(50) == 0 else (3, 39, 40)
            )
        else:
            found = self._rng.choice(_TEXTS)
        if self._rng.randrange(4) == 0:  # some characters by their number
            found = "".join(
                f"\\u{ord(each):04x}" if self._rng.randrange(2) and each != "\\" else each for each in found
            )
        return f'"{found}"'

    def value(self, depth: int = 0) -> str:
        what = self._rng.randrange(12 if depth < 4 else 8)
        if what < 3:
            return self.number()
        if what < 6:
            return self.text()
        if what == 6:
            return self._rng.choice(("true", "false", "null", "NaN", "-Infinity", "nul", "True", ""))
        if what == 7:
            if self._rng.randrange(20):
                return str(self._rng.randrange(100))
            deep, (begin, end) = self._rng.choice(_DEPTHS), self._rng.choice((("[", "]"), ('{"a":', "}")))
            return begin * deep + "1" + end * self._rng.choice((deep, deep, deep - 1, deep + 1))
        if what < 10:
            return "[" + ",".join(self.value(depth + 1) for _ in range(self._rng.randrange(4))) + "]"
        names = (self._rng.choice(("a", "b", "\\u0061", "é", "")) for _ in range(self._rng.randrange(4)))
        return "{" + ",".join(f'"{name}":{self.value(depth + 1)}' for name in names) + "}"

    def fitting(self, kind: Any) -> str:
        """A value that is likely to fit."""
        pick = self._rng.choice
        if pa.types.is_struct(kind):
            return "{" + ",".join(f'"{each.name}":{self.fitting(each.type)}' for each in kind) + "}"
        if pa.types.is_list(kind):
            return "[" + ",".join(self.fitting(kind.value_type) for _ in range(self._rng.randrange(3))) + "]"
        if pa.types.is_map(kind):
            return f'{{"é":{self.fitting(kind.item_type)}}}'
        if pa.types.is_string(kind):
            return self.text()
        if pa.types.is_boolean(kind):
            return pick(("true", "false", "null"))
        if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
            return pick((f'"{pick(_TIMES)}"', f'"{pick(_TIMES)}"', str(self._rng.randrange(-(2**40), 2**40))))
        sign, whole = pick(("", "-")), str(self._rng.randrange(10 ** self._rng.randrange(1, 20)))
        return sign + whole + ("" if pa.types.is_integer(kind) else pick(("", ".5", ".005", ".000", "." + "3" * 38)))

    # -- documents as people have them

    def collection(self) -> Collection:
        """The fields of a collection's documents, each with values of one kind, mostly."""
        return {name: self.kind() for name in self._names(self._rng.randrange(1, 9))}

    def _names(self, count: int) -> list[str]:
        return self._rng.sample(NAMES + ODD_NAMES if self._rng.randrange(4) == 0 else NAMES, count)

    def kind(self, depth: int = 0) -> Value:
        pick, rng = self._rng.choice, self._rng
        what = rng.randrange(12 if depth < 3 else 7)
        if what < 2:
            return lambda: str(pick(INTEGERS) if rng.randrange(9) else pick(("-0", rng.randrange(-(10**18), 10**18))))
        if what < 4:
            return lambda: pick(DOUBLES) if rng.randrange(9) else repr(rng.uniform(-1e6, 1e6))
        if what < 6:
            return lambda: self.spelled(pick(TEXTS))
        if what == 6:
            return lambda: pick(("true", "false"))
        if what < 9:
            element = self.kind(depth + 1)
            return lambda: f"[{','.join(element() if rng.randrange(8) else 'null' for _ in range(rng.randrange(4)))}]"
        if what < 11:
            fields = {name: self.kind(depth + 1) for name in self._names(rng.randrange(4))}
            return lambda: self.object(fields)
        kinds = [self.kind(depth + 1), self.kind(depth + 1)]
        return lambda: pick(kinds)()

    def odd(self) -> str:
        """A value of any kind, or at an edge."""
        return self._rng.choice((lambda: self._rng.choice((*LARGE_INTEGERS, *LARGE_DOUBLES)), self.kind(1)))()

    def object(self, fields: Collection) -> str:
        rng = self._rng
        members = []
        for name, value in fields.items():
            if rng.randrange(8):
                shown = (
                    name
                    if rng.randrange(12)
                    else "".join(rng.choice((each.lower(), each.upper())) if each.isascii() else each for each in name)
                )
                made = (
                    "null" if not rng.randrange(20) else self.odd() if not rng.randrange(self.odd_one_in) else value()
                )
                members.append(self.spelled(shown) + rng.choice((":", ": ")) + made)
        rng.shuffle(members)
        return "{" + rng.choice((",", ", ")).join(members) + "}"

    def spelled(self, text: str) -> str:
        """A text as JSON writers spell it: in ASCII or not, with needless escapes or not."""
        rng = self._rng
        has_half = any("\ud800" <= each <= "\udfff" for each in text)
        found = json.dumps(text, ensure_ascii=has_half or bool(rng.randrange(2)))
        if text.isascii() and text.isalnum() and not rng.randrange(20):
            found = '"' + "".join(f"\\u{ord(each):04x}" if rng.randrange(2) else each for each in text) + '"'
        return found.replace("/", "\\/") if not rng.randrange(9) else found

    def document(self, fields: Collection) -> bytes:
        rng = self._rng
        what = rng.randrange(60)
        if what == 0:
            return self.odd().encode()
        found = self.object(fields)
        if what == 1:
            found = rng.choice(
                (f"[{found}]", f" {found}\n", found[:-1], found + "x", self.spelled(found), found.replace(",", ",,", 1))
            )
        return found.encode()

    def body(self, schema: Any) -> bytes:
        pick = self._rng.choice
        if self._rng.randrange(2):
            return ("{" + ",".join(f'"{each.name}":{self.fitting(each.type)}' for each in schema) + "}").encode()
        names = [pick(("v", "w", "w", "x", "\\u0076", "V")) for _ in range(self._rng.randrange(3))]
        body = ("{" + ",".join(f'"{name}":{self.value()}' for name in ("v", *names)) + "}").encode()
        if self._rng.randrange(8) == 0:
            at = self._rng.randrange(len(body) + 1)
            body = body[:at] + pick((*_ENCODINGS, b"{", b"}", b",", b'"', b"\n")) + body[at + self._rng.randrange(2) :]
        elif self._rng.randrange(16) == 0:
            body = pick((b"", b" ", b"[]", b"null", body + body, body + b"x", b"\n" + body + b"\r\n", body[:-1]))
        return body


def check(reader: Bodies, reading: Reading, schema: Any, bodies: list[bytes], datatypes: bytes) -> Parsed | None:
    """The columns, valid for any program; None: mode=failfast ended it."""
    keys = pa.array([b"key"] * len(bodies), pa.binary())
    try:
        found = reader.columns(pa.array(bodies, pa.binary()), datatypes, keys)
    except DocumentDoesNotFit:
        assert reading.mode == "failfast"
        return None
    for column, field in zip(found.columns, schema, strict=True):
        column.validate(full=True)
        assert column.type == field.type
        assert len(column) == len(bodies)
    return found


def is_deep(body: bytes) -> bool:
    """True if Python's reader gives up."""
    try:
        object_of(body)
    except Misfit as error:
        return "too deep" in str(error)
    return False


def shown(column: Any, row: int) -> str:
    """A value as text: Python cannot hold every time, and NaN equals nothing."""
    text: str = column.slice(row, 1).to_string(window=LENGTH_MAX, container_window=LENGTH_MAX)
    return text


def run(count: int, seed: int) -> dict[str, Any]:
    """Figures of `count` documents of each kind."""
    from tests.fuzz.readers import run as read_everywhere

    figures: Counter[str] = Counter()
    rng = Random(seed)
    documents = Documents(rng)
    parse = _ArrowReader.parse

    def counted(reader: _ArrowReader, objects: Any) -> Any:
        found = parse(reader, objects)
        figures["read by Arrow"] += len(objects)
        return found

    _ArrowReader.parse = counted  # type: ignore[method-assign, assignment]
    started_s = time.process_time()
    while figures["documents"] < count:
        kinds = rng.sample(TYPES, rng.choice((1, 1, 2)))
        corrupt = rng.choice(("", ", _corrupt_record string"))
        schema = fields_of(", ".join(f"{name} {kind}" for name, kind in zip("vw", kinds, strict=False)) + corrupt)
        reading = Reading(rng.choice(MODES), time_zone=rng.choice(ZONES), epoch=rng.choice(EPOCHS))
        bodies = [documents.body(schema) for _ in range(min(BODIES_AT_ONCE, count - figures["documents"]))]
        datatype = rng.choice((0, *[1] * 15))
        figures["documents"] += len(bodies)
        figures[reading.mode] += len(bodies)
        for group in [bodies] if rng.randrange(2) else [[body] for body in bodies]:
            compare(schema, reading, group, bytes([datatype]) * len(group), figures)
    figures += read_everywhere(count, rng)
    return dict(figures) | {"seed": seed, "types": len(TYPES), "processor_s": round(time.process_time() - started_s)}


def compare(schema: Any, reading: Reading, bodies: list[bytes], datatypes: bytes, figures: Counter[str]) -> None:
    """Read documents together, and each alone."""
    found = check(Bodies(schema, reading), reading, schema, bodies, datatypes)
    alone = Bodies(schema, reading)
    alone._arrow = None
    expected = check(alone, reading, schema, bodies, datatypes)
    deep = {row for row, body in enumerate(bodies) if is_deep(body)}  # Arrow alone reads what is beside such a value
    if found is None or expected is None:
        assert deep or found is expected, f"{schema} {reading}: {bodies[0]!r}"
        figures["ended by failfast"] += 1
        return
    figures["misfits"] += len(found.misfits)
    for at, (ours, theirs) in enumerate(zip(found.columns, expected.columns, strict=True)):
        for row in () if ours.equals(theirs) else set(range(len(bodies))) - deep:
            one, other = shown(ours, row), shown(theirs, row)
            where = f"{schema.field(at)} {reading}: {bodies[row][:200]!r}"
            assert one == other, f"{where}: {one[:200]} by Arrow, {other[:200]} alone"
    odd = [bodies[row][:300] for row in (found.misfits.keys() ^ expected.misfits.keys()) - deep]
    assert not odd, f"{schema} {reading}: {odd[0]!r} does not fit in one way alone"


if __name__ == "__main__":
    sys.stdout.write(f"done {json.dumps(run(int(sys.argv[1]), int(sys.argv[2])))}\n")
