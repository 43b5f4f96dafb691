"""A worker and a service whose work is a script, for tests of supervision alone: real processes, no store, no source.

python scripted.py worker FD            the child; SCRIPT in the environment says how it behaves
python scripted.py service DATA         a supervisor of such children, until a stop command
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mirror.config import Settings
from mirror.errors import AuthRejected
from mirror.messages import HoldPositions, ProcessCommand, ProcessReport, StartMessage, StartWorker, encode
from mirror.supervise.processes.life import Send, Work, main
from storage.errors import NoSuchBoundary

if TYPE_CHECKING:
    from mirror.feed.cluster.discovery import Source

VBUCKETS = 8


def worker_command(descriptor: int) -> Sequence[str]:
    return [sys.executable, __file__, "worker", str(descriptor)]


def settings_for(data: Path, **values: Any) -> Settings:
    from mirror.config_reader import validated  # and pydantic, which the workers do without

    common = {"source": "couchbase://demo@localhost/demo", "data": data, "groups": 4, "workers": 2}
    return validated(common | values)


class ScriptedWork:
    """Streams nothing: each report is one seqno further, up to 10."""

    def __init__(self, groups: list[int], script: str) -> None:
        self.groups = groups
        self.script = script
        self.report_count = 0
        self.stopped = asyncio.Event()

    async def run(self) -> None:
        if self.script == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.script == "refused":
            raise AuthRejected("wrong password for demo")
        if self.script == "bug":
            raise ZeroDivisionError("a bug")
        await self.stopped.wait()
        if self.script == "stubborn":
            await asyncio.sleep(3600)

    async def stop(self) -> None:
        self.stopped.set()

    def status(self) -> ProcessReport:
        self.report_count += 1
        seqno = min(self.report_count, 10)
        rows = [
            {
                "vbid": vbid,
                "state": "streaming",
                "published_seqno": seqno,
                "staged_seqno": seqno,
                "source_high_seqno": 3,
                "lag_seqnos": max(0, 3 - seqno),
                "node": "db1:11210",
                "vbuuid": 0xABC,
                "documents": 1,
            }
            for vbid in range(VBUCKETS)
            if vbid % 4 in self.groups
        ]
        return {
            "vbuckets": rows,
            "counters": {"received_documents": self.report_count * 100, "received_bytes": self.report_count * 1000},
        }

    async def request(self, command: ProcessCommand) -> dict[str, Any]:
        if isinstance(command, HoldPositions) and self.script == "forgetful":
            raise NoSuchBoundary("1:5 is not kept")
        return {"heard": encode(command)}


async def make(start: StartMessage, _send: Send) -> Work:
    assert isinstance(start, StartWorker)
    return ScriptedWork(start.groups, os.environ.get("SCRIPT", ""))


async def look_up(settings: Settings, bucket_uuid: str | None = None) -> Source:
    from mirror.feed.cluster.discovery import Source

    return Source("c1", "demo", "b1", VBUCKETS)


def serve(data: Path) -> int:
    from mirror import log as logs
    from mirror.clock import SystemClock
    from mirror.supervise.supervisor import Supervisor

    logs.set_up_logs("info")
    service = Supervisor(settings_for(data), look_up, clock=SystemClock(), command=worker_command)
    return int(asyncio.run(service.run()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], make) if sys.argv[1] == "worker" else serve(Path(sys.argv[2])))
