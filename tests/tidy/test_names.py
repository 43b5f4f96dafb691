"""Packages, files and names: the project's conventions, held by tests instead of by memory."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("names")  # one process parses the sources

ROOT = Path(__file__).parents[2]
PACKAGES = ("mirror", "storage", "cli")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MODULES = [path for path in SOURCES if path.name != "__init__.py"]
INITS = [path for path in SOURCES if path.name == "__init__.py"]

VAGUE_NAMES = {"util", "utils", "helper", "helpers", "misc", "common", "base", "tools", "lib", "stuff", "functions"}

AVOIDED_WORDS = {
    "shard": "vbucket",
    "shards": "vbuckets",
    "lsn": "seqno",
    "lineage": "branch",
    "rewind": "rollback",
    "vbno": "vbid",
}
VAGUE_WORDS = {
    "wanted": "requested, expected, required or selected",
    "asked": "requested, sent or queried",
    "told": "sent, reported or notified",
    "tells": "sends or reports",
    "refill": "resync",
    "refills": "resyncs",
    "refilled": "resynced",
    "refilling": "resyncing",
    "anew": "again",
    "beside": "next to",
    "whoever": "what it is: a client, a reader, a process",
    "nobody": "what it is: no client, no reader, no process",
    "somebody": "what it is: a user, a reader, a process",
    "wish": "request or setting",
    "wishes": "requests or settings",
    "mended": "fixed",
    "deed": "instruction",
    "deeds": "instructions",
    "happenings": "events",
    "surroundings": "what it is",
}
"""Words that say less than those of docs/glossary.md: in no name, also not in the name of a test."""
AVOIDED_NAMES = {
    "committed_seqno": "published_seqno (a DCP Commit is another thing)",
    "last_committed_seqno": "published_seqno",
    "latest_seqno": "high_seqno",
    "max_seqno": "high_seqno",
    "vb_uuid": "vbuuid",
    "vbucket_uuid": "vbuuid",
    "ttl_event": "expiration",
    "failover_table": "failover_log",
}
SHARED_CLASS_NAMES = {"CloseStream", "GetFailoverLog"}
"""Class names that two modules define: an instruction of `ingest` and the DCP message of `wire` that it is sent as."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that this file gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


@cache
def words_of(identifier: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", identifier)]


def test_the_sources_are_found() -> None:
    assert len(MODULES) > 5
    assert len(INITS) >= 3


def test_a_module_has_a_docstring() -> None:
    assert [name_of(path) for path in SOURCES if not ast.get_docstring(tree_of(path))] == []


def test_packages_and_modules_avoid_vague_names() -> None:
    assert [name_of(path) for path in SOURCES if {path.stem, *path.relative_to(ROOT).parent.parts} & VAGUE_NAMES] == []


def test_an_init_module_only_exports() -> None:
    """Imports, `__all__`, `__version__`, and nothing else."""
    wrong = []
    for path in INITS:
        for node in tree_of(path).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                continue
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if {ast.unparse(target) for target in targets} <= {"__all__", "__version__"}:
                    continue
            wrong.append(f"{name_of(path)}, line {node.lineno}: {ast.unparse(node)[:80]}")
    assert wrong == []


def test_each_package_has_its_tests() -> None:
    """The tests of `mirror/serve/kv` are in `tests/serve`, those of `storage/read` in `tests/storage`."""
    packages = {path.relative_to(ROOT).parts[path.relative_to(ROOT).parts[0] == "mirror"] for path in MODULES}
    names = {name for name in packages if not name.endswith(".py")}
    assert {name for name in names if not list((ROOT / "tests" / name).glob("test_*.py"))} == set()


def test_the_words_of_the_protocol_are_used() -> None:
    wrong = []
    for path in SOURCES:
        for line, identifier in identifiers(tree_of(path)):
            avoided = {word: AVOIDED_WORDS[word] for word in words_of(identifier) if word in AVOIDED_WORDS}
            if identifier.lower() in AVOIDED_NAMES:
                avoided[identifier] = AVOIDED_NAMES[identifier.lower()]
            wrong += [f"{name_of(path)}, line {line}: {identifier}, say {word}" for word in avoided.values()]
    assert wrong == []


def test_names_avoid_vague_words() -> None:
    wrong = [
        f"{name_of(path)}, line {line}: {identifier}, say {VAGUE_WORDS[word]}"
        for path in (*SOURCES, *TESTS)
        for text in [path.read_text().lower()]
        if any(word in text for word in VAGUE_WORDS)  # few: to parse all takes 10 s
        for line, identifier in identifiers(tree_of(path))
        for word in words_of(identifier)
        if word in VAGUE_WORDS
    ]
    assert wrong == []


def test_a_class_name_is_defined_once() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name_of(path))
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in SHARED_CLASS_NAMES} == {}
    assert all(len(places[name]) == 2 for name in SHARED_CLASS_NAMES)


def test_private_names_are_not_imported_from_other_modules() -> None:
    wrong = [
        f"{name_of(path)}: {node.module}.{alias.name}"
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert wrong == []


def test_the_rule_on_words_can_fail() -> None:
    tree = ast.parse("def rewind_it(LSN): shardCount = 1")
    found = {word for _, identifier in identifiers(tree) for word in words_of(identifier)}
    assert {"rewind", "lsn", "shard"} <= found


def test_the_top_directory_holds_only_the_agreed_names() -> None:
    allowed = {"pyproject.toml", "mirror", "storage", "cli", "tests", "systemd", "README.md", "LICENSE", "CHANGELOG.md"}
    allowed |= {"docs", "CONTRIBUTING.md"}
    allowed.add("pyspark_mirror.py")  # PySpark finds data sources by the names of top-level modules
    built = {"build", "dist", "__pycache__"}
    there = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert {name for name in there if not name.endswith(".egg-info")} - built <= allowed


def test_a_log_line_is_an_event_with_fields() -> None:
    wrong = [
        f"{name_of(path)}, line {node.lineno}"
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "log"
        and node.func.attr in ("debug", "info", "warning", "error")
        and not (isinstance(node.args[0], ast.Constant) and re.fullmatch(r"[a-z]+(-[a-z]+)*", str(node.args[0].value)))
    ]
    assert wrong == []
