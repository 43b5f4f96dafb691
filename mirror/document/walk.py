"""Find the value at a path in the bytes of a JSON document, in steps of bounded work.

Knows JSON text and the parts of paths; must never know documents or requests. Only names with escapes are decoded, so a
lookup in 20 MiB takes no memory. The generators yield None after `STEP_BYTES`, or equal work, so that other requests
can run. This module only reads; `jsonpath.py` makes changed texts. Invariants: in skipped values only the ends of
strings and the number of open brackets are checked; a text that is not JSON raises no error except `PathError`, often
SUBDOC_DOC_NOT_JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from mmap import mmap
from typing import TypeVar

from mirror.document.jsonpath import PATH_BYTES_MAX, Part, PathError
from mirror.wire.constants import Status

T = TypeVar("T")
Steps = Generator[None, None, T]
Buffer = bytes | bytearray | mmap

STEP_BYTES = 32 * 1024
TOKEN_COST_BYTES = 128
"""The fixed work for a member, a string or a bracket, counted as bytes."""
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


def find(data: Buffer, parts: Sequence[Part]) -> Steps[tuple[int, int]]:
    """Return start and end of the value at a path. Raises PathError."""
    try:
        return (yield from _JsonWalk(data).find(parts))
    except IndexError:
        raise _not_json() from None


def count(data: Buffer, parts: Sequence[Part]) -> Steps[int]:
    """Return the number of members of the container at a path. Raises PathError."""
    try:
        walk = _JsonWalk(data)
        start, _ = yield from walk.find(parts)
        if data[start] not in _END_OF:
            raise PathError(Status.SUBDOC_PATH_MISMATCH)
        return (yield from walk.members(start, None))[0]
    except IndexError:
        raise _not_json() from None


def _not_json() -> PathError:
    return PathError(Status.SUBDOC_DOC_NOT_JSON)


class _JsonWalk:
    """Its methods raise IndexError if the text ends too early."""

    def __init__(self, data: Buffer) -> None:
        self._data = data
        self._left = STEP_BYTES

    def find(self, parts: Sequence[Part]) -> Steps[tuple[int, int]]:
        data = self._data
        start = yield from self._blanks(0)
        if not parts:
            return start, (yield from self._end_of_text())
        end = start
        for part in parts:
            if data[start] != (_OBJECT if isinstance(part, str) else _ARRAY):
                raise PathError(Status.SUBDOC_PATH_MISMATCH)
            _, found = yield from self.members(start, part)
            if found is None:
                raise PathError(Status.SUBDOC_PATH_ENOENT)
            start, end = found
        return start, end

    def members(self, start: int, part: Part | None) -> Steps[tuple[int, tuple[int, int] | None]]:
        """Count the members up to the one that `part` names (None: all). Return the count, and start and end of the
        named member's value, or None if it is missing.
        """
        data = self._data
        is_object, closing = data[start] == _OBJECT, _END_OF[data[start]]
        name = part.encode() if isinstance(part, str) else b""
        last: tuple[int, int] | None = None
        number = 0
        position = yield from self._blanks(start + 1)
        if data[position] == closing:
            return 0, None
        while True:
            began = position
            matches = number == part
            if is_object:
                position = yield from self._string(position)
                matches = part is not None and self._is_name(began, position, name)
                position = yield from self._mark(position, _COLON)
            value_start = position
            position = yield from self._value(position)
            last = value_start, position
            number += 1
            if matches:
                return number, last
            self._left -= position - began + TOKEN_COST_BYTES
            if self._left < 0:
                self._left = STEP_BYTES
                yield
            position = yield from self._blanks(position)
            if data[position] == closing:
                return number, last if part == -1 and not is_object else None
            position = yield from self._mark(position, _COMMA)

    def _is_name(self, start: int, end: int, name: bytes) -> bool:
        if end - start - 2 > NAME_BYTES_MAX:
            return False
        text = bytes(self._data[start + 1 : end - 1])
        if _BACKSLASH not in text:
            return text == name
        try:
            return bool(json.loads(b'"%b"' % text, strict=False) == name.decode())
        except ValueError:
            raise _not_json() from None

    def _mark(self, position: int, mark: int) -> Steps[int]:
        """Return the position after a colon or comma and the blanks around it."""
        position = yield from self._blanks(position)
        if self._data[position] != mark:
            raise _not_json()
        return (yield from self._blanks(position + 1))

    def _blanks(self, position: int) -> Steps[int]:
        if self._data[position] <= _BLANK_MAX:
            position = yield from self._run(_BLANKS, position)
        return position

    def _run(self, pattern: re.Pattern[bytes], position: int) -> Steps[int]:
        """Return the end of the pattern's match at a position."""
        while True:
            match = pattern.match(self._data, position, position + STEP_BYTES)
            assert match is not None, "the pattern matches nothing as well"
            if match.end() == position or match.end() < position + STEP_BYTES - 1:  # the limit may cut an escape
                return match.end()
            position = match.end()
            yield

    def _string(self, position: int) -> Steps[int]:
        if self._data[position] != _QUOTE:
            raise _not_json()
        end = self._short_string(position)
        if end:
            return end
        end = yield from self._run(_IN_STRING, position + 1)
        if self._data[end] != _QUOTE:
            raise _not_json()
        return end + 1

    def _short_string(self, position: int) -> int:
        """Return the end of a string of at most `STEP_BYTES` without escapes, or 0 for any other string."""
        end = self._data.find(b'"', position + 1, position + STEP_BYTES)
        return 0 if end < 0 or self._data.find(b"\\", position + 1, end) >= 0 else end + 1

    def _value(self, position: int) -> Steps[int]:
        first = self._data[position]
        if first == _QUOTE:
            return (yield from self._string(position))
        if first in _END_OF:
            return (yield from self._container(position))
        end = yield from self._run(_PLAIN, position)
        if end == position:
            raise _not_json()
        return end

    def _container(self, position: int) -> Steps[int]:
        """Return the end of a container, where all its brackets are closed."""
        data, search = self._data, _TOKEN.search
        flat = _FLAT.match(data, position, position + FLAT_BYTES_MAX)
        if flat is not None:
            return flat.end()
        depth = 0
        limit = position + STEP_BYTES
        while True:
            match = search(data, position, limit)
            if match is None:
                if limit >= len(data):
                    raise _not_json()
                position = limit
            else:
                start, position = match.span()
                token = data[start]
                if token == _QUOTE:
                    position = self._short_string(start) or (yield from self._string(start))
                elif token in _END_OF:
                    depth += 1
                else:
                    depth -= 1
                    if not depth:
                        return position
            self._left -= TOKEN_COST_BYTES
            if self._left < 0 or position >= limit:
                limit, self._left = position + STEP_BYTES, STEP_BYTES
                yield

    def _end_of_text(self) -> Steps[int]:
        end = len(self._data)
        while True:
            tail = bytes(self._data[max(0, end - STEP_BYTES) : end])
            end -= len(tail) - len(tail.rstrip(b" \t\r\n"))
            if not tail or len(tail.rstrip(b" \t\r\n")):
                return end
            yield
