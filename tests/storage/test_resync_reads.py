"""While a vbucket is resynced: its old copy, or "temporarily unavailable", as the setting says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.env import directory
from storage.errors import Unavailable
from storage.read.view import Time, View, open_view
from tests.storage.model import IDENTITY, keys_of, log
from tests.storage.rig import open_writer, publish

KEY, OTHER = keys_of(0, 2)


@pytest.fixture
def path(tmp_path: Path) -> str:
    made = str(tmp_path / "data")
    directory.create(made, IDENTITY)
    writer = open_writer(made, resync_reads="stale")
    for vbid in (0, 2):
        writer.vbuckets[vbid].save(failover_log=log())
        publish(writer, vbid, [(keys_of(vbid, 1)[0], b"old", 3)])
    writer.close()
    return made


READS: dict[str, Callable[[View], Any]] = {
    "get": lambda view: view.get(KEY),
    "get as of": lambda view: view.get(KEY, as_of=3),
    "get by collection": lambda view: view.get(KEY, 0),
    "get_many": lambda view: view.get_many([KEY, OTHER]),
    "scan": lambda view: list(view.scan(0)),
    "scan as of": lambda view: list(view.scan(0, as_of=3)),
    "changes": lambda view: list(view.changes(0)),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_vbucket_is_unavailable_until_its_resync_is_published(path: str, read: Callable[[View], Any]) -> None:
    writer = open_writer(path, resync_reads="unavailable")
    with open_view(path) as view, open_view(path, stale_reads=True) as patient:
        assert read(view)
        writer.vbuckets[0].begin_resync()
        with pytest.raises(Unavailable, match=r"vbucket 0: temporarily unavailable.*resync_reads") as caught:
            read(view)
        assert caught.value.retryable
        assert view.stale(0)
        assert read(patient)
        assert view.get(keys_of(2, 1)[0]) is not None  # the other vbuckets are well
        assert view.state(0).published_seqno == 3
        writer.vbuckets[0].abandon()  # a new try at the same resync
        with pytest.raises(Unavailable):
            read(view)
        publish(writer, 0, [(KEY, b"new", 3)])
        assert read(view)
        assert not view.stale(0)
    writer.close()


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_the_old_copy_is_served_and_marked_stale(path: str, read: Callable[[View], Any]) -> None:
    writer = open_writer(path, resync_reads="stale")
    writer.vbuckets[0].begin_resync()
    with open_view(path) as view:
        assert read(view)
        assert (view.stale(0), view.stale(2)) == (True, False)
        assert view.get(KEY).value == b"old"  # type: ignore[union-attr]
    writer.close()


def test_a_resync_that_is_under_way_follows_the_setting_of_the_next_start(path: str) -> None:
    writer = open_writer(path, resync_reads="stale")
    writer.vbuckets[0].begin_resync()
    writer.close()
    for setting, refused in (("unavailable", True), ("unavailable", True), ("stale", False)):
        open_writer(path, resync_reads=setting).close()
        with open_view(path) as view:
            if refused:
                with pytest.raises(Unavailable):
                    view.get(KEY)
            else:
                assert view.get(KEY) is not None


UNFILLED: dict[str, Callable[[View], Any]] = READS | {
    "get as of": lambda view: view.get(KEY, as_of=Time(9_999_999_999_999)),
    "scan as of": lambda view: list(view.scan(0, as_of=Time(9_999_999_999_999))),
    "scan of all": lambda view: list(view.scan()),
    "exists": lambda view: view.exists(KEY),
    "find": lambda view: view.find(b"\0" + KEY),
    "count": lambda view: view.count(0),
    "changes of all": lambda view: list(view.changes()),
}


@pytest.mark.parametrize("resync_reads", ["unavailable", "stale"])
@pytest.mark.parametrize("read", UNFILLED.values(), ids=UNFILLED)
def test_a_vbucket_that_is_not_filled_is_refused_unless_the_view_is_partial(
    tmp_path: Path, read: Callable[[View], Any], resync_reads: str
) -> None:
    path = str(tmp_path / "data")
    directory.create(path, IDENTITY)
    writers = [open_writer(path, group, resync_reads=resync_reads) for group in (0, 1)]
    writer = writers[0]
    with open_view(path, partial=True) as partial, open_view(path, stale_reads=True) as view:
        for resyncs in (False, True):
            if resyncs:
                writer.vbuckets[0].begin_resync()
            assert 0 in view.unfilled()
            with pytest.raises(Unavailable, match=r"vbucket 0: not filled yet .*--ready") as caught:
                read(view)
            assert caught.value.retryable
            with pytest.raises(Unavailable, match=r"4 of 4 vbuckets: not filled yet"):
                view.check_readable()
            partial.check_readable()
            assert not read(partial)
        for vbid in range(4):
            writers[vbid % 2].vbuckets[vbid].save(failover_log=log())
            writers[vbid % 2].vbuckets[vbid].publish(0, 0)
            writers[vbid % 2].commit()
        view.check_readable()
        assert not read(view)  # its source has said that it is empty
        publish(writer, 0, [(KEY, b"new", 3)])
        assert read(view)
    for each in writers:
        each.close()
