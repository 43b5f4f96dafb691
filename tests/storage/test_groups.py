"""The groups that a reader has open: which vbuckets, which file, and how long."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest

from storage.env import directory
from storage.env.environment import SHARED
from storage.errors import Closed, CorruptedError, ViewInvalidated
from storage.format import keys
from storage.model import Seqno
from storage.read import changes, validity
from storage.read.view import View, open_view
from tests.storage.model import IDENTITY, keys_of
from tests.storage.rig import open_writer, publish


@pytest.fixture
def short_turns() -> Iterator[None]:
    """Threads switch so often that they meet between any two lines."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def replace_group(path: str) -> None:
    folder = directory.group_path(path, 0)
    shutil.copytree(folder, folder + ".copy")
    shutil.rmtree(folder)
    os.rename(folder + ".copy", folder)


@pytest.mark.usefixtures("short_turns")
def test_threads_share_a_view_while_its_file_is_replaced(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them opened the file, and one was closed. Two of them removed the replaced file: a KeyError."""
    monkeypatch.setattr("storage.env.environment.LOOK_INTERVAL_S", 0.0)
    key = keys_of(0, 1)[0]
    writer = open_writer(path)
    publish(writer, 0, [(key, b"value", 1)])
    writer.close()
    together = Barrier(6)

    def read(view: View) -> bytes | None:
        together.wait()
        while True:
            try:
                found = view.get(key)
            except ViewInvalidated:
                continue
            return None if found is None else found.value

    with ThreadPoolExecutor(6) as pool:
        for _ in range(20):
            with open_view(path) as view:
                for _ in range(3):
                    assert set(pool.map(read, [view] * 6)) == {b"value"}
                    replace_group(path)
            assert not [each for each in SHARED.open if each.startswith(path)]
    open_writer(path).close()


@pytest.mark.usefixtures("short_turns")
def test_threads_that_read_a_view_during_its_close_get_only_the_closed_error(path: str) -> None:
    """Some of them got a KeyError, the name of a tree."""
    writer = open_writer(path)
    publish(writer, 0, [(key, b"value", number) for number, key in enumerate(keys_of(0, 20), 1)])
    writer.close()
    started = Barrier(5)

    def read(view: View) -> None:
        started.wait()
        while True:
            view.published(), list(view.changes(0)), list(view.scan(0)), view.get(keys_of(0, 1)[0])

    with ThreadPoolExecutor(4) as pool:
        for _ in range(60):
            view = open_view(path, partial=True)
            reads = [pool.submit(read, view) for _ in range(4)]
            started.wait()
            view.close()
            errors = [each.exception(20) for each in reads]
            assert {type(error) for error in errors} == {Closed}, errors


def test_a_read_ends_in_the_file_that_another_thread_has_found_replaced(path: str) -> None:
    """The file was closed, and the read failed because the view was closed, which it was not."""
    key = keys_of(0, 1)[0]
    writer = open_writer(path)
    publish(writer, 0, [(key, b"value", 1)])
    writer.close()
    with open_view(path) as view:
        reader = view.reader(0)
        with reader.environment.read() as txn:
            replace_group(path)
            assert reader.environment.look_now()
            assert view.get(key) is not None
            assert view.reader(0).environment is not reader.environment
            assert txn.get(keys.rows_db(0), keys.ROW.pack(1, 1)) is not None
        with pytest.raises(ViewInvalidated, match="start the read again"), reader.environment.read():
            pass


def test_a_view_reads_the_file_that_replaced_its_own(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is set aside and filled again, as an error recommends, by another process."""
    monkeypatch.setattr("storage.env.environment.LOOK_INTERVAL_S", 0.0)
    key = keys_of(0, 1)[0]
    writer = open_writer(path)
    publish(writer, 0, [(key, b"old", 1)])
    writer.close()
    folder = directory.group_path(path, 0)
    with open_view(path) as view, open_view(path) as other:
        assert [each.get(key).value for each in (view, other)] == [b"old", b"old"]  # type: ignore[union-attr]
        reader = other.reader(0)
        with reader.environment.read() as txn:
            served = validity.served_at(reader, txn, other.pin(0))
        scan = changes.rows(reader, changes.Range(served, (), None, Seqno(0)), raw=False)
        os.rename(folder, folder + ".aside")
        with pytest.raises(CorruptedError, match="data file is missing"):
            view.get(key)
        program = (
            "import os, sys; from storage.env import directory; from tests.storage.model import *;"
            "from tests.storage.rig import *; os.mkdir(sys.argv[2]);"
            "directory.create_environment(sys.argv[2], 0, IDENTITY);"
            "w = open_writer(sys.argv[1]); publish(w, 0, [(keys_of(0, 1)[0], b'new', 2)]); w.close()"
        )
        subprocess.run([sys.executable, "-c", program, path, folder], check=True)
        with open_view(path) as late:
            for each in (view, other, late):
                found = each.get(key)
                assert found is not None
                assert found.value == b"new"
                assert [document.seqno for document in each.scan(0)] == [2]
        with pytest.raises(ViewInvalidated, match="moved, removed or replaced"):
            list(scan)
        os.rename(path, path + ".aside")
        directory.create(path, replace(IDENTITY, bucket_uuid="another"))
        with pytest.raises(Closed, match="another mirror is at this path"):
            view.get(key)
