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
STACK = ("uvicorn", "httptools", "starlette")


@pytest.mark.ci
def test_the_oldest_allowed_servers_pass_the_tests_of_http(tmp_path: Path) -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest = [re.sub(r"^([\w-]+)>=([\d.]+).*", r"\1==\2", each) for each in dependencies if each.startswith(STACK)]
    assert len(oldest) == len(STACK)
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path / "oldest"), *oldest]
    subprocess.run(install, check=True)
    tests = ("test_http_protocol.py", "test_http_documents.py", "test_http_api.py", "test_http_service.py")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *(f"tests/serve/{each}" for each in tests),
    ]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "oldest")}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-5000:]
    version = subprocess.run(
        [sys.executable, "-c", "import uvicorn; print(f'uvicorn=={uvicorn.__version__}')"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert version.stdout.strip() in {f"{each}.0" if each.count(".") == 1 else each for each in oldest}
