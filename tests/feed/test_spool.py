"""Spools: frames in and out in order, whatever part of them went to disk, and blocks used again."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import pytest

from mirror.errors import MirrorError
from mirror.feed.read.snapshot import Position, Snapshot
from mirror.feed.read.spool import BLOCK_BYTES, Spool, SpoolFile
from storage.format.records import encode_mutation
from storage.model import Manifest


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def frames_of(rng: random.Random, count: int, longest: int) -> list[bytes]:
    return [encode_mutation(b"key", rng.randbytes(rng.randrange(longest)), seqno) for seqno in range(1, count + 1)]


@pytest.mark.parametrize("longest", [10, BLOCK_BYTES // 3, 3 * BLOCK_BYTES])
def test_frames_come_out_as_they_went_in_spilled_or_not(longest: int) -> None:
    rng = random.Random(longest)
    file = SpoolFile()
    for _ in range(20):
        spool = Spool(file)
        expected: list[bytes] = []
        for _ in range(rng.randrange(1, 6)):
            frames = frames_of(rng, rng.randrange(20), longest)
            expected += frames
            assert spool.append(frames) == sum(map(len, frames))
            if rng.random() < 0.5:
                spool.spill()
                assert spool.memory_bytes == 0
        assert list(spool.frames()) == expected
        assert list(spool.frames()) == expected, "as often as one likes"
        assert spool.frame_count == len(expected)
        assert spool.memory_bytes + spool.disk_bytes == sum(map(len, expected))
        spool.close()
        assert file.size_bytes == 0
    file.close()


def test_blocks_of_a_closed_spool_are_reused(folder: Path) -> None:
    file = SpoolFile()
    first, second = Spool(file), Spool(file)
    for spool, seqno in ((first, 1), (second, 2)):
        spool.append([encode_mutation(b"k", bytes(5 * BLOCK_BYTES), seqno)])
        spool.spill()
    size = file.size_bytes
    first.close()
    third = Spool(file)
    third.append([encode_mutation(b"k", b"\7" * (5 * BLOCK_BYTES), 3)])
    third.spill()
    assert file.size_bytes == size
    assert list(second.frames()) == [encode_mutation(b"k", bytes(5 * BLOCK_BYTES), 2)]
    assert list(third.frames()) == [encode_mutation(b"k", b"\7" * (5 * BLOCK_BYTES), 3)]
    assert os.listdir(folder) == [], "the file has no name that a crash could leave behind"
    file.close()


def test_a_full_disk_frees_the_written_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    file = SpoolFile()
    spool = Spool(file)
    spool.append([encode_mutation(b"k", bytes(3 * BLOCK_BYTES), 1)])
    real = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if offset >= BLOCK_BYTES:
            raise OSError(28, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(MirrorError, match="No space left"):
        spool.spill()
    assert file.size_bytes == 0
    monkeypatch.undo()
    spool.spill()
    assert list(spool.frames()) == [encode_mutation(b"k", bytes(3 * BLOCK_BYTES), 1)]
    file.close()


def test_a_snapshot_is_valid_until_it_is_closed() -> None:
    spool = Spool(SpoolFile())
    frame = encode_mutation(b"k", b"v", 7, collection_id=8)
    spool.append([frame])
    closed: list[tuple[int, int]] = []
    snapshot = Snapshot(3, 99, 5, 7, spool, Manifest.initial(), on_close=lambda *held: closed.append(held))
    assert (snapshot.position, snapshot.row_count) == (Position(99, 7), 1)
    (document,) = snapshot.documents()
    assert (document.vbid, document.collection_id, document.key, document.value, document.seqno) == (
        3,
        8,
        b"k",
        b"v",
        7,
    )
    snapshot.close()
    snapshot.close()
    assert closed == [(len(frame), 0)]
    with pytest.raises(AssertionError, match="valid until"):
        next(snapshot.frames())
