"""Keys come one by one from a terminal, which is then as it was; without one nothing is read."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.keyboard import Keyboard


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """The two ends of a terminal; stdin is the second."""
    ours, theirs = os.openpty()
    with os.fdopen(os.dup(theirs)) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield ours, theirs
    os.close(ours)
    os.close(theirs)


def test_a_key_is_given_without_enter_and_the_terminal_is_as_before(terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    before = termios.tcgetattr(theirs)
    with Keyboard() as keyboard:
        assert keyboard.wait(0) == ""
        os.write(ours, b"q")
        assert keyboard.wait(60) == "q"
    assert termios.tcgetattr(theirs) == before


def test_what_is_no_terminal_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "typed").write_text("qqq")
    with (tmp_path / "typed").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with Keyboard() as keyboard:
            assert keyboard.wait(0) == ""
        assert stdin.read() == "qqq"
