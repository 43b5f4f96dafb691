"""The DCP port and the bare sender are read by the same clients, to the same number of documents."""

from __future__ import annotations

from pathlib import Path

from mirror.bench import stores
from mirror.bench.dcp import dcp_rounds

DOCUMENTS = 300


def test_a_round_measures_each_number_of_clients(tmp_path: Path) -> None:
    path = str(tmp_path / "mirror")
    stores.store_rows(path, stores.own_keys(4, DOCUMENTS), snapshot_rows=DOCUMENTS)
    found = list(dcp_rounds(path, "bench", [1, 3], 1))
    assert [figures.clients for figures in found] == [1, 3]
    for figures in found:
        assert figures.streamed.documents == figures.limit.documents == figures.clients * DOCUMENTS
