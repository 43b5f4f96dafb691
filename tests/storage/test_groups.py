"""The groups that a reader has open: which vbuckets, which file, and how long."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from storage.env import directory
from storage.errors import Closed, CorruptedError, ViewInvalidated
from storage.model import Seqno
from storage.read import changes, validity
from storage.read.view import open_view
from tests.storage.model import IDENTITY, keys_of
from tests.storage.rig import open_writer, publish


def test_a_file_that_another_view_has_found_replaced_is_not_read_until_the_next_look(path: str) -> None:
    key = keys_of(0, 1)[0]
    writer = open_writer(path)
    publish(writer, 0, [(key, b"old", 1)])
    writer.close()
    folder = directory.group_path(path, 0)
    with open_view(path) as view:
        assert view.get(key) is not None
        before = view.reader(0).environment
        os.rename(folder, folder + ".aside")
        shutil.copytree(folder + ".aside", folder)
        assert before.look_now()
        assert view.get(key) is not None
        assert view.groups.readers[0].environment is not before


def test_a_view_reads_the_file_that_is_at_its_path_now(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
        scan = changes.rows(reader, changes.Range(served, (), Seqno(0)), raw=False)
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
