"""Dates and times as documents have them."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest

from mirror.errors import ConfigError
from mirror.typed.times import arrow_name, check_zone, day_of, machine_zone, micros_of, micros_of_number, zone_of

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def time(text: str, zone: str | None = "UTC") -> datetime:
    return EPOCH + timedelta(microseconds=micros_of(text, None if zone is None else zone_of(zone)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-01-31", "2026-01-31T00:00:00"),
        ("2026-1-5", "2026-01-05T00:00:00"),
        ("2026-03", "2026-03-01T00:00:00"),
        ("2026", "2026-01-01T00:00:00"),
        ("2026-01-31 7:05", "2026-01-31T07:05:00"),
        ("2026-01-31T12:00:00Z", "2026-01-31T12:00:00"),
        ("2026-01-31T12:00:00.1234567Z", "2026-01-31T12:00:00.123456"),
        ("2026-01-31T12:00:00+01:00", "2026-01-31T11:00:00"),
        ("2026-01-31 12:00:00 -0130", "2026-01-31T13:30:00"),
        ("2026-01-31 12:00:00 Europe/Berlin", "2026-01-31T11:00:00"),
        ("  2026-01-31T12:00 UTC+1 ", "2026-01-31T11:00:00"),
        ("1960-01-01T00:00:00.5Z", "1960-01-01T00:00:00.500000"),
    ],
)
def test_a_valid_time_is_parsed(text: str, expected: str) -> None:
    assert time(text) == datetime.fromisoformat(expected).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    ["", "x", "26-01-31", "20260131", "2026-13-01", "2026-02-30", "2026-01-31T25:00", "2026-01-31T", "12:30",
     "2026-01-31T12:00:60", "2026-01-31T12:00 Moon/Base", "2026-01-31T12:00+19:00", "2026-01-31T12:00+01:75"],
)  # fmt: skip
def test_an_invalid_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of many kinds, none of which is shown
        micros_of(text, UTC)


def test_a_time_without_a_zone_is_in_the_given_zone_even_when_clocks_change() -> None:
    assert time("2026-07-01 12:00", "Europe/Berlin").hour == 10
    assert time("2026-03-29 02:30", "Europe/Berlin").isoformat() == "2026-03-29T01:30:00+00:00"
    assert time("2026-10-25 02:30", "Europe/Berlin").isoformat() == "2026-10-25T00:30:00+00:00"
    assert time("2026-07-01 12:00", None).hour == 12
    with pytest.raises(ValueError, match="no zone"):
        micros_of("2026-07-01T12:00Z", None)


def test_a_date_ignores_the_time_behind_it() -> None:
    days = [day_of(text) for text in ("2026-01-31", "2026-1-31T23:59:59Z", " 2026-01-31 x", "1970", "1969-12")]
    assert days == [(date(2026, 1, 31) - date(1970, 1, 1)).days] * 3 + [0, -31]
    for text in ("31.1.2026", "2026-02-30", ""):
        with pytest.raises(ValueError):  # noqa: PT011
            day_of(text)


def test_a_number_is_scaled_to_microseconds_and_checked_for_range() -> None:
    assert micros_of_number(-5, 1000) == -5000
    with pytest.raises(ValueError, match="out of range"):
        micros_of_number(2**62, 1000)


def test_a_zone_is_given_by_name_or_by_offset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ("UTC", "GMT", "Z", "Europe/Berlin", "+1", "UTC-03:30")
    assert [arrow_name(name) for name in names] == ["UTC", "UTC", "UTC", "Europe/Berlin", "+01:00", "-03:30"]
    with pytest.raises(ConfigError, match=r"'\.\./x' is not a time zone \(for example UTC"):
        check_zone("../x")
    monkeypatch.setenv("TZ", ":Asia/Tokyo")
    assert machine_zone() == "Asia/Tokyo"
    monkeypatch.setenv("TZ", "Nowhere")
    assert machine_zone() == "UTC"
