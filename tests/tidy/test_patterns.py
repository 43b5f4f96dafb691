"""Regular expressions mean the same in every Python that the project runs on, and files are written in one way."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.tidy.test_names import SOURCES, name_of

WRITERS = {
    "storage/env/directory.py": "`replacing`, the one way outside of the data directory; locks of groups",
    "storage/admin/backup.py": "a restore, in the new data directory",
    "mirror/supervise/leases.py": "in the data directory",
    "mirror/supervise/lock.py": "in the data directory",
    "mirror/supervise/events/log.py": "in the data directory",
    "mirror/spark/places.py": "O_EXCL: no name of a part is used twice",
    "mirror/spark/tables/delta.py": "O_NOFOLLOW: an empty file for a lock",
    "cli/export.py": "a pipe or device",
    "cli/stage.py": "logs of a demonstration, in its own folder",
    "cli/sql.py": "the shell's history, in its user's own folder",
}
"""Modules that open files for writing, and why they may."""

POSSESSIVE_GROUP = re.compile(r"(?<!\\)\)[*+?]\+")
"""`(...)*+` and the like. Python up to 3.11.4 matches such groups wrongly where a group within them goes back
(cpython issue 106052): write `(?>(...)*)`. Characters and classes, as in `[a-z]*+`, are right everywhere.
"""


def test_regular_expressions_have_no_possessive_groups() -> None:
    assert [name_of(path) for path in SOURCES if POSSESSIVE_GROUP.search(path.read_text())] == []


@pytest.mark.parametrize("text", [r"(?:a|b)*+", r"(?:a)++", r"(a)?+"])
def test_the_rule_finds_possessive_groups(text: str) -> None:
    assert POSSESSIVE_GROUP.search(text)


def test_the_rule_allows_possessive_classes_and_atomic_groups() -> None:
    assert not POSSESSIVE_GROUP.search(r"(?>(?:[^a]*+|b++)*)\)++")


def writes(source: str) -> Iterator[str]:
    """Yield the expressions that make or change a file. `tempfile` is safe by itself."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "O_CREAT":
            yield ast.unparse(node)
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = (*node.args, *(each.value for each in node.keywords))
        modes = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        opens = name in ("open", "FileIO", "fdopen") and any(
            re.fullmatch("[rb]*[waxt+][rwaxbt+]*", each) for each in modes
        )
        if opens or name in ("write_text", "write_bytes") or (name == "touch" and not node.args):
            yield ast.unparse(node)


def test_files_are_written_by_one_function_or_for_a_known_reason() -> None:
    found = {name_of(path) for path in SOURCES if any(writes(path.read_text()))}
    assert found == set(WRITERS)


@pytest.mark.parametrize(
    "source",
    [
        "open(path, 'w')",
        "path.open('ab')",
        "os.open(path, flags | os.O_CREAT)",
        "path.write_text('')",
        "open(p, mode='r+')",
    ],
)
def test_the_rule_finds_writes(source: str) -> None:
    assert list(writes(source))
