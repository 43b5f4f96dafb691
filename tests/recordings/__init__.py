"""The recordings of real servers, for every test: their names, bytes, frames, and what the server itself reported.

README.md here says what they are. They are kept in one compressed archive, which is read once per process.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from mirror.wire.frame import Frame, FrameBuffer

ARCHIVE = Path(__file__).with_name("recordings.tar.xz")


@cache
def _files() -> dict[str, bytes]:
    with tarfile.open(ARCHIVE, "r:xz") as archive:
        return {member.name: file.read() for member in archive if (file := archive.extractfile(member))}


class Passed(NamedTuple):
    t: float
    conn: int
    ours: bool
    """Sent by the client."""
    frame: Frame


@dataclass(frozen=True)
class Recording:
    name: str
    pieces: tuple[tuple[str, bytes], ...]
    """("c2s" or "s2c", bytes), in the order of the wire. A frame may be spread over several pieces."""

    def side(self, direction: str) -> bytes:
        """All bytes of one direction."""
        return b"".join(data for which, data in self.pieces if which == direction)

    def frames(self) -> list[tuple[str, Frame]]:
        """All frames with their direction, in the order in which they were complete."""
        buffers = {"c2s": FrameBuffer(), "s2c": FrameBuffer()}
        found = []
        for direction, data in self.pieces:
            buffers[direction].feed(data)
            while (frame := buffers[direction].next_frame()) is not None:
                found.append((direction, frame))
        return found


def names(prefix: str = "") -> list[str]:
    """The recorded connections: `605_*`, `72_*` and `sdk_*`, sorted."""
    found = [file.removesuffix(".jsonl") for file in _files() if file.endswith(".jsonl")]
    return sorted(name for name in found if name.startswith(prefix))


def content(file: str) -> bytes:
    """A file of the archive, as it is."""
    return _files()[file]


def notes(name: str) -> Any:
    """`NAME.json`: what was done, and what the server reported afterwards (README.md)."""
    return json.loads(content(f"{name}.json"))


def read(name: str) -> Recording:
    """A recorded connection."""
    lines = [json.loads(line) for line in content(f"{name}.jsonl").splitlines()]
    return Recording(name, tuple((line["dir"], bytes.fromhex(line["hex"])) for line in lines))


def frames(name: str) -> list[tuple[str, Frame]]:
    """All frames of a recorded connection with their direction."""
    return read(name).frames()


def passed(file: str | Path) -> Iterator[Passed]:
    """Yield each frame of a file that `record` made, or (a name) of the archive, when its last byte passed. A last line
    that was cut off is passed over.
    """
    text = file.read_bytes() if isinstance(file, Path) else content(file)
    buffers: dict[tuple[int, bool], FrameBuffer] = {}
    for line in map(json.loads, text[: text.rindex(b"\n")].splitlines()):
        if "dir" in line:
            conn, ours = line.get("conn", 0), line["dir"] == "c2s"
            buffer = buffers.setdefault((conn, ours), FrameBuffer())
            buffer.feed(bytes.fromhex(line["hex"]))
            while (frame := buffer.next_frame()) is not None:
                yield Passed(line["t"], conn, ours, frame)
