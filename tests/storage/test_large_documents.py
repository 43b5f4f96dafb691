"""Large documents: what they take is known before they are read."""

from __future__ import annotations

from collections.abc import Callable

import cramjam
import pytest

from storage.errors import AnswerTooLarge
from storage.format import keys, records
from storage.read.view import View
from storage.write.writer import GroupWriter
from tests.storage.model import keys_of
from tests.storage.rig import commit, put

A, B, C = keys_of(0, 3)
VALUE = bytes(1000) * 1000
ROW_BYTES = 1500
"""More than what a row has besides its value."""


@pytest.mark.parametrize(
    ("value", "datatype", "taken"),
    [
        (VALUE, 0, len(VALUE)),
        (bytes(cramjam.snappy.compress_raw(VALUE)), 2, len(VALUE) + len(cramjam.snappy.compress_raw(VALUE))),
    ],
    ids=["plain", "compressed"],
)
def test_the_memory_for_a_document_is_known_from_its_header(
    writer: GroupWriter, view: View, monkeypatch: pytest.MonkeyPatch, value: bytes, datatype: int, taken: int
) -> None:
    put(writer, A, 1, value, datatype=datatype)
    commit(writer, 1)
    found = view.get(A, raw=True)
    assert view.get(A, raw=True, bytes_max=taken + ROW_BYTES) == found
    with monkeypatch.context() as patch:
        patch.setattr(records, "decode_row", lambda *_: pytest.fail("it was read"))
        reads: tuple[Callable[[], object], ...] = (
            lambda: view.get(A, bytes_max=taken - 1),
            lambda: view.find(b"\0" + A, bytes_max=taken - 1),
        )
        for read in reads:
            with pytest.raises(AnswerTooLarge) as caught:
                read()
            assert taken <= caught.value.byte_count <= taken + ROW_BYTES
    assert view.get(A, raw=True, bytes_max=caught.value.byte_count) == found
    assert view.reader(0).environment.running == []


@pytest.mark.parametrize("value", [b"\xff\xff\xff\xff\x0f" + VALUE, b""], ids=["a lie", "empty"])
def test_a_malformed_value_takes_its_stored_size(value: bytes) -> None:
    frame = records.encode_mutation(A, value, 1, datatype=2)
    assert records.bytes_to_read(frame) == len(frame)
    assert records.bytes_to_read(frame[:20]) == 20


def test_a_bounded_get_finds_no_document_if_get_finds_none(writer: GroupWriter, view: View) -> None:
    assert view.get(A, bytes_max=1) is None
    put(writer, A, 1, VALUE, expiry=5)
    put(writer, B, 2, VALUE)
    commit(writer, 2)
    put(writer, B, 3, b"small")
    commit(writer, 3)
    assert view.get(A) is view.get(A, bytes_max=2 * len(VALUE)) is None, "it is expired"
    assert view.get(B, bytes_max=ROW_BYTES) == view.get(B)
    assert view.get(B, as_of=2, bytes_max=2 * len(VALUE)) == view.get(B, as_of=2)
    with pytest.raises(AnswerTooLarge):
        view.get(B, as_of=2, bytes_max=ROW_BYTES)
    assert view.get(C, bytes_max=1) is None


def test_a_row_purged_between_the_two_reads_is_searched_again(
    writer: GroupWriter, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(writer, A, 1, b"value")
    commit(writer, 1)
    environment = view.reader(0).environment
    begin = environment.begin

    def purged(*, buffers: bool = False) -> object:
        if buffers:
            monkeypatch.undo()
            with environment.env.begin(write=True) as txn:
                stored = txn.pop(keys.ROW.pack(1, 1), db=environment.db(keys.rows_db(0)))
            purged_txn = begin(buffers=True)
            assert stored is not None
            with environment.env.begin(write=True) as txn:
                txn.put(keys.ROW.pack(1, 1), stored, db=environment.db(keys.rows_db(0)))
            return purged_txn
        return begin()

    monkeypatch.setattr(environment, "begin", purged)
    assert view.get(A, bytes_max=9999) == view.get(A)
