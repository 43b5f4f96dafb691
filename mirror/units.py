"""Parses durations, sizes and times as people write them: `1.5h`, `250ms`, `64MiB`, `1g`, `2026-01-31T12:00Z`. Makes
foreign text safe for a terminal. Pure.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
BYTES = {"b": 1, "k": 2**10, "kib": 2**10, "m": 2**20, "mib": 2**20, "g": 2**30, "gib": 2**30, "t": 2**40, "tib": 2**40}


def seconds(text: str) -> float:
    """Parse a duration with a unit to seconds. Raises ValueError."""
    return _parsed(text, SECONDS, "a number with ms, s, m, h or d")


def byte_count(text: str) -> int:
    """Parse a size with a unit to bytes. Raises ValueError."""
    return int(_parsed(text, BYTES, "a number with KiB, MiB, GiB, or k, m, g, which mean the same"))


def moment_ms(text: str, *, needs_zone: bool = False) -> int:
    """Parse a time in ISO 8601 to milliseconds since 1970. A time without a zone is local; with `needs_zone` it is
    refused. Raises ValueError.
    """
    try:
        found = datetime.fromisoformat(text)
        if needs_zone and found.tzinfo is None:
            raise ValueError
        return int(found.astimezone(UTC).timestamp() * 1000)  # the year in UTC must also be 1 to 9999
    except (ValueError, OverflowError, OSError):
        raise ValueError("expected a time such as 2026-01-31T12:00:00+01:00") from None


def printable(text: str) -> str:
    """Replace each character that is neither printable nor a newline or tab by a dot. Terminals obey control
    characters, and some other characters reorder the text around them.
    """
    return "".join(character if character.isprintable() or character in "\n\t" else "." for character in text)


def _parsed(text: str, units: dict[str, float] | dict[str, int], meant: str) -> float:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text, re.ASCII)
    if found is None or found[2].lower() not in units:
        raise ValueError(f"must be {meant}")
    return float(found[1]) * units[found[2].lower()]
