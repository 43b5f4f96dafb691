"""Refusals: what each says in its answer."""

from __future__ import annotations

from mirror.server.errors import UNKNOWN_COLLECTION_CONTEXT, Refused, rolled_back, unknown_collection
from mirror.wire.constants import Status


def test_a_rollback_is_the_seqno_and_nothing_else() -> None:
    error = rolled_back(0x0102)
    assert (error.status, error.value, error.bare) == (Status.ROLLBACK, b"\0\0\0\0\0\0\1\2", True)


def test_an_unknown_collection_names_the_manifest_that_lacks_it() -> None:
    error = unknown_collection(31, Status.UNKNOWN_SCOPE)
    assert (error.status, error.context, error.manifest_uid) == (Status.UNKNOWN_SCOPE, UNKNOWN_COLLECTION_CONTEXT, 31)
    assert not error.bare
    assert str(Refused(Status.EINVAL, "why")) == "why"
