from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spark.mirrors import SmallMirror


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallMirror]:
    mirror = SmallMirror(tmp_path / "data")
    yield mirror
    mirror.close()
