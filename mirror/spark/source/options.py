"""The options of the data source: names, meanings and bounds, as a user gives them to Spark (docs/spark.md, "Options").

A password is no option, because Spark's UI and log show options.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from mirror import health, units
from mirror.errors import ConfigError
from mirror.spark.places import local_path
from mirror.spark.source.columns import TABLES
from mirror.typed.bodies import AS_DECLARED, MODES, Reading
from mirror.typed.times import EPOCH_UNITS, zone_of
from storage.model import collection_named

VBUCKETS_MAX = 65_536
OF_CREATE_TABLE = "provider"
"""Spark passes this property when CREATE TABLE names no columns and the source must supply them."""
OF_SQL = (
    "pass a table's options to queries. Write CREATE TABLE name (_key string, ...) USING mirror, and give the path in "
    "each query: SELECT ... FROM name WITH (path = '...'). Or write CREATE TEMPORARY VIEW name USING mirror "
    "OPTIONS (path '...')"
)


@dataclass(frozen=True, slots=True)
class Options:
    path: str | None = None
    connection: str | None = None
    table: str = "documents"
    collections: tuple[str | int, ...] | None = None
    vbuckets: frozenset[int] | None = None
    partitions: int = 1
    columns: tuple[str, ...] | None = None
    as_of_ms: int | None = None
    reading: Reading = AS_DECLARED
    infer_schema: bool = False
    max_rows: int = 1_000_000
    max_bytes: int = 1 << 30
    latest: bool = False
    resync: bool = False
    lease_seconds: float = 60.0
    ca_file: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return self.columns or tuple(TABLES[self.table].names)

    @property
    def selection(self) -> str:
        """The collections and vbuckets to read, as a normalised text for checkpoints. Empty: all."""
        parts = []
        if self.collections is not None:
            parts.append(f"collection={','.join(sorted(map(str, self.collections)))}")
        if self.vbuckets is not None:
            parts.append(f"vbuckets={','.join(health.ranges(sorted(self.vbuckets)))}")
        return " ".join(parts)

    def vbids_of(self, held: Sequence[int]) -> list[int]:
        if self.vbuckets is None:
            return list(held)
        missing = sorted(self.vbuckets - set(held))
        if missing:
            raise ConfigError(
                f"option vbuckets: {self.path or 'the bucket'} does not hold vbucket {missing[0]}",
                hint=f"it holds {held[0]} to {held[-1]}",
            )
        return sorted(self.vbuckets)


def parse(given: Mapping[str, str]) -> Options:
    values = {name.lower(): text.strip() for name, text in given.items()}
    if OF_CREATE_TABLE in values:
        raise ConfigError("CREATE TABLE failed: it names no columns", hint=f"Spark does not {OF_SQL}")
    if not values:
        raise ConfigError("no options were given", hint=f"give path or connection. Spark does not {OF_SQL}")
    if "paths" in values:
        raise ConfigError(
            "several paths were given", hint="load each mirror by itself, and combine them with unionByName"
        )
    if "password" in values:
        raise ConfigError(
            "a password must not be an option: Spark shows options",
            hint="set DCP_MIRROR_PASSWORD or DCP_MIRROR_PASSWORD_FILE in the environment of driver and executors",
        )
    unknown = sorted(set(values) - {name.lower() for name in _PARSERS})
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}", hint=f"known: {', '.join(_PARSERS)}")
    fields = {"partitions": len(os.sched_getaffinity(0))} | _fields(values, _PARSERS.keys() - _READING)
    reading = Reading(**_fields(values, _READING))
    if fields.get("infer_schema"):  # an inferred schema asks for no column of misfits
        reading = replace(reading, corrupt_record=None)
        if "mode" not in values:
            reading = replace(reading, mode="permissive", keep_numbers=True)
    options = Options(**fields, reading=reading)
    if (options.path is None) == (options.connection is None):
        both = options.path is not None
        raise ConfigError(
            "path and connection were both given" if both else "neither path nor connection was given",
            hint="path: a mirror's directory on this machine; connection: couchbase://user@host/bucket; one of them",
        )
    if options.connection is not None and options.table != "changes":
        raise ConfigError(
            "option connection is for table=changes",
            hint="read documents by path from a mirror, or from a table that `dcp-mirror sync --source` keeps",
        )
    unknown = [name for name in options.columns or () if name not in TABLES[options.table].names]
    if unknown:
        raise ConfigError(
            f"option columns: {options.table} have no column {unknown[0]!r}",
            hint=f"known: {', '.join(TABLES[options.table].names)}",
        )
    if options.table == "changes" and any(isinstance(each, int) for each in options.collections or ()):
        raise ConfigError("option collection: changes have no ids of collections", hint="give names, scope.collection")
    if options.as_of_ms is not None and options.table != "documents":
        raise ConfigError("option asOf is for documents")
    if options.connection is not None and "maxbytesperbatch" in values:
        raise ConfigError(
            "option maxBytesPerBatch is for a path: a cluster does not say how many bytes a batch will have",
            hint="limit its rows with maxRowsPerBatch (sync: --max-rows)",
        )
    if options.infer_schema and (options.table != "documents" or options.columns is not None):
        raise ConfigError("option inferSchema is for documents, with all columns", hint="give a schema")
    if options.latest and options.table != "changes":
        raise ConfigError("option startingFrom is for table=changes")
    return options


def reading_of(given: Mapping[str, str]) -> Reading:
    return Reading(**_fields({name.lower(): text for name, text in given.items()}, _READING))


def _fields(values: Mapping[str, str], names: Set[str]) -> dict[str, Any]:
    found = {}
    for name, (field, parser) in _PARSERS.items():
        if name in names and name.lower() in values:
            try:
                found[field] = parser(values[name.lower()])
            except ValueError as error:
                raise ConfigError(f"option {name}={values[name.lower()]!r}: {error}") from None
    return found


def ranges(text: str) -> frozenset[int]:
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError("expected numbers and ranges such as 0-511,600")
        low, high = int(first), int(last) if dash else int(first)
        if high < low or high >= VBUCKETS_MAX:
            raise ValueError(f"{part.strip()} is not a range of vbuckets")
        found.update(range(low, high + 1))
    return frozenset(found)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if not all(names) or len(set(names)) != len(names):
        raise ValueError("expected names, each once, with commas between")
    return names


def _collections(text: str) -> tuple[str | int, ...]:
    return tuple(map(collection_named, _names(text)))


def byte_count(text: str) -> int:
    return _count(text if text.isdecimal() else str(units.byte_count(text)))


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ValueError("expected a number of at least 1")
    return int(text)


def _one_of(**meanings: Any) -> Any:
    def parser(text: str) -> Any:
        if text.lower() not in meanings:
            raise ValueError(f"expected {' or '.join(meanings)}")
        return meanings[text.lower()]

    return parser


def _text(text: str) -> str:
    if not text:
        raise ValueError("expected something")
    return text


def _zone(text: str) -> str:
    zone_of(text)
    return text


_READING = frozenset(("mode", "columnNameOfCorruptRecord", "timeZone", "epoch"))

_PARSERS: dict[str, tuple[str, Any]] = {
    "path": ("path", lambda text: str(local_path(_text(text)))),
    "connection": ("connection", _text),
    "table": ("table", _one_of(**{name: name for name in TABLES})),
    "collection": ("collections", _collections),
    "vbuckets": ("vbuckets", ranges),
    "partitions": ("partitions", _count),
    "columns": ("columns", _names),
    "asOf": ("as_of_ms", units.moment_ms),
    "mode": ("mode", _one_of(**{name: name for name in MODES})),
    "columnNameOfCorruptRecord": ("corrupt_record", _text),
    "timeZone": ("time_zone", _zone),
    "epoch": ("epoch", _one_of(**{name: name for name in EPOCH_UNITS})),
    "inferSchema": ("infer_schema", _one_of(true=True, false=False)),
    "maxRowsPerBatch": ("max_rows", _count),
    "maxBytesPerBatch": ("max_bytes", byte_count),
    "startingFrom": ("latest", _one_of(earliest=False, latest=True)),
    "onLostHistory": ("resync", _one_of(fail=False, resync=True)),
    "leaseSeconds": ("lease_seconds", lambda text: float(_count(text))),
    "caFile": ("ca_file", _text),
}
