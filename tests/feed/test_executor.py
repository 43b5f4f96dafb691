"""The executor: every instruction is executed, in list order, and its answer before the next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from mirror.ingest import events
from mirror.ingest import instructions as ins
from mirror.ingest.instructions import Instruction, InstructionFields
from mirror.ingest.offset import StreamOffset
from tests.feed.executor_rig import VBID, FakeVbucket, open_writer, publish, stage


@pytest.fixture
def vbucket(tmp_path: Path) -> Iterator[FakeVbucket]:
    writer = open_writer(tmp_path)
    yield FakeVbucket(writer)
    writer.close()


def test_every_instruction_is_one_that_the_type_checker_has_the_executor_handle() -> None:
    defined = {kind for kind in vars(ins).values() if isinstance(kind, type) and issubclass(kind, InstructionFields)}
    assert set(get_args(Instruction)) == defined - {InstructionFields}


def test_without_a_machine_the_rest_of_a_list_is_not_executed(vbucket: FakeVbucket) -> None:
    """The machine is dropped while its list is executed: a read that is over, for example."""
    vbucket.close_stream = lambda opaque: setattr(vbucket, "machine", None)  # type: ignore[method-assign]
    vbucket.execute([stage(vbucket, 1, 2), ins.CloseStream(VBID, "t", 5), publish(2)])
    vbucket.commit()
    assert vbucket.writer.vbuckets[0].state.published_seqno == 0


def test_answer_of_an_instruction_is_performed_before_the_next_of_the_list(vbucket: FakeVbucket) -> None:
    vbucket.answers[events.Abandoned] = [ins.ReportStatus(VBID, "t", ins.VbucketStatus.WAITING, "abandoned")]
    vbucket.execute([ins.AbandonStaged(VBID, "t"), ins.RefreshMap(VBID, "t", b"config")])
    assert vbucket.done == ["commit", ("report", ins.VbucketStatus.WAITING), ("map", b"config")]


def test_requests_go_out_or_the_machine_learns_that_there_is_no_connection(vbucket: FakeVbucket) -> None:
    instruction = ins.RequestStream(VBID, "t", StreamOffset.fresh(), 2**64 - 1, 0)
    vbucket.execute([instruction, ins.GetFailoverLog(VBID, "t")])
    assert vbucket.answers_given == [events.StreamRequested(42)]
    vbucket.connected = False
    vbucket.answers_given.clear()
    vbucket.execute([instruction, ins.GetFailoverLog(VBID, "t")])
    assert [type(event) for event in vbucket.answers_given] == [events.ConnectionLost, events.ConnectionLost]


def test_the_rest_is_handed_on(vbucket: FakeVbucket) -> None:
    vbucket.execute(
        [
            ins.CloseStream(VBID, "t", 5),
            ins.AnswerMarker(VBID, "t", 6),
            ins.RefreshCollections(VBID, "unknown"),
            ins.Reconnect(VBID, "stale"),
            ins.RetryAfter(VBID, "t", ins.RetryReason.SOURCE_BUSY, 3),
        ],
    )
    assert vbucket.done == [
        ("close", 5),
        ("marker", 6),
        "collections",
        ("reconnect", "stale"),
        ("retry", "source-busy", 3),
    ]
