"""Compacted copies: the same trees in fewer pages, and an error that names the page where the file is damaged."""

from __future__ import annotations

import os
import random
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lmdb import verify

from storage.admin import backup
from storage.env.compaction import Compaction
from storage.env.environment import DATA_FILE, Environment
from storage.errors import CorruptedError, StorageError
from storage.format import keys
from storage.read.view import open_view
from storage.write.writer import GroupWriter
from tests.storage.model import keys_of
from tests.storage.rig import publish
from tests.storage.test_backup import Kept, contents

VBIDS = (0, 1)


def made(folder: Path, seed: int) -> Environment:
    """An environment with values of all sizes, keys of many values, and free pages."""
    folder.mkdir(exist_ok=True)
    rng = random.Random(seed)
    environment = Environment(str(folder), VBIDS, writable=True, create=True, map_size=1 << 28)
    environment.open_all()
    for _ in range(rng.randrange(1, 25)):
        with environment.begin(write=True) as txn:
            for _ in range(rng.randrange(1, 300)):
                vbid, key = rng.choice(VBIDS), b"key%d" % rng.randrange(10 ** rng.randrange(1, 5))
                rows, references = environment.db(keys.rows_db(vbid)), environment.db(keys.keys_db(vbid))
                txn.put(rng.choice((key, b"hot")), rng.randbytes(keys.DUP_SIZE), db=references)
                txn.delete(key, db=rows)
                txn.put(key, rng.randbytes(rng.choice((0, 300, 300, 300, 3_000, 70_000))), db=rows)
                if rng.random() < 0.3:
                    txn.delete(key, db=rng.choice((rows, references)))
    return environment


def copied(environment: Environment, target: Path) -> Path:
    target.mkdir()
    with environment.read() as txn, closing(Compaction(environment, txn.raw)) as copy:
        (target / DATA_FILE).write_bytes(b"".join(copy.pages()))
    return target / DATA_FILE


@pytest.mark.parametrize("seed", range(6))
def test_a_copy_has_the_same_content_and_can_be_written(seed: int, tmp_path: Path) -> None:
    source = made(tmp_path / "source", seed)
    file = copied(source, tmp_path / "copy")
    assert verify.verify(str(file)) == []  # type: ignore[no-untyped-call]
    copy = Environment(str(file.parent), VBIDS, writable=True, map_size=1 << 28)
    copy.open_all()
    names = [name(vbid) for vbid in VBIDS for name in (keys.rows_db, keys.keys_db)]
    with source.read() as txn, copy.read() as of_copy:
        for name in names:
            assert list(txn.cursor(name)) == list(of_copy.cursor(name))
            assert txn.stat(name) == of_copy.stat(name)
    with copy.begin(write=True) as writing:
        for number in range(1_000):
            writing.put(b"new%d" % number, b"x" * 300, db=copy.db(names[0]))
    assert verify.verify(str(file)) == []  # type: ignore[no-untyped-call]
    copy.close()
    source.close()


def test_free_pages_are_left_out(tmp_path: Path) -> None:
    source = made(tmp_path / "source", 1)
    with source.begin(write=True) as txn:
        txn.drop(source.db(keys.rows_db(0)), delete=False)
    assert copied(source, tmp_path / "copy").stat().st_size < source.file_bytes() * 0.7
    source.close()


def test_later_commits_are_not_in_the_copy(tmp_path: Path) -> None:
    source = made(tmp_path / "source", 2)
    with source.read() as txn, closing(Compaction(source, txn.raw)) as copy:
        before = list(txn.cursor(keys.rows_db(0)))
        for number in range(50):
            with source.begin(write=True) as writing:
                writing.put(b"later%d" % number, b"x" * 5_000, db=source.db(keys.rows_db(0)))
        (tmp_path / DATA_FILE).write_bytes(b"".join(copy.pages()))
    source.close()
    there = Environment(str(tmp_path), VBIDS, map_size=1 << 28)
    there.open_all()
    with there.read() as txn:
        assert list(txn.cursor(keys.rows_db(0))) == before
    there.close()


def test_a_copy_that_begins_too_late_is_refused(tmp_path: Path) -> None:
    source = made(tmp_path, 3)
    with source.read() as txn:
        for _ in range(2):
            with source.begin(write=True) as writing:
                writing.put(b"later", os.urandom(8), db=source.db(keys.DB_META))
        with pytest.raises(StorageError, match="overtook"):
            Compaction(source, txn.raw)
    source.close()


def test_a_document_with_a_thousand_versions_is_backed_up(path: str, writer: GroupWriter, tmp_path: Path) -> None:
    """LMDB's own compacting copy ended the process by SIGSEGV from some hundred versions of a key on."""
    key = keys_of(0, 1)[0]
    for first in range(1, 1_001, 100):
        publish(writer, 0, [(key, b"%d" % seqno, seqno) for seqno in range(first, first + 100)])
    sink = Kept()
    backup.create(path, sink, time_ms=1_000)
    backup.restore(sink.parts, str(tmp_path / "restored"), clock_ms=lambda: 2_000)
    with open_view(str(tmp_path / "restored"), partial=True) as view:
        assert contents(view) == {key: b"1000"}
        assert [change.document.value for change in view.changes(0) if change.document][-2:] == [b"999", b"1000"]


def test_a_flipped_bit_ends_a_copy_with_an_error_or_is_in_the_data_that_is_copied(tmp_path: Path) -> None:
    """No page number, length or offset of a damaged file is followed where it is none."""
    source = made(tmp_path, 4)
    with source.read() as txn, closing(Compaction(source, txn.raw)) as copy:
        number, live = txn.raw.id(), [page for page, kind in enumerate(copy._kinds) if kind in (1, 2, 3)]
    source.close()
    closed: Any = SimpleNamespace(path=str(tmp_path), env=SimpleNamespace(stat=lambda: {"psize": 4096}))
    transaction: Any = SimpleNamespace(id=lambda: number)
    file = tmp_path / DATA_FILE
    good = file.read_bytes()
    rng = random.Random(5)
    errors = 0
    with file.open("r+b", buffering=0) as data:
        for _ in range(200):
            at = rng.choice(live) * 4096 + rng.randrange(64)  # headers, and where nodes are
            os.pwrite(data.fileno(), bytes([good[at] ^ 1 << rng.randrange(8)]), at)
            try:
                with closing(Compaction(closed, transaction)) as copy:
                    assert all(len(each) == copy.page_bytes for each in copy.pages())
            except CorruptedError as error:
                errors += "page" in str(error)
            os.pwrite(data.fileno(), good[at : at + 1], at)
    assert errors > 33
