"""Setting a mirror aside when the source's bucket is another one, and at no other time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mirror.errors import ConfigError, ConnectFailed, SupervisionError
from mirror.feed.cluster.discovery import Source
from mirror.supervise.lock import ServiceLock
from mirror.supervise.setup import LookUp, set_aside_another_bucket
from storage.env import directory
from storage.model import Identity
from tests.supervise.scripted import settings_for

OLD = Identity("cluster", "demo", "old-uuid", 8, 2)


def source_of(uuid: str, vbuckets: int = 8) -> LookUp:
    async def look_up(settings: object, bucket_uuid: str | None = None) -> Source:
        return Source("cluster", "demo", uuid, vbuckets)

    return look_up


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    directory.create(str(path), OLD)
    return path


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


async def test_another_bucket_moves_the_old_data_whole(data: Path) -> None:
    before = names_in(data)
    target = await set_aside_another_bucket(settings_for(data), source_of("new-uuid"))
    assert target == f"{data}.old-uuid"
    assert names_in(data) == set()
    assert directory.load(target) == OLD
    assert before <= names_in(Path(target))
    directory.create(str(data), OLD)  # it happens again: nothing that was set aside is overwritten
    assert await set_aside_another_bucket(settings_for(data), source_of("new-uuid")) == f"{data}.old-uuid.2"
    assert directory.load(f"{data}.old-uuid") == directory.load(f"{data}.old-uuid.2") == OLD


async def test_another_number_of_vbuckets_is_another_bucket(data: Path) -> None:
    assert await set_aside_another_bucket(settings_for(data), source_of("old-uuid", 16)) == f"{data}.old-uuid"


async def test_the_same_bucket_and_an_empty_directory_stay(data: Path, tmp_path: Path) -> None:
    assert await set_aside_another_bucket(settings_for(data), source_of("old-uuid")) is None
    assert directory.load(str(data)) == OLD
    assert await set_aside_another_bucket(settings_for(tmp_path / "none"), source_of("new-uuid")) is None
    with pytest.raises(ConfigError):
        await set_aside_another_bucket(replace(settings_for(data), data=None), source_of("x"))


async def test_nothing_is_touched_while_a_service_runs_or_the_source_is_silent(data: Path) -> None:
    async def silent(settings: object, bucket_uuid: str | None = None) -> Source:
        raise ConnectFailed("nobody answers")

    with pytest.raises(ConnectFailed):
        await set_aside_another_bucket(settings_for(data), silent)
    lock = ServiceLock(data)
    with pytest.raises(SupervisionError):
        await set_aside_another_bucket(settings_for(data), source_of("new-uuid"))
    lock.release()
    assert directory.load(str(data)) == OLD
