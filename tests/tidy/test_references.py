"""Documents, sections and recordings that code and documents name exist. No path leaves the checkout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import recordings

ROOT = Path(__file__).parents[2]
TEXTS = {".py", ".md", ".toml", ".sh", ".yaml", ".yml", ".service", ".conf", ".html", ".js", ".css", ""}
FOREIGN = re.compile(
    r"(docs/)?(BinaryProtocol|Collections|Document|Duplex|ErrorMap|SubDocument|UnorderedExecution|rbac|protocol-flow)\.md"
    r"|(docs/)?dcp/documentation/.*|(docs/)?range_scans/.*|.*_with_meta\.md"
    r"|(commands/)?(control|prepare|buffer-ack|open-connection|deletion|rollback|name|\{[a-z,]+\})\.md"
)
"""Documents of kv_engine."""


@cache
def sources() -> dict[Path, str]:
    """Every text of the checkout, also where the checkout is an export without a repository."""
    found = {}
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        if any(part.endswith(".egg-info") or part in ("__pycache__", "build", "dist") for part in parts):
            continue
        if parts[0].startswith(".") and parts[0] not in (".ci", ".gitignore", ".pre-commit-config.yaml"):
            continue
        if path.is_file() and path.suffix in TEXTS and path != Path(__file__):
            found[path] = path.read_text()
    return found


def places(pattern: str) -> Iterator[tuple[str, Path, re.Match[str]]]:
    for path, text in sources().items():
        for match in re.finditer(pattern, text):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{path.relative_to(ROOT)}:{line}: {match[0]}", path, match


@cache
def sections() -> frozenset[str]:
    """The numbers of docs/protocol.md: `2`, `2.5` and, where a section is a numbered list, `2.5.1`."""
    found = set()
    section = ""
    for line in (ROOT / "docs" / "protocol.md").read_text().splitlines():
        if heading := re.match(r"#+ (\d+(?:\.\d+)?)\.? ", line):
            section = heading[1]
            found.add(section)
        elif item := re.match(r"(\d+)\. ", line):
            found.add(f"{section}.{item[1]}")
    return frozenset(found)


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def missing_documents() -> Iterator[str]:
    names = {path.name for path in sources()}
    for place, path, match in places(r"(?<![\w:/*])[\w./*{},~-]*\w\.md\b"):
        name = match[0]
        there = any((folder / name).is_file() for folder in (ROOT, path.parent)) or ("/" not in name and name in names)
        if not there and not FOREIGN.fullmatch(name):
            yield place


def missing_sections() -> Iterator[str]:
    numbers = r"docs/protocol\.md[,\s]+(\d+(?:\.\d+)*(?:(?:,| and| to|-)\s*\d+\.\d+)*)"
    for place, _, match in places(numbers):
        for number in re.findall(r"\d+(?:\.\d+)*", match[1]):
            if number not in sections():
                yield f"{place}: no {number}"


def missing_recordings() -> Iterator[str]:
    names = [*recordings.names(), "rollback_answers_605", "rollback_answers_72", "sdk_72"]
    for place, _, match in places(r"(?<![\w.])(?:605|72|sdk_72|rollback_answers)_(?=[a-z\d*])\w*"):
        if not any(name.startswith(match[0]) for name in names):
            yield place


def unnamed_documents() -> Iterator[str]:
    """Citations whose document is unclear."""
    yield from (place for place, _, _ in places(r"(?i)protocol facts|\bcaptures[/,) ]|\bpains? \d|\bdesign \d"))


def broken_links() -> Iterator[str]:
    for place, path, match in places(r"\]\((?!https?://)([^)\s#]*)(?:#([^)\s]*))?\)"):
        if path.suffix != ".md":
            continue
        target = path.parent / match[1] if match[1] else path
        if not target.exists():
            yield place
        elif match[2] and match[2] not in {anchor(line) for line in re.findall(r"(?m)^#+ (.*)$", target.read_text())}:
            yield f"{place}: no such heading"


def ways_out() -> Iterator[str]:
    """Paths that lead out of the checkout: by `..`, by too many parents, by the name of a home directory."""
    for place, path, match in places(r"__file__\)(?:\.resolve\(\))?(?:\.parents\[(\d+)\])?((?:\.parent)*)"):
        up = (int(match[1]) + 1 if match[1] else 0) + match[2].count(".parent")
        if up > len(path.relative_to(ROOT).parts):
            yield place
    for place, path, match in places(r"\]\((\.\.[^)\s#]*)"):
        if not (path.parent / match[1]).resolve().is_relative_to(ROOT.resolve()):
            yield place
    yield from (place for place, _, _ in places(r"""["' /]\.\.["']? */ *["']|(?<![\w.])/(?:home|Users|work)/\w+"""))


@pytest.mark.parametrize(
    "rule", [missing_documents, missing_sections, missing_recordings, unnamed_documents, broken_links, ways_out]
)
def test_every_reference_leads_to_something_that_exists(rule: Callable[[], Iterator[str]]) -> None:
    assert not list(rule())
