"""Every block of the documents is run against the embedded source, or says why it is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import NOT_RUN, PAGES, ROOT, RUN_LANGUAGES, SERVICE, SPARK_PAGE, Block, Site, blocks_of, site

pytestmark = pytest.mark.xdist_group("documents")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def quick_start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The README's own blocks, run; its source and mirror go on."""
    with site(tmp_path_factory.mktemp("documents"), all_blocks=True) as found:
        yield found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_run_or_gives_a_reason(page: Path) -> None:
    found = blocks_of(page)
    assert len(found) * 2 == sum(line.startswith("```") for line in page.read_text().splitlines())
    for block in found:
        assert block.language, f"{block}: name the language"
        if block.mark:
            assert block.mark == SERVICE or block.mark.removeprefix(NOT_RUN).strip(), f"{block}: {block.mark}"
            assert block.mark.startswith((SERVICE, NOT_RUN)), f"{block}: {block.mark}"
        if block.language in ("bash", "shell", "console", "py"):
            pytest.fail(f"{block}: write one of {', '.join(RUN_LANGUAGES)}")


@pytest.mark.ci
@pytest.mark.parametrize("page", [page for page in PAGES if page not in (SPARK_PAGE, ROOT / "README.md")], ids=name_of)
def test_the_blocks_of_a_page_run_without_error(page: Path, quick_start: Site) -> None:
    names: dict[str, Any] = {}
    for block in blocks_of(page):
        if block.is_run:
            quick_start.run(block, names)


def test_the_blocks_of_the_readme_run_without_error(quick_start: Site) -> None:
    ran = [block for block in blocks_of(ROOT / "README.md") if block.is_run]
    assert {block.language for block in ran} == {"sh", "python"}
    said = quick_start.shell.run(quick_start.placed("dcp-mirror status --data /tmp/orders"))
    assert "(64 vbuckets)" in said


def test_a_block_that_fails_is_noticed(tmp_path: Path) -> None:
    own = Site(tmp_path)
    try:
        with pytest.raises(AssertionError, match="nowhere"):
            own.run(Block(ROOT / "README.md", 1, "sh", "ls /nowhere\necho on\n", ""), {})
    finally:
        own.shell.end()
