"""The host of a vbucket: what reaches its machine, and how it executes what the machine returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_args

import pytest

from mirror.feed.follow.store_sink import PersistenceGate
from mirror.feed.host import failover_log_event
from mirror.ingest import events
from mirror.ingest import instructions as ins
from mirror.ingest.instructions import Instruction, VbucketStatus
from mirror.ingest.state import Phase
from mirror.wire.codec_dcp import encode_failover_log
from mirror.wire.constants import Opcode, Status
from mirror.wire.frame import request, response
from storage.model import FailoverLog, Seqno
from tests.feed.gated_rig import GatedVbucket

PUBLISH = ins.PublishSnapshot(Seqno(9), Seqno(0))
"""Leaves something in the gate of a vbucket that executes it."""


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[GatedVbucket]:
    made = GatedVbucket(tmp_path)
    yield made
    made.close()


def gate_of(rig: GatedVbucket) -> PersistenceGate:
    assert rig.actor.gate is not None
    return rig.actor.gate


def test_every_instruction_is_part_of_the_checked_union() -> None:
    defined = {kind for kind in vars(ins).values() if is_dataclass(kind) and kind.__module__ == ins.__name__}
    assert set(get_args(Instruction)) == defined


def test_a_list_stops_when_its_machine_is_dropped(rig: GatedVbucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is dropped while its list is executed: a read that is over, for example."""
    monkeypatch.setattr(rig.host, "close_stream", lambda _opaque: rig.host.drop_machine())
    rig.host.execute([ins.CloseStream(5), PUBLISH])
    assert gate_of(rig).waiting == 0


def test_an_answer_is_handled_before_the_next_instruction_of_the_list(
    rig: GatedVbucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    answered, following = (ins.ReportStatus(VbucketStatus.WAITING, text) for text in ("answered", "next"))
    monkeypatch.setattr(rig.host.machine, "handle", lambda _answer: [answered])
    monkeypatch.setattr(rig.actor, "report", lambda _status, text: said.append(text))
    rig.host.execute([ins.AbandonStaged(), following])
    assert said == ["answered", "next"]


def test_a_refusal_by_the_sink_ends_the_list(rig: GatedVbucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.host, "retry_after", lambda *_: None)
    rig.accept((9, 0))
    rig.snapshot(0, 5, {5: (b"a", b"1")})
    rig.host.execute([ins.Advance(Seqno(3), None), PUBLISH])
    assert gate_of(rig).waiting == 0, "the machine had the rest abandoned"
    assert "advance to 3 below 5" in str(rig.actor.progress.last_error)


def test_a_host_without_a_machine_handles_and_sends_nothing(rig: GatedVbucket) -> None:
    sent = len(rig.session.requests)
    rig.host.drop_machine()
    assert (rig.host.machine, rig.host.streaming, rig.host.opaque) == (None, False, None)
    rig.host.handle(events.RetryDue())
    rig.connect()
    assert len(rig.session.requests) == sent
    rig.host.start_machine()
    rig.connect()
    assert len(rig.session.requests) == sent + 1


def test_a_request_that_cannot_be_sent_counts_as_a_lost_connection(rig: GatedVbucket) -> None:
    rig.session.ready = False
    rig.host.start_machine()
    rig.connect()
    assert rig.host.machine is not None
    assert rig.host.machine.phase is Phase.IDLE
    assert "no connection" in rig.actor.progress.text


def test_a_detached_vbucket_is_not_detached_again(rig: GatedVbucket) -> None:
    rig.accept((9, 0))
    rig.actor.detach(events.Stop("moved"))
    assert (rig.host.session, rig.actor.progress.text) == (None, "moved")
    rig.actor.detach(events.ConnectionLost("later"))
    assert rig.actor.progress.text == "moved"
    rig.actor.detach(events.NoActiveNode())
    assert "names no active node" in rig.actor.progress.text


def test_an_answer_with_a_failover_log_is_parsed_or_refused() -> None:
    sent = request(Opcode.DCP_GET_FAILOVER_LOG)
    sound = response(sent, value=encode_failover_log([(7, 3), (5, 0)]))
    assert failover_log_event(sound) == events.FailoverLogReceived(FailoverLog.of([(7, 3), (5, 0)]))
    assert failover_log_event(response(sent, Status.NOT_MY_VBUCKET)) == events.FailoverLogRefused(Status.NOT_MY_VBUCKET)
    assert failover_log_event(response(sent, value=b"broken")) == events.FailoverLogRefused(Status.EINTERNAL)
