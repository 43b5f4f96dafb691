"""`user`: edits the file of network readers, with their names, SCRAM verifiers and collections.

A password is typed twice or comes as one line on stdin, never on the command line, and is not stored. A change replaces
the whole file, and running services notice it.
"""

from __future__ import annotations

import getpass
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cli import options, output
from cli.exits import Absent
from mirror.errors import ConfigError
from mirror.serve.access.auth import EVERYTHING, entry_of, new_salt_key, parse_users, read_users
from storage.env.directory import replace_file

app = typer.Typer(
    name="user",
    help="Manage the users that may read over the network.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

FileOption = Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="The users file (setting users_file).")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME")]


@app.command()
def add(
    name: NameArgument,
    file: FileOption,
    read: Annotated[
        list[str] | None,
        typer.Option(
            "--read",
            metavar="PATTERN",
            help="*, scope.* or scope.collection; can be repeated. Default: *; a known user keeps its own.",
        ),
    ] = None,
) -> None:
    """Add a user, or change a password. The password is typed in or read from stdin."""
    document = _load(file)
    document.setdefault("salt_key", new_salt_key())
    users = document.setdefault("users", {})
    users[name] = entry_of(_password(name), read or users.get(name, {}).get("read", EVERYTHING))
    _save(file, document)


@app.command()
def remove(name: NameArgument, file: FileOption) -> None:
    """Remove a user."""
    document = _load(file)
    if document.get("users", {}).pop(name, None) is None:
        raise Absent(f"no user {name!r} in {file}")
    _save(file, document)


@app.command("list")
def list_users(file: FileOption, as_json: options.JsonOption = False) -> None:
    """Print the users and the collections that they may read."""
    users = parse_users(read_users(file), file)
    anonymous = users.anonymous
    rows = {reader.name: sorted(reader.patterns) for reader in users.readers.values()}
    if as_json:
        output.print_json({"users": rows, "anonymous": sorted(anonymous.patterns) if anonymous else None})
        return
    for name, patterns in rows.items():
        output.echo(f"{name}  {' '.join(patterns)}")
    if anonymous is not None:
        output.echo(f"(local clients without a login)  {' '.join(sorted(anonymous.patterns))}")


def _password(name: str) -> str:
    if not sys.stdin.isatty():
        password = sys.stdin.readline().rstrip("\r\n")
    else:
        password = getpass.getpass(f"Password of {name}: ")
        if getpass.getpass("Again: ") != password:
            raise ConfigError("the passwords differ", hint="type it again")
    if not password:
        raise ConfigError("no password was given", hint="type it, or give it as one line on stdin")
    return password


def _load(file: Path) -> dict[str, Any]:
    document = read_users(file) if file.exists() else {"users": {}}
    parse_users(document, file)
    return document


def _save(file: Path, document: dict[str, Any]) -> None:
    parse_users(document, file)
    try:
        replace_file(file, json.dumps(document, indent=1).encode())
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None
