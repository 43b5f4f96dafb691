"""Settings: every limit of the program with its reason, frozen after they are read.

Knows names, bounds and where a value came from; nothing of what is done with it. Order: flags, then environment
`DCP_MIRROR_*`, then a TOML file, then defaults. A bad value is one `ConfigError` that names the setting and the remedy.
The password is not a setting: it is read afresh from its place whenever it is needed (`PasswordSource`), so that it
can be changed without a restart, and it is never printed.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from mirror.errors import ConfigError

ENV_PREFIX = "DCP_MIRROR_"
MASK = "********"
MIB = 1024 * 1024

PASSWORD_BYTES_MAX = 4096
"""A password file larger than this is some other file."""

NOT_SETTINGS = {"DCP_MIRROR_PASSWORD", "DCP_MIRROR_USER"}
"""Variables with our prefix that are read elsewhere: secrets, the sandbox's user, the tests' data."""


class Settings(BaseSettings):
    """What is in force. Immutable; `model_copy(update=...)` makes another."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix=ENV_PREFIX, env_ignore_empty=True)

    # what and where
    source: str | None = None
    """Connection string of the bucket: `couchbase://user@host[:port][,host2]/bucket`."""
    data: Path | None = None
    """The data directory."""
    workers: Annotated[int, Field(ge=1, le=64)] = Field(default_factory=lambda: min(4, os.cpu_count() or 1))
    """Worker processes. One Python thread each; more than there are cores only adds switching."""
    groups: Annotated[int, Field(ge=1, le=256)] = 8
    """Groups that the vbuckets are dealt into when the data directory is made; one LMDB environment each, fixed from
    then on. Eight lets up to eight workers share the work and keeps the group commits large."""
    vbuckets: str | None = None
    """Hold these vbuckets alone (`0-511`), where several mirrors share a bucket; fixed when the data directory is made.
    None: all of them. `kv_nodes` tells clients who holds the rest."""
    collections: Annotated[tuple[str, ...] | None, NoDecode] = None
    """Mirror these collections alone (`scope.collection`, several parted by commas); fixed when the data directory is
    made. One that does not exist yet is waited for. None, and no `scope`: what the directory was made for, or all."""
    scope: str | None = None
    """Mirror this scope alone, with whatever collections it has and gets; fixed when the data directory is made."""
    sync: Literal["safe", "full", "unsafe"] = "safe"
    """What each commit forces to the disk; `storage/FORMAT.md`."""

    # committing
    commit_interval_ms: Annotated[int, Field(ge=0, le=10_000)] = 25
    """Live snapshots carry 2-3 mutations each: a commit for each would be ruinous. 25 ms batches them unnoticed."""
    batch_bytes_max: Annotated[int, Field(ge=64 * 1024, le=64 * MIB)] = 8 * MIB
    """Staged bytes a group may hold in memory before it commits; bounds the worker's memory and an LMDB transaction."""
    map_size_bytes: Annotated[int, Field(ge=16 * MIB)] | None = None
    """Address space reserved per group at open; None leaves it to the store, which grows it as needed."""

    # flow control and liveness
    connection_buffer_size: Annotated[int, Field(ge=4096, le=512 * MIB)] = 20 * MIB
    """Flow-control window per node connection. One message of 20 MiB may overshoot it, so a worker holds at most
    this and one document per connection."""
    noop_interval_s: Annotated[float, Field(ge=0.1, le=10_800)] = 20.0
    """The source's sign of life. A connection silent for twice as long is replaced. 20 is the least that old
    servers' documents allow."""
    connect_timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    """For the TCP and TLS handshake with one node."""
    request_timeout_s: Annotated[float, Field(gt=0, le=600)] = 30.0
    """For the answer to one request; opening a stream on a busy node takes seconds."""
    retry_delay_min_ms: Annotated[int, Field(ge=1, le=60_000)] = 100
    """First pause before trying again; doubles with each failure."""
    retry_delay_max_ms: Annotated[int, Field(ge=1, le=600_000)] = 10_000
    """Longest pause: a node that is back is noticed within it."""
    bootstrap_timeout_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    """Give up when no node of the source could be reached for this long after start; 0: never, wait for it."""
    map_poll_interval_s: Annotated[float, Field(ge=0.05, le=600)] = 2.5
    """How often the cluster map is asked for where nothing announces its change."""
    seqno_poll_interval_s: Annotated[float, Field(ge=0.05, le=600)] = 1.0
    """How often the source's high seqnos are asked for; the lag is as fresh as this."""
    stall_timeout_s: Annotated[float, Field(ge=1, le=86_400)] = 120.0
    """A vbucket behind its source that received nothing for this long is called stalled, and its stream reopened."""
    storage_retry_interval_s: Annotated[float, Field(ge=0.05, le=600)] = 5.0
    """How often a group whose disk is full tries again."""

    # what is asked of the source's streams
    track_prepares: bool = False
    """Receive both halves of sync writes (durable ones) instead of their outcome alone, and keep the open ones. Readers
    see committed versions either way. Not together with `collections` or `scope`: no source filters such streams."""
    change_streams: bool = False
    """Ask for superseded versions where a bucket keeps them (Magma, 7.2 or newer): `changes` then shows what happened
    between two snapshots, as far as the source's own retention reaches."""
    out_of_order_backfill: bool = False
    """Take the first fill of a single collection in the source's own order (7.0 or newer): faster for a small
    collection of a large bucket; broken off, it begins anew. Only with `collections` of one name."""
    compression: Literal["as_stored", "forced"] = "as_stored"
    """`forced` has the source compress every value: less network and disk here for more of the source's processors."""

    # the source's security; certificates, key and password are read again at each connection
    tls_ca_file: Path | None = None
    """CA certificates (PEM) that sign the cluster's; None: the system's."""
    tls_client_cert_file: Path | None = None
    """Client certificate (PEM), for certificate authentication."""
    tls_client_key_file: Path | None = None
    """Its key, where it is not in the same file."""
    tls_minimum_version: Literal["1.2", "1.3"] = "1.2"
    """Older versions are not safe; 1.2 is what servers before 7.2 speak."""
    plain_allowed: bool = False
    """Send the password in the clear where the server knows nothing better and there is no TLS."""
    network: Literal["auto", "default", "external"] = "auto"
    """Which of the cluster's advertised addresses to use; `auto` takes those that the given host belongs to. In the
    connection string: `?network=external`."""
    dns_server: str | None = None
    """Address (and port) of the name server that is asked which hosts a single name without a port stands for (DNS
    SRV); None: the system's. Hosts themselves are always resolved by the system."""
    password_file: Path | None = None
    """File that holds the password and nothing else."""
    secrets_dir: Path | None = None
    """Folder with a file `password`; None: the service manager's credentials folder, where it gives one."""

    # listeners towards readers: off unless an address is given
    kv: str | None = None
    """Address of the KV listener."""
    http: str | None = None
    """Address of the HTTP listener."""
    dcp: str | None = None
    """Address of the DCP listener."""

    kv_processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that share the KV address. One answers some ten thousand requests a second; another core, another."""
    kv_nodes: str | None = None
    """All mirrors of this bucket as clients reach them (`host:port,host:port`, the same list on each): clients then
    spread their reads over them. `host:port=0-511` where a mirror holds only some `vbuckets`. A change is told to
    connected clients. None: this mirror alone."""
    users_file: Path | None = None
    """Who may read: SCRAM verifiers and collections, as `dcp-mirror user` writes them. None: on this machine everybody,
    and whoever logs in with the source's user and password."""
    listen_tls_cert_file: Path | None = None
    """Certificate chain (PEM) of the listeners with `tls://`."""
    listen_tls_key_file: Path | None = None
    """Its key, where it is not in the same file."""
    reader_connections_max: Annotated[int, Field(ge=1, le=65_536)] = 1024
    """Readers' connections of one listening process; more are closed at once. Each costs some 10 KiB when idle."""
    reader_idle_timeout_s: Annotated[float, Field(ge=1, le=86_400)] = 600.0
    """A reader silent for this long is hung up on. SDKs speak every few seconds."""
    reader_send_timeout_s: Annotated[float, Field(ge=0.1, le=3600)] = 30.0
    """A reader that takes nothing of an answer for this long is hung up on."""
    reader_unsent_bytes_max: Annotated[int, Field(ge=MIB, le=16 * 1024 * MIB)] = 128 * MIB
    """Answers that a listening process holds for readers who do not take them; above it the one with most is hung up
    on. Six of the largest documents."""
    kv_request_bytes_max: Annotated[int, Field(ge=4096, le=MIB)] = 64 * 1024
    """Body of a KV request: a key, or sixteen paths of a kilobyte each. Larger ones (writes) are refused unread."""
    kv_pipeline_max: Annotated[int, Field(ge=1, le=65_536)] = 128
    """Requests of one connection answered before the others have their turn; the rest of its pipeline waits unread."""
    http_processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that share the HTTP address."""
    dcp_processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that share the DCP address. One sends some hundred thousand documents a second; another core, another
    connection's streams."""
    ready_lag_limit_s: Annotated[float, Field(gt=0, le=86_400)] = 30.0
    """A mirror further behind its source than this is not ready (`/readyz`), and its page calls a vbucket lagging."""
    refill_reads: Literal["unavailable", "stale"] = "unavailable"
    """What readers get of a vbucket that is filled anew because its history was lost: `temporarily unavailable` until
    it is whole again, or the old copy, which holds what the source has lost. SDKs try again until their own timeout and
    then say that the failure is temporary. In-process readers may ask for the old copy all the same."""

    # housekeeping
    history_s: Annotated[int, Field(ge=0, le=10 * 366 * 86_400)] = 3600
    """How long superseded versions, tombstones, retracted rows and boundaries are kept. Readers can go back so far, and
    a failover that loses more than this costs a vbucket a refill."""
    history_boundaries: Annotated[int, Field(ge=1)] | None = None
    """Kept boundaries of a vbucket at most; None: as many as `history_s` keeps."""
    history_bytes: Annotated[int, Field(ge=1)] | None = None
    """Bytes of rows above the history floor of a vbucket at most; None: as many as `history_s` keeps."""
    lease_max_s: Annotated[float, Field(ge=1, le=86_400)] = 600.0
    """A reader's lease on history ends after this long at most, unless it is renewed: so long a dead job keeps it."""
    lease_age_max_s: Annotated[float, Field(ge=1, le=366 * 86_400)] = 86_400.0
    """No lease is renewed beyond this age: so much history, at most, a job that lives on can keep."""
    publish: Literal["received", "persisted"] = "received"
    """When a complete snapshot becomes visible: when it was received, or only when the source has it on the disk of the
    active node and of every replica, so that a failover takes nothing back that readers have seen. That costs the
    source's disks' delay for each document, a request for each waiting vbucket and copy every
    `persistence_poll_interval_ms`, and a connection per node and worker; a node that does not answer holds everything
    up. Not for ephemeral buckets: nothing of them is ever persisted."""
    persistence_poll_interval_ms: Annotated[int, Field(ge=5, le=60_000)] = 100
    """How often the source is asked what it has persisted, while snapshots wait for it."""
    worker_heartbeat_timeout_s: Annotated[float, Field(ge=1, le=3600)] = 30.0
    """A worker that says nothing for this long is killed and started again."""
    stop_timeout_s: Annotated[float, Field(ge=0.1, le=3600)] = 20.0
    """How long a clean stop may take before the rest is killed."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of messages on stderr."""
    log_json: bool = False
    """Log lines as JSON objects."""

    @field_validator("collections", mode="before")
    @classmethod
    def _parted(cls, value: Any) -> Any:
        """From the environment and flags it is one text."""
        if isinstance(value, str):
            value = tuple(name.strip() for name in value.split(",") if name.strip())
        return value or None

    @field_validator("source", "kv", "http", "dcp", mode="before")
    @classmethod
    def _not_blank(cls, value: Any) -> Any:
        if isinstance(value, str) and not value.strip():
            raise ValueError("must not be empty")
        return value

    @field_validator("source")
    @classmethod
    def _no_password_in_source(cls, value: str | None) -> str | None:
        if value is not None and re.match(r"^[a-z]+://[^/@]*:[^/@]*@", value):
            raise ValueError("must not hold a password: set DCP_MIRROR_PASSWORD or a password file instead")
        return value


def vbucket_range(text: str, setting: str) -> tuple[int, int]:
    """The first and the last of some vbuckets, as `0-511` says them. Raises ConfigError that names the setting."""
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text, re.ASCII)
    if found is None or int(found[1]) > int(found[2]):
        raise ConfigError(
            f"{setting} {text!r} is no range of vbuckets", hint="FIRST-LAST, such as 0-511", setting=setting
        )
    return int(found[1]), int(found[2])


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings and, per setting, where its value came from: `flag`, `environment`, `file PATH` or `default`."""

    settings: Settings
    provenance: dict[str, str]

    def rows(self) -> list[tuple[str, Any, str]]:
        """(name, value, provenance) of each setting, and of the password, which is masked."""
        values = self.settings.model_dump(mode="json")
        rows = [(name, values[name], self.provenance[name]) for name in Settings.model_fields]
        origin = PasswordSource.of(self.settings).origin()
        rows.append(("password", MASK if origin else None, origin or "not set"))
        return rows


def load(flags: Mapping[str, Any] | None = None, *, config_file: Path | None = None) -> Loaded:
    """Read the settings. Flags that are None count as not given. Raises ConfigError."""
    layers: list[tuple[str, dict[str, Any]]] = [
        ("flag", {name: value for name, value in (flags or {}).items() if value is not None}),
        ("environment", _from_environment()),
    ]
    if config_file is not None:
        layers.append((f"file {config_file}", _from_file(config_file)))
    merged: dict[str, Any] = {}
    provenance = dict.fromkeys(Settings.model_fields, "default")
    for origin, values in layers:
        for name, value in values.items():
            if name not in Settings.model_fields:
                raise ConfigError(f"unknown setting {name!r} ({origin})", hint=_nearest(name), setting=name)
            if name not in merged:
                merged[name] = value
                provenance[name] = origin
    try:
        settings = Settings.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "settings"
        raise ConfigError(
            f"setting {name} ({provenance.get(name, 'default')}) is wrong: "
            f"{first['msg'].removeprefix('Value error, ')}, not {_shown(first['input'])}",
            hint=f"change it by --set {name}=VALUE, {ENV_PREFIX}{name.upper()}, or in the file given by --config",
            setting=name,
        ) from None
    if settings.vbuckets is not None:
        vbucket_range(settings.vbuckets, "vbuckets")
    if settings.retry_delay_min_ms > settings.retry_delay_max_ms:
        raise ConfigError(
            f"setting retry_delay_min_ms ({settings.retry_delay_min_ms}) is above retry_delay_max_ms "
            f"({settings.retry_delay_max_ms})",
            hint="make the first pause no longer than the longest",
            setting="retry_delay_min_ms",
        )
    if settings.track_prepares and (settings.collections or settings.scope):
        raise ConfigError(
            "track_prepares is set for a mirror of single collections",
            hint="a source sends both halves of sync writes for a whole bucket alone: give up one of the two",
            setting="track_prepares",
        )
    return Loaded(settings, provenance)


def from_wire(values: Mapping[str, Any]) -> Settings:
    """Return the settings another process sent as `to_wire(settings)`."""
    return Settings.model_validate(dict(values))


def to_wire(settings: Settings) -> dict[str, Any]:
    """Return the settings as plain values, for another process."""
    return settings.model_dump(mode="json")


@dataclass(frozen=True, slots=True)
class PasswordSource:
    """Where the password is. Nothing is kept: each `read()` looks again, so a change needs no restart."""

    file: Path | None
    folder: Path | None

    @staticmethod
    def of(settings: Settings) -> PasswordSource:
        """The places that the settings and the environment name."""
        folder = settings.secrets_dir
        if folder is None and os.environ.get("CREDENTIALS_DIRECTORY"):
            folder = Path(os.environ["CREDENTIALS_DIRECTORY"])
        return PasswordSource(settings.password_file, folder)

    def origin(self) -> str | None:
        """Say where the password would be read from; None: nowhere."""
        if os.environ.get("DCP_MIRROR_PASSWORD") is not None:
            return "environment"
        if self.file is not None:
            return f"file {self.file}"
        if self.folder is not None and (self.folder / "password").exists():
            return f"file {self.folder / 'password'}"
        return None

    def read(self) -> str | None:
        """Return the password as it stands now; None where none is set. Raises ConfigError on an unreadable file."""
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


def _from_environment() -> dict[str, Any]:
    for name in os.environ:
        if name.startswith(ENV_PREFIX) and name not in NOT_SETTINGS:
            setting = name[len(ENV_PREFIX) :].lower()
            if setting not in Settings.model_fields:
                raise ConfigError(f"unknown setting {name} (environment)", hint=_nearest(setting), setting=setting)
    return dict(EnvSettingsSource(Settings)())


def _from_file(path: Path) -> dict[str, Any]:
    try:
        path.open("rb").close()
        return dict(TomlConfigSettingsSource(Settings, toml_file=path)())
    except OSError as error:
        raise ConfigError(
            f"the settings file {path} cannot be read: {error.strerror}",
            hint="check the path given by --config",
            setting="config",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the settings file {path} is not TOML: {error}", hint="mend that line", setting="config"
        ) from None


def _shown(value: Any) -> str:
    text = str(value)
    if re.match(r"^[a-z]+://[^/@]*:[^/@]*@", text):
        return MASK
    return repr(value) if len(text) <= 60 else repr(text[:60]) + "..."


def _nearest(name: str) -> str:

    near = get_close_matches(name, Settings.model_fields, n=1)
    return f"did you mean {near[0]}?" if near else "`dcp-mirror config show` lists all settings"
