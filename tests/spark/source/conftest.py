from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spark.mirrors import SmallMirror


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[SmallMirror]:
    mirror = SmallMirror(tmp_path / "data")
    yield mirror
    mirror.close()


@pytest.fixture
def small(empty: SmallMirror) -> SmallMirror:
    """Modules fill theirs."""
    return empty
