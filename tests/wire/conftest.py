"""Recordings, read once; and how fast hypothesis is asked to be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Recording:
    name: str
    pieces: tuple[tuple[str, bytes], ...]
    """("c2s" or "s2c", bytes), in the order of the wire."""

    def side(self, direction: str) -> bytes:
        return b"".join(data for which, data in self.pieces if which == direction)


def read(path: Path) -> Recording:
    pieces = []
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            pieces.append((row["dir"], bytes.fromhex(row["hex"])))
    return Recording(path.stem, tuple(pieces))


@pytest.fixture(scope="session")
def recordings(captures: Path) -> list[Recording]:
    """All of them: data-driven tests go through the list and name the recording that fails."""
    return [read(path) for path in sorted(captures.glob("*.jsonl"))]
