"""Options that several commands share, and the settings from option, environment, file or default, in this order."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from mirror import client, units
from mirror.config import Settings, Values, required_data
from mirror.config_reader import NAMES, LoadedSettings, load, validated
from mirror.errors import ConfigError
from mirror.log import set_up_logs
from mirror.messages import GetSource
from storage.model import collection_named


def one_of(*values: str) -> Callable[[], list[str]]:
    return lambda: list(values)


def optional(*names: str, metavar: str | None = None, **facts: Any) -> Any:
    """Declare an option whose default the help omits. Shells complete the values of a metavar such as `safe|full`."""
    if metavar is not None and "|" in metavar and metavar.islower():
        facts.setdefault("autocompletion", one_of(*metavar.split("|")))
    return typer.Option(*names, metavar=metavar, **{"show_default": False} | facts)


DataOption = Annotated[Path | None, optional("--data", "-d", metavar="DIR", help="The mirror's data directory.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, in the shape of cli/JSON.md.")]
ConfigOption = Annotated[Path | None, optional("--config", metavar="FILE", help="Settings file (TOML).")]
SetOption = Annotated[
    list[str] | None,
    optional(
        "--set",
        metavar="NAME=VALUE",
        help="Any other setting; `config show` lists the names.",
        autocompletion=lambda: [f"{name}=" for name in NAMES],
    ),
]
SourceOption = Annotated[
    str | None,
    optional(
        "--source",
        "-s",
        metavar="URL",
        help="couchbase[s]://user@host[:port][,host2]/bucket; one name without a port may be a DNS SRV record.",
    ),
]
VbidOption = Annotated[int | None, optional("--vbid", min=0, max=65535, help="Only this vbucket.")]
VbidsOption = Annotated[list[int] | None, optional("--vbid", help="Only these vbuckets.")]
KvOption = Annotated[
    str | None, optional("--kv", metavar="ADDR", help="Serve Couchbase SDKs and memcached clients here.")
]
HttpOption = Annotated[str | None, optional("--http", metavar="ADDR", help="Serve HTTP and the status page here.")]
TlsCaOption = Annotated[
    Path | None, optional("--tls-ca-file", metavar="FILE", help="CA certificates (PEM) of a couchbases:// source.")
]
CollectionOption = Annotated[
    str | None, optional("--collection", "-c", metavar="SCOPE.NAME", help="Collection, by name or id.")
]
PartialOption = Annotated[
    bool, typer.Option("--partial", help="During the first fill, read the vbuckets that are filled; say how many lack.")
]
AsOfOption = Annotated[
    str | None,
    optional(
        "--as-of",
        metavar="SEQNO|TIME",
        help="Read at the newest kept boundary up to this seqno or time (ISO 8601).",
    ),
]
AsOfTimeOption = Annotated[
    str | None,
    optional("--as-of", metavar="TIME", help="Each vbucket at its newest kept boundary up to this time (ISO 8601)."),
]


def need(who: str, extra: str, *modules: str) -> None:
    """Raise ConfigError if packages of a pip extra are missing."""
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            package = module.partition(".")[0]
            raise ConfigError(
                f"{who} the package {package} ({error})",
                hint=f"pip install 'dcp-mirror[{extra}]', or in a checkout: .venv/bin/pip install -e '.[{extra}]'",
            ) from None


def flags_from(pairs: list[str] | None) -> Values:
    flags: Values = {}
    for pair in pairs or ():
        name, separator, value = pair.partition("=")
        if not separator or not name.strip():
            raise ConfigError(f"--set {pair!r} is not NAME=VALUE", hint="`dcp-mirror config show` lists all settings")
        flags[name.strip().replace("-", "_").lower()] = value
    return flags


def settings_from(flags: Values, *, config: Path | None = None, pairs: list[str] | None = None) -> LoadedSettings:
    return load(
        flags_from(pairs) | {name: value for name, value in flags.items() if value is not None}, config_file=config
    )


def with_source(loaded: LoadedSettings) -> Settings:
    """Return the settings. If they have no source, add the source settings of the service on the data directory.

    Raises ConfigError if no service runs there, and what `client.ask` raises.
    """
    settings = loaded.settings
    if settings.source is not None:
        return settings
    answer = None if settings.data is None else client.ask(settings.data, GetSource())
    if answer is None:
        raise ConfigError(
            "no source is given" + ("" if settings.data is None else f", and no service runs on {settings.data}"),
            hint="give --source couchbase://user@host/bucket, the service's --config FILE, or set DCP_MIRROR_SOURCE",
        )
    values = {name: value for name, value, origin in loaded.rows() if origin != "default" and name in NAMES}
    given = {name: value for name, value in answer["settings"].items() if value is not None}
    return validated(given | values)


def data_directory(data: Path | None, config: Path | None = None) -> Path:
    return required_data(settings_from({"data": data}, config=config).settings)


def quiet_logs(settings: Settings) -> None:
    """Log only errors, except if `log_level` is debug."""
    set_up_logs("debug" if settings.log_level == "debug" else "error", json=settings.log_json)


def moment_ms(text: str, option: str) -> int:
    """Parse a time in ISO 8601 (local time if it has no zone) or an age such as `2h`. Raises ConfigError."""
    try:
        if text[-1:].isalpha() and text[:1].isdigit() and not text.endswith("Z"):
            return int((time.time() - units.seconds(text)) * 1000)
        return units.moment_ms(text)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{option} {text!r} is neither a time nor an age", hint="write 2026-01-31T12:00:00, or an age: 15m, 2h, 1d"
        ) from None


def collection_from(text: str | None) -> str | int | None:
    return None if text is None else collection_named(text)
