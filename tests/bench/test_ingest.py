"""The ingest benchmark measures a real mirror: what it fills is whole, and the limit writes the same documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from mirror.bench import ingest
from storage.admin.check import check
from storage.format import records
from storage.model import Branch, Vbid
from storage.read.view import open_view


def test_the_documents_are_as_many_and_as_large_as_requested() -> None:
    documents = list(ingest.documents(500, 200))
    assert len({key for key, _ in documents}) == 500
    assert {len(key) for key, _ in documents} == {20}
    assert {len(value) for _, value in documents} == {200}
    assert [value for _, value in documents] == [value for _, value in documents if value.startswith(b'{"id":')]


def test_the_limit_has_every_document_in_its_vbucket_with_rising_seqnos() -> None:
    rows = ingest.limit_rows(300, 4, 64)
    assert sum(map(len, rows.values())) == 300
    for vbid, each in rows.items():
        found = [records.decode_row(Vbid(vbid), Branch(1), frame).seqno for _, frame in each]
        assert found == list(range(1, len(each) + 1))


@pytest.mark.timeout(120)
def test_several_workers_fill_a_mirror_together(tmp_path: Path) -> None:
    (figures,) = ingest.ingest_rounds(3000, 16, 100, 1, str(tmp_path), "safe", workers=3)
    assert figures.ingest.documents == 3000
    path = str(tmp_path / "m-turn-0")
    assert check(path).problems == []
    with open_view(path) as view:
        assert sum(view.count(vbid) for vbid in range(16)) == 3000


@pytest.mark.timeout(120)
def test_a_round_fills_a_mirror_and_reports_its_figures(tmp_path: Path) -> None:
    found = list(ingest.ingest_rounds(3000, 8, 100, 1, str(tmp_path), "safe", orders=ingest.ORDERS))
    assert [figures.order for figures in found] == ["turn", "stream"]
    for figures in found:
        assert figures.documents == figures.ingest.documents == figures.limit.documents == 3000
        assert figures.ingest.seconds > 0
        assert figures.ratio > 0
        assert figures.peak_private_bytes > 1 << 20
        path = str(tmp_path / f"m-{figures.order}-0")
        assert check(path).problems == []
        with open_view(path) as view:
            assert sum(view.count(vbid) for vbid in range(8)) == 3000
