from __future__ import annotations

import os
import secrets

from hypothesis import settings


def seed_from(variable: str) -> int:
    """Return the number in an environment variable. If it is unset: a random one, in .ci/run always 1."""
    return int(os.environ.get(variable) or (1 if settings().derandomize else secrets.randbelow(2**31)))
