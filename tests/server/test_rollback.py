"""The producer's rollback rule, against every recorded answer of two real engines; and what consumers find common."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.ingest.handshake import common_history
from mirror.server.errors import Refused
from mirror.server.rollback import StreamHistory, judge
from mirror.wire.constants import Status
from mirror.wire.events import StreamRequest
from storage.model import SEQNO_MAX, FailoverLog
from tests import recordings

STRICT_VBUUID = 0x20
IGNORE_PURGED_TOMBSTONES = 0x80
ACCEPTED, OUT_OF_RANGE = None, "ERANGE"


def log(*entries: tuple[int, int]) -> FailoverLog:
    return FailoverLog.of(entries)


def answer_to(
    request: StreamRequest, history: StreamHistory, client_purge_seqno: int | None = None
) -> int | str | None:
    try:
        return judge(request, history, client_purge_seqno)
    except Refused as refused:
        return Status(refused.status).name


def request_at(
    start: int, snap_start: int, snap_end: int, vbuuid: int, *, flags: int = 0, end: int = SEQNO_MAX
) -> StreamRequest:
    return StreamRequest(0, flags, start, end, vbuuid, snap_start, snap_end)


@pytest.mark.parametrize("server", ["605", "72"])
def test_the_producer_rule_gives_every_recorded_answer(server: str) -> None:
    recorded: dict[str, Any] = recordings.notes(f"rollback_answers_{server}")
    case_count = 0
    for vbucket in recorded["vbuckets"]:
        failover_log = log(*((entry["uuid"], entry["seqno"]) for entry in vbucket["failover_log"]))
        for values in vbucket["cases"]:
            case = dict(zip(recorded["columns"], values, strict=True))
            positions = (case[name] for name in ("start_seqno", "snap_start_seqno", "snap_end_seqno", "vbuuid"))
            request = request_at(*positions, flags=case["flags"], end=case["end_seqno"])
            answer = answer_to(request, StreamHistory(failover_log, vbucket["high_seqno"], vbucket["purge_seqno"]))
            expected = {"SUCCESS": ACCEPTED, "ERANGE": OUT_OF_RANGE, "ROLLBACK": case["rollback_seqno"]}
            assert answer == expected[case["status"]], (vbucket["vbid"], case)
            case_count += 1
    assert case_count == 3840


@pytest.mark.parametrize(
    ("request_", "options", "answer"),
    [
        # (start, snap_start, snap_end, vbuuid); the history: A from 0, B from 10, C from 20; high 30, purge 5
        pytest.param((12, 10, 11, 0xC), {}, OUT_OF_RANGE, id="start above the snapshot is out of range"),
        pytest.param((9, 10, 11, 0xC), {}, OUT_OF_RANGE, id="start below the snapshot is out of range"),
        pytest.param((12, 12, 12, 0xC), {"end": 11}, OUT_OF_RANGE, id="start above end is out of range"),
        pytest.param((0, 0, 0, 0xDEAD), {}, ACCEPTED, id="0 is accepted whatever the vbuuid"),
        pytest.param((0, 0, 0, 0xDEAD), {"flags": STRICT_VBUUID}, 0, id="strict: an unknown vbuuid is not"),
        pytest.param((0, 0, 0, 0), {"flags": STRICT_VBUUID}, ACCEPTED, id="strict: no vbuuid is accepted from 0"),
        pytest.param((4, 4, 4, 0xA), {}, 0, id="below the purge seqno everything is requested again"),
        pytest.param((4, 4, 4, 0xA), {"client_purge_seqno": 4}, 0, id="another purge seqno is no help"),
        pytest.param((4, 4, 4, 0xA), {"client_purge_seqno": 5}, ACCEPTED, id="the same purge seqno is"),
        pytest.param((4, 4, 4, 0xA), {"flags": IGNORE_PURGED_TOMBSTONES}, ACCEPTED, id="flag 0x80 forgets deletions"),
        pytest.param((4, 4, 4, 0xA), {"holds_whole_filter": True}, ACCEPTED, id="a complete filter needs no more"),
        pytest.param((5, 4, 8, 0xA), {}, ACCEPTED, id="the start counts, not the snapshot's start"),
        pytest.param((8, 8, 8, 0xDEAD), {}, 0, id="an unknown history starts again"),
        pytest.param((15, 15, 15, 0xA), {}, 10, id="beyond the branch point back to it"),
        pytest.param((10, 10, 10, 0xA), {}, ACCEPTED, id="at the branch point the old history is fine"),
        pytest.param((9, 8, 12, 0xA), {}, 8, id="inside a snapshot that crosses it back to its start"),
        pytest.param((12, 8, 12, 0xA), {}, 10, id="with the whole snapshot back to the branch point"),
        pytest.param((8, 8, 12, 0xA), {}, ACCEPTED, id="with nothing of the snapshot stay"),
        pytest.param((31, 31, 31, 0xC), {}, 30, id="ahead of the source back to its high seqno"),
        pytest.param((15, 15, 15, 0xC), {}, ACCEPTED, id="the newest vbuuid below its own entry is fine"),
    ],
)
def test_the_producer_rule_case_by_case(
    request_: tuple[int, int, int, int], options: dict[str, Any], answer: int | str | None
) -> None:
    options = dict(options)
    whole_filter = options.pop("holds_whole_filter", False)
    client_purge_seqno = options.pop("client_purge_seqno", None)
    history = StreamHistory(log((0xC, 20), (0xB, 10), (0xA, 0)), 30, 5, holds_whole_filter=whole_filter)
    assert answer_to(request_at(*request_, **options), history, client_purge_seqno) == answer


def test_a_producer_without_a_failover_log_knows_no_history() -> None:
    assert judge(request_at(8, 8, 8, 0xA), StreamHistory(log(), 30, 0)) == 0


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
        request = request_at(boundary, boundary, boundary, common.vbuuid)
        assert judge(request, StreamHistory(source, high_seqno, 0)) is ACCEPTED
