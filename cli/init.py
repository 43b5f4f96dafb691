"""`init`: tries a source and writes a settings file; with `--systemd`, also the files of a systemd unit.

The password goes into a file of its own with mode 0600.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import shlex
import shutil
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from cli import options, output
from cli.doctor import examined
from cli.exits import CommandEnded
from mirror.config import PasswordSource, Settings, Values
from mirror.config_reader import describe, validated
from mirror.errors import ConfigError
from mirror.feed.connection.connection_string import parse
from mirror.inspection.doctor import StepVerdict, examine
from mirror.log import set_up_logs
from storage.env.directory import replace_file

UNIT = "dcp-mirror@.service"
UNIT_PATH = ("/opt/dcp-mirror/bin", "/usr/local/bin", "/usr/bin", "/bin")
"""The PATH in the unit file."""
WIDTH = 100
ATTEMPTS_MAX = 3
"""Limit of attempts with a typed password: sources may lock a user after several failures."""


def init(
    source: options.SourceOption = None,
    data: options.DataOption = None,
    http: options.HttpOption = None,
    kv: options.KvOption = None,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="The settings file.")] = Path("dcp-mirror.toml"),
    tls_ca_file: options.TlsCaOption = None,
    systemd: Annotated[
        str | None,
        options.optional("--systemd", metavar="NAME", help="Also write the files of the unit dcp-mirror@NAME."),
    ] = None,
    root: Annotated[Path, typer.Option("--root", metavar="DIR", help="Root directory for --systemd.")] = Path("/"),
    check: Annotated[bool, typer.Option("--check/--no-check", help="Try the source first.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Try a source, write a commented settings file, and print the next commands. Asks for missing values.

    The password comes from DCP_MIRROR_PASSWORD or a file, or is typed in and kept in its own file.
    """
    source = source or prompt_for("Source (couchbases://user@host/bucket)", "--source", parse)
    bucket = parse(source).bucket
    if systemd is None:
        data = data or Path(prompt_for("Data directory", "--data", check_directory, default=bucket)).absolute()
        to = to.absolute()
    elif "/" in systemd or systemd in ("", ".", ".."):
        raise ConfigError(f"--systemd {systemd!r} cannot be a unit's instance", hint="give a plain name")
    else:
        to, data = root / "etc" / "dcp-mirror" / f"{systemd}.toml", None  # the unit passes --data
    given: Values = {"source": source, "data": data, "http": http, "kv": kv, "tls_ca_file": tls_ca_file}
    given = {name: value for name, value in given.items() if value is not None}
    settings = validated(given)
    password = password_for(settings, bucket)
    if check:
        set_up_logs("error")
        password = try_source(settings, source, password)
    files: dict[Path, tuple[str, int]] = {}
    if systemd is not None:
        files |= unit_files(root)
        if password is not None or PasswordSource.of(settings).origin():
            secret = password if password is not None else PasswordSource.of(settings).read() or ""
            files[to.with_suffix(".password")] = secret, 0o600
    elif password is not None:
        given["password_file"] = to.with_suffix(".password")
        files[to.with_suffix(".password")] = password, 0o600
    files[to] = settings_text(given), 0o644
    write(files, force=force)
    for path in files:
        output.echo(f"written  {path}")
    for command in next_commands(to, systemd):
        output.echo(f"next     {command}")


def prompt_for(question: str, option: str, judge: Callable[[str], object], default: str | None = None) -> str:
    if not sys.stdin.isatty():
        raise ConfigError(f"{option} is not given", hint=f"give {option}, or run the command on a terminal")

    def judged(answer: str) -> str:
        try:
            judge(answer)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from None  # typer asks again
        return answer

    return str(typer.prompt(question, default=default, err=True, value_proc=judged))


def check_directory(text: str) -> None:
    if Path(text).exists() and not Path(text).is_dir():
        raise ConfigError(f"{text} is not a directory", hint="name a new one, or that of a mirror")


def password_for(settings: Settings, bucket: str) -> str | None:
    """Return a typed password; None if a password is configured or stdin is not a terminal."""
    if PasswordSource.of(settings).origin() is not None or not sys.stdin.isatty():
        return None
    return typed_password(f"Password for bucket {bucket} (kept in a file of its own): ")


def typed_password(question: str) -> str:
    """Read a password without echo, and put it into the environment, where `doctor` reads it."""
    try:
        password = getpass.getpass(question)
    except EOFError:  # Ctrl-D
        raise typer.Abort from None
    os.environ["DCP_MIRROR_PASSWORD"] = password
    return password


def try_source(settings: Settings, source: str, password: str | None) -> str | None:
    """Run `doctor` and return the password. If the source refuses a typed password, ask again, up to ATTEMPTS_MAX
    attempts. Raises CommandEnded with the exit code of the first failure.
    """
    for attempts_left in reversed(range(ATTEMPTS_MAX)):
        findings = asyncio.run(examined(examine(settings, source, None)))
        failed = [finding for finding in findings if finding.verdict is StepVerdict.FAIL]
        if not failed:
            return password
        if password is None or failed[0].step != "login" or not attempts_left:
            break
        password = typed_password("Password, again (Ctrl-C ends this): ")
    output.echo("nothing was written: correct the failed step, or give --no-check", err=True)
    raise CommandEnded(int(failed[0].exit_code))


def settings_text(given: Mapping[str, Any]) -> str:
    """Return a settings file with the given values, and every other setting as a comment."""
    lines = ["# Settings of a mirror. `dcp-mirror config explain` says more. No password belongs in here."]
    section = ""
    defaults = Settings()
    for setting in describe():
        if setting.section != section:
            section = setting.section
            lines += ["", f"# -- {section} --"]
        lines += ["", *(f"# {line}" for line in textwrap.wrap(setting.meaning, WIDTH))]
        if setting.name in given:
            lines.append(f"{setting.name} = {toml_value(given[setting.name])}")
        else:
            default = getattr(defaults, setting.name)
            lines.append(f"#{setting.name} = {'' if default is None else toml_value(default)}".rstrip())
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    if isinstance(value, bool | int | float):
        return str(value).lower()
    return json.dumps(list(value) if isinstance(value, tuple) else str(value), ensure_ascii=False)


def unit_files(root: Path) -> dict[Path, tuple[str, int]]:
    """Return path -> (text, mode) of the files for the unit, its user, directories and PATH. Raises ConfigError."""
    places = (Path(__file__).parents[1] / "systemd", Path(sysconfig.get_path("data"), "share/doc/dcp-mirror/systemd"))
    folder = next((place for place in places if (place / UNIT).exists()), None)
    if folder is None:
        raise ConfigError("the unit is not installed with this program", hint="copy systemd/ of the sources by hand")
    etc = root / "etc"
    files = {
        etc / "systemd" / "system" / UNIT: ((folder / UNIT).read_text(), 0o644),
        etc / "sysusers.d" / "dcp-mirror.conf": ((folder / "dcp-mirror.sysusers.conf").read_text(), 0o644),
        etc / "tmpfiles.d" / "dcp-mirror.conf": ((folder / "dcp-mirror.tmpfiles.conf").read_text(), 0o644),
    }
    program = shutil.which(sys.argv[0]) or sys.argv[0]
    here = os.path.dirname(os.path.abspath(program))
    if here not in UNIT_PATH and os.path.basename(program) == "dcp-mirror":
        text = f"[Service]\nEnvironment=PATH={':'.join((here, *UNIT_PATH))}\n"
        files[etc / "systemd" / "system" / f"{UNIT}.d" / "path.conf"] = text, 0o644
    return files


def write(files: Mapping[Path, tuple[str, int]], *, force: bool) -> None:
    try:
        for path, (text, _) in files.items():
            if path.exists() and not path.is_file():
                raise ConfigError(f"{path} is no regular file", hint="give --to a file, or a new name")
            if path.exists() and not force and path.read_text() != text:
                raise ConfigError(f"{path} exists", hint="give --force to overwrite it, or another --to or --root")
        for path, (text, mode) in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, text.encode(), mode=mode)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}", hint="give a place that this user may write") from None


def next_commands(to: Path, systemd: str | None) -> tuple[str, str]:
    if systemd is None:
        return f"dcp-mirror run --config {shlex.quote(str(to))}", f"dcp-mirror status --config {shlex.quote(str(to))}"
    prepare = "systemd-sysusers && systemd-tmpfiles --create && systemctl daemon-reload"
    return prepare, f"systemctl enable --now dcp-mirror@{systemd}"
