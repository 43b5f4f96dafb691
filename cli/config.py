"""`config show` and `config explain`: the values of the settings, and the meaning of each.

docs/settings.md is the output of `config explain --markdown`.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import asdict
from itertools import groupby
from typing import Annotated

import typer

from cli import options, output, render
from mirror.config import FIXED
from mirror.config_reader import ENV_PREFIX, NAMES, Description, describe, nearest
from mirror.errors import ConfigError

HELP = "Settings: flags, then DCP_MIRROR_*, then the file of --config, then defaults."

INTRODUCTION = f"""\
<!-- Generated: `dcp-mirror config explain --markdown > docs/settings.md`. Edit mirror/config.py instead. -->

# Settings

For operators: each setting with its default, and its bounds in brackets.

A setting comes from a flag (`--set NAME=VALUE` works for all), else from the environment variable `{ENV_PREFIX}NAME`,
the TOML file of `--config`, its default. Values take units (`1h`, `64MiB`); a plain number has the unit in the
setting's name. The password is no setting: it comes from `{ENV_PREFIX}PASSWORD`, or `password_file`.

A change takes effect at the next start of the service. `config show --config FILE` checks a file before. **New data
directory**: the start refuses another value.
"""

LINE_LENGTH = 120
BOOLEAN, PLAIN = "`true` or `false`", ("text", "path")
"""Descriptions of values that docs/settings.md leaves out."""

app = typer.Typer(help=HELP, no_args_is_help=True)


@app.callback(help=HELP)
def config() -> None:
    pass


@app.command()
def show(
    config: options.ConfigOption = None, pairs: options.SetOption = None, as_json: options.JsonOption = False
) -> None:
    """Print the settings in force and the origin of each value. Secrets are masked."""
    rows = options.settings_from({}, config=config, pairs=pairs).rows()
    if as_json:
        output.print_json([{"name": name, "value": value, "from": origin} for name, value, origin in rows])
        return
    shown = [[name, output.DASH if value is None else str(value), origin] for name, value, origin in rows]
    render.show(render.plain_table(["setting", "value", "from"], shown))


@app.command()
def explain(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Only these settings.", autocompletion=options.one_of(*NAMES)),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/settings.md.")] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Explain each setting: values, unit, bounds and default."""
    known = {each.name: each for each in describe()}
    for name in names or ():
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}", hint=nearest(name))
    chosen = [known[name] for name in names] if names else list(known.values())
    if markdown:
        typer.echo(markdown_page(chosen), nl=False)
    elif as_json:
        output.print_json([asdict(each) for each in chosen])
    else:
        render.show(render.settings_view([(each, facts(each)) for each in chosen]))


def facts(setting: Description) -> dict[str, str]:
    found = {"values": setting.values, "default": setting.default or "not set"}
    return found | ({"change": "only in a new data directory"} if setting.name in FIXED else {})


def markdown_page(settings: list[Description]) -> str:
    parts = [INTRODUCTION]
    for section, members in groupby(settings, key=lambda each: each.section):
        parts.append(f"\n## {section}\n")
        for each in members:
            values = re.sub(r"^(integer|number), ([a-z]+, )?(?=\S+ )", "", each.values)  # the name has the unit
            if each.default is not None:
                default = each.default if " " in each.default else f"`{each.default}`"
                values = default if each.values == BOOLEAN else f"{default} ({values})"
            shown = ["" if values in PLAIN else values, "new data directory" if each.name in FIXED else ""]
            line = "; ".join(filter(None, shown))
            parts.append(f"\n### {each.name}\n\n{_wrapped(each.meaning)}\n" + (line and f"\n{_wrapped(line)}.\n"))
    return "".join(parts)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, LINE_LENGTH, break_long_words=False, break_on_hyphens=False)
