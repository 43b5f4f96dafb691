"""Errors say what, where, and whose fault."""

from __future__ import annotations

import pytest

from mirror.wire.constants import Opcode, Status
from mirror.wire.errors import LocalProtocolError, ProtocolError, RemoteProtocolError


def test_an_error_names_its_opcode_and_vbucket() -> None:
    assert str(RemoteProtocolError("bad", op=Opcode.DCP_MUTATION, vbid=7)) == "DCP_MUTATION vb 7: bad"
    assert str(RemoteProtocolError("bad", op=0x4F)) == "0x4f: bad"
    assert str(RemoteProtocolError("bad", vbid=0)) == "vb 0: bad"
    assert str(LocalProtocolError("bad")) == "bad"


@pytest.mark.parametrize(("kind", "retryable"), [(LocalProtocolError, False), (RemoteProtocolError, True)])
def test_an_error_of_the_peer_is_retryable_and_our_own_is_not(kind: type[ProtocolError], retryable: bool) -> None:
    error = kind("bad", op=1, vbid=2, status=Status.UNKNOWN_COMMAND)
    assert isinstance(error, ProtocolError)
    assert error.retryable is retryable
    assert error.hint
    assert (error.op, error.vbid, error.status) == (1, 2, Status.UNKNOWN_COMMAND)
