"""The object store's environment. The session and the store themselves are in `sessions`."""

from __future__ import annotations

import pytest

from tests.spark.sessions import ObjectStore


@pytest.fixture
def s3(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The same, with its environment in this process."""
    for name, value in object_store.env.items():
        monkeypatch.setenv(name, value)
    return object_store
