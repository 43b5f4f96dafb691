from __future__ import annotations

import json

import pytest

from cli import output


def test_a_json_value_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_control_bytes_are_escaped_for_people(data: bytes, shown: str) -> None:
    assert output.for_people(data) == shown
