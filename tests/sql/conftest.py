from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mirror import View, open_view
from tests.spark.mirrors import SmallMirror


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[SmallMirror]:
    made = SmallMirror(tmp_path / "mirror")
    yield made
    made.close()


@pytest.fixture
def view(mirror: SmallMirror) -> Iterator[View]:
    with open_view(mirror.path) as opened:
        yield opened
