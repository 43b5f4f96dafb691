"""Paths into JSON text (kv_engine docs/SubDocument.md): find a value, and return the text with a value added, changed
or removed.

A change keeps every other byte of the text, but a removal also takes the comma and the blanks between the member and
its neighbour, as in kv_engine (tests/recordings, sdk_72_conn2). A failure raises `PathError` with the client's status.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from mirror.wire.constants import Status

PATH_BYTES_MAX = 1024
PATH_PARTS_MAX = 32
NUMBER_MAX = 2**63 - 1

_scan = json.JSONDecoder().raw_decode
_BLANKS = " \t\r\n"

Part = str | int


class PathError(Exception):
    """An operation at a path failed, or its path or value is invalid. `status` is the answer to the client."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.name)
        self.status = status


@dataclass(frozen=True, slots=True)
class Member:
    """A value in its container. `start` is the start of its key, or of the value itself in an array."""

    name: Part
    start: int
    value_start: int
    end: int


def parse_path(path: str) -> list[Part]:
    """Return the parts of a path: names of members and indexes of elements (-1: the last). Raises PathError."""
    if len(path.encode()) > PATH_BYTES_MAX:
        raise PathError(Status.SUBDOC_PATH_E2BIG)
    parts: list[Part] = []
    position = 0
    while position < len(path):
        if path[position] == "[":
            end = path.find("]", position)
            number = path[position + 1 : end]
            if end < 0 or not ((number.isascii() and number.isdigit()) or number == "-1"):
                raise PathError(Status.SUBDOC_PATH_EINVAL)
            parts.append(int(number))
            position = end + 1
            if position < len(path) and path[position] == ".":
                position = _after_dot(path, position)
            continue
        name, position = _name(path, position)
        parts.append(name)
    if len(parts) > PATH_PARTS_MAX:
        raise PathError(Status.SUBDOC_PATH_E2BIG)
    return parts


def _name(path: str, position: int) -> tuple[str, int]:
    out: list[str] = []
    if path[position] == "`":
        position += 1
        while True:
            end = path.find("`", position)
            if end < 0:
                raise PathError(Status.SUBDOC_PATH_EINVAL)
            out.append(path[position:end])
            position = end + 1
            if path[position : position + 1] != "`":
                break
            out.append("`")
            position += 1
    else:
        end = min((at for at in (path.find(c, position) for c in ".[") if at >= 0), default=len(path))
        out.append(path[position:end])
        position = end
    name = "".join(out)
    if not name or (position < len(path) and path[position] not in ".["):
        raise PathError(Status.SUBDOC_PATH_EINVAL)
    if position < len(path) and path[position] == ".":
        position = _after_dot(path, position)
    return name, position


def _after_dot(path: str, position: int) -> int:
    if position + 1 >= len(path) or path[position + 1] in ".[":
        raise PathError(Status.SUBDOC_PATH_EINVAL)
    return position + 1


def _skip(text: str, position: int) -> int:
    while text[position] in _BLANKS:
        position += 1
    return position


def members(text: str, start: int) -> Iterator[Member]:
    """Yield the members or elements of the container at `start`. The text must be valid JSON."""
    is_object = text[start] == "{"
    position = _skip(text, start + 1)
    index = 0
    while text[position] not in "}]":
        begin, name = position, index
        if is_object:
            key, position = _scan(text, position)
            position = _skip(text, _skip(text, position) + 1)
            name = key
        _, end = _scan(text, position)
        yield Member(name, begin, position, end)
        index += 1
        position = _skip(text, end)
        if text[position] == ",":
            position = _skip(text, position + 1)


def root(text: str) -> int:
    return _skip(text, 0)


def find(text: str, parts: list[Part]) -> tuple[int, int]:
    """Return start and end of the value at a path. Raises PathError."""
    start = root(text)
    end = len(text.rstrip(_BLANKS))
    for part in parts:
        member = child(text, start, part)
        if member is None:
            raise PathError(Status.SUBDOC_PATH_ENOENT)
        start, end = member.value_start, member.end
    return start, end


def child(text: str, start: int, part: Part) -> Member | None:
    """Return the member `part` of the container at `start`, or None. Raises PathError for a name unless the value at
    `start` is an object, and for an index unless it is an array.
    """
    if text[start] != ("{" if isinstance(part, str) else "["):
        raise PathError(Status.SUBDOC_PATH_MISMATCH)
    found = None
    for member in members(text, start):
        if member.name == part:
            return member
        found = member
    return found if part == -1 else None


def replace(text: str, parts: list[Part], value: str) -> str:
    start, end = find(text, parts)
    return text[:start] + value + text[end:]


def remove(text: str, parts: list[Part]) -> str:
    """Remove a member from its container. Raises PathError."""
    if not parts:
        raise PathError(Status.SUBDOC_PATH_EINVAL)
    start, _ = find(text, parts[:-1])
    gone = child(text, start, parts[-1])
    if gone is None:
        raise PathError(Status.SUBDOC_PATH_ENOENT)
    before = after = None
    for member in members(text, start):
        if member.end <= gone.start:
            before = member
        elif member.start >= gone.end:
            after = member
            break
    if after is not None:
        return text[: gone.start] + text[after.start :]
    if before is not None:
        return text[: before.end] + text[gone.end :]
    return text[: gone.start] + text[gone.end :]


def insert_member(text: str, parts: list[Part], value: str, *, make_parents: bool, add_only: bool) -> str:
    """Add a member to an object, or replace it. Raises PathError, with `add_only` also for an existing member."""
    if not parts or not isinstance(parts[-1], str):
        raise PathError(Status.SUBDOC_PATH_EINVAL)
    start = _parent(text, parts[:-1])
    if start is None:
        if not make_parents:
            raise PathError(Status.SUBDOC_PATH_ENOENT)
        return _with_parents(text, parts, value)
    old = child(text, start, parts[-1])
    if old is None:
        return _append(text, start, f"{json.dumps(parts[-1], ensure_ascii=False)}:{value}")
    if add_only:
        raise PathError(Status.SUBDOC_PATH_EEXISTS)
    return text[: old.value_start] + value + text[old.end :]


def push(text: str, parts: list[Part], values: str, *, first: bool, make_parents: bool) -> str:
    """Put values (separated by commas) at the beginning (`first`) or the end of an array."""
    start = _parent(text, parts)
    if start is None:
        if not make_parents:
            raise PathError(Status.SUBDOC_PATH_ENOENT)
        return insert_member(text, parts, f"[{values}]", make_parents=True, add_only=True)
    if text[start] != "[":
        raise PathError(Status.SUBDOC_PATH_MISMATCH)
    if first and any(True for _ in members(text, start)):
        return f"{text[: start + 1]}{values},{text[start + 1 :]}"
    return _append(text, start, values)


def insert_element(text: str, parts: list[Part], values: str) -> str:
    """Put values before the element at the path's index; an index one past the end appends."""
    index = parts[-1] if parts else None
    if not isinstance(index, int) or index < 0:
        raise PathError(Status.SUBDOC_PATH_EINVAL)
    start, _ = find(text, parts[:-1])
    member = child(text, start, index)
    if member is not None:
        return f"{text[: member.start]}{values},{text[member.start :]}"
    if sum(1 for _ in members(text, start)) != index:
        raise PathError(Status.SUBDOC_PATH_ENOENT)
    return _append(text, start, values)


def add_unique(text: str, parts: list[Part], value: str, *, make_parents: bool) -> str:
    """Append a scalar to an array of scalars. Raises PathError, also if the array has the scalar."""
    added = json.loads(value)
    if isinstance(added, dict | list):
        raise PathError(Status.SUBDOC_VALUE_CANTINSERT)
    start = _parent(text, parts)
    if start is not None and text[start] == "[":
        for member in members(text, start):
            there = json.loads(text[member.value_start : member.end])
            if isinstance(there, dict | list):
                raise PathError(Status.SUBDOC_PATH_MISMATCH)
            if there == added and type(there) is type(added):
                raise PathError(Status.SUBDOC_PATH_EEXISTS)
    return push(text, parts, value, first=False, make_parents=make_parents)


def add_number(text: str, parts: list[Part], delta: int, *, make_parents: bool) -> tuple[str, int]:
    """Add `delta` to the integer at a path; a missing integer counts as 0. Return the text and the new number."""
    if delta == 0 or abs(delta) > NUMBER_MAX:
        raise PathError(Status.SUBDOC_DELTA_EINVAL)
    number = delta
    try:
        start, end = find(text, parts)
    except PathError as error:
        if error.status != Status.SUBDOC_PATH_ENOENT:
            raise
        return insert_member(text, parts, str(number), make_parents=make_parents, add_only=True), number
    old = json.loads(text[start:end])
    if not isinstance(old, int) or isinstance(old, bool):
        raise PathError(Status.SUBDOC_PATH_MISMATCH)
    if abs(old) > NUMBER_MAX:
        raise PathError(Status.SUBDOC_NUM_ERANGE)
    number += old
    if not -NUMBER_MAX - 1 <= number <= NUMBER_MAX:
        raise PathError(Status.SUBDOC_VALUE_CANTINSERT)
    return text[:start] + str(number) + text[end:], number


def _parent(text: str, parts: list[Part]) -> int | None:
    try:
        return find(text, parts)[0]
    except PathError as error:
        if error.status != Status.SUBDOC_PATH_ENOENT:
            raise
        return None


def _with_parents(text: str, parts: list[Part], value: str) -> str:
    """Make the objects that are missing on the path."""
    for length in range(len(parts) - 1, 0, -1):
        start = _parent(text, parts[: length - 1])
        if start is None:
            continue
        for name in reversed(parts[length:]):
            if not isinstance(name, str):
                raise PathError(Status.SUBDOC_PATH_ENOENT)
            value = f"{{{json.dumps(name, ensure_ascii=False)}:{value}}}"
        return insert_member(text, parts[:length], value, make_parents=False, add_only=True)
    raise PathError(Status.SUBDOC_PATH_ENOENT)


def _append(text: str, start: int, addition: str) -> str:
    last = None
    for member in members(text, start):
        last = member
    if last is None:
        return text[: start + 1] + addition + text[start + 1 :]
    return f"{text[: last.end]},{addition}{text[last.end :]}"
