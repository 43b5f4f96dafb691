"""Cursor files: a token for each vbucket, one a line, so that one name stands for a position in the whole mirror.

Knows the file and tokens as text; what a token means, the store knows. Invariant: the file is replaced whole, by fsync
and rename, so a reader finds the old positions or the new ones.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from mirror.errors import ConfigError, SupervisionError
from mirror.ownership import private_file
from storage.read.view import Token

FILE_BYTES_MAX = 16 << 20
"""Three times the tokens of 65,536 vbuckets."""
_HEAD = "# dcp-mirror: a token of each vbucket; `changes --since` this file goes on after them\n"


def load(path: Path) -> dict[int, Token]:
    """Return the tokens of a cursor file by vbucket. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            if stat.S_ISREG(found.st_mode) and found.st_size > FILE_BYTES_MAX:
                raise ValueError("too large")
            lines = [line.strip() for line in file.read(FILE_BYTES_MAX).splitlines()]
        tokens = [Token.parse(line) for line in lines if line and not line.startswith("#")]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", hint="give a file that `--cursor` or `export` wrote") from None
    except ValueError as error:
        raise ConfigError(
            f"{path} is no cursor file: {error}", hint="give one that `--cursor` or `export` wrote"
        ) from None
    return {int(token.vbid): token for token in tokens}


def save(path: Path, tokens: Iterable[Token]) -> None:
    """Replace a cursor file and sync it to disk. Raises SupervisionError."""
    text = _HEAD + "".join(f"{token}\n" for token in sorted(tokens, key=lambda token: token.vbid))
    temporary = path.with_name(path.name + ".new")
    try:
        with private_file(temporary, replaces=path) as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        hint = "what was printed since the last time it could be written will be printed again"
        raise SupervisionError(f"the cursor file {path} cannot be written: {error.strerror}", hint=hint) from None
