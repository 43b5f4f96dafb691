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
from mirror.supervise.listeners.addresses import Listeners, kind_of, outdated_by
from tests.ports import free_port


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


def test_a_map_that_changed_has_a_later_revision() -> None:
    listeners = Listeners(Settings(kv="0"), 100)
    assert listeners.renew(100) == 101
    assert listeners.renew(150) == 150
    assert listeners.start_message(1000, {}).revision == 150


@pytest.mark.parametrize(
    ("changed", "worker", "server"),
    [
        ({"reader_connections_max"}, False, True),
        ({"kv"}, False, True),
        ({"dcp"}, False, False),
        ({"users_file", "ready_lag_limit_s"}, False, True),
        ({"batch_bytes_max"}, True, False),
        ({"log_level"}, True, True),
        ({"workers", "kv_processes", "http_processes", "kv_nodes"}, False, False),
        (set(), False, False),
    ],
)
def test_a_changed_setting_restarts_only_the_processes_that_use_it(
    changed: set[str], worker: bool, server: bool
) -> None:
    assert (outdated_by(0, changed), outdated_by(1000, changed)) == (worker, server)


def test_a_changed_address_is_bound_and_the_old_one_released(tmp_path: Path) -> None:
    first, second = free_port(), free_port()
    settings = Settings(kv=f"{first},unix:{tmp_path}/kv.sock", http="0")
    listeners = Listeners(settings, 1)
    listeners.reserve()
    listeners.ready(1000)
    listeners.ready(2000)
    urls = listeners.urls()
    listeners.change(replace(settings, kv=f"unix:{tmp_path}/kv.sock,{second}", dcp="0"))
    assert listeners.urls() == urls | {"kv": [f"unix:{tmp_path}/kv.sock"]}, "port 0 is not another after a reload"
    assert listeners.ready(1000) == [f"kv couchbase://127.0.0.1:{second}"]
    assert listeners.urls()["kv"] == [f"unix:{tmp_path}/kv.sock", f"couchbase://127.0.0.1:{second}"]
    assert set(listeners.desired(settings)) == {1000, 2000, 3000}
    assert (tmp_path / "kv.sock").exists()
    socket.create_server(("127.0.0.1", first)).close()
    listeners.change(replace(settings, kv=None))
    assert set(listeners.urls()) == {"http"}
    assert not (tmp_path / "kv.sock").exists()
    socket.create_server(("127.0.0.1", second)).close()
    listeners.release()


def test_an_unavailable_address_changes_no_listener(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = free_port()
        settings = Settings(kv=f"unix:{tmp_path}/kv.sock")
        listeners = Listeners(settings, 1)
        listeners.reserve()
        listeners.ready(1000)
        urls = listeners.urls()
        assert urls == {"kv": [f"unix:{tmp_path}/kv.sock"]}
        with pytest.raises(ConfigError, match="http: cannot listen"):
            listeners.change(Settings(kv=f"{free}", http=f"{taken.getsockname()[1]}"))
        assert listeners.urls() == urls
        assert (tmp_path / "kv.sock").exists()
        socket.create_server(("127.0.0.1", free)).close()
        with pytest.raises(ConfigError, match="is the address of kv until kv has changed"):
            listeners.change(Settings(http=f"unix:{tmp_path}/kv.sock"))
        with pytest.raises(ConfigError, match="users file"):
            listeners.change(replace(settings, users_file=tmp_path / "absent"))
        listeners.release()


def test_an_address_may_gain_tls_or_another_host_at_its_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of this service listen at the port already: that is no other service."""
    monkeypatch.setattr("mirror.supervise.listeners.addresses.server_tls", lambda _settings: None)
    monkeypatch.setattr("mirror.supervise.listeners.addresses.users_of", lambda _settings: None)
    listeners = Listeners(Settings(kv="0"), 1)
    listeners.reserve()
    (held,) = listeners.start_message(1000, {}).listeners
    port = held[0].rpartition(":")[2]
    with socket.socket() as serving:
        serving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        serving.bind(("127.0.0.1", int(port)))
        serving.listen()
        settings = Settings(
            kv=f"tls://127.0.0.1:{port}", listen_tls_cert_file=tmp_path / "cert", users_file=tmp_path / "users"
        )
        listeners.change(settings)
        assert listeners.start_message(1000, {}).listeners == [[f"tls://127.0.0.1:{port}", None]]
        listeners.change(replace(settings, kv=f"tls://0.0.0.0:{port}"))
        assert listeners.start_message(1000, {}).listeners == [[f"tls://0.0.0.0:{port}", None]]
    listeners.release()
