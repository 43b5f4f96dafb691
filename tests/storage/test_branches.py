"""Opening branches, one transaction each: nothing in between can be seen, and numbers are never used twice."""

from __future__ import annotations

import pytest

from storage import branches
from storage.model import Boundary, Branch, FailoverEntry, Seqno, SnapshotRange, Vbuuid
from storage.view import open_view
from storage.writer import GroupWriter
from tests.storage.model import keys_of, log, row
from tests.storage.test_writer import crash, open_writer, publish

KEY = keys_of(0, 1)[0]


def entries(*pairs: tuple[int, int]) -> tuple[FailoverEntry, ...]:
    return tuple(FailoverEntry(Vbuuid(uuid), Seqno(seqno)) for uuid, seqno in pairs)


def boundary(seqno: int, vbuuid: int) -> Boundary:
    return Boundary(Branch(1), Seqno(seqno), Seqno(0), Vbuuid(vbuuid), 0)


@pytest.mark.parametrize(
    ("before", "at", "after"),
    [
        (entries((3, 30), (2, 20), (1, 0)), 25, entries((2, 20), (1, 0))),
        (entries((3, 30), (2, 20), (1, 0)), 30, entries((3, 30), (2, 20), (1, 0))),
        (entries((3, 30), (2, 20)), 10, entries((9, 0))),
        (entries(), 10, entries((9, 0))),
    ],
)
def test_a_rollback_prunes_the_failover_log(
    before: tuple[FailoverEntry, ...], at: int, after: tuple[FailoverEntry, ...]
) -> None:
    assert branches.prune_failover_log(before, boundary(at, 9)) == after


def test_a_boundary_without_vbuuid_leaves_an_empty_log() -> None:
    assert branches.prune_failover_log(entries((3, 30)), boundary(10, 0)) == ()


@pytest.mark.parametrize(("seqno", "vbuuid"), [(35, 3), (30, 3), (29, 2), (5, 1)])
def test_a_seqno_belongs_to_the_newest_history_that_began_before_it(seqno: int, vbuuid: int) -> None:
    assert branches.vbuuid_at(entries((3, 30), (2, 20), (1, 0)), seqno) == vbuuid


def test_branch_numbers_rise_through_everything_that_opens_one(path: str) -> None:
    writer = open_writer(path)
    seen = [writer.state(0).staging_branch]
    writer.save_failover_log(0, log())
    publish(writer, 0, [(KEY, b"1", 1)])
    publish(writer, 0, [(KEY, b"2", 2)])
    writer.rollback(0, 1)
    seen.append(writer.state(0).staging_branch)
    writer.stage(0, [row(writer.row_prefix(0), KEY, b"3", 5)], 0, SnapshotRange(Seqno(5), Seqno(9)))
    writer.commit(flush_open=True)
    writer.abandon(0)
    seen.append(writer.state(0).staging_branch)
    writer.begin_refill(0)
    seen.append(writer.state(0).staging_branch)
    writer.abandon(0)  # nothing was written to it: it stays
    assert writer.state(0).staging_branch == seen[-1]
    writer.stage(0, [row(writer.row_prefix(0), KEY, b"4", 1)], 0, SnapshotRange(Seqno(1), Seqno(9)))
    writer.commit(flush_open=True)
    writer.abandon(0)
    seen.append(writer.state(0).staging_branch)
    writer.rollback(0, 1)  # gives the refill up
    seen.append(writer.state(0).staging_branch)
    assert seen == sorted(set(seen))
    assert writer.state(0).branch == writer.state(0).staging_branch
    writer.close()


class Interrupted(Exception):
    """The machine went away here."""


@pytest.mark.parametrize("operation", ["rollback", "abandon", "begin_refill"])
def test_an_operation_that_is_cut_off_before_its_commit_changed_nothing(
    path: str, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_writer(path)
    writer.save_failover_log(0, log())
    publish(writer, 0, [(KEY, b"1", 1)])
    publish(writer, 0, [(KEY, b"2", 2)])
    writer.stage(0, [row(writer.row_prefix(0), KEY, b"3", 3)], 0, SnapshotRange(Seqno(3), Seqno(9)))
    writer.commit(flush_open=True)
    before = writer.state(0)
    original = branches._put_state  # the last write of each of them

    def cut(*args: object, **more: object) -> None:
        original(*args, **more)  # type: ignore[arg-type]
        raise Interrupted

    arguments = (0, 1) if operation == "rollback" else (0,)
    with monkeypatch.context() as patch:
        patch.setattr(branches, "_put_state", cut)
        with pytest.raises(Interrupted):
            getattr(writer, operation)(*arguments)
    crash(writer)
    writer = open_writer(path)
    assert writer.state(0) == before
    getattr(writer, operation)(*arguments)
    after = writer.state(0)
    assert after.staging_branch == before.staging_branch + 1
    with open_view(path) as view:
        document = view.get(KEY)
        assert document is not None
        assert document.value == (b"1" if operation == "rollback" else b"2")
    writer.close()


def test_a_rollback_record_says_where_from_and_where_to(path: str) -> None:
    writer: GroupWriter = open_writer(path)
    writer.save_failover_log(0, entries((5, 0)))
    publish(writer, 0, [(KEY, b"1", 10)])
    writer.save_failover_log(0, entries((6, 10), (5, 0)))
    publish(writer, 0, [(KEY, b"2", 20)])
    writer.rollback(0, 15)
    with open_view(path) as view:
        record = view.rollbacks(0)[-1]
    assert (record.from_branch, record.from_seqno, record.to_branch, record.to_seqno) == (1, 20, 2, 10)
    assert (record.from_vbuuid, record.to_vbuuid) == (6, 6)
    assert record.time_ms > 0
    writer.close()
