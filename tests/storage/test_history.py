"""What history takes: the cheap figures against what a walk finds."""

from __future__ import annotations

from storage.history.purge import Window
from storage.read.view import open_view
from tests.storage.model import keys_of, log, row, span
from tests.storage.test_writer import open_writer

KEYS = keys_of(0, 4)


def test_figures_follow_what_is_stored(path: str) -> None:
    now = 1_000
    writer = open_writer(path, clock=lambda: now)
    writer.vbuckets[0].save(failover_log=log())
    with open_view(path) as view:
        empty = view.history(0)
        assert (empty.floor_seqno, empty.floor_ms, empty.boundaries, empty.versions) == (0, None, 0, 0)
        for seqno in range(1, 11):
            now = 1_000 * seqno
            writer.vbuckets[0].stage(
                [row(writer.vbuckets[0].prefix, KEYS[seqno % 4], b"v", seqno)], 9, span(seqno, seqno)
            )
            writer.vbuckets[0].publish(seqno, seqno)
            writer.commit()
        full = view.history(0)
        assert full == writer.histories()[0]
        assert (full.floor_seqno, full.floor_ms) == (1, 1_000)
        assert full.boundaries == len(view.boundaries(0)) == 10
        assert full.versions == 10
        assert full.versions - view.count(0) == 6  # what history takes
        assert full.row_bytes >= 4096
        assert full.key_bytes >= 4096
        writer.vbuckets[0].stage([row(writer.vbuckets[0].prefix, KEYS[0], b"v", 11)], 9, span(11, 12))
        writer.commit(flush_open=True)
        assert view.history(0).boundaries is None  # a staged row has no key row yet: indistinguishable
        writer.vbuckets[0].abandon()
        window = Window(boundaries=1, time_ms=0)
        writer.background.window = writer.background.purger.window = window
        while writer.step():
            pass
        purged = view.history(0)
        assert (purged.floor_seqno, purged.floor_ms, purged.purged_seqno) == (10, 10_000, 10)
        assert purged.versions == view.count(0) == 4
        assert purged.local_purge_seqno == writer.vbuckets[0].state.local_purge_seqno
    writer.close()
