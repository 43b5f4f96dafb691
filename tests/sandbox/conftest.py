"""Whatever a test opened is closed behind it, also when it failed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from .client import Client


@pytest.fixture(autouse=True)
async def _nothing_stays_open() -> AsyncIterator[None]:
    yield
    for client in Client.opened:
        await client.close()
    Client.opened.clear()
    for cluster in Client.clusters:
        await cluster.stop()
    Client.clusters.clear()
