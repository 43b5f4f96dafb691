"""Find the value at a path in the bytes of a JSON document.

Only names with escapes are decoded, so a lookup in 20 MiB takes no memory. In skipped values only the ends of strings
and the number of open brackets are checked; a text that is not JSON raises no error except `PathError`, often
SUBDOC_DOC_NOT_JSON. One call of a regular expression, which holds the interpreter's lock, reads `STEP_BYTES` at most.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from mirror.document.jsonpath import PATH_BYTES_MAX, Part, PathError
from mirror.wire.constants import Status

STEP_BYTES = 32 * 1024
FLAT_BYTES_MAX = 2 * 1024
NAME_BYTES_MAX = 6 * PATH_BYTES_MAX
"""The length of the longest name that a path can have, if a document spells each byte with an escape."""

_BLANKS = re.compile(rb"[ \t\r\n]*+")
_IN_STRING = re.compile(rb'(?>(?:[^"\\]++|\\.)*)', re.DOTALL)
_PLAIN = re.compile(rb"[-+.0-9A-Za-z]*+")
"""Numbers, true, false and null."""
_TOKEN = re.compile(rb'[\[\]{}"]')
_FLAT = re.compile(rb'[\[{][^\[\]{}"\\]*+(?>(?:"[^"\\]*+"[^\[\]{}"\\]*+)*)[\]}]')
"""A container without inner containers or escapes. Most containers are flat, and this pattern skips them fast."""

_QUOTE, _COLON, _COMMA, _BACKSLASH, _BLANK_MAX = b'":,\\ '
_ARRAY, _OBJECT = b"[{"
_END_OF = {_ARRAY: ord("]"), _OBJECT: ord("}")}


def find(data: bytes, parts: Sequence[Part]) -> tuple[int, int]:
    """Return start and end of the value at a path. Raises PathError."""
    try:
        return _JsonWalk(data).find(parts)
    except IndexError:
        raise _not_json() from None


def count(data: bytes, parts: Sequence[Part]) -> int:
    """Return the number of members of the container at a path. Raises PathError."""
    try:
        walk = _JsonWalk(data)
        start, _ = walk.find(parts)
        if data[start] not in _END_OF:
            raise PathError(Status.SUBDOC_PATH_MISMATCH)
        return walk.members(start, None)[0]
    except IndexError:
        raise _not_json() from None


def _not_json() -> PathError:
    return PathError(Status.SUBDOC_DOC_NOT_JSON)


class _JsonWalk:
    """Its methods raise IndexError if the text ends too early."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def find(self, parts: Sequence[Part]) -> tuple[int, int]:
        data = self._data
        start = self._blanks(0)
        end = len(data.rstrip(b" \t\r\n"))
        for part in parts:
            if data[start] != (_OBJECT if isinstance(part, str) else _ARRAY):
                raise PathError(Status.SUBDOC_PATH_MISMATCH)
            _, found = self.members(start, part)
            if found is None:
                raise PathError(Status.SUBDOC_PATH_ENOENT)
            start, end = found
        return start, end

    def members(self, start: int, part: Part | None) -> tuple[int, tuple[int, int] | None]:
        """Count the members up to the one that `part` names (None: all). Return the count, and start and end of the
        named member's value, or None if it is missing.
        """
        data = self._data
        is_object, closing = data[start] == _OBJECT, _END_OF[data[start]]
        name = part.encode() if isinstance(part, str) else b""
        number = 0
        position = self._blanks(start + 1)
        if data[position] == closing:
            return 0, None
        while True:
            began = position
            matches = number == part
            if is_object:
                position = self._string(position)
                matches = part is not None and self._is_name(began, position, name)
                position = self._mark(position, _COLON)
            value_start = position
            position = self._value(position)
            last = value_start, position
            number += 1
            if matches:
                return number, last
            position = self._blanks(position)
            if data[position] == closing:
                return number, last if part == -1 and not is_object else None
            position = self._mark(position, _COMMA)

    def _is_name(self, start: int, end: int, name: bytes) -> bool:
        if end - start - 2 > NAME_BYTES_MAX:
            return False
        text = self._data[start + 1 : end - 1]
        if _BACKSLASH not in text:
            return text == name
        try:
            return bool(json.loads(b'"%b"' % text, strict=False) == name.decode())
        except ValueError:
            raise _not_json() from None

    def _mark(self, position: int, mark: int) -> int:
        """Return the position after a colon or comma and the blanks around it."""
        position = self._blanks(position)
        if self._data[position] != mark:
            raise _not_json()
        return self._blanks(position + 1)

    def _blanks(self, position: int) -> int:
        return self._run(_BLANKS, position) if self._data[position] <= _BLANK_MAX else position

    def _run(self, pattern: re.Pattern[bytes], position: int) -> int:
        """Return the end of the pattern's match at a position."""
        while True:
            match = pattern.match(self._data, position, position + STEP_BYTES)
            assert match is not None, "the pattern matches nothing as well"
            if match.end() == position or match.end() < position + STEP_BYTES - 1:  # the limit may cut an escape
                return match.end()
            position = match.end()

    def _string(self, position: int) -> int:
        if self._data[position] != _QUOTE:
            raise _not_json()
        end = self._data.find(b'"', position + 1, position + STEP_BYTES)
        if end >= 0 and self._data.find(b"\\", position + 1, end) < 0:  # short, and without escapes
            return end + 1
        end = self._run(_IN_STRING, position + 1)
        if self._data[end] != _QUOTE:
            raise _not_json()
        return end + 1

    def _value(self, position: int) -> int:
        first = self._data[position]
        if first == _QUOTE:
            return self._string(position)
        if first in _END_OF:
            return self._container(position)
        end = self._run(_PLAIN, position)
        if end == position:
            raise _not_json()
        return end

    def _container(self, position: int) -> int:
        """Return the end of a container, where all its brackets are closed."""
        data, search = self._data, _TOKEN.search
        flat = _FLAT.match(data, position, position + FLAT_BYTES_MAX)
        if flat is not None:
            return flat.end()
        depth = 0
        while True:
            match = search(data, position, position + STEP_BYTES)
            if match is None:
                position += STEP_BYTES
                if position >= len(data):
                    raise _not_json()
                continue
            start, position = match.span()
            token = data[start]
            if token == _QUOTE:
                position = self._string(start)
            elif token in _END_OF:
                depth += 1
            else:
                depth -= 1
                if not depth:
                    return position
