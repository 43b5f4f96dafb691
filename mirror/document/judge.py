"""Check that bytes are one JSON value (RFC 8259, UTF-8), without holding the interpreter's lock for long.

`json.loads` reads 20 MiB in one call that holds the lock for 0.9 s. `is_json` lets other threads run after every
`STEP_BYTES`, and builds no values. It accepts what `json.loads(data.decode())` accepts, but refuses NaN, Infinity,
containers nested deeper than `DEPTH_MAX`, and numbers of `NUMBER_BYTES_MAX` bytes or more.
"""

from __future__ import annotations

import codecs
import re
from functools import cache

STEP_BYTES = 16 * 1024
DEPTH_MAX = 900
"""Greatest depth of nested containers."""
NUMBER_BYTES_MAX = 4096

# Groups that must not backtrack are atomic, not possessive. Python 3.11.2, which Debian 12 has, matches possessive
# groups wrongly (cpython issue 106052, fixed in 3.11.5).
_BLANKS = rb"[ \t\r\n]*+"
_STRING = rb'"(?>(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)"'
_NUMBER = rb"(?>(?![-+.0-9eE]{%d})-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?)" % NUMBER_BYTES_MAX
_SCALAR = rb"(?:%b|%b|true|false|null)" % (_STRING, _NUMBER)
LEVELS = 3
"""The regular expressions match containers nested up to this depth. One match may span many containers."""


def _nested(inner: bytes) -> bytes:
    """Return the pattern of a scalar, or of a container whose values match `inner`."""
    member = _STRING + _BLANKS + b":" + _BLANKS + inner
    array, members = (
        b"%b(?>(?:%b%b(?>(?:,%b%b%b)*))?)" % (_BLANKS, of, _BLANKS, _BLANKS, of, _BLANKS) for of in (inner, member)
    )
    return rb"(?:%b|\[%b\]|\{%b\})" % (_SCALAR, array, members)


@cache
def _patterns() -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """Return the patterns of array items and object members, each with the comma after it. Compiling takes a quarter of
    a second, so it waits for the first use.
    """
    value = _SCALAR
    for _ in range(LEVELS):
        value = _nested(value)
    items = rb"(?>(?:%b%b,%b)*)" % (value, _BLANKS, _BLANKS)
    members = rb"(?>(?:%b%b:%b%b%b,%b)*)" % (_STRING, _BLANKS, _BLANKS, value, _BLANKS, _BLANKS)
    return re.compile(items), re.compile(members)


_SPACE = re.compile(_BLANKS)
_WORD = re.compile(rb"(?:%b|true|false|null)" % _NUMBER)
_IN_STRING = re.compile(rb'(?>(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)')
_ESCAPE_BYTES_MAX = 6
_QUOTE, _COLON, _COMMA = b'":,'
_ARRAY, _OBJECT, _END_ARRAY, _END_OBJECT = b"[{]}"


class _NoJson(Exception):
    pass


def is_json(data: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    view = memoryview(data)
    try:
        for at in range(0, len(data), STEP_BYTES):
            decoder.decode(view[at : at + STEP_BYTES], at + STEP_BYTES >= len(data))
        _Judge(data).judge()
    except (_NoJson, IndexError, UnicodeDecodeError):
        return False
    return True


class _Judge:
    """Its methods raise _NoJson, or IndexError if the text ends too early."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def judge(self) -> None:
        """Read the text in a loop, because recursion would overflow Python's stack."""
        data = self._data
        inside = bytearray()  # the brackets that are open
        self._blanks()
        while True:
            first = data[self._at]
            if first in (_ARRAY, _OBJECT):
                if len(inside) >= DEPTH_MAX:
                    raise _NoJson
                inside.append(first)
                self._at += 1
                self._blanks()
                if data[self._at] != (_END_ARRAY if first == _ARRAY else _END_OBJECT):
                    self._before_value(first)
                    continue
                inside.pop()
                self._at += 1
            elif first == _QUOTE:
                self._string()
            else:
                self._word()
            while True:  # after a value
                self._blanks()
                if not inside:
                    if self._at != len(data):
                        raise _NoJson
                    return
                mark = data[self._at]
                self._at += 1
                if mark == _COMMA:
                    self._blanks()
                    self._before_value(inside[-1])
                    break
                if mark != (_END_ARRAY if inside.pop() == _ARRAY else _END_OBJECT):
                    raise _NoJson

    def _before_value(self, bracket: int) -> None:
        """Skip the values that the pattern matches, each with its comma. Stop at the first other value.

        This value is nested too deeply for the pattern, longer than STEP_BYTES, invalid, or the container's last. In an
        object, skip also the name of this value.
        """
        pattern = _patterns()[bracket == _OBJECT]
        while True:
            match = pattern.match(self._data, self._at, self._at + STEP_BYTES)
            assert match is not None, "the pattern matches nothing as well"
            if match.end() == self._at:
                break
            self._at = match.end()
        self._blanks()
        if bracket == _OBJECT:
            if self._data[self._at] != _QUOTE:
                raise _NoJson
            self._string()
            self._blanks()
            if self._data[self._at] != _COLON:
                raise _NoJson
            self._at += 1
            self._blanks()

    def _blanks(self) -> None:
        while True:
            match = _SPACE.match(self._data, self._at, self._at + STEP_BYTES)
            assert match is not None, "the pattern matches nothing as well"
            self._at, began = match.end(), self._at
            if self._at - began < STEP_BYTES:
                return

    def _word(self) -> None:
        match = _WORD.match(self._data, self._at, self._at + NUMBER_BYTES_MAX)
        if match is None:
            raise _NoJson
        self._at = match.end()

    def _string(self) -> None:
        self._at += 1
        while True:
            match = _IN_STRING.match(self._data, self._at, self._at + STEP_BYTES)
            assert match is not None, "the pattern matches nothing as well"
            began, self._at = self._at, match.end()
            if self._data[self._at] == _QUOTE:
                self._at += 1
                return
            if self._at < began + STEP_BYTES - _ESCAPE_BYTES_MAX:  # only an escape may be cut off
                raise _NoJson
