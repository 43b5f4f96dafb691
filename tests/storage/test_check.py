"""A check that finds nothing proves nothing unless it finds damage: each kind is made by hand and must be named."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import storage.admin.check
from storage.admin.check import check
from storage.env import directory
from storage.env.environment import Environment
from storage.errors import NotAMirror
from storage.format import keys, records
from tests.storage.frames import sealed
from tests.storage.model import IDENTITY, keys_of, log
from tests.storage.rig import open_writer, publish, snapshots, stage

KEYS = keys_of(0, 5)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A mirror whose vbucket 0 went through two snapshots, a rollback, and holds staged rows of a third."""
    path = str(tmp_path / "mirror")
    directory.create(path, IDENTITY)
    writer = open_writer(path)
    writer.vbuckets[0].save(failover_log=log())
    for first in (1, 6):
        publish(writer, 0, [(key, b"v", seqno) for seqno, key in enumerate(KEYS, first)])
    writer.vbuckets[0].rollback(7)
    stage(writer, 30, *((key, b"w", seqno) for seqno, key in enumerate(KEYS, 20)), flush=True)
    writer.close()
    assert check(path).problems == []
    return path


def test_a_sound_store_is_clean_and_counted(path: str) -> None:
    seen: list[tuple[int, int]] = []
    report = check(path, progress=lambda done, of: seen.append((done, of)))
    assert not report.problems
    assert (report.vbuckets, report.rows, report.key_rows, report.boundaries) == (4, 15, 10, 1)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


ROWS, KEY_TREE = keys.rows_db(0), keys.keys_db(0)
FIRST = keys.ROW.pack(1, 1)


def put(tree: bytes, key: bytes, value: bytes) -> Callable[[Environment, object], None]:
    return lambda env, txn: txn.put(key, value, db=env.db(tree))  # type: ignore[attr-defined]


def delete(tree: bytes, key: bytes, value: bytes = b"") -> Callable[[Environment, object], None]:
    return lambda env, txn: txn.delete(key, value, db=env.db(tree))  # type: ignore[attr-defined]


FRAME = records.encode_mutation(KEYS[0], b"v", 1)
SEALED = sealed(FRAME)
OTHER_SEQNO = records.encode_mutation(KEYS[0], b"v", 3)
DAMAGE: dict[str, tuple[Callable[[Environment, object], object], str]] = {
    "a key without its row": (delete(ROWS, FIRST), "which is missing"),
    "a row without its key": (delete(KEY_TREE, b"\0" + KEYS[0], keys.DUP.pack(1, 1, 0x57)), "1:1 has no key row"),
    "a later row without its key": (
        delete(KEY_TREE, b"\0" + KEYS[4], keys.DUP.pack(1, 5, 0x57)),
        "row 1:5 has no key row",
    ),
    "a key that points to another document": (
        put(KEY_TREE, b"\0" + KEYS[1], keys.DUP.pack(1, 1, 0x57)),
        "another document's",
    ),
    "a key of another kind": (put(KEY_TREE, b"\0" + KEYS[0], keys.DUP.pack(1, 1, 0x58)), "another document's"),
    "a row of another seqno": (put(ROWS, FIRST, sealed(OTHER_SEQNO)), "event of seqno 3"),
    "a row that is cut short": (put(ROWS, FIRST, sealed(FRAME[:-1])), "lengths do not add up"),
    "a row of an unknown opcode": (put(ROWS, FIRST, sealed(b"\x80\x01" + FRAME[2:])), "cannot be read"),
    "a row with a flipped bit in its value": (
        put(ROWS, FIRST, SEALED[:-5] + b"w" + SEALED[-4:]),
        "row 1:1: the row of seqno 1 (branch 1), key b'" + KEYS[0].decode() + "', is damaged",
    ),
    "a row without its checksum": (put(ROWS, FIRST, FRAME), "its checksum does not match"),
    "an empty row": (put(ROWS, FIRST, b"\x80"), "vbucket 0"),
    "a row of an unknown branch": (put(ROWS, keys.ROW.pack(9, 1), SEALED), "unknown branch"),
    "a row below its branch's base": (put(ROWS, keys.ROW.pack(2, 1), SEALED), "not above its branch's base 5"),
    "a row beyond what is staged": (
        put(ROWS, keys.ROW.pack(2, 99), sealed(records.encode_mutation(KEYS[0], b"v", 99))),
        "above the staged seqno",
    ),
    "a row key of a wrong size": (put(ROWS, FIRST + b"\7\7", FRAME), "14 bytes"),
    "a missing boundary": (
        lambda env, txn: [delete(ROWS, keys.ROW.pack(branch, 5) + b"\1")(env, txn) for branch in (1, 2)],
        "published seqno 5 is not a kept boundary",
    ),
    "a boundary of a wrong size": (put(ROWS, keys.ROW.pack(2, 5) + b"\1", b"x"), "1 bytes"),
    "no pub": (delete(keys.DB_PUB, b"\0\0"), "group-0000: vbucket 0: the pub record is missing or damaged"),
    "a pub of a wrong size": (
        put(keys.DB_PUB, b"\0\0", b"xx"),
        "group-0000: vbucket 0: the pub record is missing or damaged",
    ),
    "a served branch that is unknown": (put(keys.DB_PUB, b"\0\0", keys.PUB.pack(7, 5, 0, 0, 0, 0)), "vbucket 0"),
    "published beyond staged": (put(keys.DB_PUB, b"\0\0", keys.PUB.pack(2, 50, 5, 0, 0, 0)), "contradict"),
    "a floor above what is published": (put(keys.DB_PUB, b"\0\0", keys.PUB.pack(2, 5, 6, 0, 0, 0)), "history floor"),
    "no state": (
        delete(keys.DB_STATE, b"\0\0"),
        "group-0000: vbucket 0: the state record is missing (stop the service, move",
    ),
    "a state that is no msgpack": (
        put(keys.DB_STATE, b"\0\0", b"\xc1"),
        "group-0000: vbucket 0: the state record cannot be read",
    ),
    "a branch without its parent": (delete(keys.DB_BRANCH, keys.BRANCH_KEY.pack(0, 1)), "vbucket 0"),
    "a circle of branches": (
        put(keys.DB_BRANCH, keys.BRANCH_KEY.pack(0, 1), records.encode_branch(records.BranchRow(2, 0, 0, 1, 0))),
        "vbucket 0",
    ),
    "a branch without a history": (
        put(keys.DB_BRANCH, keys.BRANCH_KEY.pack(0, 1), records.encode_branch(records.BranchRow(None, 0, 0, 1, 0))),
        "the history ids of branch 1 are missing",
    ),
    "a vbucket of another group": (put(keys.DB_PUB, b"\0\1", keys.PUB.pack(1, 0, 0, 0, 0, 0)), "row of vbucket 1"),
    "a vbucket's purge in another group": (
        put(keys.DB_PURGE, b"\0\1", keys.PURGE.pack(5, 5, 0, 0)),
        "tree purge has a row of vbucket 1",
    ),
    "no fence": (delete(keys.DB_META, b"fence"), "fence is not a number of 8 bytes"),
    "another bucket's data": (put(keys.DB_META, b"identity", directory.identity_bytes(IDENTITY, 1)), "holds group 1"),
    "no identity": (delete(keys.DB_META, b"identity"), "has no identity"),
}


@pytest.mark.parametrize("gap_rows", [storage.admin.check.GAP_ROWS, 1])
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_named(path: str, name: str, gap_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a vbucket of more than `GAP_ROWS` rows, a row without its key was not found."""
    monkeypatch.setattr(storage.admin.check, "GAP_ROWS", gap_rows)
    damage, expected = DAMAGE[name]
    environment = Environment(directory.group_path(path, 0), IDENTITY.group_vbids(0), writable=True)
    environment.open_all()
    with environment.begin(write=True) as txn:
        damage(environment, txn)
    environment.close()
    problems = check(path).problems
    assert problems
    assert any(expected in problem for problem in problems), problems
    assert not any("vbucket 1" in problem or "vbucket 3" in problem for problem in problems if name[:9] != "a vbucket")


def test_boundaries_with_wrong_counters_are_found(tmp_path: Path) -> None:
    path = str(tmp_path / "mirror")
    directory.create(path, IDENTITY)
    writer = open_writer(path)
    writer.vbuckets[0].save(failover_log=log())
    snapshots(writer, [(KEYS[0], b"v", 1)], [(KEYS[0], b"v", 2)])
    key = keys.ROW.pack(1, 2) + keys.BOUNDARY_SUFFIX
    with writer.environment.begin(write=True) as txn:
        rows = writer.environment.db(ROWS)
        value = txn.get(key, db=rows)
        txn.put(key, value[:-1] + bytes([value[-1] ^ 1]), db=rows)
    writer.close()
    (problem,) = check(path).problems
    assert "boundary 2 counts 2 boundaries" in problem


def test_a_torn_file_is_reported_and_the_other_group_still_checked(path: str) -> None:
    file = os.path.join(directory.group_path(path, 0), "data.mdb")
    with open(file, "r+b") as handle:
        handle.truncate(5000)
        handle.write(b"\xff" * 5000)
    report = check(path)
    assert any(problem.startswith("group 0") for problem in report.problems)
    assert report.vbuckets == 2


def test_a_page_that_was_overwritten_is_found(path: str) -> None:
    file = os.path.join(directory.group_path(path, 0), "data.mdb")
    with open(file, "r+b") as handle:
        size = handle.seek(0, 2)
        handle.seek(4096 * 2)  # the two meta pages stay
        handle.write(os.urandom(size - 4096 * 2))
    assert any("page verification" in problem for problem in check(path).problems)


def test_a_missing_group_file_is_reported(path: str) -> None:
    os.unlink(os.path.join(directory.group_path(path, 1), "data.mdb"))
    assert any("group 1" in problem and "missing" in problem for problem in check(path).problems)


def test_a_path_without_a_mirror_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotAMirror, match="no such directory"):
        check(str(tmp_path / "nowhere"))
