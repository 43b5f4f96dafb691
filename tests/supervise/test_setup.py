"""Before the first worker: the source is found, and the data directory is made, refused, or set aside."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from mirror.config import Settings
from mirror.errors import BucketChanged, ConfigError, ConnectFailed, ExitCode
from mirror.feed.cluster.discovery import Source
from mirror.supervise.supervisor import RunOptions
from storage.env import directory
from storage.errors import CorruptedError
from storage.model import Identity
from storage.write.writer import GroupWriter, WriterOptions
from tests.supervise.conftest import eventually
from tests.supervise.scripted import settings_for
from tests.supervise.service import running, service_of, serving


def digest(group: str) -> bytes:
    return hashlib.sha256((Path(group) / "data.mdb").read_bytes()).digest()


async def test_workers_start_on_known_data_while_the_source_is_away(tmp_path: Path) -> None:
    directory.create(str(tmp_path), Identity("c1", "demo", "b1", 8, 4))

    async def away(settings: Settings, bucket_uuid: str | None = None) -> Source:
        raise ConnectFailed("refused")

    async with serving(service_of(tmp_path, look_up=away)) as service:
        await eventually(running(service))
        assert "source-unreachable" in [event["event"] for event in service.reports.document()["events"]]


async def test_known_data_is_served_while_the_source_is_silent(tmp_path: Path) -> None:
    directory.create(str(tmp_path), Identity("c1", "demo", "b1", 8, 4))

    async def silent(settings: Settings, bucket_uuid: str | None = None) -> Source:
        await asyncio.Event().wait()
        raise AssertionError

    settings = settings_for(tmp_path, kv="0", http="0")
    async with serving(service_of(tmp_path, look_up=silent, settings=settings)) as service:
        await eventually(lambda: set(service.reports.document()["listeners"]) == {"kv", "http"})
        assert service.reports.document()["workers"] == [], "nothing is opened before it is known whose bucket it is"


@pytest.mark.parametrize(
    "identity",
    [Identity("c1", "demo", "another", 8, 4), Identity("c1", "demo", "b1", 16, 4)],
    ids=["bucket", "vbuckets"],
)
async def test_data_of_another_bucket_is_left_unchanged(tmp_path: Path, identity: Identity) -> None:
    directory.create(str(tmp_path), identity)
    with pytest.raises(BucketChanged) as caught:
        await service_of(tmp_path).run()
    assert caught.value.exit_code is ExitCode.DATA
    assert directory.load(str(tmp_path)) == identity


async def test_a_directory_whose_description_is_missing_is_left_unchanged(tmp_path: Path) -> None:
    identity = Identity("c1", "demo", "b1", 8, 4)
    directory.create(str(tmp_path), identity)
    group = directory.group_path(str(tmp_path), 2)
    GroupWriter(group, WriterOptions(group=2, identity=identity, clock_ms=int)).close()
    (tmp_path / directory.FILE).unlink()
    before = digest(group)
    with pytest.raises(CorruptedError, match="is missing"):
        await service_of(tmp_path).run()
    assert digest(group) == before


async def test_the_number_of_groups_cannot_change_but_the_number_of_workers_can(tmp_path: Path) -> None:
    directory.create(str(tmp_path), Identity("c1", "demo", "b1", 8, 4))
    with pytest.raises(ConfigError, match="4 groups, not 2"):
        await service_of(tmp_path, options=RunOptions(required_groups=2)).run()
    async with serving(service_of(tmp_path, settings=settings_for(tmp_path, workers=3, groups=8))) as service:
        await eventually(running(service, 3))
        assert [worker["groups"] for worker in service.reports.document()["workers"]] == [[0, 3], [1], [2]]


async def test_a_mirror_of_some_collections_refuses_to_become_one_of_others(tmp_path: Path) -> None:
    selected = settings_for(tmp_path, collections="inventory.route, inventory.airline")
    async with serving(service_of(tmp_path, settings=selected)) as service:
        await eventually(running(service))
        assert service.reports.document()["selection"] == "collections inventory.airline, inventory.route"
    assert directory.load(str(tmp_path)).selection == "collections inventory.airline,inventory.route"
    for other, named in (({"scope": "inventory"}, "scope inventory"), ({"collections": "a.b"}, "collections a.b")):
        with pytest.raises(ConfigError, match=f"inventory.route, not {named}") as caught:
            await service_of(tmp_path, settings=settings_for(tmp_path, **other)).run()
        assert "leave --collection and --scope out" in str(caught.value)
    async with serving(service_of(tmp_path)) as service:  # not named again: it stays what it was made for
        await eventually(running(service))


async def test_a_mirror_of_the_whole_bucket_refuses_to_become_one_of_a_part(tmp_path: Path) -> None:
    directory.create(str(tmp_path), Identity("c1", "demo", "b1", 8, 4))
    with pytest.raises(ConfigError, match="mirrors the whole bucket, not scope inventory"):
        await service_of(tmp_path, settings=settings_for(tmp_path, scope="inventory")).run()
