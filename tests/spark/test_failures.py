"""What a user's mistake looks like, and that a programmer's is not hidden."""

from __future__ import annotations

import os

import pytest

from mirror.errors import ConfigError
from mirror.spark.source.failures import (
    MirrorSourceError,
    clear_errors,
    hide_tracebacks,
    show_tracebacks,
    with_clear_errors,
)
from storage.errors import CorruptedError


@pytest.fixture(autouse=True)
def tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset before, and after."""
    monkeypatch.setenv("SPARK_HIDE_TRACEBACK", "")


def test_a_foreseen_error_is_one_line_without_a_traceback() -> None:
    with pytest.raises(MirrorSourceError) as raised, clear_errors():
        raise CorruptedError("a row\nis damaged", path="/data", vbid=3, hint="run check")
    assert str(raised.value) == "/data: vbucket 3: a row is damaged (run check)"
    assert os.environ["SPARK_HIDE_TRACEBACK"] == "1"


def test_a_function_reports_likewise() -> None:
    @with_clear_errors
    def fails(what: str) -> None:
        raise ConfigError(what, hint="fix it")

    with pytest.raises(MirrorSourceError, match=r"^this is wrong \(fix it\)$"):
        fails("this is wrong")


def test_what_nobody_foresaw_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), clear_errors():
        divmod(1, 0)
    assert not os.environ["SPARK_HIDE_TRACEBACK"]


def test_tracebacks_are_hidden_for_as_long_as_an_error_of_pysparks_is_foreseen() -> None:
    hide_tracebacks()
    assert os.environ["SPARK_HIDE_TRACEBACK"] == "1"
    show_tracebacks()
    assert "SPARK_HIDE_TRACEBACK" not in os.environ
