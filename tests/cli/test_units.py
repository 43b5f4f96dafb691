"""Durations and sizes with units, wherever people write a setting."""

from __future__ import annotations

import pytest

from mirror import units
from mirror.config_reader import validated
from mirror.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("90s", 90), ("15m", 900), ("15 min", 900), ("1.5h", 5400), ("2d", 172_800), ("1H", 3600)],
)
def test_a_duration_is_read_with_its_unit(text: str, seconds: float) -> None:
    assert units.seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "count"), [("1B", 1), ("4k", 4096), ("64MiB", 64 * 2**20), ("1.5g", 3 * 2**29), ("2 TiB", 2**41)]
)
def test_a_size_is_read_with_its_unit(text: str, count: int) -> None:
    assert units.byte_count(text) == count


@pytest.mark.parametrize("text", ["", "h", "1", "-1h", "1e3s", "1w", "\u0661h", "1h30m", "1MB", "infs"])
def test_a_text_that_is_no_duration_or_size_is_refused(text: str) -> None:
    for read in (units.seconds, units.byte_count):
        with pytest.raises(ValueError, match="must be a number with"):
            read(text)


def test_settings_take_units_and_plain_numbers() -> None:
    found = validated(
        {"history_s": "2h", "retry_delay_max_ms": "0.1s", "batch_bytes_max": "4MiB", "ready_lag_limit_s": "90"}
    )
    assert (found.history_s, found.retry_delay_max_ms, found.batch_bytes_max) == (7200, 100, 4 * 2**20)
    assert found.ready_lag_limit_s == 90
    assert validated({"connection_buffer_size": "20MiB", "history_bytes": "1g"}).history_bytes == 2**30


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("workers", "x", "must be integer, 1 to "),
        ("history_s", "1 week", "must be a number with ms, s, m, h or d, not '1 week'"),
        ("history_s", "100ms", "must be integer, seconds, 0 to "),
        ("sync", "fast", "must be safe, full, unsafe, not 'fast'"),
        ("log_json", "perhaps", "must be true or false, not 'perhaps'"),
        ("batch_bytes_max", "1", "must be integer, bytes, 65536 to "),
    ],
)
def test_a_wrong_value_is_refused_in_the_words_of_the_program(name: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validated({name: value})
    assert words in str(caught.value)
    assert "Input should" not in str(caught.value)
