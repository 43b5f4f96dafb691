"""The source's control socket: faults and changes of topology on request, from another process.

A line holds one JSON object: `{"command": NAME, ...}`, answered by `{"ok": true, "result": ...}` or `{"ok": false,
"error": "..."}`. Invariant: a bad command has no effect, and the connection stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from mirror.errors import ConfigError, ConnectFailed, MirrorError
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.control.commands import COMMANDS, check_numbers
from mirror.sandbox.data.documents import DocumentError
from mirror.sandbox.workload import Workload

LINE_BYTES_MAX = 64 * 1024
ANSWER_TIMEOUT_SECONDS = 60.0


def default_path(port: int) -> Path:
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    return folder / f"dcp-mirror-sandbox-{port}.sock"


class SandboxControl:
    def __init__(self, cluster: SandboxCluster, workload: Workload | None, path: Path) -> None:
        self.cluster = cluster
        self.workload = workload
        self.path = path
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=LINE_BYTES_MAX)
        self.path.chmod(0o600)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()

    async def answer(self, line: bytes) -> dict[str, object]:
        try:
            command = json.loads(line)
            handler = COMMANDS[command.pop("command")]
        except (ValueError, KeyError, TypeError, AttributeError):
            return {"ok": False, "error": f"no such command; there are: {', '.join(COMMANDS)}"}
        try:
            check_numbers(self, command)
            result = handler(self, command)
            if isinstance(result, Awaitable):
                result = await result
        except KeyError as error:
            return {"ok": False, "error": f"{error.args[0]} is missing"}
        except DocumentError as error:
            return {"ok": False, "error": f"refused as a client would be: {error}"}
        except (TypeError, ValueError, LookupError, MirrorError) as error:
            return {"ok": False, "error": str(error) or type(error).__name__}
        return {"ok": True, "result": result}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ValueError, asyncio.CancelledError):
            while line := await reader.readline():
                writer.write(json.dumps(await self.answer(line)).encode() + b"\n")
                await writer.drain()
        writer.close()


def ask(path: Path, command: str, /, **arguments: object) -> Any:
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(ANSWER_TIMEOUT_SECONDS)
            link.connect(str(path))
            link.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")
            with link.makefile("rb") as lines:
                answer = json.loads(lines.readline() or b"null")
    except (OSError, ValueError) as error:
        raise ConnectFailed(
            f"no source answers at {path}: {error}", hint="start `dcp-mirror sandbox`, or name its --control socket"
        ) from error
    if not isinstance(answer, dict) or not answer.get("ok"):
        raise ConfigError(answer["error"] if isinstance(answer, dict) else f"the source at {path} hung up")
    return answer["result"]
