"""Errors say where, what and how to fix it, in one line."""

from __future__ import annotations

import pytest

from storage import errors


def test_the_text_is_one_line_with_place_and_remedy() -> None:
    error = errors.Full("no space left", path="/data/group-0000", vbid=5, hint="free some")
    assert str(error) == "/data/group-0000: vbucket 5: no space left (free some)"
    assert str(errors.Closed("closed")) == "closed"


@pytest.mark.parametrize(
    ("kind", "code", "retryable"),
    [
        (errors.CorruptedError, 3, False),
        (errors.WrongBucket, 3, False),
        (errors.FormatTooNew, 3, False),
        (errors.NotAMirror, 2, False),
        (errors.Full, 1, True),
        (errors.Locked, 1, True),
        (errors.ViewInvalidated, 1, True),
    ],
)
def test_kinds_carry_exit_code_and_whether_waiting_helps(
    kind: type[errors.StorageError], code: int, retryable: bool
) -> None:
    assert (kind("x").exit_code, kind("x").retryable) == (code, retryable)
    assert issubclass(kind, errors.StorageError)
