"""Which package imports which, by import-linter's contracts in pyproject.toml."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def lint_imports(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", *arguments]
    return subprocess.run(
        command, cwd=folder, env=os.environ | {"NO_COLOR": "1"}, capture_output=True, text=True, check=False
    )


def test_every_contract_is_kept() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert f"{len(contracts)} kept, 0 broken" in result.stdout


def test_the_drawing_of_the_packages_agrees_with_the_contracts() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    outer, inner, *_ = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert outer == ["cli", "mirror", "storage"]
    text = (ROOT / "docs" / "design.md").read_text()
    drawing = ["cli", *text.partition("```text\ncli\nsupervise\n")[2].partition("```")[0].splitlines()]
    drawing.insert(1, "supervise")
    layers = [sorted(re.findall(r"\w+", layer)) for layer in inner]
    assert [sorted(re.findall(r"\w+", line)) for line in drawing] == [["cli"], *layers, ["storage"]]
    assert [line for line in drawing if "|" in line] == [
        line.replace("(", "").replace(")", "") for line in inner if "|" in line
    ]


@pytest.mark.parametrize(
    ("importer", "imported"), [("wire.frame", "socket"), ("serve.dcp.dcp_stream", "mirror.serve.kv.scans")]
)
def test_an_import_against_the_contracts_is_noticed(tmp_path: Path, importer: str, imported: str) -> None:
    """The same packages with empty modules, but for the imports that contracts name, and the one against them."""
    for root in ("cli", "mirror", "storage"):
        for module in (ROOT / root).rglob("*.py"):
            copy = tmp_path / module.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.touch()
    (tmp_path / "cli" / "render.py").write_text("import rich\n")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / "mirror" / f"{importer.replace('.', '/')}.py").write_text(f"import {imported}\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1
    assert "1 broken" in result.stdout
    assert f"mirror.{importer} -> {imported}" in result.stdout
