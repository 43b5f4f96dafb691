"""The tests of HTTP, with the oldest releases of the server that pyproject.toml allows. All others have the newest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STACK = ("uvicorn", "h11", "starlette")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["protocol"], marks=pytest.mark.ci),
        pytest.param(["documents", "api", "service"], marks=pytest.mark.long),
    ],
)
def test_the_oldest_allowed_servers_pass_the_tests_of_http(names: list[str], tmp_path: Path) -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest = [re.sub(r"^([\w-]+)>=([\d.]+).*", r"\1==\2", each) for each in dependencies if each.startswith(STACK)]
    assert len(oldest) == len(STACK)
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path / "oldest"), *oldest]
    subprocess.run(install, check=True)
    tests = [f"tests/serve/test_http_{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "oldest")}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-5000:]
    version = subprocess.run(
        [sys.executable, "-c", "import uvicorn; print(f'uvicorn=={uvicorn.__version__}')"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert version.stdout.strip() in {f"{each}.0" if each.count(".") == 1 else each for each in oldest}
