"""JSON objects on stdout (shapes: cli/JSON.md), one a line, and bytes made readable."""

from __future__ import annotations

import json
import sys
from typing import Any


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")


def for_people(data: bytes, limit: int = 200) -> str:
    """Return bytes as one readable line: UTF-8 if possible, shortened if long."""
    text = data[: limit * 4].decode(errors="backslashreplace").translate({10: "\\n", 13: "\\r", 9: "\\t", 27: "\\e"})
    text = "".join(character if character.isprintable() else "." for character in text)
    return text if len(text) <= limit and len(data) <= limit * 4 else text[:limit] + "..."
