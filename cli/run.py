"""`run`: the service in the foreground.

Logs and progress go to stderr. The listeners' addresses are the first lines of stdout; with --json, stderr has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from cli import options, output, render
from cli.exits import CommandEnded
from mirror.clock import SystemClock
from mirror.config import Settings, Values
from mirror.config_reader import LoadedSettings
from mirror.errors import ExitCode
from mirror.feed.connection.connection_string import parse
from mirror.log import get_logger, set_up_logs
from mirror.messages import Status
from mirror.ownership import refuse_files_of_others
from mirror.supervise.setup import look_up_with
from mirror.supervise.supervisor import RunOptions, Supervisor

log = get_logger("run")


def run(
    source: options.SourceOption = None,
    data: options.DataOption = None,
    workers: Annotated[int | None, options.optional("--workers", help="Worker processes.")] = None,
    groups: Annotated[
        int | None, options.optional("--groups", help="Groups of vbuckets. Fixed once DIR exists.")
    ] = None,
    kv: options.KvOption = None,
    http: options.HttpOption = None,
    collection: Annotated[
        list[str] | None,
        options.optional(
            "--collection",
            "-c",
            metavar="SCOPE.NAME",
            help="Mirror only this collection; repeat the option for more. Fixed once DIR exists.",
        ),
    ] = None,
    scope: Annotated[
        str | None, options.optional("--scope", metavar="NAME", help="Mirror only this scope. Fixed once DIR exists.")
    ] = None,
    dcp: Annotated[
        str | None,
        options.optional("--dcp", metavar="ADDR", help="Serve DCP here, for other mirrors, Spark and any DCP client."),
    ] = None,
    tls_ca_file: options.TlsCaOption = None,
    config: options.ConfigOption = None,
    pairs: options.SetOption = None,
    until_caught_up: Annotated[
        bool, typer.Option("--until-caught-up", help="End once everything the source had at the start is published.")
    ] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Mirror a bucket into DIR until SIGTERM or Ctrl-C. The password comes from DCP_MIRROR_PASSWORD or a file.

    ADDR is PORT, HOST:PORT, [IPV6]:PORT or unix:PATH, with tls:// in front for TLS; separate several with commas.
    """
    flags = {
        "source": source, "data": data, "workers": workers, "groups": groups, "kv": kv, "http": http, "dcp": dcp,
        "collections": ",".join(collection) if collection else None, "scope": scope, "tls_ca_file": tls_ca_file,
    }  # fmt: skip
    end_with(ExitCode.INTERRUPTED if until_caught_up else ExitCode.DONE)
    loaded = settings_in_force(flags, config, pairs)
    if loaded.settings.source is not None:
        parse(loaded.settings.source)
    required_groups = loaded.settings.groups if loaded.provenance["groups"] != "default" else None
    code = serve(loaded.settings, RunOptions(until_caught_up, required_groups), as_json=as_json)
    if code:
        raise CommandEnded(int(code))


def serve(settings: Settings, chosen: RunOptions, *, as_json: bool) -> ExitCode:
    """Run the service to its end, and report the progress if it ends by itself (`until_caught_up`)."""
    began_s = time.monotonic()
    last: Status = {}
    with render.ProgressLine() if chosen.until_caught_up else contextlib.nullcontext() as screen:

        def progress(document: Status) -> None:
            last.update(document)
            if screen is not None:
                screen.show(render.progress_line(document))

        def announce(line: str) -> None:
            with contextlib.suppress(OSError):  # the reader of stdout may be gone
                output.echo(line, err=as_json)

        clock = SystemClock()
        service = Supervisor(
            settings,
            look_up_with(clock),
            clock=clock,
            options=chosen,
            progress=progress,
            announce=announce,
        )
        code = asyncio.run(service.run())
    if chosen.until_caught_up:
        elapsed_s = round(time.monotonic() - began_s, 2)
        if as_json:
            output.print_json(caught_up_object(settings.data, last, int(code), elapsed_s))
        elif code == 0:
            output.echo(f"caught up: {render.progress_line(last)} in {output.duration(elapsed_s)}", err=True)
    return code


def end_with(code: ExitCode) -> None:
    """End with `code` on SIGTERM, until the supervisor handles the signal."""

    def end(*_: object) -> NoReturn:
        raise CommandEnded(code)

    signal.signal(signal.SIGTERM, end)


def settings_in_force(flags: Values, config: Path | None, pairs: list[str] | None) -> LoadedSettings:
    loaded = options.settings_from(flags, config=config, pairs=pairs)
    settings = loaded.settings
    refuse_files_of_others(settings, config)
    set_up_logs(settings.log_level, json=settings.log_json)
    if settings.password_file is not None and "DCP_MIRROR_PASSWORD" in os.environ:
        log.warning("password-file-ignored", file=str(settings.password_file), used="DCP_MIRROR_PASSWORD")
    return loaded


def caught_up_object(data: Path | None, status: Status, code: int, elapsed_s: float) -> dict[str, object]:
    totals = status.get("totals") or {}
    return {
        "caught_up": code == 0,
        "data": str(data),
        "bucket": status.get("bucket"),
        "elapsed_s": elapsed_s,
        "published_seqnos": totals.get("published_seqnos"),
        "rollback_count": totals.get("rollback_count"),
        "vbuckets": (status.get("catch_up") or {}).get("vbuckets"),
        "vbuckets_done": (status.get("catch_up") or {}).get("vbuckets_done"),
    }
