"""The bench of rollbacks measures a real one, to its end."""

from __future__ import annotations

from pathlib import Path

from mirror.bench import rollback
from storage.admin.check import check
from storage.read.view import open_view


def test_a_rollback_is_measured_to_its_last_row(tmp_path: Path) -> None:
    path = str(tmp_path / "m")
    figures = rollback.rollback_round(path, 3_000, value_bytes=64)
    assert figures.retracted_rows == 3_000
    assert figures.steps > 1
    assert min(figures.removed_rows_per_s, figures.removed_rows_per_s_alone, figures.step_ms_max) > 0
    assert check(path).problems == []
    with open_view(path) as view:
        assert (view.state(0).branch, view.state(0).published_seqno, view.count(0)) == (2, 1_500, 1_500)
        assert len(list(view.scan_seqno(0))) == 1_500
        assert view.state(1).published_seqno > 0
