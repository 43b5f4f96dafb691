"""The rollback rule of both roles; the producer's against every recorded answer of two real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mirror.ingest.rollback import Accept, OutOfRange, ProducerAnswer, Rollback, producer_answer
from storage.model import FailoverEntry, Seqno, Vbuuid

CAPTURES = Path(__file__).parents[2] / ".." / "shared" / "captures"
STRICT_VBUUID = 0x20
IGNORE_PURGED_TOMBSTONES = 0x80


def log(*entries: tuple[int, int]) -> tuple[FailoverEntry, ...]:
    return tuple(FailoverEntry(Vbuuid(vbuuid), Seqno(seqno)) for vbuuid, seqno in entries)


def recorded_answer(status: str, rollback_seqno: int | None) -> ProducerAnswer:
    if status == "ROLLBACK":
        assert rollback_seqno is not None
        return Rollback(rollback_seqno)
    answers: dict[str, ProducerAnswer] = {"SUCCESS": Accept(), "ERANGE": OutOfRange()}
    return answers[status]


@pytest.mark.parametrize("server", ["605", "72"])
def test_the_producer_rule_gives_every_recorded_answer(server: str) -> None:
    recorded: dict[str, Any] = json.loads((CAPTURES / f"rollback_answers_{server}.json").read_text())
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
        pytest.param((0, 0, 0, 0xDEAD), {"strict_vbuuid": True}, Rollback(0), id="strict: an unknown vbuuid is not"),
        pytest.param((0, 0, 0, 0), {"strict_vbuuid": True}, Accept(), id="strict: no vbuuid is accepted from 0"),
        pytest.param((4, 4, 4, 0xA), {}, Rollback(0), id="below the purge seqno everything is asked again"),
        pytest.param((4, 4, 4, 0xA), {"client_purge_seqno": 4}, Rollback(0), id="another purge seqno is no help"),
        pytest.param((4, 4, 4, 0xA), {"client_purge_seqno": 5}, Accept(), id="the same purge seqno is"),
        pytest.param((4, 4, 4, 0xA), {"ignore_purged_tombstones": True}, Accept(), id="flag 0x80 forgets deletions"),
        pytest.param((4, 4, 4, 0xA), {"holds_whole_filter": True}, Accept(), id="a complete filter needs no more"),
        pytest.param((5, 4, 8, 0xA), {}, Accept(), id="the start counts, not the snapshot's start"),
        pytest.param((8, 8, 8, 0xDEAD), {}, Rollback(0), id="an unknown history starts again"),
        pytest.param((15, 15, 15, 0xA), {}, Rollback(10), id="beyond the branch point back to it"),
        pytest.param((10, 10, 10, 0xA), {}, Accept(), id="at the branch point the old history is fine"),
        pytest.param((9, 8, 12, 0xA), {}, Rollback(8), id="inside a snapshot that crosses it back to its start"),
        pytest.param((12, 8, 12, 0xA), {}, Rollback(10), id="with the whole snapshot back to the branch point"),
        pytest.param((8, 8, 12, 0xA), {}, Accept(), id="with nothing of the snapshot stay"),
        pytest.param((31, 31, 31, 0xC), {}, Rollback(30), id="ahead of the source back to its high seqno"),
        pytest.param((15, 15, 15, 0xC), {}, Accept(), id="the newest vbuuid below its own entry is fine"),
    ],
)
def test_the_producer_rule_case_by_case(
    request_: tuple[int, int, int, int], options: dict[str, Any], answer: ProducerAnswer
) -> None:
    assert producer_answer(*request_, log((0xC, 20), (0xB, 10), (0xA, 0)), 30, 5, **options) == answer


def test_a_producer_without_a_failover_log_knows_no_history() -> None:
    assert producer_answer(8, 8, 8, 0xA, (), 30, 0) == Rollback(0)
