"""Paths into JSON text (kv_engine docs/SubDocument.md), and the error of a path that cannot be used."""

from __future__ import annotations

from mirror.wire.constants import Status

PATH_BYTES_MAX = 1024
PATH_PARTS_MAX = 32


Part = str | int


class PathError(Exception):
    """An operation at a path failed, or its path or value is invalid. `status` is the answer to the client."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.name)
        self.status = status


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
