"""Key rows of large snapshots, made between commits."""

from __future__ import annotations

import pytest

import storage.history.index
import storage.history.purge
import storage.read.scan
from storage.admin.check import check
from storage.read.view import open_view
from tests.storage.model import log
from tests.storage.rig import crash, open_writer, settle, stage, staged

pytestmark = pytest.mark.usefixtures("small_limits")


def test_the_map_grows_while_key_rows_are_made_and_none_is_left_out(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.write.pending.INLINE_INDEX_ROWS", 0)
    monkeypatch.setattr(storage.history.index, "SLICE_ROWS", 100)
    writer = open_writer(path, map_size=1 << 20)
    count = 2_500
    stage(writer, count, *((b"%0240d" % seqno, b"v", seqno) for seqno in range(1, count + 1)), flush=True)
    writer.vbuckets[0].publish(count, 1)
    writer.commit()
    before = writer.figures()["map_bytes"]
    while writer.vbuckets[0].complete_seqno is not None:
        writer.step()
        writer.commit()
    assert writer.figures()["map_bytes"] > before, "it became full while key rows were written"
    writer.close()
    assert check(path).problems == []
    with open_view(path) as view:
        assert len(list(view.scan(0))) == count


@pytest.mark.parametrize("dies", [False, True])
def test_rows_of_the_next_snapshot_on_disk_while_key_rows_of_the_last_are_made_get_theirs(
    path: str, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """A snapshot is complete and waits for its key rows; memory pressure writes down rows of the next one; a commit
    without anything to write counted those as not on disk. They were published without key rows: documents that no read
    could find. After a crash they lay above what the state said was staged, and could not be appended again.
    """
    monkeypatch.setattr("storage.write.pending.INLINE_INDEX_ROWS", 2)
    writer = open_writer(path)
    staged(writer, 0, 1, 9, 10)
    writer.commit(flush_open=True)
    staged(writer, 0, 10, 10, 10)
    writer.vbuckets[0].publish(10, 0)
    staged(writer, 0, 11, 12, 18)
    writer.commit(flush_open=True)
    staged(writer, 0, 13, 14, 18)
    writer.vbuckets[0].save(failover_log=log())
    writer.commit()
    if dies:
        crash(writer)
        writer = open_writer(path)
        assert writer.vbuckets[0].state.staged_seqno == 12
        staged(writer, 0, 13, 14, 18)
    else:
        settle(writer)
        assert writer.vbuckets[0].state.published_seqno == 10
    staged(writer, 0, 15, 18, 18)
    writer.vbuckets[0].publish(18, 10)
    settle(writer)
    with open_view(path) as view:
        assert sorted(int(each.seqno) for each in view.scan(0)) == list(range(1, 19))
    assert check(path).problems == []
    writer.close()
