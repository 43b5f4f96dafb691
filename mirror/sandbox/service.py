"""The embedded source as a program: what `dcp-mirror sandbox` runs.

Knows options, signals and the order of starting; must never know what clients do. Invariants: the first line on
standard output is the connection string, printed when every node listens and the load is in; nothing else goes to
standard output; SIGINT and SIGTERM end it cleanly.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

from mirror.errors import ConfigError
from mirror.feed.connection.connection_string import parse
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.control.server import SandboxControl, default_path
from mirror.sandbox.data.profile import DEFAULT_PROFILE
from mirror.sandbox.data.vbucket import CHECKPOINTS_KEPT
from mirror.sandbox.node.tls import NodeTls
from mirror.sandbox.workload import Workload, WorkloadOptions

USER_VARIABLE = "DCP_MIRROR_USER"
PASSWORD_VARIABLE = "DCP_MIRROR_PASSWORD"

HISTORY_ITEMS = 100_000
CHECKPOINT_ITEMS_MIN = 50
"""The checkpoints of all vbuckets hold so many changes together, but each one this many."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of the command line."""

    nodes: int = 1
    vbuckets: int = 64
    port: int = 0
    bucket: str = "demo"
    load: int = 0
    rate: float = 0.0
    """Operations per second; 0: the source is quiet."""
    keys: int = 100_000
    overwrite_share: float = 0.5
    delete_share: float = 0.05
    value_bytes: int = 300
    replicas: int = 0
    seed: int = 0
    host: str = "127.0.0.1"
    profile: str = DEFAULT_PROFILE
    """Which server's release it is like: a name of `profile.PROFILES`."""
    history: bool = False
    """Every version is kept, for change streams."""
    tls: NodeTls | None = None
    tls_only: bool = False
    tls_port: int = 0
    advertised_host: str | None = None
    external_host: str | None = None
    bucket_uuid: str | None = None
    """None: derived from the port and the bucket's name, so that a restart is the same bucket; random for `port` 0."""
    control: Path | None = None
    """The control socket; by default one named after the port, in the runtime folder."""


def serve(options: ServeOptions) -> None:
    """Run the source until a signal ends it."""
    if not 0 < options.vbuckets <= 1024:
        raise ConfigError(f"{options.vbuckets} vbuckets", hint="take 1 to 1024", setting="vbuckets")
    if not 0 < options.nodes <= 64:
        raise ConfigError(f"{options.nodes} nodes", hint="take 1 to 64", setting="nodes")
    if options.bucket_uuid is not None and not re.fullmatch("[0-9a-f]{32}", options.bucket_uuid):
        raise ConfigError(f"bucket uuid {options.bucket_uuid!r}", hint="32 hexadecimal digits", setting="bucket_uuid")
    try:
        asyncio.run(_serve(options))
    except OSError as error:
        raise ConfigError(f"cannot listen at {options.host}:{options.port}: {error}", hint="take --port 0") from error


async def _serve(options: ServeOptions) -> None:
    cluster = SandboxCluster(
        nodes=options.nodes,
        vbuckets=options.vbuckets,
        bucket=options.bucket,
        user=os.environ.get(USER_VARIABLE, "demo"),
        password=os.environ.get(PASSWORD_VARIABLE) or "demo",
        seed=options.seed,
        host=options.host,
        port=options.port,
        replicas=options.replicas,
        profile=options.profile,
        keeps_history=options.history,
        bounded=True,
        checkpoint_items_max=max(CHECKPOINT_ITEMS_MIN, HISTORY_ITEMS // options.vbuckets // CHECKPOINTS_KEPT),
        tls=options.tls,
        tls_only=options.tls_only,
        tls_port=options.tls_port,
        advertised_host=options.advertised_host,
        external_host=options.external_host,
    )
    place = f"{options.host}:{options.port}/{options.bucket}"
    made = uuid.uuid5(uuid.NAMESPACE_URL, place) if options.port else uuid.uuid4()
    cluster.bucket.map.bucket_uuid = options.bucket_uuid or made.hex
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    workload = Workload(
        cluster.bucket,
        WorkloadOptions(
            seed=options.seed,
            rate=options.rate,
            keys=max(options.keys, options.load),
            overwrite_share=options.overwrite_share,
            delete_share=options.delete_share,
            value_bytes=options.value_bytes,
        ),
    )
    await cluster.start()
    if options.load:
        workload.load(options.load)
    first_port = parse(cluster.connection_string).addresses[0].port
    control = SandboxControl(cluster, workload, options.control or default_path(first_port))
    await control.start()
    writing = asyncio.create_task(workload.run())
    try:
        sys.stdout.write(cluster.connection_string + "\n")
        sys.stdout.flush()
        if sys.stderr.isatty():
            sys.stderr.write(next_steps(cluster.connection_string))
        await ended.wait()
    finally:
        writing.cancel()
        await control.stop()
        await cluster.stop()


def next_steps(connection_string: str) -> str:
    """Return the hints for a person at a terminal."""
    user = os.environ.get(USER_VARIABLE, "demo")
    source = connection_string if "@" in connection_string else connection_string.replace("://", f"://{user}@", 1)
    is_ours = not os.environ.get(PASSWORD_VARIABLE)
    return (
        f"user {user}, password {'demo' if is_ours else f'that of {PASSWORD_VARIABLE}'}; Ctrl-C ends the source\n"
        f"mirror it: {f'{PASSWORD_VARIABLE}=demo ' if is_ours else ''}dcp-mirror run --source {source} "
        "--data /tmp/mirror --http 8080\n"
    )
