"""The service's newest map: on the disk before it is followed, and never replaced by an older one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mirror.errors import OlderMap
from mirror.ingest.topology import ClusterMap, Node
from mirror.supervise.context import MapBook
from storage.env import directory
from storage.env.directory import MapRecord
from storage.errors import CorruptedError, Full

MAP = ClusterMap(1, 7, "demo", "b1", (Node("h", 11210),), (0, 0))


def recorded(data: Path) -> tuple[int, int] | None:
    found = directory.load_map(str(data), "b1")
    return None if found is None else found.revision


def test_a_newer_map_is_recorded_and_an_older_one_refused_after_a_restart(tmp_path: Path) -> None:
    book = MapBook(str(tmp_path), "b1")
    assert book.take(MAP)
    assert recorded(tmp_path) == (1, 7)
    assert not book.take(MAP)
    assert book.take(replace(MAP, rev=9))
    for opened in (book, MapBook(str(tmp_path), "b1")):
        assert not opened.take(MAP)
        with pytest.raises(OlderMap, match="revision 7 of epoch 1"):
            opened.check(MAP)
        opened.check(replace(MAP, rev=9))
        opened.check(replace(MAP, rev_epoch=2, rev=1))
    assert recorded(tmp_path) == (1, 9)


def test_new_hosts_in_a_map_are_logged(tmp_path: Path) -> None:
    book = MapBook(str(tmp_path), "b1")
    with capture_logs() as logged:
        book.take(MAP)
        book.take(replace(MAP, rev=8))
        book.take(replace(MAP, rev=9, nodes=(Node("h", 11210), Node("evil.example", 11210))))
        book.take(MAP)
    assert [(each["hosts"], each["rev"]) for each in logged] == [("h", 7), ("evil.example", 9)]


def test_the_recorded_map_is_followed_again_after_a_restart(tmp_path: Path) -> None:
    MapBook(str(tmp_path), "b1").take(MAP)
    again = MapBook(str(tmp_path), "b1")
    assert again.current is None
    assert again.floor == (1, 7)
    assert again.take(MAP)
    assert again.current == MAP


def test_an_older_map_is_followed_once_the_record_is_removed(tmp_path: Path) -> None:
    MapBook(str(tmp_path), "b1").take(MAP)
    (tmp_path / directory.MAP_FILE).unlink()
    book = MapBook(str(tmp_path), "b1")
    assert book.take(replace(MAP, rev=2))
    assert recorded(tmp_path) == (1, 2)
    assert not book.take(replace(MAP, rev=1))


def test_a_mirrors_map_is_not_recorded(tmp_path: Path) -> None:
    book = MapBook(str(tmp_path), "b1")
    assert book.take(replace(MAP, of_mirror=True, rev=1_700_000_000))
    assert recorded(tmp_path) is None


def test_a_full_disk_does_not_keep_the_service_on_a_stale_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newer map is followed, and recorded once there is room."""

    def full(_path: str, _record: MapRecord) -> None:
        raise Full("no space left on device")

    book = MapBook(str(tmp_path), "b1")
    with monkeypatch.context() as broken:
        broken.setattr(directory, "save_map", full)
        assert book.take(MAP)
    assert recorded(tmp_path) is None
    book.retry()
    assert recorded(tmp_path) == (1, 7)


def test_a_damaged_record_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text("{")
    with pytest.raises(CorruptedError, match="remove the file"):
        MapBook(str(tmp_path), "b1")
