"""Read dates and times in JSON documents as days and microseconds since 1970.

Like Spark's from_json without a pattern, this module accepts a date alone, a date and time with or without a zone,
fractions of a second (cut off after microseconds), and zones as offsets or names. The caller gives the zone for texts
without one. Unlike Spark, it refuses a time without a date, and years other than 0001 to 9999.
"""

from __future__ import annotations

import os
import re
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo

from mirror.errors import ConfigError

EPOCH_UNITS = {"seconds": 1_000_000, "millis": 1_000, "micros": 1}
"""Microseconds in each unit."""

_EPOCH_DAY = date(1970, 1, 1).toordinal()
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_DATE = r"(\d{4})(?:-(\d{1,2})(?:-(\d{1,2})"
_DAY = re.compile(_DATE + r"(?:[ T].*)?)?)?", re.ASCII | re.DOTALL)
_TIME = re.compile(
    _DATE + r"(?:[ T](\d{1,2})(?::(\d{1,2})(?::(\d{1,2})(?:\.(\d*))?)?(.*))?)?)?)?", re.ASCII | re.DOTALL
)
_OFFSET = re.compile(r"(?:UTC|GMT|UT)?([+-])(\d{1,2})(?::?(\d\d)(?::?(\d\d))?)?", re.ASCII)
OFFSET_MAX = timedelta(hours=18)


@lru_cache(maxsize=256)
def zone_of(name: str) -> tzinfo:
    """Return the time zone of that name: `Europe/Berlin`, `Z`, `+01:00`, `UTC+1`. Raises ValueError."""
    if name in ("Z", "UTC", "GMT", "UT"):
        return UTC
    found = _OFFSET.fullmatch(name)
    if found is not None:
        sign, hours, minutes, seconds = found.groups()
        offset = timedelta(hours=int(hours), minutes=int(minutes or 0), seconds=int(seconds or 0))
        if offset > OFFSET_MAX or int(minutes or 0) > 59 or int(seconds or 0) > 59:
            raise ValueError(f"{name!r} is not a time zone")
        return timezone(-offset if sign == "-" else offset)
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, LookupError):
        raise ValueError(f"{name!r} is not a time zone") from None


def arrow_name(name: str) -> str:
    """Return Arrow's name of a zone. Raises ValueError."""
    zone = zone_of(name)
    if zone is UTC or not isinstance(zone, timezone):
        return "UTC" if zone is UTC else name
    return zone.tzname(None).removeprefix("UTC")


def check_zone(name: str) -> None:
    try:
        zone_of(name)
    except ValueError as error:
        raise ConfigError(str(error), hint="for example UTC, Europe/Berlin or +01:00") from None


def machine_zone() -> str:
    """Return this machine's time zone: TZ, or if it is unset the link /etc/localtime; UTC for an unknown name."""
    name = os.environ.get("TZ", "").removeprefix(":") or os.path.realpath("/etc/localtime").rpartition("/zoneinfo/")[2]
    try:
        zone_of(name)
    except ValueError:
        return "UTC"
    return name


def day_of(text: str) -> int:
    """Return a date as days since 1970. Text after the date, from a blank or T on, is ignored. Raises ValueError."""
    found = _DAY.fullmatch(text.strip())
    if found is None:
        raise ValueError("no date")
    year, month, day = found.groups(default="1")
    return date(int(year), int(month), int(day)).toordinal() - _EPOCH_DAY


def micros_of(text: str, zone: tzinfo | None) -> int:
    """Return a time, or the beginning of a date, as microseconds since 1970. `zone` is for texts without a zone.

    If `zone` is None, times have no zone: they count as UTC, and a text that names a zone is refused. Otherwise a time
    skipped by the change to summer time moves forward by the skipped time, and a time that occurs twice means the first
    one. Raises ValueError.
    """
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise ValueError("no time")
    year, month, day, hour, minute, second, fraction, rest = found.groups()
    named = (rest or "").strip()
    if zone is None and named:
        raise ValueError("a local time has no zone")
    time = datetime(
        int(year),
        int(month or 1),
        int(day or 1),
        int(hour or 0),
        int(minute or 0),
        int(second or 0),
        int((fraction or "")[:6].ljust(6, "0")),
        tzinfo=zone_of(named) if named else zone or UTC,
    )
    return (time - _EPOCH) // _MICROSECOND


def micros_of_number(number: int, unit: int) -> int:
    """Convert `number` units of `unit` microseconds to microseconds since 1970. Raises ValueError."""
    micros = number * unit
    if not -(2**63) <= micros < 2**63:
        raise ValueError("out of range")
    return micros
