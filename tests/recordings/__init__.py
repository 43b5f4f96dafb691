"""The recordings of real servers, for every test: their names, bytes, frames, and what the server itself reported.

README.md here says what they are. They are kept in one compressed archive, which is read once per process. Code under
test that reads a recording by its path gets a file from `unpack`.
"""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mirror.wire.buffer import FrameBuffer
from mirror.wire.frame import Frame

ARCHIVE = Path(__file__).with_name("recordings.tar.xz")


@cache
def _files() -> dict[str, bytes]:
    with tarfile.open(ARCHIVE, "r:xz") as archive:
        return {member.name: file.read() for member in archive if (file := archive.extractfile(member))}


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


def unpack(name: str, folder: Path) -> Path:
    """A recorded connection as a file in `folder`."""
    path = folder / f"{name}.jsonl"
    path.write_bytes(content(path.name))
    return path
