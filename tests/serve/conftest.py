"""Empty stores with their writers, and servers over them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from mirror.clock import SystemClock
from mirror.serve.bucket.bucket import ServedBucket
from tests.serve.dcp_rig import DcpEndpoint, serving_dcp
from tests.serve.http_site import Site, Source, made, running
from tests.serve.kv_rig import Endpoint, Store, serving, with_users


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    with made(tmp_path) as opened:
        yield opened


@pytest.fixture
def site(source: Source, tmp_path: Path) -> Iterator[Site]:
    with running(tmp_path / "data", source) as served:
        yield served


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Of as many vbuckets as the module says (16), each empty, with an accepted stream."""
    made = Store(tmp_path, vbuckets=getattr(request.module, "VBUCKETS", 16))
    made.logs()
    yield made
    made.close()


@pytest.fixture
def bucket(store: Store) -> Iterator[ServedBucket]:
    opened = ServedBucket(store.path, SystemClock())
    yield opened
    opened.close()


@pytest.fixture
async def endpoint(store: Store) -> AsyncIterator[Endpoint]:
    async with serving(store.path) as served:
        yield served


@pytest.fixture
async def dcp(store: Store) -> AsyncIterator[DcpEndpoint]:
    async with serving_dcp(store.path) as served:
        yield served


@pytest.fixture
def users_file(tmp_path: Path) -> Path:
    return with_users(tmp_path / "users.json", {"ann": "pw"})


@pytest.fixture
def all_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first backfill is one snapshot, up to what is published."""
    monkeypatch.setattr("storage.read.stream_reads.SETTLED_SHARE", 0)
