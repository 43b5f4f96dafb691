"""`run`: the service in the foreground.

Knows the flags, the screen and the exit code; the work is the supervisor's. Logs and progress go to stderr, and the
addresses that readers can come to are the first lines on stdout. Invariants: nothing is started before every setting
was found good; with --until-caught-up the exit code says whether it was: a signal before that is 130.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from cli import options, output, render
from cli.exits import CommandEnded
from mirror.clock import SystemClock
from mirror.config_reader import LoadedSettings
from mirror.errors import ExitCode
from mirror.feed.connection.connection_string import parse
from mirror.log import get_logger, set_up_logs
from mirror.ownership import refuse_files_of_others
from mirror.supervise.setup import look_up_with, set_aside_another_bucket
from mirror.supervise.supervisor import Supervisor

log = get_logger("run")


def run(
    source: Annotated[
        str | None,
        typer.Option(
            "--source",
            "-s",
            metavar="URL",
            help="couchbase[s]://user@host[:port][,host2]/bucket; one name without a port may be a DNS SRV record.",
            show_default=False,
        ),
    ] = None,
    data: options.DataOption = None,
    workers: Annotated[int | None, typer.Option("--workers", help="Worker processes.", show_default=False)] = None,
    groups: Annotated[
        int | None,
        typer.Option("--groups", help="Groups of vbuckets; fixed once DIR is made.", show_default=False),
    ] = None,
    sync: Annotated[
        str | None,
        typer.Option(
            "--sync",
            metavar="safe|full|unsafe",
            help="What a commit forces to the disk.",
            show_default=False,
            autocompletion=options.one_of("safe", "full", "unsafe"),
        ),
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option(
            "--kv", metavar="ADDR", help="Serve Couchbase SDKs and memcached clients here.", show_default=False
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option("--http", metavar="ADDR", help="Serve HTTP and the status page here.", show_default=False),
    ] = None,
    collection: Annotated[
        list[str] | None,
        typer.Option(
            "--collection",
            "-c",
            metavar="SCOPE.NAME",
            help="Mirror this collection alone; give it again for others. Fixed once DIR is made.",
            show_default=False,
        ),
    ] = None,
    scope: Annotated[
        str | None,
        typer.Option(
            "--scope", metavar="NAME", help="Mirror this scope alone. Fixed once DIR is made.", show_default=False
        ),
    ] = None,
    dcp: Annotated[
        str | None,
        typer.Option(
            "--dcp",
            metavar="ADDR",
            help="Be a DCP source here: for other mirrors, Spark, any DCP client.",
            show_default=False,
        ),
    ] = None,
    tls_ca_file: options.TlsCaOption = None,
    tls_client_cert_file: options.TlsCertOption = None,
    tls_client_key_file: options.TlsKeyOption = None,
    network: options.NetworkOption = None,
    config: options.ConfigOption = None,
    pairs: options.SetOption = None,
    until_caught_up: Annotated[
        bool, typer.Option("--until-caught-up", help="End once everything the source had at start is published.")
    ] = False,
    replace_bucket: Annotated[
        bool,
        typer.Option(
            "--replace-bucket",
            help="Where DIR mirrors another bucket than the source has now (it was recreated): rename it to "
            "DIR.<its bucket's uuid> and start from nothing.",
        ),
    ] = False,
    accept_older_map: Annotated[
        bool,
        typer.Option(
            "--accept-older-map",
            help="Follow the newest cluster map found at start, even if it is older than one followed before: for a "
            "cluster that was restored to an earlier state. Give it for one start only.",
        ),
    ] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Mirror a bucket into DIR until SIGTERM or Ctrl-C. The password comes from DCP_MIRROR_PASSWORD or a file.

    ADDR is PORT, HOST:PORT, [IPV6]:PORT or unix:PATH, with tls:// in front for TLS; separate several with commas.
    """

    def ended_early(*_: object) -> NoReturn:
        raise CommandEnded(ExitCode.INTERRUPTED if until_caught_up else ExitCode.DONE)

    signal.signal(signal.SIGTERM, ended_early)  # until the supervisor takes it
    flags = {
        "source": source, "data": data, "workers": workers, "groups": groups, "sync": sync, "kv": kv, "http": http,
        "collections": ",".join(collection) if collection else None, "scope": scope, "dcp": dcp,
        "tls_ca_file": tls_ca_file, "tls_client_cert_file": tls_client_cert_file,
        "tls_client_key_file": tls_client_key_file, "network": network,
    }  # fmt: skip

    def read() -> LoadedSettings:
        loaded = options.settings_from(flags, config=config, pairs=pairs)
        refuse_files_of_others(loaded.settings, config)
        set_up_logs(loaded.settings.log_level, json=loaded.settings.log_json)
        if loaded.settings.password_file is not None and "DCP_MIRROR_PASSWORD" in os.environ:
            log.warning("password-file-ignored", file=str(loaded.settings.password_file), used="DCP_MIRROR_PASSWORD")
        return loaded

    loaded = read()
    settings = loaded.settings
    if settings.source is not None:
        parse(settings.source)
    if replace_bucket:
        set_aside = asyncio.run(set_aside_another_bucket(settings, look_up_with(SystemClock())))
        if set_aside is not None:
            typer.echo(f"the data of the old bucket is at {set_aside} now", err=True)
    began = time.monotonic()
    last: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        screen = stack.enter_context(render.Screen(to_stderr=True)) if until_caught_up else None

        def progress(document: dict[str, Any]) -> None:
            last.update(document)
            if screen is not None:
                screen.show(render.progress_view(document), render.progress_line(document))

        def announce(line: str) -> None:
            with contextlib.suppress(OSError):  # anyone who read it may be gone
                typer.echo(line, err=as_json)

        service = Supervisor(
            settings,
            look_up_with(SystemClock()),
            clock=SystemClock(),
            required_groups=settings.groups if loaded.provenance["groups"] != "default" else None,
            until_caught_up=until_caught_up,
            reload=lambda: read().settings,
            progress=progress,
            announce=announce,
            accept_older_map=accept_older_map,
        )
        code = asyncio.run(service.run())
    if until_caught_up:
        elapsed_s = round(time.monotonic() - began, 2)
        if as_json:
            output.print_json(caught_up_object(settings.data, last, int(code), elapsed_s))
        elif code == 0:
            typer.echo(f"caught up: {render.progress_line(last)} in {render.duration(elapsed_s)}", err=True)
    if code:
        raise CommandEnded(int(code))


def caught_up_object(data: Path | None, status: dict[str, Any], code: int, elapsed_s: float) -> dict[str, Any]:
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
