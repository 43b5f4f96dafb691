"""`replay`: a recording served as a source.

Knows signals and who may log in; what is answered is `mirror.sandbox.replay`'s. Invariants: the first line on stdout is
the connection string; it listens on loopback alone; SIGINT and SIGTERM end it cleanly.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from cli import options, output
from mirror.errors import ConfigError
from mirror.inspection.recording import Recording
from mirror.sandbox.replay import ReplayedSource, Script, read_script

USER_VARIABLE, PASSWORD_VARIABLE = "DCP_MIRROR_USER", "DCP_MIRROR_PASSWORD"


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A recording that `record` made.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="Port to listen at; 0: any.")] = 0,
    as_json: options.JsonOption = False,
) -> None:
    """Serve a recording as a source, on loopback, until interrupted; the first line is its connection string.

    Any DCP client that asks the recorded questions gets the recorded answers. User and password are those of
    DCP_MIRROR_USER and DCP_MIRROR_PASSWORD, or demo and demo.
    """
    script = read_script(Recording(file))
    if not script.exchanges:
        raise ConfigError(f"{file} holds no DCP stream", hint="record with a user that may stream")
    try:
        asyncio.run(serve(script, port, as_json=as_json))
    except OSError as error:
        raise ConfigError(f"cannot listen at port {port}: {error.strerror or error}", hint="take --port 0") from None


async def serve(script: Script, port: int, *, as_json: bool) -> None:
    """Listen until a signal."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    user, password = os.environ.get(USER_VARIABLE, "demo"), os.environ.get(PASSWORD_VARIABLE, "demo")
    async with ReplayedSource(script, user=user, password=password, port=port, whole=True) as source:
        facts: dict[str, Any] = {
            "connection_string": source.connection_string,
            "vbuckets": len(script.exchanges),
            "high_seqnos": sum(script.high_seqnos.values()),
        }
        if as_json:
            output.print_json(facts)
        else:
            typer.echo(source.connection_string)
            typer.echo(f"{facts['vbuckets']} vbuckets up to seqno {facts['high_seqnos']:,} in sum", err=True)
        typer.get_text_stream("stdout").flush()
        await stop.wait()
