"""The only writer of a group: its lock, its fence, growing maps, and failing commits."""

from __future__ import annotations

from typing import Any

import lmdb
import pytest

from storage.admin.check import check
from storage.env.environment import Environment
from storage.errors import Locked, StorageError
from storage.read.view import open_view
from storage.write.writer import GroupWriter
from tests.storage.model import keys_of, log
from tests.storage.rig import crash, open_writer, publish, staged

pytestmark = pytest.mark.usefixtures("small_limits")


def test_a_writer_that_lost_its_group_cannot_write(path: str) -> None:
    old = open_writer(path)
    crash(old)  # its lock is gone, but the object lives on as a stopped process would
    new = open_writer(path)
    new.close()
    revived = open_writer(path)
    revived.owner.fence -= 1
    revived.vbuckets[0].save(failover_log=log())
    with pytest.raises(Locked, match="took this group over"):
        revived.commit()
    revived.close()


def test_the_map_grows_and_the_batch_is_replayed(path: str) -> None:
    writer = open_writer(path, map_size=1 << 20)
    key = keys_of(0, 1)[0]
    for round_number in range(8):
        first = round_number * 200 + 1
        publish(writer, 0, [(key, b"x" * 1000, first + n) for n in range(200)])
    assert writer.figures()["map_bytes"] > 1 << 20
    with open_view(path) as view:
        assert len(list(view.changes(0))) == 1600
    writer.close()
    assert check(path).problems == []


def test_a_failed_write_during_a_resync_raises_only_its_own_error(path: str, writer: GroupWriter) -> None:
    """Opening again after a failed write gave the unfinished copy up by another write, inside of the first one's
    recovery: KeyError, and the group was lost until a restart.
    """
    writer.vbuckets[0].begin_resync()
    staged(writer, 0, 5, 7, 9)
    writer.commit(flush_open=True)

    def failing(_txn: Any) -> None:
        raise lmdb.DiskError("no space")

    with pytest.raises(StorageError):
        writer.owner.write(failing)
    assert writer.vbuckets[0].state.staged_seqno == 7
    writer.vbuckets[0].abandon()
    publish(writer, 2, [(keys_of(2, 1)[0], b"y", 1)])
    assert check(path).problems == []


def test_a_file_that_has_outgrown_its_map_is_opened_and_grows_on(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB opens it with a map that just holds it; its new owner's first write found no room, and so at every start."""
    begin = Environment.begin
    full = [lmdb.MapFullError("full"), lmdb.MapFullError("full")]

    def begin_full(self: Environment, *, write: bool = False, **more: bool) -> Any:
        if write and full:
            raise full.pop()
        return begin(self, write=write, **more)

    monkeypatch.setattr(Environment, "begin", begin_full)
    writer = open_writer(path, map_size=1 << 20)
    assert not full
    assert writer.figures()["map_bytes"] == 4 << 20
    publish(writer, 0, [(keys_of(0, 1)[0], b"1", 1)])
    writer.close()
