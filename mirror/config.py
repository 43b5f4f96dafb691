"""Settings: every limit of the program with its reason, frozen after they are read.

Knows names, defaults and bounds; `mirror.config_reader` reads and checks them. Nothing here imports pydantic: a worker
gets settings that were checked, and starts in half the time without it. The password is not a setting: it is read
afresh from its place whenever it is needed (`PasswordSource`), so that it can be changed without a restart, and it is
never printed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from mirror.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import Field

MIB = 1024 * 1024

PASSWORD_BYTES_MAX = 4096

T = TypeVar("T")


class Effect(StrEnum):
    """When a changed setting takes effect."""

    DIRECTORY = "new data directory"
    RESTART = "restart"
    LIVE = "reload"
    WORKERS = "reload, which restarts workers"
    SERVERS = "reload, which restarts servers"
    OWN_SERVERS = "reload, which restarts its servers"
    ALL = "reload, which restarts workers and servers"


def takes(effect: Effect, default: T) -> T:
    """Declare a setting whose change has another effect than to restart the workers."""
    return field(default=default, metadata={"effect": effect})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings in force. `dataclasses.replace` makes a changed copy.

    `config explain` and docs/settings.md print the text below each field. `config_reader.validated` checks the bounds.
    """

    source: str | None = takes(Effect.RESTART, None)
    """Connection string of the bucket: `couchbase://user@host[:port][,host2]/bucket[?network=external]`, or
    `couchbases://` for TLS. It must not contain a password."""
    data: Path | None = takes(Effect.RESTART, None)
    """The data directory. `run` creates it with mode 0700."""
    workers: Annotated[int, Field(ge=1, le=64, json_schema_extra={"default": "number of cores, at most 4"})] = field(
        default_factory=lambda: min(4, os.cpu_count() or 1), metadata={"effect": Effect.LIVE}
    )
    """Worker processes. Each has one Python thread; more workers than cores only adds context switches. The number can
    change at every start."""
    groups: Annotated[int, Field(ge=1, le=256)] = takes(Effect.DIRECTORY, 8)
    """Groups that the vbuckets are divided into when the data directory is created; each is one LMDB environment. Eight
    lets up to eight workers share the work and keeps the group commits large."""
    vbuckets: str | None = takes(Effect.DIRECTORY, None)
    """Hold only these vbuckets (`0-511`), where several mirrors share a bucket. Unset: all of them. `kv_nodes` names
    the mirrors that hold the rest."""
    collections: tuple[str, ...] | None = takes(Effect.DIRECTORY, None)
    """Mirror only these collections (`scope.collection`, separated by commas). A collection that does not exist yet is
    waited for. Unset, and no `scope`: the selection that the directory was created with, else the whole bucket."""
    scope: str | None = takes(Effect.DIRECTORY, None)
    """Mirror only this scope, with all collections that it has and gets."""
    sync: Literal["safe", "full", "unsafe"] = "safe"
    """What each commit forces to disk. `safe`: the data at each commit, the meta page with the next commit or when the
    group was idle for 0.2 s; a power cut may undo a group's last commit, which is then fetched again. `full`: both at
    each commit. `unsafe`: nothing; a power cut can damage the file, so only for data that may be fetched again."""

    commit_interval_ms: Annotated[int, Field(ge=0, le=10_000)] = 25
    """The longest that a complete snapshot waits for others to be committed with it. It is committed at once while
    commits take less than half of the worker's time, averaged over this time, and in larger batches as load rises."""
    batch_bytes_max: Annotated[int, Field(ge=64 * 1024, le=64 * MIB)] = 8 * MIB
    """Received rows that a worker keeps in memory before it writes down its fullest group; bounds the worker's memory
    and the size of an LMDB transaction."""
    map_size_bytes: Annotated[int, Field(ge=16 * MIB)] | None = None
    """Address space reserved for each group at open. Unset: the store's own default. The store grows the map when it is
    full, so this is a lower bound."""

    connection_buffer_size: Annotated[int, Field(ge=4096, le=512 * MIB)] = 20 * MIB
    """DCP flow-control window of each connection to a node. One message of up to 20 MiB may exceed it, so a worker
    holds at most the window and one document for each connection."""
    noop_interval_s: Annotated[float, Field(ge=0.1, le=10_800)] = 20.0
    """How often the source sends a noop on an idle connection. A connection that is silent for twice as long is
    replaced. 20 is the smallest value that the documentation of old servers allows."""
    connect_timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    """Limit for connecting to one node, TLS and login included."""
    request_timeout_s: Annotated[float, Field(gt=0, le=600)] = 30.0
    """Limit for the answer to one request. Opening a stream on a busy node takes seconds."""
    retry_delay_min_ms: Annotated[int, Field(ge=1, le=60_000)] = 100
    """Pause before the first attempt to connect again; doubles with each failure. At most `retry_delay_max_ms`."""
    retry_delay_max_ms: Annotated[int, Field(ge=1, le=600_000)] = 5_000
    """Longest pause between attempts to connect: a node that is back is noticed within it."""
    bootstrap_timeout_s: Annotated[float, Field(ge=0, le=86_400)] = takes(Effect.RESTART, 0.0)
    """Fail when no node of the source can be reached for this long after the start. 0: keep trying (with
    `run --until-caught-up`: 60 s)."""
    map_poll_interval_s: Annotated[float, Field(ge=0.05, le=600)] = 2.5
    """How often every node of the cluster, and every host of the source, is queried for the cluster map, besides what
    nodes announce. A node that was failed over without its knowledge is left within about this time."""
    seqno_poll_interval_s: Annotated[float, Field(ge=0.05, le=600)] = 1.0
    """How often the high seqnos of the source are requested, besides once when a connection is open; the reported lag
    is as fresh as this."""
    stall_timeout_s: Annotated[float, Field(ge=1, le=86_400)] = 120.0
    """A vbucket that is behind the source, or in the middle of a snapshot, and receives nothing for this long is
    reported as `stalled`, and its stream is reopened."""
    storage_retry_interval_s: Annotated[float, Field(ge=0.05, le=600)] = 5.0
    """How often a group whose disk is full checks whether there is space again."""

    change_streams: bool = False
    """Request superseded versions where a bucket keeps them (Magma, 7.2 or newer): `changes` then shows the versions
    between two snapshots, as far as the source's own retention reaches."""
    compression: Literal["as_stored", "forced"] = "as_stored"
    """`forced` makes the source compress every value: less network traffic and disk space here, more CPU time
    there."""

    tls_ca_file: Path | None = None
    """CA certificates (PEM) that sign those of the cluster. Unset: the system's. Only for `couchbases://`. Read again
    at each connection."""
    tls_client_cert_file: Path | None = None
    """Client certificate (PEM) for certificate authentication. Read again at each connection."""
    tls_client_key_file: Path | None = None
    """Private key (PEM) of `tls_client_cert_file`, where it is not in the same file."""
    tls_minimum_version: Literal["1.2", "1.3"] = "1.2"
    """Oldest TLS version to accept. Older ones are not secure; servers before 7.2 speak 1.2."""
    plain_allowed: bool = False
    """Allow SASL PLAIN without TLS where the server offers nothing else: the password is then sent in clear text."""
    network: Literal["auto", "default", "external"] = "auto"
    """Which of the addresses that the cluster advertises to use. `auto`: those that the first host of `source` belongs
    to. `?network=external` in the connection string takes precedence."""
    source_hosts: tuple[str, ...] | None = None
    """Hosts that a cluster map may name, separated by commas: names, `*.example.com`, addresses, networks
    (`10.1.0.0/16`). A map that names another is refused. Unset: any host, and the log names each that is new. The
    sender of a map decides which hosts the user's name and a proof of its password are sent to: with `couchbases://`
    these must have a certificate for the name."""
    dns_server: str | None = None
    """Address (and port) of the name server that resolves DNS SRV records. Unset: the system's. Host names are
    always resolved by the system."""
    password_file: Path | None = None
    """File that contains the password and nothing else. Read again at each login."""
    secrets_dir: Path | None = None
    """Directory with a file `password`. Unset: systemd's `CREDENTIALS_DIRECTORY`, if there is one."""

    kv: str | None = takes(Effect.OWN_SERVERS, None)
    """Addresses of the KV listener: `PORT`, `HOST:PORT`, `[IPV6]:PORT` or `unix:PATH`, with `tls://` in front for TLS;
    several are separated by commas. Unset: no listener."""
    http: str | None = takes(Effect.OWN_SERVERS, None)
    """Addresses of the HTTP listener, written like those of `kv`."""
    dcp: str | None = takes(Effect.OWN_SERVERS, None)
    """Addresses of the DCP listener, written like those of `kv`."""

    kv_processes: Annotated[int, Field(ge=1, le=64)] = takes(Effect.LIVE, 1)
    """Processes that share the KV addresses. One answers some ten thousand requests a second; each uses one core."""
    kv_nodes: str | None = takes(Effect.LIVE, None)
    """All mirrors of this bucket as clients reach them (`host:port,host:port`, the same list on each mirror): SDKs then
    spread their reads over them. `host:port=0-511` where a mirror holds only some `vbuckets`. Connected clients are
    notified of a changed list. A list that contradicts the bucket or this mirror is refused; the state is `degraded`
    while a mirror that it names does not answer for its vbuckets. Unset: this mirror alone."""
    users_file: Path | None = takes(Effect.SERVERS, None)
    """Users that may read: SCRAM verifiers and collections, as `dcp-mirror user` writes them. Read again when it
    changes. Unset: every local client may read everything, and so may the source's user with its password."""
    listen_tls_cert_file: Path | None = takes(Effect.SERVERS, None)
    """Certificate chain (PEM) of the listeners with `tls://`. A file that replaces it, or one of the two below, is used
    for new connections at once; open ones go on."""
    listen_tls_key_file: Path | None = takes(Effect.SERVERS, None)
    """Private key (PEM) of `listen_tls_cert_file`, where it is not in the same file."""
    listen_tls_client_ca_file: Path | None = takes(Effect.SERVERS, None)
    """Authorities (PEM) that sign clients' certificates. A client of a listener with `tls://` that shows one is the
    user of its common name and needs no password; any other logs in. Unset: clients need none."""
    reader_connections_max: Annotated[int, Field(ge=1, le=65_536)] = takes(Effect.SERVERS, 1024)
    """Connections of one listening process; further ones are closed at once. An idle connection costs about 10 KiB."""
    reader_connections_per_peer_max: Annotated[int, Field(ge=1, le=65_536)] = takes(Effect.SERVERS, 256)
    """Connections of another machine (an IPv4 address, an IPv6 network of 64 bits) or of another user of a Unix socket
    to one listening process; further ones are closed at once. All clients on loopback count as one. Raise it where
    clients come through a proxy."""
    reader_login_timeout_s: Annotated[float, Field(ge=0.1, le=600)] = takes(Effect.SERVERS, 10.0)
    """A client that has not logged in after this time, the TLS handshake included, is disconnected; where no login is
    needed, one that has requested nothing. Such clients have a quarter of the connections of a listening process; above
    that the oldest is disconnected for a new one."""
    reader_idle_timeout_s: Annotated[float, Field(ge=1, le=86_400)] = takes(Effect.SERVERS, 600.0)
    """A client that sends nothing for this long is disconnected. SDKs send something every few seconds."""
    reader_send_timeout_s: Annotated[float, Field(ge=0.1, le=3600)] = takes(Effect.SERVERS, 30.0)
    """A client that takes nothing of its answer for this long is disconnected."""
    reader_unsent_bytes_max: Annotated[int, Field(ge=MIB, le=16 * 1024 * MIB)] = takes(Effect.SERVERS, 128 * MIB)
    """Answers that a listening process keeps for clients that have not taken them; above it the client with the most is
    disconnected. The default is six of the largest documents."""
    kv_request_bytes_max: Annotated[int, Field(ge=4096, le=MIB)] = takes(Effect.SERVERS, 64 * 1024)
    """Largest body of a KV request: enough for a key, or sixteen paths of a kilobyte each. Larger ones (writes) are
    refused without being read."""
    kv_pipeline_max: Annotated[int, Field(ge=1, le=65_536)] = takes(Effect.SERVERS, 128)
    """Requests of one connection that are answered before other connections get their turn; the rest stay in the
    socket."""
    http_processes: Annotated[int, Field(ge=1, le=64)] = takes(Effect.LIVE, 1)
    """Processes that share the HTTP addresses."""
    dcp_processes: Annotated[int, Field(ge=1, le=64)] = takes(Effect.LIVE, 1)
    """Processes that share the DCP addresses. One sends some hundred thousand documents a second; a connection stays
    with one process."""
    ready_lag_limit_s: Annotated[float, Field(gt=0, le=86_400)] = takes(Effect.SERVERS, 30.0)
    """A mirror that is further behind its source than this is not ready (`/readyz`), and the status page shows the
    vbucket as lagging."""
    resync_reads: Literal["unavailable", "stale"] = takes(Effect.ALL, "unavailable")
    """What readers get from a vbucket during a resync. `unavailable`: a temporary error until the new copy is complete.
    `stale`: the old copy, which contains writes that the source has lost. In-process readers can request the old copy
    with `stale_reads=True` in either case."""
    verify_reads: bool = takes(Effect.SERVERS, True)
    """Compare each row that is read on the KV, HTTP and DCP addresses with its checksum: a damaged row is an error, and
    without this a wrong document. It costs a point read 5 %, a scan 6 %, a DCP backfill up to 18 %. In-process readers
    choose by `open_view(..., verify_reads=False)`."""

    history_s: Annotated[int, Field(ge=0, le=10 * 366 * 86_400)] = 3600
    """How long superseded versions, tombstones, retracted rows and boundaries are kept. Readers can go back this far; a
    failover that loses more than this costs a resync of the vbucket."""
    history_boundaries: Annotated[int, Field(ge=1)] | None = None
    """Largest number of kept boundaries of a vbucket. Unset: as many as `history_s` keeps."""
    history_bytes: Annotated[int, Field(ge=1)] | None = None
    """Largest size of the rows above the history floor of a vbucket. Unset: as much as `history_s` keeps."""
    lease_max_s: Annotated[float, Field(ge=1, le=86_400)] = takes(Effect.LIVE, 600.0)
    """A reader's lease on history ends after this long unless it is renewed: so long a dead job keeps history."""
    lease_age_max_s: Annotated[float, Field(ge=1, le=366 * 86_400)] = takes(Effect.LIVE, 86_400.0)
    """A lease is not renewed beyond this age, which bounds the history that a running job can keep."""
    readers_group: str | None = None
    """Group of the system whose members may read the data directory in-process. They get no right to write data: the
    directories become 0750, `mirror.json`, `map.json` and `data.mdb` 0640, and only `lock.mdb`, in which LMDB registers
    readers, 0660. The service's user must be a member. Unset: modes are left as they are, by default the service's user
    alone reads."""
    reader_pin_limit_s: Annotated[float, Field(ge=5, le=86_400)] = 60.0
    """A process that reads within one LMDB transaction for longer is named in `warnings` and in the log: the file grows
    meanwhile, since no page that was freed can be used again. Readers of this package hold one for milliseconds; a
    process that was stopped in the middle, or reads the files by itself, can only be ended by its owner."""
    publish: Literal["received", "persisted"] = takes(Effect.ALL, "received")
    """When a complete snapshot becomes visible. `received`: at once. `persisted`: when the source has it on the disk of
    the active node and of every replica, so that no failover takes back what was read. That adds the delay of the
    source's disks, a request for each waiting vbucket and copy every `persistence_poll_interval_ms`, and a connection
    for each node and worker; a node that does not answer delays its vbuckets. Not for ephemeral buckets: they persist
    nothing. A source that is a mirror needs the same setting."""
    persistence_poll_interval_ms: Annotated[int, Field(ge=5, le=60_000)] = 100
    """How often the source is queried for what it has persisted, while snapshots wait for that."""

    worker_heartbeat_timeout_s: Annotated[float, Field(ge=1, le=3600)] = 30.0
    """A worker that sends no heartbeat for this long is killed and replaced."""
    stop_timeout_s: Annotated[float, Field(ge=0.1, le=3600)] = takes(Effect.LIVE, 20.0)
    """How long a process may take to stop cleanly before it is killed."""
    log_level: Literal["debug", "info", "warning", "error"] = takes(Effect.ALL, "info")
    """Lowest level of the messages on stderr."""
    on_event: str | None = takes(Effect.LIVE, None)
    """Command that is run for each event (docs/operations.md, Events), with the event as one line of JSON on its stdin,
    for example to send it to a pager. Words as in a shell, but no shell is run. At most 2 run at once, each for 10 s,
    and 100 events wait; a failure is logged once. It gets no password of the service."""
    log_json: bool = takes(Effect.ALL, False)
    """Write log lines as JSON objects."""


EFFECTS: dict[str, Effect] = {each.name: each.metadata.get("effect", Effect.WORKERS) for each in fields(Settings)}
"""Setting -> when a change takes effect."""
AT_START = (Effect.DIRECTORY, Effect.RESTART)
"""A reload leaves these settings as they were."""


def vbucket_range(text: str, setting: str) -> tuple[int, int]:
    """Parse a range such as `0-511`. Raises ConfigError that names the setting."""
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text, re.ASCII)
    if found is None or int(found[1]) > int(found[2]):
        raise ConfigError(
            f"{setting} {text!r} is no range of vbuckets", hint="FIRST-LAST, such as 0-511", setting=setting
        )
    return int(found[1]), int(found[2])


def from_wire(values: Mapping[str, Any]) -> Settings:
    """Return the settings another process sent as `to_wire(settings)`."""
    kinds = {each.name: str(each.type) for each in fields(Settings)}
    given = dict(values)
    for name, value in given.items():
        if value is not None and "Path" in kinds[name]:
            given[name] = Path(value)
        elif isinstance(value, list):
            given[name] = tuple(value)
    return Settings(**given)


OF_SOURCE = (
    "source",
    "network",
    "source_hosts",
    "dns_server",
    "tls_ca_file",
    "tls_client_cert_file",
    "tls_client_key_file",
    "tls_minimum_version",
    "plain_allowed",
    "password_file",
    "secrets_dir",
)
"""Settings that say how to reach the source: commands take them from a running service. None of them is a secret."""


def to_wire(settings: Settings) -> dict[str, Any]:
    """Return the settings as plain values, for another process."""
    values = {each.name: getattr(settings, each.name) for each in fields(Settings)}
    for name, value in values.items():
        if isinstance(value, Path):
            values[name] = str(value)
        elif isinstance(value, tuple):
            values[name] = list(value)
    return values


@dataclass(frozen=True, slots=True)
class PasswordSource:
    """The place of the password. Each `read()` looks again, so a change needs no restart."""

    file: Path | None
    folder: Path | None

    @staticmethod
    def of(settings: Settings) -> PasswordSource:
        folder = settings.secrets_dir
        if folder is None and os.environ.get("CREDENTIALS_DIRECTORY"):
            folder = Path(os.environ["CREDENTIALS_DIRECTORY"])
        return PasswordSource(settings.password_file, folder)

    def origin(self) -> str | None:
        """Describe the place of the password; None without one."""
        if os.environ.get("DCP_MIRROR_PASSWORD") is not None:
            return "environment"
        if self.file is not None:
            return f"file {self.file}"
        if self.folder is not None and (self.folder / "password").exists():
            return f"file {self.folder / 'password'}"
        return None

    def read(self) -> str | None:
        """Return the current password; None if none is set. Raises ConfigError if a file cannot be read."""
        from_environment = os.environ.get("DCP_MIRROR_PASSWORD")
        if from_environment is not None:
            return from_environment
        if self.file is not None:
            return _read_secret(self.file, "password_file")
        if self.folder is not None and (self.folder / "password").exists():
            return _read_secret(self.folder / "password", "secrets_dir")
        return None


def _read_secret(path: Path, setting: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(PASSWORD_BYTES_MAX + 1)
        if len(data) > PASSWORD_BYTES_MAX:
            raise ConfigError(
                f"the password file {path} is larger than {PASSWORD_BYTES_MAX} bytes",
                hint="it must hold the password and nothing else",
                setting=setting,
            )
        return data.decode().rstrip("\r\n")
    except OSError as error:
        raise ConfigError(
            f"the password file {path} cannot be read: {error.strerror}",
            hint="check that it exists and that this user may read it",
            setting=setting,
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"the password file {path} is not UTF-8", hint="write the password as UTF-8 text", setting=setting
        ) from None
