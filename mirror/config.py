"""The settings, each with its bounds and meaning. A `Settings` object is frozen.

`mirror.config_reader` reads and checks settings. This module does not import pydantic: workers get checked settings,
and start in half the time without pydantic. The password is no setting: `PasswordSource` reads it at each use. The
password is never printed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mirror.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import Field

MIB = 1024 * 1024

PASSWORD_BYTES_MAX = 4096

Values = dict[str, Any]
"""Setting -> value, or the value as text."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings in force. `dataclasses.replace` makes a changed copy.

    `config explain` and docs/settings.md print the text below each field. `config_reader.validated` checks the bounds.
    """

    source: str | None = None
    """Connection string, without a password: `couchbase://user@host[:port][,host2]/bucket[?network=external]`, or
    `couchbases://` for TLS."""
    data: Path | None = None
    """The data directory; `run` creates it with mode 0700."""
    workers: Annotated[int, Field(ge=1, le=64, json_schema_extra={"default": "number of cores, at most 4"})] = field(
        default_factory=lambda: min(4, os.cpu_count() or 1)
    )
    """Worker processes. More workers than cores are no faster."""
    groups: Annotated[int, Field(ge=1, le=256)] = 8
    """LMDB environments that share the vbuckets; each worker needs at least one. Fewer groups make larger commits."""
    vbuckets: str | None = None
    """Hold only these vbuckets (`0-511`) if several mirrors share a bucket. Unset: all."""
    collections: tuple[str, ...] | None = None
    """Mirror only these collections (`scope.collection`, separated by commas), and wait for missing ones. If this and
    `scope` are unset: what the data directory mirrors already; in a new one, the whole bucket."""
    scope: str | None = None
    """Mirror only this scope."""
    sync: Literal["safe", "full", "unsafe"] = "safe"
    """With `safe` a commit syncs its data before it returns. LMDB's meta page, which makes the data valid, follows
    within 0.2 s: a power cut may undo a group's last commit, and the mirror fetches it again. `full` syncs both.
    `unsafe` syncs nothing; a power cut can damage the file."""

    batch_bytes_max: Annotated[int, Field(ge=64 * 1024, le=64 * MIB)] = 8 * MIB
    """Most bytes of received rows in a worker's memory, and in an LMDB transaction."""

    connection_buffer_size: Annotated[int, Field(ge=4096, le=512 * MIB)] = 20 * MIB
    """DCP flow-control window of a connection. One message of up to 20 MiB may exceed it."""
    noop_interval_s: Annotated[float, Field(ge=0.1, le=10_800)] = 20.0
    """Interval of the source's noops. After twice this time in silence the mirror reconnects. Old servers allow no less
    than 20."""
    request_timeout_s: Annotated[float, Field(gt=0, le=600)] = 30.0
    """Time for an answer of the source. A busy node takes seconds to open a stream."""
    retry_delay_max_ms: Annotated[int, Field(ge=1, le=600_000)] = 5_000
    """Longest pause between attempts to connect. The first pause takes 0.1 s, each further one twice as long."""
    bootstrap_timeout_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    """Fail if no node answers for this long after the start. 0: never (`run --until-caught-up`: 60 s)."""
    map_poll_interval_s: Annotated[float, Field(ge=0.05, le=600)] = 2.5
    """Interval at which the mirror requests the cluster map from every node. If a node was failed over and does not
    know it, the mirror changes to the new node after about this time."""
    stall_timeout_s: Annotated[float, Field(ge=1, le=86_400)] = 120.0
    """If a vbucket behind the source, or inside a snapshot, gets no data for this long, it is `stalled`, and the mirror
    opens its stream again."""

    change_streams: bool = False
    """Request superseded versions from buckets that keep them (Magma, 7.2 or newer), for `changes`."""
    compression: Literal["as_stored", "forced"] = "as_stored"
    """`forced`: the source compresses every value, for less traffic and disk space and more processor time."""

    tls_ca_file: Path | None = None
    """CA certificates (PEM) for `couchbases://`, read at each connection. Unset: the system's."""
    tls_client_cert_file: Path | None = None
    """Client certificate (PEM) that logs in, read at each connection."""
    tls_client_key_file: Path | None = None
    """Private key (PEM), if not in `tls_client_cert_file`."""
    tls_minimum_version: Literal["1.2", "1.3"] = "1.2"
    """Oldest TLS version to accept. Servers before 7.2 speak 1.2."""
    plain_allowed: bool = False
    """Allow SASL PLAIN without TLS (the password in clear text) if the server offers nothing else."""
    network: Literal["auto", "default", "external"] = "auto"
    """Advertised addresses to use. `auto`: those that include the host that answered. `?network=external` in
    `source` overrides this setting."""
    source_hosts: tuple[str, ...] | None = None
    """Hosts that a cluster map may name, separated by commas: names, `*.example.com`, addresses, networks
    (`10.1.0.0/16`). The mirror logs in to them, so they get the user's name and a proof of its password. Unset: any;
    new ones are logged."""
    password_file: Path | None = None
    """File with the password and nothing else, read at each login. Unset: `password` in systemd's
    `CREDENTIALS_DIRECTORY`, if it exists."""

    kv: str | None = None
    """KV addresses, separated by commas: `PORT`, `HOST:PORT`, `[IPV6]:PORT` or `unix:PATH`, with `tls://` in front for
    TLS. Unset: no listener."""
    http: str | None = None
    """HTTP addresses, written like `kv`."""
    dcp: str | None = None
    """DCP addresses, written like `kv`."""

    kv_processes: Annotated[int, Field(ge=1, le=64)] = 1
    """KV processes, a core each. One answers some ten thousand requests a second."""
    kv_nodes: str | None = None
    """All mirrors of this bucket as clients reach them (`host:port,host:port`, the same on each mirror), with
    `host:port=0-511` if a mirror holds only some `vbuckets`. Unset: this mirror."""
    users_file: Path | None = None
    """Users that may read, written by `dcp-mirror user`. Unset: local clients and the source's user read everything."""
    listen_tls_cert_file: Path | None = None
    """Certificate chain (PEM) of `tls://` listeners. New connections use a replaced file at once."""
    listen_tls_key_file: Path | None = None
    """Private key (PEM), if not in `listen_tls_cert_file`."""
    listen_tls_client_ca_file: Path | None = None
    """Authorities (PEM) of client certificates, whose common name is the user; other clients log in. Unset: no client
    certificates."""
    reader_connections_max: Annotated[int, Field(ge=1, le=65_536)] = 1024
    """Connections of a listening process. Beyond it, the oldest one without a login is closed; else the new one."""
    reader_connections_per_peer_max: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Connections of one peer to a listening process. A peer is an IPv4 address, IPv6 /64, or user of a Unix socket;
    loopback and the service's own user have no limit. Raise it for clients behind a proxy."""
    reader_unsent_bytes_max: Annotated[int, Field(ge=MIB, le=16 * 1024 * MIB)] = 128 * MIB
    """Unsent answers of a listening process. Above it, the client with the most is disconnected."""
    http_processes: Annotated[int, Field(ge=1, le=64)] = 1
    """HTTP processes."""
    dcp_processes: Annotated[int, Field(ge=1, le=64)] = 1
    """DCP processes. One sends some hundred thousand documents a second."""
    ready_lag_limit_s: Annotated[float, Field(gt=0, le=86_400)] = 30.0
    """Lag above which the mirror is not ready (`/readyz`)."""
    resync_reads: Literal["unavailable", "stale"] = "unavailable"
    """Reads of a vbucket during a resync. `unavailable`: a temporary error. `stale`: the old copy, with writes that the
    source has lost (in-process also by `stale_reads=True`)."""
    verify_reads: bool = True
    """Verify the checksum of each row read over KV, HTTP and DCP. Costs a point read 5 %, a scan 6 %, a DCP backfill up
    to 18 %."""
    sql: bool = False
    """Answer SQL at `POST /v1/query`. Needs the extra `dcp-mirror[sql]`."""
    sql_processes: Annotated[int, Field(ge=1, le=64)] = 2
    """Queries that an HTTP process runs at a time, each in a process with up to two cores. Others wait; meanwhile each
    user keeps one query, and further ones of this user are ended with a 503."""
    sql_memory_bytes: Annotated[int, Field(ge=64 * MIB, le=1024 * 1024 * MIB)] = 512 * MIB
    """Memory of a query. One that needs more fails: nothing is spilled to disk."""
    sql_timeout_s: Annotated[float, Field(ge=0.1, le=3600)] = 60.0
    """Time for a query and its answer."""
    sql_rows_max: Annotated[int, Field(ge=1, le=100_000_000)] = 100_000
    """Rows of an answer. A longer one is cut there, and says so."""

    history_s: Annotated[int, Field(ge=0, le=10 * 366 * 86_400)] = 3600
    """Superseded versions, tombstones, retracted rows and boundaries are kept for this long. A failover that loses more
    costs a resync. A copy that a resync replaced goes at once, unless a lease holds it."""
    history_boundaries: Annotated[int, Field(ge=1)] | None = None
    """Most kept boundaries of a vbucket."""
    history_bytes: Annotated[int, Field(ge=1)] | None = None
    """Largest size of the rows above a vbucket's floor."""
    lease_max_s: Annotated[float, Field(ge=1, le=86_400)] = 600.0
    """Longest time between renewals of a lease that a reader may request."""
    lease_age_max_s: Annotated[float, Field(ge=1, le=366 * 86_400)] = 86_400.0
    """Age at which a lease can no longer be renewed."""
    readers_group: str | None = None
    """System group that may read the data directory in-process (docs/operations.md, Readers as another user)."""
    publish: Literal["received", "persisted"] = "received"
    """When a complete snapshot becomes visible. `received`: at once. `persisted`: once the active node and every
    replica have it on disk, so that no failover takes it back. That costs the delay of the disks, and ten requests a
    second for each waiting vbucket and copy; a silent node delays its vbuckets. Not for ephemeral buckets. A source
    that is a mirror needs the same setting."""

    worker_heartbeat_timeout_s: Annotated[float, Field(ge=1, le=3600)] = 30.0
    """The supervisor kills and replaces a process without a heartbeat for this long; while it starts, after a minute at
    least."""
    stop_timeout_s: Annotated[float, Field(ge=0.1, le=3600)] = 20.0
    """Time for a clean stop of a process; then it is killed."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of log messages."""
    log_json: bool = False
    """Write log lines as JSON objects."""


FIXED = ("groups", "vbuckets", "collections", "scope")
"""Settings that a data directory keeps. The start refuses another value."""


def required_source(settings: Settings) -> str:
    """Return the setting `source`. Raises ConfigError without one."""
    if settings.source is None:
        hint = "give --source couchbase://user@host/bucket or set DCP_MIRROR_SOURCE"
        raise ConfigError("no source is given", hint=hint)
    return settings.source


def required_data(settings: Settings) -> Path:
    """Return the setting `data`. Raises ConfigError without one."""
    if settings.data is None:
        raise ConfigError("no data directory is given", hint="give --data DIR or set DCP_MIRROR_DATA")
    return settings.data


def vbucket_range(text: str, setting: str) -> tuple[int, int]:
    """Parse a range such as `0-511`. Raises ConfigError that names the setting."""
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text, re.ASCII)
    if found is None or int(found[1]) > int(found[2]):
        raise ConfigError(f"{setting} {text!r} is not a range of vbuckets", hint="FIRST-LAST, such as 0-511")
    return int(found[1]), int(found[2])


def from_wire(values: Mapping[str, Any]) -> Settings:
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
    "tls_ca_file",
    "tls_client_cert_file",
    "tls_client_key_file",
    "tls_minimum_version",
    "plain_allowed",
    "password_file",
)
"""Settings for the connection to the source. Commands take them from a running service. None of them is a secret."""


def to_wire(settings: Settings) -> Values:
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
    """The place of the password. Each `read()` reads it again, so a new password needs no restart."""

    file: Path | None
    folder: Path | None

    @staticmethod
    def of(settings: Settings) -> PasswordSource:
        folder = os.environ.get("CREDENTIALS_DIRECTORY")
        return PasswordSource(settings.password_file, Path(folder) if folder else None)

    def origin(self) -> str | None:
        """Describe the place of the password; None without one."""
        if os.environ.get("DCP_MIRROR_PASSWORD") is not None:
            return "environment"
        found = self._file()
        return None if found is None else f"file {found}"

    def read(self) -> str | None:
        """Return the current password; None if none is set. Raises ConfigError if its file is unreadable or invalid."""
        from_environment = os.environ.get("DCP_MIRROR_PASSWORD")
        if from_environment is not None:
            return from_environment
        found = self._file()
        return None if found is None else _read_secret(found)

    def _file(self) -> Path | None:
        if self.file is None and self.folder is not None and (found := self.folder / "password").exists():
            return found
        return self.file


def _read_secret(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(PASSWORD_BYTES_MAX + 1)
        if len(data) > PASSWORD_BYTES_MAX:
            raise ConfigError(
                f"the password file {path} is larger than {PASSWORD_BYTES_MAX} bytes",
                hint="it must hold the password and nothing else",
            )
        return data.decode("utf-8-sig").rstrip("\r\n")
    except OSError as error:
        raise ConfigError(
            f"the password file {path} cannot be read: {error.strerror}",
            hint="check that it exists and that this user may read it",
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"the password file {path} is not UTF-8",
            hint="write the password as UTF-8 text",
        ) from None
