"""The host of a vbucket: what reaches its machine, and how it executes what the machine returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_args

import pytest

from mirror.feed.stream.host import failover_log_event
from mirror.ingest import events
from mirror.ingest import instructions as ins
from mirror.ingest.instructions import Instruction
from mirror.ingest.offset import StreamOffset
from mirror.ingest.state import Phase
from mirror.wire.codec_dcp import encode_failover_log
from mirror.wire.constants import Opcode, Status
from mirror.wire.frame import request, response
from storage.model import FailoverLog
from tests.feed.executor_rig import FakeVbucket, open_writer, publish, stage
from tests.feed.gated_rig import GatedVbucket


@pytest.fixture
def vbucket(tmp_path: Path) -> Iterator[FakeVbucket]:
    writer = open_writer(tmp_path)
    yield FakeVbucket(writer)
    writer.close()


def test_every_instruction_is_one_that_the_type_checker_has_the_executor_handle() -> None:
    defined = {kind for kind in vars(ins).values() if is_dataclass(kind) and kind.__module__ == ins.__name__}
    assert set(get_args(Instruction)) == defined


def test_without_a_machine_the_rest_of_a_list_is_not_executed(vbucket: FakeVbucket) -> None:
    """The machine is dropped while its list is executed: a read that is over, for example."""
    vbucket.close_stream = lambda opaque: setattr(vbucket, "machine", None)  # type: ignore[method-assign]
    vbucket.execute([stage(vbucket, 1, 2), ins.CloseStream(5), publish(2)])
    vbucket.commit()
    assert vbucket.writer.vbuckets[0].state.published_seqno == 0


def test_answer_of_an_instruction_is_performed_before_the_next_of_the_list(vbucket: FakeVbucket) -> None:
    vbucket.answers[events.Abandoned] = [ins.ReportStatus(ins.VbucketStatus.WAITING, "abandoned")]
    vbucket.execute([ins.AbandonStaged(), ins.RefreshMap(b"config")])
    assert vbucket.done == ["commit", ("report", ins.VbucketStatus.WAITING), ("map", b"config")]


def test_requests_go_out_or_the_machine_learns_that_there_is_no_connection(vbucket: FakeVbucket) -> None:
    instruction = ins.RequestStream(StreamOffset.fresh(), 2**64 - 1)
    vbucket.execute([instruction, ins.GetFailoverLog()])
    assert vbucket.answers_given == [events.StreamRequested(42)]
    vbucket.connected = False
    vbucket.answers_given.clear()
    vbucket.execute([instruction, ins.GetFailoverLog()])
    assert [type(event) for event in vbucket.answers_given] == [events.ConnectionLost, events.ConnectionLost]


@pytest.fixture
def rig(tmp_path: Path) -> GatedVbucket:
    return GatedVbucket(tmp_path)


def test_without_a_machine_nothing_is_handled_or_sent(rig: GatedVbucket) -> None:
    sent = len(rig.session.requests)
    rig.actor.drop_machine()
    assert (rig.actor.machine, rig.actor.streaming, rig.actor.opaque) == (None, False, None)
    rig.actor.handle(events.RetryDue())
    rig.connect()
    assert len(rig.session.requests) == sent
    rig.actor.start_machine()
    rig.connect()
    assert len(rig.session.requests) == sent + 1
    rig.close()


def test_a_request_that_the_session_cannot_carry_is_answered_as_a_lost_connection(rig: GatedVbucket) -> None:
    rig.session.ready = False
    rig.actor.start_machine()
    rig.connect()
    assert rig.actor.machine is not None
    assert rig.actor.machine.phase is Phase.IDLE
    assert "no connection" in rig.actor.text
    rig.close()


def test_what_is_not_attached_is_not_detached_twice(rig: GatedVbucket) -> None:
    rig.accept((9, 0))
    rig.actor.detach(events.Stop("moved"))
    assert (rig.actor.session, rig.actor.text) == (None, "moved")
    rig.actor.detach(events.ConnectionLost("later"))
    assert rig.actor.text == "moved"
    rig.actor.detach(events.NoActiveNode())
    assert "names no active node" in rig.actor.text
    rig.close()


def test_an_answer_with_a_failover_log_is_read_or_refused() -> None:
    sent = request(Opcode.DCP_GET_FAILOVER_LOG)
    sound = response(sent, value=encode_failover_log([(7, 3), (5, 0)]))
    assert failover_log_event(sound) == events.FailoverLogReceived(FailoverLog.of([(7, 3), (5, 0)]))
    assert failover_log_event(response(sent, Status.NOT_MY_VBUCKET)) == events.FailoverLogRefused(Status.NOT_MY_VBUCKET)
    assert failover_log_event(response(sent, value=b"broken")) == events.FailoverLogRefused(Status.EINTERNAL)
