"""The wheel, built from the sdist and installed into an empty environment: what is in it, and that it works there."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mirror
from tests.serve.http_site import made

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("user_program.py")
DOCUMENTS = "dcp_mirror-{version}.data/data/share/doc/dcp-mirror/"
pytestmark = pytest.mark.ci

LEFT_OUT = (".*", "*.egg-info", "__pycache__", "build", "dist")


def run(*command: str | Path, cwd: Path, code: int = 0, **more: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DCP_MIRROR"))}
    done = subprocess.run(command, cwd=cwd, env=environment | more, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, place / "checkout", ignore=shutil.ignore_patterns(*LEFT_OUT))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", place, place / "checkout", cwd=place)
    return place


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and, lent by that of the tests, what it requires without extras."""
    place = tmp_path_factory.mktemp("installed") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", place, cwd=place.parent)
    python = place / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, wheel, cwd=place)
    (packages,) = place.glob("lib/python*/site-packages")
    for distribution in required("dcp-mirror"):
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in LEFT}:
            (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
    return place


LEFT = ("..", "__pycache__")
"""Of a distribution's files: scripts outside, and what Python compiles again."""


def required(name: str) -> list[importlib.metadata.Distribution]:
    """The distributions that one needs without extras, and those that they need."""
    found: dict[str, importlib.metadata.Distribution] = {}

    def add(of: importlib.metadata.Distribution) -> None:
        for line in of.requires or ():
            requirement = Requirement(line)
            key = canonicalize_name(requirement.name)
            if key not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
                found[key] = importlib.metadata.distribution(key)
                add(found[key])

    add(importlib.metadata.distribution(name))
    return list(found.values())


def test_the_wheel_holds_every_file_that_commands_and_documents_need(wheel: Path) -> None:
    documents = DOCUMENTS.format(version=mirror.__version__)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"mirror/py.typed", "storage/py.typed", "cli/py.typed", "storage/FORMAT.md", "cli/JSON.md"} <= names
    for folder in ("mirror/serve/page", "mirror/serve/assets", "mirror/spark"):
        here = [path for path in (ROOT / folder).iterdir() if path.is_file()]
        assert {path.relative_to(ROOT).as_posix() for path in here} <= names
    for folder, pattern in (("docs", "*.md"), ("docs/images", "*"), ("systemd", "*"), (".", "*.md")):
        here = [path for path in (ROOT / folder).glob(pattern) if path.is_file()]
        assert {documents + path.relative_to(ROOT).as_posix() for path in here} <= names
    assert not [name for name in names if name.endswith(".py") and name.startswith(("tests/", "build/"))]


def test_the_installed_documents_lead_to_each_other(installed: Path) -> None:
    documents = installed / "share" / "doc" / "dcp-mirror"
    assert len(list(documents.rglob("*.md"))) > 10
    broken = []
    for path in documents.rglob("*.md"):
        for target in re.findall(r"\]\((?!https?://)([^)\s#]+)", path.read_text()):
            there = (path.parent / target).resolve()
            if not there.exists() and there.suffix != ".py":
                broken.append(f"{path.relative_to(documents)}: {target}")
    assert broken == []


def test_the_sdist_holds_every_file_that_the_wheel_is_built_from(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "mirror/serve/page/index.html", "docs/protocol.md"} <= names
    assert {"storage/FORMAT.md", "systemd/dcp-mirror@.service", "mirror/py.typed", "pyspark_mirror.py"} <= names


def test_the_requirements_of_the_wheel_are_complete(wheel: Path) -> None:
    """Each module of another distribution that is imported anywhere belongs to one that the metadata names."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = Parser().parsestr(archive.read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode())
        trees = [ast.parse(archive.read(name)) for name in names if name.endswith(".py")]
    imported = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported.add(node.module.partition(".")[0])
    others = imported - sys.stdlib_module_names - {"mirror", "storage", "cli", "pyspark_mirror"}
    required = {
        re.split(r"[^\w.-]", line)[0].lower().replace("_", "-")
        for line in metadata.get_all("Requires-Dist") or []
        if not (extra := re.search(r"extra == .(\w+)", line)) or extra[1] in ("spark", "sql")
    }
    distributions = importlib.metadata.packages_distributions()
    missing = {
        name
        for name in others
        if not required & {each.lower().replace("_", "-") for each in distributions.get(name, [name])}
    }
    assert missing == set()


def test_the_program_starts_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    command = installed / "bin" / "dcp-mirror"
    assert run(command, "--version", cwd=tmp_path) == f"dcp-mirror {mirror.__version__}\n"
    assert "run" in run(command, "--help", cwd=tmp_path)
    where = run(
        installed / "bin" / "python", "-c", "import cli, mirror; print(cli.__file__, mirror.__file__)", cwd=tmp_path
    )
    assert all(Path(path).is_relative_to(installed) for path in where.split())


def test_the_demo_ends_well_with_the_wheel(installed: Path, tmp_path: Path) -> None:
    small = ("--seconds", "8", "--documents", "3000", "--rate", "300")
    printed = run(installed / "bin" / "dcp-mirror", "demo", *small, "--data", tmp_path / "data", "--json", cwd=tmp_path)
    summary = json.loads(printed)
    assert summary["ok"] is True
    assert summary["documents"]["source"] == summary["documents"]["mirror"]


def test_the_debian_package_has_the_program_and_its_unit(wheel: Path, installed: Path, tmp_path: Path) -> None:
    """Its dependencies are left out, so that nothing is fetched; the packages of `installed` stand in for them."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("dpkg is not installed")
    build = ("sh", ROOT / "docs" / "debian" / "build.sh", tmp_path, wheel)
    run(*build, cwd=tmp_path, PIP_NO_DEPS="1", PIP_NO_INDEX="1", PYTHON=sys.executable)
    (package,) = tmp_path.glob(f"dcp-mirror_{mirror.__version__}_*.deb")
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert f"python3 (>= {version})" in run("dpkg-deb", "--field", package, "Depends", cwd=tmp_path)
    run("dpkg-deb", "--raw-extract", package, tmp_path / "root", cwd=tmp_path)
    root = tmp_path / "root"
    run("sh", "-n", root / "DEBIAN" / "postinst", cwd=tmp_path)
    for installed_name, name in (
        ("usr/lib/systemd/system/dcp-mirror@.service", "dcp-mirror@.service"),
        ("usr/lib/sysusers.d/dcp-mirror.conf", "dcp-mirror.sysusers.conf"),
        ("usr/lib/tmpfiles.d/dcp-mirror.conf", "dcp-mirror.tmpfiles.conf"),
    ):
        assert (root / installed_name).read_bytes() == (ROOT / "systemd" / name).read_bytes()
    home = root / "opt" / "dcp-mirror"
    assert (root / "usr/bin/dcp-mirror").readlink() == Path("/opt/dcp-mirror/bin/dcp-mirror")
    assert (home / "bin/dcp-mirror").read_text().startswith("#!/opt/dcp-mirror/bin/python")
    (lent,) = installed.glob("lib/python*/site-packages")
    command = ("import sys; sys.path.append(sys.argv.pop()); from cli.main import main; main()", "--version", lent)
    assert mirror.__version__ in run(home / "bin" / "python", "-c", *command, cwd=tmp_path)


def test_the_program_of_a_user_reads_a_mirror_with_the_wheel(installed: Path, tmp_path: Path) -> None:
    with made(tmp_path) as source:
        for key in ("a", "b1", "b2"):
            source.put(key, key.encode())
    printed = run(installed / "bin" / "python", PROGRAM, tmp_path / "data", cwd=tmp_path)
    assert printed.splitlines() == ["b'a' None", "[b'b1', b'b2']", "['a', 'b1', 'b2']", "True"]
    run(installed / "bin" / "python", PROGRAM, tmp_path, cwd=tmp_path, code=1)


def test_the_program_of_a_user_is_type_checked_against_the_wheel(installed: Path, tmp_path: Path) -> None:
    mypy = (
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--python-executable",
        installed / "bin" / "python",
    )
    shutil.copy(PROGRAM, tmp_path / "user_program.py")
    assert "Success" in run(*mypy, "user_program.py", cwd=tmp_path)
    (tmp_path / "wrong.py").write_text('import mirror\nmirror.open_view("x").get(1)\n')
    assert "incompatible type" in run(*mypy, "wrong.py", cwd=tmp_path, code=1)
