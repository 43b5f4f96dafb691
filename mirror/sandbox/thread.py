"""The sandbox in a thread, for programs without asyncio. `call` and `run` use the cluster in its event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from mirror.sandbox.cluster import SandboxCluster

START_TIMEOUT_SECONDS = 30.0

P = ParamSpec("P")
T = TypeVar("T")


class SandboxThread:
    """`with SandboxThread(SandboxCluster(...)) as source:` and then `source.call(source.cluster.set, "k", {})`."""

    def __init__(self, cluster: SandboxCluster) -> None:
        self.cluster = cluster
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="sandbox", daemon=True)

    @property
    def connection_string(self) -> str:
        return self.cluster.connection_string

    def __enter__(self) -> SandboxThread:
        self._thread.start()
        self.run(self.cluster.start())
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.run(self.cluster.stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(START_TIMEOUT_SECONDS)
            self._loop.close()

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        async def called() -> T:
            return function(*args, **kwargs)

        return self.run(called())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        pending = asyncio.all_tasks(self._loop)
        for task in pending:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
