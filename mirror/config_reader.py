"""Read and check settings: flags override `DCP_MIRROR_*` variables, and variables override a TOML file.

A bad value raises a `ConfigError` that names the setting and the remedy.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, create_model, field_validator
from pydantic.fields import FieldInfo

from mirror import config, units
from mirror.config import PasswordSource, Settings, Values, to_wire, vbucket_range
from mirror.errors import ConfigError

ENV_PREFIX = "DCP_MIRROR_"
MASK = "********"
NAMES = tuple(each.name for each in fields(Settings))

SECTIONS = {
    "source": "What is mirrored, and where",
    "batch_bytes_max": "Committing",
    "connection_buffer_size": "Flow control, timeouts, retries",
    "change_streams": "What is requested from the source",
    "tls_ca_file": "Security of the connection to the source",
    "kv": "Listeners for readers",
    "history_s": "History and publishing",
    "worker_heartbeat_timeout_s": "Processes and logging",
}
"""The first setting of each section -> the section's title."""

UNITS: dict[str, tuple[str, Callable[[str], float]]] = {
    "_ms": ("milliseconds", lambda text: units.seconds(text) * 1000),
    "_s": ("seconds", units.seconds),
    "_bytes": ("bytes", units.byte_count),
    "_bytes_max": ("bytes", units.byte_count),
    "_size": ("bytes", units.byte_count),
}
"""Suffix of a setting -> the unit of a plain number, and a parser of texts with a unit."""

NOT_SETTINGS = {"DCP_MIRROR_PASSWORD", "DCP_MIRROR_USER"}
"""Variables with our prefix that are no settings: the password, the sandbox's user."""


class _Checks(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="wrap")
    @classmethod
    def _with_unit(cls, value: Any, check: Callable[[Any], Any], info: ValidationInfo) -> Any:
        if isinstance(value, str) and value[-1:].isalpha() and value[:1].isdigit():
            for suffix, (_, read) in UNITS.items():
                if str(info.field_name).endswith(suffix):
                    value = read(value)
        return check(value)

    @field_validator("collections", "source_hosts", mode="before", check_fields=False)
    @classmethod
    def _parted(cls, value: Any) -> Any:
        """Split a text: flags and the environment give lists as text."""
        if isinstance(value, str):
            value = tuple(name.strip() for name in value.split(",") if name.strip())
        return value or None

    @field_validator("source", "kv", "http", "dcp", "readers_group", mode="before", check_fields=False)
    @classmethod
    def _not_blank(cls, value: Any) -> Any:
        if isinstance(value, str) and not value.strip():
            raise ValueError("must not be empty")
        return value

    @field_validator("source", check_fields=False)
    @classmethod
    def _no_password_in_source(cls, value: str | None) -> str | None:
        if value is not None and re.match(r"^[a-z]+://[^/@]*:[^/@]*@", value):
            raise ValueError("must not hold a password: set DCP_MIRROR_PASSWORD or a password file instead")
        return value


_HINTS = get_type_hints(Settings, vars(config) | {"Field": Field}, include_extras=True)
_DEFAULTS: Values = {
    each.name: each.default if each.default_factory is MISSING else Field(default_factory=each.default_factory)
    for each in fields(Settings)
}
_FIELDS: Values = {name: (_HINTS[name], _DEFAULTS[name]) for name in NAMES}
_CheckedSettings = create_model("_CheckedSettings", __base__=_Checks, **_FIELDS)


def validated(values: Mapping[str, Any], provenance: Mapping[str, str] | None = None) -> Settings:
    """Check the values, convert those given as text, and return the settings. Raises ConfigError."""
    try:
        checked = _CheckedSettings.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "settings"
        if first["type"] == "value_error":
            wrong = first["msg"].removeprefix("Value error, ")
        else:
            wrong = "must be " + _values(name, _CheckedSettings.model_fields[name]).replace("`", "")
        raise ConfigError(
            f"setting {name} ({(provenance or {}).get(name, 'default')}) is wrong: {wrong}, "
            f"not {_shown(first['input'])}",
            hint=f"change it by --set {name}=VALUE, {ENV_PREFIX}{name.upper()}, or in the file given by --config",
        ) from None
    return Settings(**{name: getattr(checked, name) for name in NAMES})


@dataclass(frozen=True, slots=True)
class Description:
    name: str
    section: str
    meaning: str
    values: str
    """The type with unit and bounds, or the allowed values."""
    default: str | None
    """None: unset."""


def describe() -> list[Description]:
    section = ""
    found = []
    body = cast(ast.ClassDef, ast.parse(inspect.getsource(Settings)).body[0]).body
    meanings = {
        statement.target.id: " ".join(str(below.value.value).split())
        for statement, below in pairwise(body)
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }
    for name, field in _CheckedSettings.model_fields.items():
        section = SECTIONS.get(name, section)
        extra = field.json_schema_extra
        default = extra.get("default") if isinstance(extra, dict) else field.default
        found.append(Description(name, section, meanings[name], _values(name, field), _written(default)))
    return found


def _values(name: str, field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{each}`" for each in get_args(field.annotation))
    kind, metadata = field.annotation, list(field.metadata)
    if type(None) in get_args(kind):  # optional: the union contains the type and its bounds
        kind = next(each for each in get_args(kind) if each is not type(None))
    if get_origin(kind) is Annotated:
        kind, inner = get_args(kind)
        metadata += inner.metadata
    words = [_TYPE_NAMES[get_origin(kind) or kind]]
    words += [unit for suffix, (unit, _) in UNITS.items() if name.endswith(suffix)][:1]
    bounds = {sign: getattr(each, sign) for each in metadata for sign in ("ge", "gt", "le") if hasattr(each, sign)}
    if "ge" in bounds:
        low = _written(bounds["ge"])
        words.append(f"{low} to {_written(bounds['le'])}" if "le" in bounds else f"at least {low}")
    elif "gt" in bounds:
        words.append(f"above {_written(bounds['gt'])}, at most {_written(bounds['le'])}")
    return ", ".join(words)


def _written(value: Any) -> str | None:
    """Return the value as text that `--set` takes."""
    if value is None or isinstance(value, str):
        return value
    return str(value).lower() if isinstance(value, bool) else f"{value:.15g}"


_TYPE_NAMES: dict[Any, str] = {
    int: "integer",
    float: "number",
    bool: "`true` or `false`",
    str: "text",
    Path: "path",
    tuple: "list of texts",
}


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings with the origin of each value: `flag`, `environment`, `file PATH` or `default`."""

    settings: Settings
    provenance: dict[str, str]

    def rows(self) -> list[tuple[str, Any, str]]:
        """Return (name, value, origin) of each setting, and of the password, masked."""
        values = to_wire(self.settings)
        rows = [(name, values[name], self.provenance[name]) for name in NAMES]
        origin = PasswordSource.of(self.settings).origin()
        rows.append(("password", MASK if origin else None, origin or "not set"))
        return rows


def load(flags: Mapping[str, Any] | None = None, *, config_file: Path | None = None) -> LoadedSettings:
    """Read the settings. Flags that are None count as not given. Raises ConfigError."""
    layers: list[tuple[str, Values]] = [
        ("flag", {name: value for name, value in (flags or {}).items() if value is not None}),
        ("environment", _from_environment()),
    ]
    if config_file is not None:
        layers.append((f"file {config_file}", _from_file(config_file)))
    merged: Values = {}
    provenance = dict.fromkeys(NAMES, "default")
    for origin, values in layers:
        for name, value in values.items():
            if name not in NAMES:
                raise ConfigError(f"unknown setting {name!r} ({origin})", hint=nearest(name))
            if name not in merged:
                merged[name] = value
                provenance[name] = origin
    settings = validated(merged, provenance)
    if settings.vbuckets is not None:
        vbucket_range(settings.vbuckets, "vbuckets")
    return LoadedSettings(settings, provenance)


def _from_environment() -> Values:
    for name in os.environ:
        if name.startswith(ENV_PREFIX) and name not in NOT_SETTINGS:
            setting = name[len(ENV_PREFIX) :].lower()
            if setting not in NAMES:
                raise ConfigError(f"unknown setting {name} (environment)", hint=nearest(setting))
    given = {name: os.environ.get(f"{ENV_PREFIX}{name.upper()}") for name in NAMES}
    return {name: value for name, value in given.items() if value}


def _from_file(path: Path) -> Values:
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))  # editors of Windows put a byte order mark first
    except OSError as error:
        raise ConfigError(
            f"the settings file {path} cannot be read: {error.strerror}",
            hint="check the path given by --config",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the settings file {path} is not TOML: {error}", hint="fix that line") from None


def _shown(value: Any) -> str:
    text = str(value)
    if re.match(r"^[a-z]+://[^/@]*:[^/@]*@", text):
        return MASK
    return repr(value) if len(text) <= 60 else repr(text[:60]) + "..."


def nearest(name: str) -> str:
    near = get_close_matches(name, NAMES, n=1)
    return f"did you mean {near[0]}?" if near else "`dcp-mirror config show` lists all settings"
