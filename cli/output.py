"""What goes to stdout: JSON objects in the shapes that `cli/JSON.md` promises, and bytes that people can look at.

Knows stdout and JSON; the shapes are made in `mirror.serve.objects`, for HTTP gives the same. Never rich, a socket or a
file. Invariant: one object is one line.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from mirror.serve.objects import change_object, document_object, key_fields, rollback_object, value_fields

__all__ = [
    "change_object",
    "document_object",
    "for_people",
    "key_fields",
    "print_json",
    "rollback_object",
    "value_fields",
]


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")


def for_people(data: bytes, limit: int = 200) -> str:
    """Return bytes as one readable line: UTF-8 if possible, shortened if long."""
    text = data[: limit * 4].decode(errors="backslashreplace").translate({10: "\\n", 13: "\\r", 9: "\\t", 27: "\\e"})
    text = "".join(character if character.isprintable() else "." for character in text)
    return text if len(text) <= limit and len(data) <= limit * 4 else text[:limit] + "..."
