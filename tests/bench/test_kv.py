"""The benchmark's client and servers, at a size that shows only that they work."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mirror.bench import stores
from mirror.bench.kv import Memcached, Redis, measure, mirror_server, peer_server, peers

DOCUMENTS = 300


def test_the_mirror_is_measured(tmp_path: Path) -> None:
    path = str(tmp_path / "mirror")
    stores.store_rows(path, stores.own_keys(4, DOCUMENTS), snapshot_rows=DOCUMENTS)
    with mirror_server(path) as port:
        figures = measure(port, Memcached, stores.sample_keys(200, DOCUMENTS))
    assert figures.requests_per_s > 0
    assert figures.pipelined_per_s > 0
    assert 0 < figures.p50_us <= figures.p99_us


def test_a_mirror_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended before"), mirror_server(str(tmp_path)):
        pass


@pytest.mark.parametrize("name", ["memcached", "redis-server"])
def test_peers_are_measured_where_they_are_installed(name: str) -> None:
    if shutil.which(name) is None:
        assert name not in peers()
        pytest.skip(f"{name} is not installed")
    documents = [(b"k%d" % number, b"value") for number in range(DOCUMENTS)]
    with peer_server(name, documents) as (port, protocol):
        assert measure(port, protocol, [key for key, _ in documents]).requests_per_s > 0


@pytest.mark.parametrize(
    ("protocol", "answers"),
    [
        (Redis, [b"+OK\r\n", b"$5\r\nvalue\r\n", b"$-1\r\n", b"-ERR no\r\n"]),
        (Memcached, [bytes([0x81]) + bytes(10) + b"\x05" + bytes(12) + b"value", bytes([0x81]) + bytes(23)]),
    ],
)
def test_answers_are_distinguished_however_they_are_cut(
    protocol: type[Redis] | type[Memcached], answers: list[bytes]
) -> None:
    data = bytearray(b"".join(answers))
    pos = 0
    for answer in answers:
        for end in range(pos, pos + len(answer)):
            assert protocol.answer_size(data[:end], pos) == 0
        assert protocol.answer_size(data, pos) == len(answer)
        pos += len(answer)
    assert protocol.get(b"key") != protocol.set(b"key", b"value")
