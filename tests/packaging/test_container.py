"""The Containerfile and the compose file: read, and held against what the program has. No container tool is needed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mirror.config_reader import ENV_PREFIX, NAMES, NOT_SETTINGS
from tests.cli.conftest import call_here
from tests.crash.service import until
from tests.ports import free_port
from tests.processes import ProcessGroup

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "container"


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments), with continued lines joined."""
    text = re.sub(r"^#.*\n", "", (FOLDER / "Containerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for instruction, arguments in instructions():
        if instruction == "FROM":
            found.append([])
        if found:
            found[-1].append((instruction, arguments))
    return found


def of(name: str, stage: list[tuple[str, str]]) -> list[str]:
    return [arguments for instruction, arguments in stage if instruction == name]


def test_the_image_runs_without_privileges_as_its_own_user() -> None:
    image = stages()[-1]
    (user,) = of("USER", image)
    assert user == "10001:10001"
    assert "groupadd --gid 10001" in of("RUN", image)[0]
    assert "--uid 10001 --gid 10001" in of("RUN", image)[0]
    assert of("VOLUME", image) == ["/data"]
    assert of("STOPSIGNAL", image) == ["SIGTERM"]
    assert [name for name, _ in image].index("USER") > [name for name, _ in image].index("RUN")


def test_the_image_runs_a_command_of_the_program_and_its_variables_are_settings() -> None:
    image = stages()[-1]
    assert json.loads(of("ENTRYPOINT", image)[0]) == ["dcp-mirror"]
    (command,) = json.loads(of("CMD", image)[0])
    assert call_here(command, "--help").code == 0
    compose = (FOLDER / "compose.yaml").read_text()
    named = set(re.findall(rf"{ENV_PREFIX}\w+", "".join(of("ENV", image)) + compose))
    assert len(named) >= 4
    assert {name for name in named if name.removeprefix(ENV_PREFIX).lower() not in NAMES} <= NOT_SETTINGS


def test_the_health_check_asks_for_livez() -> None:
    (check,) = of("HEALTHCHECK", stages()[-1])
    program, option, code = json.loads(check[check.index("CMD") + 3 :])
    assert (program, option) == ("python3", "-c")
    compile(code, "health", "exec")
    assert "/livez" in code
    (variables,) = of("ENV", stages()[-1])
    assert f":{re.findall('DCP_MIRROR_HTTP=([0-9]+)', variables)[0]}/livez" in code


def test_the_build_gets_every_file_that_is_installed() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "**"
    kept = tuple(line.removeprefix("!") for line in lines if line.startswith("!"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    installed = [name for names in project["tool"]["setuptools"]["data-files"].values() for name in names]
    assert all(name.startswith(kept) for name in [*installed, "mirror/", "storage/", "cli/", "pyproject.toml"])
    assert all((ROOT / name).exists() for name in kept)


def test_the_mirror_of_the_compose_file_has_no_rights_and_waits_for_its_source() -> None:
    mirror = (FOLDER / "compose.yaml").read_text().split("\n  mirror:\n")[1].split("\n\n")[0]
    for line in ("read_only: true", "cap_drop: [ALL]", "no-new-privileges:true", "condition: service_healthy"):
        assert line in mirror
    assert "image: dcp-mirror" in mirror


def test_the_mirror_of_the_compose_file_reads_no_file_of_the_host() -> None:
    """The password was one, written with umask 077 by another user than the image's, who could not read it."""
    services, _, rest = (FOLDER / "compose.yaml").read_text().partition("\nvolumes:\n")
    assert re.findall(r"^    (?:secrets|configs|env_file):.*", services, re.M) == []
    mounted = [flow(text) for text in re.findall(r"^    volumes: (.+)", services, re.M)]
    assert mounted == [["mirror:/data"]]
    assert rest == "  mirror:\n", "a volume of the engine"


def flow(text: str) -> list[str]:
    """A list as YAML writes it in one line, with plain and quoted words."""
    return [json.loads(word) if word[0] == '"' else word for word in re.findall(r'"(?:[^"\\]|\\.)*"|[^\s,\[\]]+', text)]


@dataclass(frozen=True)
class Containers:
    """The commands of the compose file's two containers, with ports and folders of a test in place of theirs."""

    source: list[str]
    source_check: list[str]
    mirror: list[str]
    mirror_check: list[str]
    variables: dict[str, str]


def containers(replaced: dict[str, str]) -> Containers:
    def here(text: str) -> str:
        for old, new in replaced.items():
            text = text.replace(old, new)
        return text

    image = stages()[-1]
    (check,) = of("HEALTHCHECK", image)
    entry, command = (json.loads(of(name, image)[0]) for name in ("ENTRYPOINT", "CMD"))
    (set_in_image,) = of("ENV", image)
    services = here((FOLDER / "compose.yaml").read_text())
    source, mirror = (re.split(rf"\n  {name}:\n", services)[1].split("\n\n")[0] for name in ("source", "mirror"))
    (source_command,), (tested,) = (
        re.findall(r"\n    command: (.+)", "\n" + source),
        re.findall(r"\n      test: (.+)", source),
    )
    variables = dict(word.split("=", 1) for word in here(set_in_image).split() if not word.startswith("PATH="))
    variables |= dict(re.findall(rf'\n      ({ENV_PREFIX}\w+): "?([^"\n]+)"?', mirror))
    kind, *source_check = flow(tested)
    assert kind == "CMD"
    return Containers(
        [*entry, *flow(source_command)],
        source_check,
        [*entry, *command],
        json.loads(here(check)[check.index("CMD") + 3 :]),
        variables,
    )


def given_to_compose(folder: Path) -> dict[str, str]:
    """The environment that the command of docs/operations.md gives to compose, found by a podman that prints it."""
    text = (ROOT / "docs" / "operations.md").read_text()
    (command,) = re.findall(r"\n(.*podman compose .*)\n", text)
    program = folder / "podman"
    program.write_text("#!/bin/sh\nenv\n")
    program.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    said = subprocess.run(["sh", "-c", command], env={"PATH": path}, cwd=folder, capture_output=True, check=True)
    return dict(line.split("=", 1) for line in said.stdout.decode().splitlines())


def filled_in(text: str, variables: dict[str, str]) -> str:
    """A value of the compose file whose variable must be set: `${NAME:?why}`."""
    found = re.fullmatch(r"\$\{(\w+):\?.+\}", text)
    return variables[found[1]] if found else text


@pytest.mark.ci
def test_the_commands_of_image_and_compose_file_work(tmp_path: Path) -> None:
    """Source, mirror and both health checks run with the variables of image and compose file and no others."""
    http, source_port, kv = (str(free_port()) for _ in range(3))
    given = given_to_compose(tmp_path)
    there = {"8080": http, "11310": source_port, "11410": kv, "/data": f"{tmp_path}/mirror"}
    found = containers(there)
    assert set(re.findall(r"\b\d{4,5}\b", " ".join([*found.source[1:4], *found.mirror_check]))) == {http, source_port}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {name: filled_in(value, given) for name, value in found.variables.items()}
    base = {"PATH": path, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def healthy(check: list[str]) -> bool:
        return subprocess.run(check, env=base, cwd=tmp_path, capture_output=True, timeout=60).returncode == 0

    assert not healthy(found.source_check)
    assert not healthy(found.mirror_check)
    log = (tmp_path / "log").open("w")
    more: Any = {"stdout": log, "stderr": subprocess.STDOUT, "process_group": 0, "cwd": tmp_path}
    with (
        ProcessGroup(found.source, env=base, **more),
        ProcessGroup(found.mirror, env=base | variables, **more) as mirror,
    ):
        until("the source to be healthy", lambda: healthy(found.source_check))
        until("the mirror to be healthy", lambda: healthy(found.mirror_check))
        ready = f"http://127.0.0.1:{http}/readyz"
        until("the mirror to be ready", lambda: answers(ready))
        socket.create_connection(("127.0.0.1", int(kv))).close()
        (stop,) = of("STOPSIGNAL", stages()[-1])
        mirror.send_signal(signal.Signals[stop])
        assert mirror.wait(40) == 0, "within stop_grace_period"
        assert not healthy(found.mirror_check)
        assert healthy(found.source_check)
    log.close()


def answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10):
        return True
    return False
