"""`config show`: the settings in force and where each comes from.

Knows how to print them; reading, judging and masking are `mirror.config`'s.
"""

from __future__ import annotations

import typer

from cli import options, output, render

app = typer.Typer(
    help="Settings: flags, then DCP_MIRROR_*, then the file of --config, then defaults.", no_args_is_help=True
)


@app.callback()
def config() -> None:
    """Settings: flags, then DCP_MIRROR_*, then the file of --config, then defaults."""


@app.command()
def show(
    config: options.ConfigOption = None, pairs: options.SetOption = None, as_json: options.JsonOption = False
) -> None:
    """Print the settings in force and where each value comes from; secrets are masked."""
    rows = options.settings_from({}, config=config, pairs=pairs).rows()
    if as_json:
        output.print_json([{"name": name, "value": value, "from": origin} for name, value, origin in rows])
        return
    shown = [[name, render.DASH if value is None else str(value), origin] for name, value, origin in rows]
    render.show(render.plain_table(["setting", "value", "from"], shown))
