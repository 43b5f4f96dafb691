"""Fingerprints: equal for two copies of one version, different for every change that a reader could see."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import CorruptedError
from storage.format.digest import Digest, Fingerprint, Runs, fingerprint
from storage.format.records import decode_row, encode_mutation
from storage.model import Branch, Document, Seqno
from tests.storage.frames import encode_deletion

XATTRS = b"\x00\x00\x00\x0e\x00\x00\x00\x0ameta\x00null\x00"


def of(frame: bytes) -> Fingerprint:
    return fingerprint(decode_row(3, Branch(2), frame, raw=True))


def mutation(**changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "key": b"key",
        "value": b"value" * 9,
        "seqno": 5,
        "collection_id": 8,
        "rev_seqno": 3,
        "cas": 7,
        "flags": 1,
    }
    return encode_mutation(**(fields | {"expiry": 9, "datatype": 0} | changes))


def test_a_fingerprint_names_the_version_and_ignores_its_encoding() -> None:
    value = b"value" * 9
    plain = of(mutation())
    assert plain[:5] == (b"\x08key", 5, 3, 7, False)
    packed = bytes(cramjam.snappy.compress_raw(value))
    assert of(mutation(value=packed, datatype=2)) == plain
    assert of(mutation(value=b"", datatype=2)) == of(mutation(value=b""))
    with_xattrs = of(mutation(value=XATTRS + value, datatype=4))
    assert of(mutation(value=bytes(cramjam.snappy.compress_raw(XATTRS + value)), datatype=6)) == with_xattrs
    assert with_xattrs != plain


@pytest.mark.parametrize(
    "changes",
    [
        {"key": b"kez"},
        {"value": b"valuf" * 9},
        {"seqno": 6},
        {"collection_id": 9},
        {"rev_seqno": 4},
        {"cas": 8},
        {"flags": 2},
        {"expiry": 10},
        {"datatype": 1},
    ],
)
def test_every_visible_change_alters_the_digest(changes: dict[str, Any]) -> None:
    assert of(mutation(**changes)) != of(mutation())
    digests = [Digest(), Digest()]
    digests[0].add(of(mutation()))
    digests[1].add(of(mutation(**changes)))
    assert digests[0].hex() != digests[1].hex()


def test_a_fingerprint_of_a_tombstone_ignores_its_cause_and_time() -> None:
    deleted, expired = encode_deletion(b"k", 5), encode_deletion(b"k", 5, expired=True)
    assert of(deleted) == of(expired)
    assert of(deleted).deleted
    later = expired[:-6] + (1_700_000_000).to_bytes(4) + expired[-2:]
    assert decode_row(0, Branch(0), later).expiry == 1_700_000_000
    assert of(later) == of(expired)
    assert of(deleted) != of(mutation(key=b"k", value=b"", collection_id=0, rev_seqno=2, cas=1))


def test_a_value_that_cannot_be_read_is_reported() -> None:
    broken = Document(0, 0, b"k", Seqno(1), 1, 1, 0, 0, 2, b"\xff" * 9)
    with pytest.raises(CorruptedError):
        fingerprint(broken)


@given(st.lists(st.tuples(st.binary(max_size=3), st.integers(0, 9)), max_size=60), st.integers(1, 7))
def test_runs_give_the_newest_of_each_key_in_order(pairs: list[tuple[bytes, int]], run_rows: int) -> None:
    runs = Runs(run_rows=run_rows)
    expected: dict[bytes, Fingerprint] = {}
    for key, seqno in pairs:
        each = Fingerprint(key, seqno, 1, 1, False, b"d" * 16)
        runs.add(each)
        expected[key] = max(each, expected.get(key, each))
    assert list(runs.newest()) == [expected[key] for key in sorted(expected)]
    assert list(runs.newest()) == [expected[key] for key in sorted(expected)], "as often as one likes"
    runs.close()
    assert list(runs.newest()) == []


def test_runs_leave_no_file_behind(tmp_path: Path) -> None:
    runs = Runs(str(tmp_path), run_rows=10)
    rng = random.Random(1)
    for number in range(100):
        runs.add(Fingerprint(rng.randbytes(4), number, 1, 1, False, b""))
    assert list(tmp_path.iterdir()) == []
    assert len(list(runs.newest())) == 100
    runs.close()
