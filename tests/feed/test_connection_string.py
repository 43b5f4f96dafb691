"""Connection strings: what is meant, and what is refused with a remedy."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.errors import ConfigError
from mirror.feed.connection.connection_string import ConnectionString, NodeAddress, parse


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (
            "couchbase://demo@localhost/demo",
            ConnectionString(False, "demo", (NodeAddress("localhost", 11210),), "demo"),
        ),
        ("couchbases://u@h/b", ConnectionString(True, "u", (NodeAddress("h", 11207),), "b")),
        ("couchbase://h:12000/b", ConnectionString(False, None, (NodeAddress("h", 12000),), "b", True)),
        (
            "couchbase://u@10.0.0.1,10.0.0.2:99/b.x-y_z%25",
            ConnectionString(
                False, "u", (NodeAddress("10.0.0.1", 11210), NodeAddress("10.0.0.2", 99)), "b.x-y_z%", True
            ),
        ),
        ("couchbase://u@[::1]:1/b", ConnectionString(False, "u", (NodeAddress("::1", 1),), "b", True)),
        ("couchbase://u@[fe80::1]/b/", ConnectionString(False, "u", (NodeAddress("fe80::1", 11210),), "b")),
        ("couchbase://a%40b@h/b", ConnectionString(False, "a@b", (NodeAddress("h", 11210),), "b")),
        ("couchbase://a@b@h/b", ConnectionString(False, "a@b", (NodeAddress("h", 11210),), "b")),
        (
            "couchbases://g;h:1/b",
            ConnectionString(True, None, (NodeAddress("g", 11207), NodeAddress("h", 1)), "b", True),
        ),
        (
            "couchbases://h/b?network=external",
            ConnectionString(True, None, (NodeAddress("h", 11207),), "b", network="external"),
        ),
    ],
)
def test_a_connection_string_is_parsed_to_its_parts(text: str, meant: ConnectionString) -> None:
    assert parse(text) == meant
    again = parse(str(meant))
    for part in ("tls", "user", "addresses", "bucket", "network", "srv_name"):
        assert getattr(again, part) == getattr(meant, part)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "scheme"),
        ("localhost", "scheme"),
        ("http://h/b", "scheme"),
        ("couchbase://h", "no bucket"),
        ("couchbase://h/", "no bucket"),
        ("couchbase:///b", "host"),
        ("couchbase://u@/b", "host"),
        ("couchbase://h/a/b", "bucket's name"),
        ("couchbase://h:0/b", "port"),
        ("couchbase://h:/b", "port"),
        ("couchbase://h:65536/b", "port"),
        ("couchbase://h:x/b", "port"),
        ("couchbase://u:hunter2@h/b", "password"),
        ("couchbase://::1/b", "brackets|ambiguous"),
        ("couchbase://[::1/b", "brackets"),
        ("couchbase://[::1]x/b", "brackets"),
        ("couchbase://[host]/b", "IPv6"),
        ("couchbase://a b/b", "host"),
        ("couchbase://h/b?kv_timeout=1", "kv_timeout"),
        ("couchbase://h/b?network=elsewhere", "elsewhere"),
        ("couchbase://" + ",".join(["h"] * 65) + "/b", "hosts"),
    ],
)
def test_an_invalid_connection_string_is_one_clear_error(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse(text)
    assert caught.value.hint
    assert "hunter2" not in str(caught.value)


@given(st.text("ab1:/@[]%,.;?=& \0ä☃", max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for prefix in ("", "couchbase://"):
        with contextlib.suppress(ConfigError):
            parse(prefix + text)
