"""A mirror that holds some of its bucket's vbuckets: it has these alone, and says so of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.admin import check
from storage.env import directory
from storage.errors import CorruptedError, NotHeld, StorageError, WrongBucket
from storage.model import Identity
from storage.read.view import View, open_view
from storage.write.writer import GroupWriter, WriterOptions
from tests.storage.model import keys_of, log
from tests.storage.rig import publish

IDENTITY = Identity("cluster", "bucket", "uuid", 8, 2, (3, 6))


def key_in(vbid: int) -> bytes:
    return keys_of(vbid, 1, IDENTITY.vbucket_count)[0]


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "mirror")
    directory.create(path, IDENTITY)
    for group in range(2):
        writer = GroupWriter(
            directory.group_path(path, group),
            WriterOptions(group=group, identity=IDENTITY, sync="unsafe", clock_ms=lambda: 1),
        )
        for vbid in IDENTITY.group_vbids(group):
            writer.vbuckets[vbid].save(failover_log=log())
            publish(writer, vbid, [(key_in(vbid), b"v", 7)])
        writer.close()
    return path


@pytest.fixture
def view(path: str) -> View:
    return open_view(path)


def test_the_held_vbuckets_are_divided_into_the_groups(path: str) -> None:
    assert directory.load(path) == IDENTITY
    assert [list(IDENTITY.group_vbids(group)) for group in range(2)] == [[4, 6], [3, 5]]
    whole = Identity("cluster", "bucket", "uuid", 8, 2)
    assert directory.identity_bytes(whole, 0) != directory.identity_bytes(IDENTITY, 0)
    with pytest.raises(WrongBucket):
        directory.check_identity(directory.identity_bytes(IDENTITY, 0), whole, 0, path)
    assert b"held" not in directory.identity_bytes(whole, 0)


def test_held_vbuckets_are_read_and_others_are_elsewhere(view: View) -> None:
    found = [document.key for document in view.scan()]
    assert found == [key_in(vbid) for vbid in (3, 4, 5, 6)]
    assert [state.vbid for state in view.states()] == [3, 4, 5, 6]
    assert [each.pub.seqno for _, each in sorted(view.published().items())] == [7] * 4
    assert [change.token.vbid for change in view.changes()] == [3, 4, 5, 6]
    assert view.manifest().uid == 0
    document = view.get(key_in(6))
    assert document is not None
    assert document.value == b"v"
    for vbid in (0, 1, 2, 7):
        for read in (
            lambda vbid=vbid: view.get(key_in(vbid)),
            lambda vbid=vbid: view.get_many([key_in(4), key_in(vbid)]),
            lambda vbid=vbid: view.find(b"\0" + key_in(vbid)),
            lambda vbid=vbid: view.state(vbid),
            lambda vbid=vbid: list(view.scan(vbid)),
        ):
            with pytest.raises(NotHeld, match="holds vbuckets 3 to 6"):
                read()
    with pytest.raises(StorageError, match="there is no vbucket 8"):
        view.state(8)
    view.close()


def test_a_check_covers_the_held_vbuckets(path: str) -> None:
    report = check.check(path)
    assert not report.problems
    assert report.vbuckets == 4


@pytest.mark.parametrize("held", ["[3]", "[6,3]", "[-1,3]", "[3,8]", '"3-6"', "7", '["3","6"]'])
def test_an_impossible_range_is_an_error(path: str, held: str) -> None:
    file = Path(path) / "mirror.json"
    text = file.read_text()
    start = text.index('"held":')
    file.write_text(text[:start] + f'"held": {held}\n}}')
    with pytest.raises(CorruptedError, match="cannot be true"):
        directory.load(path)
