"""The host of a vbucket: what reaches its machine, and what is sent over which session."""

from __future__ import annotations

from pathlib import Path

import pytest

from mirror.feed.stream.host import failover_log_event
from mirror.ingest import events
from mirror.ingest.state import Phase
from mirror.wire.codec_dcp import encode_failover_log
from mirror.wire.constants import Opcode, Status
from mirror.wire.frame import request, response
from storage.model import FailoverLog
from tests.feed.gated_rig import GatedVbucket


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
