"""What a test opened is closed after it, also when it failed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.sandbox.client import Client


@pytest.fixture(autouse=True)
async def _nothing_stays_open() -> AsyncIterator[None]:
    yield
    await Client.close_all()
