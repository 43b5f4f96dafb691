"""Environments as closed files: what was in them is in the mirror that is made of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from storage.admin.check import check
from storage.env import directory, handover
from storage.errors import CorruptedError, StorageError
from storage.model import Identity
from storage.read.view import open_view
from storage.write.writer import GroupWriter, WriterOptions
from tests.storage.model import IDENTITY, keys_of, log
from tests.storage.rig import publish


def packed(scratch: Path, target: Path, group: int, identity: Identity = IDENTITY) -> int:
    """A group made by itself, as on a machine of its own, with two documents in each vbucket."""
    vbids = identity.group_vbids(group)
    scratch.mkdir(parents=True, exist_ok=True)
    directory.create_environment(str(scratch), group, identity)
    writer = GroupWriter(
        str(scratch), WriterOptions(group=group, identity=identity, clock_ms=lambda: 1_000, map_size=1 << 30)
    )
    for vbid in vbids:
        writer.vbuckets[vbid].save(failover_log=log())
        publish(writer, vbid, [(key, b"value", seqno) for seqno, key in enumerate(keys_of(vbid, 2), 1)])
    writer.close()
    return handover.pack(str(scratch), group, identity, str(target))


def test_groups_made_apart_are_a_mirror_together(tmp_path: Path) -> None:
    target = tmp_path / "mirror"
    target.mkdir()
    sizes = [packed(tmp_path / f"scratch-{group}", target, group) for group in range(2)]
    with pytest.raises(CorruptedError, match=r"mirror\.json is missing"):
        open_view(str(target))
    handover.describe(str(target), IDENTITY)
    assert check(str(target)).problems == []
    with open_view(str(target)) as view:
        assert len(list(view.scan())) == 2 * IDENTITY.vbucket_count
        assert view.identity == IDENTITY
        state = view.state(0)
        assert (state.published_seqno, state.failover_log) == (2, tuple(log()))
        assert [document.value for document in view.scan(0)] == [b"value"] * 2
    assert [os.path.getsize(target / f"group-000{group}" / "data.mdb") for group in range(2)] == sizes
    assert sorted(path.name for path in target.iterdir()) == ["group-0000", "group-0001", "mirror.json"]


def test_a_group_that_is_missing_is_named_and_no_mirror_is_made(tmp_path: Path) -> None:
    target = tmp_path / "mirror"
    target.mkdir()
    packed(tmp_path / "scratch", target, 0)
    with pytest.raises(CorruptedError, match=r"group-0001: the group is missing"):
        handover.describe(str(target), IDENTITY)
    assert not directory.exists(str(target))


def test_a_second_attempt_at_a_group_leaves_the_first(tmp_path: Path) -> None:
    target = tmp_path / "mirror"
    target.mkdir()
    size = packed(tmp_path / "one", target, 0)
    before = (target / "group-0000" / "data.mdb").stat().st_ino
    assert packed(tmp_path / "two", target, 0) == size
    assert (target / "group-0000" / "data.mdb").stat().st_ino == before
    assert [path.name for path in target.iterdir()] == ["group-0000"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere"):
        packed(tmp_path / "scratch", tmp_path / "nowhere", 0)
