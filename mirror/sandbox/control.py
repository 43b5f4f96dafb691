"""The control socket of a running sandbox, at which other processes request faults and changes.

A request is a line with one JSON object, `{"command": NAME, ...}`. The answer is `{"ok": true, "result": ...}` or
`{"ok": false, "error": "..."}`. `dcp-mirror sandbox fault --help` lists the commands and their arguments; the first
node has number 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from mirror.errors import ConfigError, ConnectFailed
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.data.bucket import DEFAULT_COLLECTION
from mirror.sandbox.data.documents import DocumentError
from mirror.sandbox.data.item import Item
from mirror.sandbox.node.faults import Faults
from mirror.sandbox.workload import Workload
from mirror.server.session import ALL_PRIVILEGES

LINE_BYTES_MAX = 64 * 1024
ANSWER_TIMEOUT_SECONDS = 60.0

Arguments = dict[str, Any]
Command = Callable[["SandboxControl", Arguments], Any | Awaitable[Any]]


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
            result = handler(self, checked(self, command))
            if isinstance(result, Awaitable):
                result = await result
        except KeyError as error:
            return {"ok": False, "error": f"{error.args[0]} is missing"}
        except DocumentError as error:
            return {"ok": False, "error": f"refused as a client would be: {error}"}
        except Exception as error:
            return {"ok": False, "error": str(error) or type(error).__name__}
        return {"ok": True, "result": result}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ValueError, asyncio.CancelledError):
            while line := await reader.readline():
                writer.write(json.dumps(await self.answer(line)).encode() + b"\n")
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await writer.wait_closed()  # otherwise asyncio may log the stream's error


def _whole(said: object, largest: int = 2**64 - 1) -> int:
    number = int(said) if isinstance(said, str) else said
    if type(number) is not int or not 0 <= number <= largest:
        raise ValueError
    return number


def _number(said: object) -> float:
    number = float(said) if isinstance(said, str | int | float) and not isinstance(said, bool) else -1.0
    if not 0 <= number < math.inf:
        raise ValueError
    return number


def _text(said: object) -> str:
    if not isinstance(said, str):
        raise ValueError
    said.encode()  # raises ValueError for half of a surrogate pair
    return said


WHOLE, NUMBER, TEXT = "a whole number", "a number", "a text"
KINDS: dict[str, tuple[str, Callable[[object], object]]] = {
    **dict.fromkeys(("vbid", "node", "lose", "count"), (WHOLE, _whole)),
    "rate": (NUMBER, _number),
    **dict.fromkeys(("key", "value", "collection", "path", "scope", "user", "password", "lacks"), (TEXT, _text)),
}
"""Argument of a command -> its kind in words, and its parser. Parsers also take text."""


def checked(server: SandboxControl, arguments: Arguments) -> Arguments:
    """Return the arguments with the types that the commands take; leave out nulls. Raises ValueError."""
    found = {}
    counts = {"vbid": len(server.cluster.vbuckets), "node": len(server.cluster.nodes)}
    for name, said in arguments.items():
        if name not in KINDS:
            raise ValueError(f"no such argument: {name}; there are: {', '.join(sorted(KINDS))}")
        if said is None:
            continue
        words, parse = KINDS[name]
        try:
            found[name] = parse(said)
        except (ValueError, OverflowError):
            raise ValueError(f"{name}={said} is not {words}") from None
        count = counts.get(name)
        if count is not None and _whole(found[name]) >= count:
            raise ValueError(f"{name}={said}: there are 0 to {count - 1}")
    return found


def _status(server: SandboxControl, _said: Arguments) -> Any:
    cluster = server.cluster
    owners = cluster.bucket.map.owners
    return {
        "connection_string": cluster.connection_string,
        "bucket_uuid": cluster.bucket.map.bucket_uuid,
        "profile": cluster.bucket.profile.name,
        "documents": cluster.bucket.document_count,
        "written": server.workload.written if server.workload else 0,
        "vbuckets": len(owners),
        "nodes": [
            {
                "node": node.number,
                "port": node.port,
                "tls_port": node.tls_port,
                "alive": node.alive,
                "connections": len(node.connections),
                "vbuckets": owners.count(node.number),
            }
            for node in cluster.nodes
        ],
    }


def _vbucket(server: SandboxControl, arguments: Arguments) -> Any:
    vbucket, sent = server.cluster.vbucket(arguments["vbid"]), server.cluster.sent(arguments["vbid"])
    return {
        "vbid": vbucket.vbid,
        "node": server.cluster.bucket.map.owners[vbucket.vbid],
        "high_seqno": vbucket.high_seqno,
        "purge_seqno": vbucket.purge_seqno,
        "documents": vbucket.document_count,
        "failover_log": [[entry.vbuuid, entry.seqno] for entry in vbucket.failover_log],
        "frames_sent": sent.frames,
        "bytes_sent": sent.bytes,
        "stream_requests": [request.start_seqno for request in sent.stream_requests],
    }


def _on_connections(fault: Callable[..., int]) -> Command:
    return lambda server, said: {"connections": fault(server.cluster.faults, **said)}


def _user(server: SandboxControl, arguments: Arguments) -> Any:
    users = server.cluster.bucket.users
    name, lacks = arguments["user"], frozenset(arguments.get("lacks", "").split(",")) - {""}
    if not lacks <= ALL_PRIVILEGES:
        raise ValueError(
            f"no such privilege: {min(lacks - ALL_PRIVILEGES)}; there are: {', '.join(sorted(ALL_PRIVILEGES))}"
        )
    known = users.by_name.get(name)
    password = arguments.get("password", known.password if known else None)
    if password is None:
        raise KeyError("password")
    return {"privileges": sorted(users.add(name, password, ALL_PRIVILEGES - lacks).privileges)}


def _where(arguments: Arguments) -> dict[str, Any]:
    return {"collection": arguments.get("collection", DEFAULT_COLLECTION), "vbid": arguments.get("vbid")}


def _written(item: Item) -> Any:
    return {"vbid": int.from_bytes(item.frame[6:8]), "seqno": item.seqno}


def _workload(server: SandboxControl) -> Workload:
    if server.workload is None:
        raise ValueError("there is no workload")
    return server.workload


def _write(server: SandboxControl, arguments: Arguments) -> Any:
    workload = _workload(server)
    workload.write(arguments["count"])
    return {"written": workload.written}


COMMANDS: dict[str, Command] = {
    "status": _status,
    "vbucket": _vbucket,
    "cut": _on_connections(Faults.cut),
    "silence": _on_connections(Faults.silence),
    "user": _user,
    "kill-node": lambda server, said: server.cluster.kill_node(said["node"]),
    "restart-node": lambda server, said: server.cluster.restart_node(said["node"], lose=said.get("lose")),
    "failover-node": lambda server, said: server.cluster.failover_node(said["node"], lose=said.get("lose", 0)),
    "failover": lambda server, said: {"base_seqno": server.cluster.failover(said["vbid"], lose=said.get("lose", 0))},
    "recreate-bucket": lambda server, _: server.cluster.recreate_bucket(),
    "write": _write,
    "rate": lambda server, said: setattr(_workload(server), "rate", said["rate"]),
    "set": lambda server, said: _written(server.cluster.set(said["key"], said["value"], **_where(said))),
    "delete": lambda server, said: _written(server.cluster.delete(said["key"], **_where(said))),
    "create-scope": lambda server, said: {"scope_id": server.cluster.bucket.create_scope(said["scope"])},
    "create-collection": lambda server, said: {
        "collection_id": server.cluster.bucket.create_collection(said["scope"], said["collection"])
    },
    "drop-collection": lambda server, said: server.cluster.bucket.drop_collection(said["path"]),
    "flush-collection": lambda server, said: server.cluster.bucket.flush_collection(said["path"]),
}


def default_path(port: int) -> Path:
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    return folder / f"dcp-mirror-sandbox-{port}.sock"


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
