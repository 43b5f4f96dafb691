"""`sandbox`: runs the embedded source; `sandbox fault`: makes it fail on request.

The first line on stdout is the connection string.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from pathlib import Path
from typing import Annotated

import typer

from cli import output
from cli.options import optional
from mirror.errors import ConfigError
from mirror.feed.connection.connection_string import parse
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.control import COMMANDS, SandboxControl, ask, default_path
from mirror.sandbox.data.profile import DEFAULT_PROFILE, PROFILES
from mirror.sandbox.data.sandbox_vbucket import CHECKPOINTS_KEPT
from mirror.sandbox.workload import Workload, WorkloadOptions

USER_VARIABLE = "DCP_MIRROR_USER"
PASSWORD_VARIABLE = "DCP_MIRROR_PASSWORD"
HISTORY_ITEMS = 100_000
CHECKPOINT_ITEMS_MIN = 50

app = typer.Typer(help="The embedded source: a small Couchbase-like cluster in memory, for trying and testing.")

ControlOption = Annotated[
    Path | None, optional("--control", metavar="SOCKET", help="Control socket, instead of one named after the port.")
]


@app.callback(invoke_without_command=True)
def sandbox(
    context: typer.Context,
    nodes: Annotated[int, typer.Option("--nodes", "-n", min=1, max=64, help="Nodes of the cluster.")] = 1,
    vbuckets: Annotated[int, typer.Option("--vbuckets", min=1, max=1024, help="Vbuckets of the bucket.")] = 64,
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="KV port of the first node; 0: a free one.")
    ] = 0,
    bucket: Annotated[str, typer.Option("--bucket", help="The bucket's name.")] = "demo",
    load: Annotated[int, typer.Option("--load", min=0, help="Documents at the start.")] = 0,
    rate: Annotated[float, typer.Option("--rate", min=0, help="Writes per second from then on.")] = 0.0,
    keys: Annotated[int, typer.Option("--keys", min=1, help="Number of keys that the writes use.")] = 100_000,
    value_bytes: Annotated[int, typer.Option("--value-bytes", min=1, help="Mean size of a value.")] = 300,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    profile: Annotated[
        str, typer.Option("--profile", help=f"Server release to imitate: {', '.join(PROFILES)}.")
    ] = DEFAULT_PROFILE,
    control: ControlOption = None,
) -> None:
    """Run the embedded source until Ctrl-C. User and password: DCP_MIRROR_USER, DCP_MIRROR_PASSWORD (demo, demo).

    Couchbase SDKs get, insert, upsert, replace and remove documents; other changes are unknown commands.
    """
    if context.invoked_subcommand is not None:
        return
    cluster = SandboxCluster(
        nodes,
        vbuckets,
        bucket,
        user=os.environ.get(USER_VARIABLE, "demo"),
        password=os.environ.get(PASSWORD_VARIABLE) or "demo",
        host=host,
        port=port,
        profile=profile,
        bounded=True,
        checkpoint_items_max=max(CHECKPOINT_ITEMS_MIN, HISTORY_ITEMS // vbuckets // CHECKPOINTS_KEPT),
    )
    made = uuid.uuid5(uuid.NAMESPACE_URL, f"{host}:{port}/{bucket}") if port else uuid.uuid4()
    cluster.bucket.map.bucket_uuid = made.hex
    written = WorkloadOptions(rate=rate, keys=max(keys, load), value_bytes=value_bytes)
    try:
        asyncio.run(serve(cluster, Workload(cluster.bucket, written), load, control))
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {error}", hint="take --port 0") from error


async def serve(cluster: SandboxCluster, workload: Workload, load: int, control_path: Path | None) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await cluster.start()
    if load:
        workload.load(load)
    first_port = parse(cluster.connection_string).addresses[0].port
    control = SandboxControl(cluster, workload, control_path or default_path(first_port))
    await control.start()
    writing = asyncio.create_task(workload.run())
    try:
        output.echo(cluster.connection_string)
        if sys.stderr.isatty():
            output.echo(next_steps(cluster), err=True)
        await ended.wait()
    finally:
        writing.cancel()
        await control.stop()
        await cluster.stop()


def next_steps(cluster: SandboxCluster) -> str:
    is_ours = not os.environ.get(PASSWORD_VARIABLE)
    password = "demo" if is_ours else f"that of {PASSWORD_VARIABLE}"
    given = f"{PASSWORD_VARIABLE}=demo " if is_ours else ""
    return (
        f"user {cluster.user.name}, password {password}; Ctrl-C ends the source\n"
        f"mirror it: {given}dcp-mirror run --source {cluster.connection_string} --data /tmp/mirror --http 8080"
    )


def socket_of(at: str | None, port: int | None, control: Path | None) -> Path:
    if control is not None:
        return control
    if at is not None:
        return default_path(parse(at).addresses[0].port)
    if port is not None:
        return default_path(port)
    raise ConfigError("no source given", hint="give --port, --source or --control")


def arguments_from(pairs: list[str]) -> dict[str, str]:
    """Parse `node=0 lose=10`. Raises ConfigError."""
    arguments: dict[str, str] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator or not name:
            raise ConfigError(f"{pair!r} is not NAME=VALUE", hint="for instance `node=0 lose=10`")
        arguments[name.replace("-", "_")] = text
    return arguments


def fault_kinds() -> list[str]:
    return sorted(COMMANDS)


FAULT_HELP = """Make a running sandbox fail on purpose. Prints its answer as JSON.

CONNECTIONS of DCP, each with [node=N]
  cut, silence

CLUSTER
  kill-node node=N, restart-node node=N [lose=N]
  failover-node node=N [lose=N], failover vbid=N [lose=N]
  recreate-bucket
  user user=NAME [password=P] [lacks=DcpStream,SystemCollectionLookup]

DATA
  write count=N, rate rate=N: the workload's next operations
  set key=K value=V, delete key=K, each with [collection=S.C] [vbid=N]

COLLECTIONS
  create-scope scope=S, create-collection scope=S collection=C
  flush-collection path=S.C, drop-collection path=S.C

LOOKING
  status, vbucket vbid=N
"""


@app.command(help="\b\n" + FAULT_HELP.replace("\n\n", "\n\n\b\n"))
def fault(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="The fault, from the list above.", autocompletion=fault_kinds)
    ],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Its arguments.")] = None,
    source: Annotated[str | None, optional("--source", "-s", metavar="URL", help="The running source.")] = None,
    port: Annotated[int | None, optional("--port", "-p", help="Or its first port.")] = None,
    control: ControlOption = None,
) -> None:
    """Make a running sandbox fail on purpose. Prints its answer as JSON."""
    given = arguments_from(arguments or [])
    output.print_json(ask(socket_of(source, port, control), kind, **given))
