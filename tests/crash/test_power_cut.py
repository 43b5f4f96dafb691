"""A power cut after syncs that failed, from a log of every write: each sector that was not synced may or may not be on
the disk, and what was dirty when a sync failed never comes there (Linux drops it and counts it as written).
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from storage.admin.check import check
from storage.env import directory
from tests.crash.power_cut_writer import digest

ENTRY = struct.Struct("<cqq")
SECTOR = 512
Entry = tuple[bytes, int, bytes]


def entries_of(log: Path) -> list[Entry]:
    data = log.read_bytes()
    found: list[Entry] = []
    at = 0
    while at < len(data):
        kind, offset, length = ENTRY.unpack_from(data, at)
        at += ENTRY.size
        content = data[at : at + length] if kind == b"w" else b""
        at += len(content)
        found.append((kind, offset, content))
    return found


def image(entries: list[Entry], random: Random) -> tuple[bytes, int]:
    """Return a possible state of the disk after these operations, and the newest commit before their end."""
    durable = bytearray()
    dirty: list[tuple[int, bytes]] = []
    mark = 0

    def put(offset: int, data: bytes) -> None:
        if len(durable) < offset + len(data):
            durable.extend(bytes(offset + len(data) - len(durable)))
        durable[offset : offset + len(data)] = data

    for kind, offset, data in entries:
        if kind == b"w":
            dirty.append((offset, data))
        elif kind == b"s":
            put(*dirty.pop())
        elif kind == b"m":
            mark = offset
        else:
            for each in dirty if kind == b"f" else ():
                put(*each)
            dirty = []
    mode = random.choice(["all", "none", "some", "some", "some"])
    for offset, data in dirty:
        for start in range(0, len(data), SECTOR):
            if mode == "all" or (mode == "some" and random.random() < 0.5):
                put(offset + start, data[start : start + SECTOR])
    return bytes(durable), mark


@pytest.mark.parametrize(("seed", "images"), [(0, 20), pytest.param(1, 60, marks=pytest.mark.ci)])
def test_a_power_cut_after_failed_syncs_leaves_a_sound_file(tmp_path: Path, shim: Path, seed: int, images: int) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "tests.crash.power_cut_writer", str(tmp_path / "data"), str(seed)]
    environment = os.environ | {"LD_PRELOAD": str(shim), "POWER_CUT_LOG": str(log)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    digests = json.loads(done.stdout)
    entries = entries_of(log)
    assert sum(kind == b"x" for kind, _, _ in entries) >= 8
    first = next(at for at, (kind, _, _) in enumerate(entries) if kind == b"m")
    random = Random(seed)
    wrong = []
    for number in range(images):
        data, mark = image(entries[: random.randrange(first + 1, len(entries) + 1)], random)
        there = str(tmp_path / f"image-{number}")
        shutil.copytree(tmp_path / "data", there)
        os.unlink(os.path.join(directory.group_path(there, 0), "lock.mdb"))
        Path(directory.group_path(there, 0), "data.mdb").write_bytes(data)
        report = check(there)
        seen = digest(there) if not report.problems else "damaged"
        if seen not in digests[max(0, mark - 1) : mark + 2]:
            wrong.append((number, mark, report.problems[:2]))
        shutil.rmtree(there)
    assert wrong == []
