"""The rollback rule of both roles; the producer's against every recorded answer of two real engines."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.ingest.rollback import (
    Accept,
    OutOfRange,
    ProducerAnswer,
    RollbackAnswer,
    common_history,
    producer_answer,
)
from storage.model import FailoverLog
from tests import recordings

STRICT_VBUUID = 0x20
IGNORE_PURGED_TOMBSTONES = 0x80


def log(*entries: tuple[int, int]) -> FailoverLog:
    return FailoverLog.of(entries)


def recorded_answer(status: str, rollback_seqno: int | None) -> ProducerAnswer:
    if status == "ROLLBACK":
        assert rollback_seqno is not None
        return RollbackAnswer(rollback_seqno)
    answers: dict[str, ProducerAnswer] = {"SUCCESS": Accept(), "ERANGE": OutOfRange()}
    return answers[status]


@pytest.mark.parametrize("server", ["605", "72"])
def test_the_producer_rule_gives_every_recorded_answer(server: str) -> None:
    recorded: dict[str, Any] = recordings.notes(f"rollback_answers_{server}")
    case_count = 0
    for vbucket in recorded["vbuckets"]:
        failover_log = log(*((entry["uuid"], entry["seqno"]) for entry in vbucket["failover_log"]))
        for values in vbucket["cases"]:
            case = dict(zip(recorded["columns"], values, strict=True))
            answer = producer_answer(
                case["start_seqno"],
                case["snap_start_seqno"],
                case["snap_end_seqno"],
                case["vbuuid"],
                failover_log,
                vbucket["high_seqno"],
                vbucket["purge_seqno"],
                end_seqno=case["end_seqno"],
                strict_vbuuid=bool(case["flags"] & STRICT_VBUUID),
                ignore_purged_tombstones=bool(case["flags"] & IGNORE_PURGED_TOMBSTONES),
            )
            assert answer == recorded_answer(case["status"], case["rollback_seqno"]), (vbucket["vbid"], case)
            case_count += 1
    assert case_count == 3840


@pytest.mark.parametrize(
    ("request_", "options", "answer"),
    [
        # (start, snap_start, snap_end, vbuuid); the history: A from 0, B from 10, C from 20; high 30, purge 5
        pytest.param((12, 10, 11, 0xC), {}, OutOfRange(), id="start above the snapshot is out of range"),
        pytest.param((9, 10, 11, 0xC), {}, OutOfRange(), id="start below the snapshot is out of range"),
        pytest.param((12, 12, 12, 0xC), {"end_seqno": 11}, OutOfRange(), id="start above end is out of range"),
        pytest.param((0, 0, 0, 0xDEAD), {}, Accept(), id="0 is accepted whatever the vbuuid"),
        pytest.param(
            (0, 0, 0, 0xDEAD), {"strict_vbuuid": True}, RollbackAnswer(0), id="strict: an unknown vbuuid is not"
        ),
        pytest.param((0, 0, 0, 0), {"strict_vbuuid": True}, Accept(), id="strict: no vbuuid is accepted from 0"),
        pytest.param((4, 4, 4, 0xA), {}, RollbackAnswer(0), id="below the purge seqno everything is requested again"),
        pytest.param((4, 4, 4, 0xA), {"client_purge_seqno": 4}, RollbackAnswer(0), id="another purge seqno is no help"),
        pytest.param((4, 4, 4, 0xA), {"client_purge_seqno": 5}, Accept(), id="the same purge seqno is"),
        pytest.param((4, 4, 4, 0xA), {"ignore_purged_tombstones": True}, Accept(), id="flag 0x80 forgets deletions"),
        pytest.param((4, 4, 4, 0xA), {"holds_whole_filter": True}, Accept(), id="a complete filter needs no more"),
        pytest.param((5, 4, 8, 0xA), {}, Accept(), id="the start counts, not the snapshot's start"),
        pytest.param((8, 8, 8, 0xDEAD), {}, RollbackAnswer(0), id="an unknown history starts again"),
        pytest.param((15, 15, 15, 0xA), {}, RollbackAnswer(10), id="beyond the branch point back to it"),
        pytest.param((10, 10, 10, 0xA), {}, Accept(), id="at the branch point the old history is fine"),
        pytest.param((9, 8, 12, 0xA), {}, RollbackAnswer(8), id="inside a snapshot that crosses it back to its start"),
        pytest.param((12, 8, 12, 0xA), {}, RollbackAnswer(10), id="with the whole snapshot back to the branch point"),
        pytest.param((8, 8, 12, 0xA), {}, Accept(), id="with nothing of the snapshot stay"),
        pytest.param((31, 31, 31, 0xC), {}, RollbackAnswer(30), id="ahead of the source back to its high seqno"),
        pytest.param((15, 15, 15, 0xC), {}, Accept(), id="the newest vbuuid below its own entry is fine"),
    ],
)
def test_the_producer_rule_case_by_case(
    request_: tuple[int, int, int, int], options: dict[str, Any], answer: ProducerAnswer
) -> None:
    assert producer_answer(*request_, log((0xC, 20), (0xB, 10), (0xA, 0)), 30, 5, **options) == answer


def test_a_producer_without_a_failover_log_knows_no_history() -> None:
    assert producer_answer(8, 8, 8, 0xA, log(), 30, 0) == RollbackAnswer(0)


# --- consumer ---

# Ours: A from 0, B from 10, C from 20; we stand at 25.
OURS = ((0xC, 20), (0xB, 10), (0xA, 0))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param(((0xD, 22), *OURS), (0xC, 22), id="the source left our newest history after 22"),
        pytest.param(((0xD, 12), *OURS[1:]), (0xB, 12), id="the source never had our newest history"),
        pytest.param(((0xD, 30), (0xB, 10), (0xA, 0)), (0xB, 20), id="our own next history is the limit"),
        pytest.param(OURS, (0xC, 25), id="our own position is the limit"),
        pytest.param(((0xD, 0),), None, id="nothing in common"),
        pytest.param(((0xD, 0), (0xA, 0)), None, id="only seqno 0 in common"),
        pytest.param((), None, id="no log at all"),
    ],
)
def test_common_history_is_the_newest_shared_and_ends_where_either_left_it(
    source: tuple[tuple[int, int], ...], expected: tuple[int, int] | None
) -> None:
    common = common_history(log(*OURS), 25, log(*source))
    assert (None if common is None else (common.vbuuid, common.seqno)) == expected
    if common is not None:
        assert common.failover_log[0].vbuuid == common.vbuuid
        assert common.failover_log == log(*OURS)[-len(common.failover_log) :]


def test_a_history_that_began_at_our_very_position_gives_way_to_the_one_before() -> None:
    """A failover without loss, to a node that never informed the others: nothing need be fetched again."""
    common = common_history(log((0xD, 25), *OURS), 25, log((0xE, 25), *OURS))
    assert common is not None
    assert (common.vbuuid, common.seqno) == (0xC, 25)


HISTORIES = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 30)), max_size=6).map(
    lambda pairs: log(*sorted(dict(pairs).items(), key=lambda pair: -pair[1]))
)


@given(HISTORIES, st.integers(1, 30), HISTORIES, st.integers(0, 30))
def test_going_back_to_common_history_is_answered_with_acceptance(
    own: FailoverLog, own_seqno: int, source: FailoverLog, high_seqno: int
) -> None:
    common = common_history(own, own_seqno, source)
    if common is None:
        return
    high_seqno = max(high_seqno, common.seqno)
    assert 0 < common.seqno <= own_seqno
    for boundary in {int(common.seqno), (int(common.seqno) + 1) // 2}:
        assert producer_answer(boundary, boundary, boundary, common.vbuuid, source, high_seqno, 0) == Accept()
