from __future__ import annotations

import json

import pytest

from cli import output


def test_one_value_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"text": "two\nlines", "ß": 1})
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"text": "two\nlines", "ß": 1}


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"plain", "plain"),
        ("ü".encode(), "ü"),
        (b"two\nlines\tand\x1b[31m", "two\\nlines\\tand\\e[31m"),
        (b"\xff\x00", "\\xff."),
        (b"x" * 500, "x" * 200 + "..."),
    ],
)
def test_bytes_for_people_never_reach_the_terminal_as_control(data: bytes, shown: str) -> None:
    assert output.for_people(data) == shown
