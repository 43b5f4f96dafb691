"""The import direction of the house, by import-linter's contracts in pyproject.toml."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

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


def test_a_wall_that_is_broken_is_noticed(tmp_path: Path) -> None:
    """A small house with the same contracts, in which wire opens a socket."""
    rooms = ("wire", "document", "ingest", "feed", "serve", "server", "sandbox", "supervise")
    for room in ("cli", "mirror", *(f"mirror/{room}" for room in rooms)):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").touch()
    (tmp_path / "storage").mkdir()
    for module in (
        "mirror/client.py",
        "mirror/config.py",
        "mirror/config_reader.py",
        "mirror/clock.py",
        "mirror/errors.py",
        "mirror/health.py",
        "mirror/lease.py",
        "mirror/log.py",
        "storage/__init__.py",
        "storage/model.py",
    ):
        (tmp_path / module).touch()
    (tmp_path / "cli" / "render.py").write_text("import rich\n")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    assert lint_imports(tmp_path).returncode == 0
    (tmp_path / "mirror" / "wire" / "frame.py").write_text("import socket\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1
    assert "mirror.wire.frame -> socket" in result.stdout
