"""Options as users write them, and what is said about those that are invalid."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from mirror.errors import ConfigError
from mirror.spark.source.options import parse, ranges, reading_of
from mirror.typed.bodies import Reading


def test_an_option_that_is_not_given_has_a_default() -> None:
    options = parse({"path": "/data"})
    assert (options.path, options.connection, options.table) == ("/data", None, "documents")
    assert (options.max_rows, options.max_bytes, options.resync) == (1_000_000, 1 << 30, False)
    assert options.partitions >= 1
    assert options.names[:2] == ("key", "collection")


def test_an_option_is_read_in_any_case_of_letters() -> None:
    options = parse(
        {
            "CONNECTION": "couchbase://h/b",
            "table": "Changes",
            "collection": "shop.orders, carts",
            "vBuckets": "0-3,7",
            "partitions": "5",
            "columns": "key,kind",
            "mode": "PERMISSIVE",
            "columnNameOfCorruptRecord": "_bad",
            "timezone": "Europe/Berlin",
            "epoch": "millis",
            "maxrowsperbatch": "10",
            "startingFrom": "latest",
            "onLostHistory": "resync",
            "leaseSeconds": "30",
            "caFile": "/ca.pem",
        }
    )
    assert options.collections == ("shop.orders", "_default.carts")
    assert options.vbuckets == frozenset({0, 1, 2, 3, 7})
    assert (options.partitions, options.names) == (5, ("key", "kind"))
    assert options.reading == Reading("permissive", "_bad", "Europe/Berlin", "millis")
    assert reading_of({"mode": "dropmalformed"}) == Reading("dropmalformed")
    assert (options.max_rows, options.latest, options.resync) == (10, True, True)
    assert (options.lease_seconds, options.ca_file) == (30.0, "/ca.pem")
    assert parse({"path": "/d", "MAXBYTESPERBATCH": "64m"}).max_bytes == 64 << 20
    at = parse({"path": "/d", "asOf": "2026-01-31T12:00:00+00:00"}).as_of_ms
    assert at == int(datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp() * 1000)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "no options were given"),
        ({"path": "/a", "connection": "couchbase://h/b"}, "were both given"),
        ({"path": "/a", "colection": "x"}, "unknown option 'colection'.*known: path"),
        ({"connection": "couchbase://h/b", "password": "secret"}, "must not be an option.*DCP_MIRROR_PASSWORD"),
        ({"path": "/a", "table": "docs"}, "table='docs': expected documents or changes"),
        ({"path": "/a", "vbuckets": "5-2"}, "vbuckets='5-2': 5-2 is not a range"),
        ({"path": "/a", "vbuckets": "all"}, "such as 0-511,600"),
        ({"path": "/a", "partitions": "0"}, "partitions='0': expected a number"),
        ({"path": "/a", "columns": "key,key"}, "each once"),
        ({"path": "/a", "columns": "kind"}, "documents have no column 'kind'"),
        ({"path": "/a", "asOf": "yesterday"}, "expected a time such as"),
        ({"connection": "couchbase://h/b"}, "is for table=changes .*sync --source"),
        ({"path": "/a", "table": "changes", "asOf": "2026-01-31"}, "asOf is for documents"),
        ({"path": "/a", "maxBytesPerBatch": "much"}, "must be a number with KiB"),
        (
            {"connection": "couchbase://h/b", "table": "changes", "maxBytesPerBatch": "1g"},
            "is for a path.*maxRowsPerBatch",
        ),
        ({"path": "/a", "startingFrom": "latest"}, "is for table=changes"),
        ({"path": "/a", "mode": "lax"}, "expected failfast or permissive or dropmalformed"),
        ({"path": "/a", "timeZone": "Moon"}, "'Moon' is not a time zone"),
        ({"path": ""}, "expected something"),
    ],
)
def test_an_invalid_option_is_named(given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        parse(given)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


def test_ranges_may_overlap() -> None:
    assert ranges("1-3, 2,65535") == {1, 2, 3, 65535}


def test_a_selection_has_one_spelling() -> None:
    assert parse({"path": "x"}).selection == ""
    given = {"path": "x", "collection": "b.b, a", "vbuckets": "7,0-2,1-4"}
    assert parse(given).selection == "collection=_default.a,b.b vbuckets=0-4,7"
    assert parse({"connection": "couchbase://h/b", "table": "changes", "vbuckets": "3"}).selection == "vbuckets=3"
