"""The Containerfile and the compose file: read, and held against what the program has. No container tool is needed."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from mirror.config_reader import ENV_PREFIX, NAMES, NOT_SETTINGS
from tests.cli.conftest import call

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


def test_two_stages_of_one_base_that_can_be_chosen() -> None:
    assert instructions()[0][0] == "ARG"
    base = instructions()[0][1].removeprefix("BASE=")
    assert not base.endswith(":latest")
    assert ":" in base
    assert [stage[0][1].split()[0] for stage in stages()] == ["${BASE}", "${BASE}"]
    assert {name for name, _ in instructions()} <= {
        "ARG", "FROM", "COPY", "RUN", "ENV", "USER", "VOLUME", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD",
    }  # fmt: skip


def test_the_image_runs_without_privileges_as_a_user_that_it_makes() -> None:
    image = stages()[-1]
    (user,) = of("USER", image)
    assert user == "10001:10001"
    assert "groupadd --gid 10001" in of("RUN", image)[0]
    assert "--uid 10001 --gid 10001" in of("RUN", image)[0]
    assert of("VOLUME", image) == ["/data"]
    assert of("STOPSIGNAL", image) == ["SIGTERM"]
    assert [name for name, _ in image].index("USER") > [name for name, _ in image].index("RUN")


def test_what_it_runs_is_a_command_of_the_program_and_its_variables_are_settings() -> None:
    image = stages()[-1]
    assert json.loads(of("ENTRYPOINT", image)[0]) == ["dcp-mirror"]
    (command,) = json.loads(of("CMD", image)[0])
    assert call(command, "--help").code == 0
    compose = (FOLDER / "compose.yaml").read_text()
    named = set(re.findall(rf"{ENV_PREFIX}\w+", "".join(of("ENV", image)) + compose))
    assert len(named) >= 4
    assert {name for name in named if name.removeprefix(ENV_PREFIX).lower() not in NAMES} <= NOT_SETTINGS


def test_the_health_check_asks_whether_the_process_lives() -> None:
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
