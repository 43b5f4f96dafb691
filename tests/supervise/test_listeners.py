"""Addresses and slots of the servers: what is taken, announced, started and restarted."""

from __future__ import annotations

import resource
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from mirror.config import Settings
from mirror.config_reader import validated
from mirror.errors import ConfigError
from mirror.supervise.listeners.addresses import Listeners, kind_of


def test_each_kind_has_its_slots_above_the_workers(tmp_path: Path) -> None:
    settings = Settings(kv=f"127.0.0.1:0,unix:{tmp_path}/kv.sock", http="0", kv_processes=2)
    listeners = Listeners(settings, 7)
    assert listeners.desired(settings) == {}
    listeners.reserve()
    assert listeners.desired(settings) == {1000: (), 1001: (), 2000: ()}
    assert listeners.desired(replace(settings, kv_processes=1)) == {1000: (), 2000: ()}
    assert [kind_of(slot) for slot in (0, 999, 1000, 1999, 2000, 3000, 4000)] == [
        None, None, "kv", "kv", "http", "dcp", None,
    ]  # fmt: skip
    started = listeners.start_message(1001, {})
    assert (started.kind, started.revision, len(started.listeners)) == ("kv", 7, 2)
    (inherited,) = listeners.inherited(1000)
    assert started.listeners[1] == [f"unix:{tmp_path}/kv.sock", inherited]
    assert listeners.inherited(0) == listeners.inherited(2000) == []
    assert listeners.urls() == {}, "none listens yet"
    assert listeners.ready(0) == []
    lines = listeners.ready(1001)
    urls = listeners.urls()
    assert set(urls) == {"kv"}, "the process of the other kind does not listen yet"
    assert lines == [f"kv {url}" for url in urls["kv"]]
    assert urls["kv"][0].startswith("couchbase://127.0.0.1:")
    assert urls["kv"][1] == f"unix:{tmp_path}/kv.sock"
    assert listeners.ready(1000) == []
    (line,) = listeners.ready(2000)
    assert listeners.urls() == urls | {"http": [line.removeprefix("http ")]}
    assert line.startswith("http http://127.0.0.1:")
    listeners.release()
    assert not (tmp_path / "kv.sock").exists()


def test_more_connections_than_open_files_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (1024, 1024))
    Listeners(Settings(), 1)
    with pytest.raises(ConfigError, match=r"^reader_connections_max .* needs 1176 open files"):
        Listeners(Settings(http="0"), 1)
    Listeners(Settings(http="0", reader_connections_max=800), 1)


def test_a_service_without_addresses_has_no_servers() -> None:
    listeners = Listeners(Settings(), 1)
    listeners.reserve()
    assert (listeners.desired(Settings()), listeners.urls()) == ({}, {})
    listeners.release()


def test_an_address_in_use_releases_the_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        listeners = Listeners(Settings(kv=f"{port}", http=f"{taken.getsockname()[1]}"), 1)
        with pytest.raises(ConfigError, match="http: cannot listen"):
            listeners.reserve()
        socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"kv": "nowhere"}, "kv"),
        ({"http": "0.0.0.0:80"}, "http"),
        ({"kv": "0", "users_file": "/nonexistent"}, "the users file"),
        ({"kv": "tls://127.0.0.1:0", "listen_tls_cert_file": "/nonexistent"}, "the certificate"),
        ({"kv_nodes": "a,b"}, "kv_nodes"),
        ({"kv": "11410", "http": "0,127.0.0.1:11410"}, "http"),
        ({"kv": "unix:/tmp/a", "dcp": "unix:/tmp/a"}, "dcp"),
    ],
)
def test_bad_addresses_are_refused_before_a_server_starts(values: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named} "):
        Listeners(validated(values), 1)
