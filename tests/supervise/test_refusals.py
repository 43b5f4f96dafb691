"""Each kind of error of the source or of its login, while local data is served and while there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from mirror.config import Settings
from mirror.errors import ConnectFailed, MirrorError
from mirror.feed.cluster.discovery import Source
from mirror.supervise import setup
from mirror.supervise.setup import LookUp
from storage.env import directory
from storage.model import Identity
from tests.feed.test_errors import SOURCE_ERRORS
from tests.supervise.conftest import eventually
from tests.supervise.service import running, service_of, serving

PERMANENT = [kind for kind in SOURCE_ERRORS if not kind.retryable]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "SOURCE_RETRY_MIN_S", 0.01)
    monkeypatch.setattr(setup, "SOURCE_RETRY_MAX_S", 0.01)


class Answers:
    """The source refuses the first connection; then it answers every one with an error."""

    def __init__(self, error: MirrorError) -> None:
        self.error = error
        self.count = 0

    def look_up(self) -> LookUp:
        async def answer(settings: Settings, bucket_uuid: str | None = None) -> Source:
            self.count += 1
            raise ConnectFailed("refused") if self.count == 1 else self.error

        return answer


@pytest.mark.parametrize("kind", SOURCE_ERRORS)
async def test_a_service_with_data_goes_on_after_any_error(kind: type[MirrorError], tmp_path: Path) -> None:
    directory.create(str(tmp_path), Identity("c1", "demo", "b1", 8, 4))
    answers = Answers(kind("refused"))
    async with serving(service_of(tmp_path, look_up=answers.look_up())) as service:
        await eventually(lambda: answers.count > 1)
        await eventually(running(service))
        await eventually(lambda: service.reports.document()["source_error"] is None)  # the workers report it


@pytest.mark.parametrize("kind", PERMANENT)
async def test_a_service_without_data_ends_with_a_permanent_error(kind: type[MirrorError], tmp_path: Path) -> None:
    with pytest.raises(kind) as caught:
        await service_of(tmp_path, look_up=Answers(kind("refused")).look_up()).run()
    assert caught.value.exit_code == kind.exit_code


@pytest.mark.parametrize("kind", PERMANENT)
async def test_a_service_that_serves_no_reader_yet_ends_with_a_permanent_error(
    kind: type[MirrorError], tmp_path: Path
) -> None:
    """The first answer of the source, before readers are served, may show that the wrong settings were given."""
    directory.create(str(tmp_path), Identity("c1", "demo", "b1", 8, 4))

    async def refused(settings: Settings, bucket_uuid: str | None = None) -> Source:
        raise kind("refused")

    with pytest.raises(kind):
        await service_of(tmp_path, look_up=refused).run()
