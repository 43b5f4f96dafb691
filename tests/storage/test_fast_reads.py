"""The fast path of point reads gives the answers and errors of the general one, over random histories and damage."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.errors import StorageError
from storage.format import keys
from storage.model import Document
from storage.read import point_reads
from storage.read.point_reads import ReadRun
from storage.read.view import View, open_view
from storage.write.writer import GroupWriter
from tests.storage.bit_flips import KEYS, VBIDS, make, opened_writer

NAMES = [key for vbid in VBIDS for key in KEYS[vbid]]


def outcome(read: Callable[[], Any]) -> object:
    try:
        return read()
    except StorageError as error:
        return type(error), error.vbid


def damage(writer: GroupWriter, rng: Random) -> None:
    """Flip one bit of a row, or of a reference."""
    vbid = rng.choice(VBIDS)
    with writer.environment.env.begin(write=True) as txn:
        tree = writer.environment.db(rng.choice((keys.rows_db, keys.keys_db))(vbid))
        key, value = rng.choice(list(txn.cursor(tree)))
        flipped = bytearray(value)
        flipped[rng.randrange(len(value))] ^= 1 << rng.randrange(8)
        txn.delete(key, value, tree)
        txn.put(key, bytes(flipped), db=tree)


def answers(view: View, *, whole: bool) -> list[object]:
    """What each key gives, as body and as stored; and all keys at once."""
    reads = [partial(view.get, key, raw=raw) for key in NAMES for raw in (False, True)]
    return [*map(outcome, reads), *([view.get_many(NAMES)] if whole else [])]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10_000), flips=st.integers(0, 6))
def test_the_fast_path_answers_as_the_general_one_after_any_history_and_damage(seed: int, flips: int) -> None:
    rng = Random(seed)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = str(Path(folder) / "data")
        make(path, seed)
        writer = opened_writer(path, 10**9)
        stack.callback(writer.close)
        for _ in range(flips):
            damage(writer, rng)
        with open_view(path) as view, pytest.MonkeyPatch.context() as patch:
            fast = answers(view, whole=not flips)
            with ReadRun() as run:
                reads = [partial(run.row, view.reader(keys.vbid_of(key, 4)), b"\0" + key, 1 << 30) for key in NAMES]
                rows = [outcome(each) for each in reads]
            patch.setattr(point_reads, "_row", lambda *_: point_reads._OTHER)
            assert fast == answers(view, whole=not flips)
            for row, document in zip(rows, fast[1::2], strict=False):
                if isinstance(row, bytes):
                    assert isinstance(document, Document)
                elif row is not None:
                    assert row == document, "an error of the fast path is one of the general path"
