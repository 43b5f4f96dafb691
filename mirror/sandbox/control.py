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
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mirror.errors import ConfigError, ConnectFailed
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.data.bucket import DEFAULT_COLLECTION
from mirror.sandbox.data.documents import DocumentError
from mirror.sandbox.data.item import Item
from mirror.sandbox.node.faults import Faults
from mirror.sandbox.workload import Workload
from mirror.server.session import ALL_PRIVILEGES
from mirror.wire import codec_dcp
from mirror.wire.constants import Status, StreamEndReason

LINE_BYTES_MAX = 64 * 1024
ANSWER_TIMEOUT_SECONDS = 60.0

Arguments = dict[str, Any]
Code = TypeVar("Code", bound=IntEnum)
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


USUAL_REFUSALS = (
    Status.KEY_EEXISTS,
    Status.EINVAL,
    Status.NOT_MY_VBUCKET,
    Status.AUTH_STALE,
    Status.ERANGE,
    Status.ROLLBACK,
    Status.EACCESS,
    Status.ENOMEM,
    Status.NOT_SUPPORTED,
    Status.ETMPFAIL,
    Status.UNKNOWN_COLLECTION,
    Status.UNKNOWN_SCOPE,
    Status.DCP_STREAM_ID_INVALID,
)
"""Usual statuses of refused stream requests, for error texts. `refuse-streams` takes other statuses, too."""


def _whole(said: object, largest: int = 2**64 - 1) -> int:
    number = int(said) if isinstance(said, str) else said
    if type(number) is not int or not 0 <= number <= largest:
        raise ValueError
    return number


def _wholes(said: object) -> list[int]:
    parts = said.split(",") if isinstance(said, str) else said if isinstance(said, list) else [said]
    if not parts:
        raise ValueError
    return [_whole(part) for part in parts]


def _number(said: object) -> float:
    number = float(said) if isinstance(said, str | int | float) and not isinstance(said, bool) else -1.0
    if not 0 <= number < math.inf:
        raise ValueError
    return number


def _flag(said: object) -> bool:
    if said not in (True, False, "true", "false"):
        raise ValueError
    return said in (True, "true")


def _text(said: object) -> str:
    if not isinstance(said, str):
        raise ValueError
    said.encode()  # raises ValueError for half of a surrogate pair
    return said


def _text_or_whole(said: object) -> str | int:
    return said if isinstance(said, str) else _whole(said)


WHOLE, NUMBER, FLAG, TEXT = "a whole number", "a number", "true or false", "a text"
KINDS: dict[str, tuple[str, Callable[[object], object]]] = {
    **dict.fromkeys(("vbid", "node", "lose", "times", "seqno", "below_seqno", "count"), (WHOLE, _whole)),
    **dict.fromkeys(("pieces", "after_pieces", "antilag_items"), (WHOLE, _whole)),
    "max_ttl": (WHOLE, partial(_whole, largest=2**32 - 1)),
    **dict.fromkeys(("vbids", "nodes"), ("a list of whole numbers", _wholes)),
    **dict.fromkeys(("bytes_per_second", "rate"), (NUMBER, _number)),
    **dict.fromkeys(("future", "dcp_only", "history"), (FLAG, _flag)),
    **dict.fromkeys(("name", "key", "value", "collection", "path", "scope"), (TEXT, _text)),
    **dict.fromkeys(("user", "password", "lacks", "cert"), (TEXT, _text)),
    **dict.fromkeys(("status", "reason"), ("a name or number", _text_or_whole)),
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
        count = counts.get(name.removesuffix("s"))
        if count is not None and max(_wholes(found[name])) >= count:
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


def _refuse_streams(server: SandboxControl, arguments: Arguments) -> None:
    seqno = arguments.get("seqno")
    server.cluster.faults.streams.refuse(
        _one_of(Status, arguments["status"]),
        arguments.get("vbids"),
        times=arguments.get("times"),
        value=None if seqno is None else codec_dcp.encode_rollback_seqno(seqno),
    )


def _end_streams(server: SandboxControl, arguments: Arguments) -> Any:
    reason = _one_of(StreamEndReason, arguments["reason"])
    return {"streams": server.cluster.faults.end_streams(reason, arguments.get("vbids"), node=arguments.get("node"))}


def _one_of(kind: type[Code], said: object) -> Code:
    for member in kind:
        if str(said) == str(int(member)) or str(said).upper().replace("-", "_") == member.name:
            return member
    usual = ", ".join(member.name for member in (USUAL_REFUSALS if kind is Status else kind))
    raise ValueError(f"no such {kind.__name__}: {said}; there are: {usual}")


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


def _rotate_certificate(server: SandboxControl, arguments: Arguments) -> Any:
    tls = server.cluster.tls
    if tls is None:
        raise ValueError("the source speaks no TLS")
    files = [Path(arguments[name]) if name in arguments else None for name in ("cert", "key")]
    tls.rotate(*files)
    return {"cert": str(tls.cert_file)}


def _split_off(server: SandboxControl, arguments: Arguments) -> None:
    server.cluster.split_off(arguments["node"])


def _prepare(server: SandboxControl, arguments: Arguments) -> Any:
    return _written(server.cluster.bucket.prepare(arguments["key"], arguments.get("value"), **_where(arguments)))


async def _named(name: str, result: Awaitable[Any]) -> Any:
    return {name: await result}


def _where(arguments: Arguments) -> dict[str, Any]:
    return {"collection": arguments.get("collection", DEFAULT_COLLECTION), "vbid": arguments.get("vbid")}


def _written(item: Item) -> Any:
    return {"vbid": int.from_bytes(item.frame[6:8]), "seqno": item.seqno}


def _tune(server: SandboxControl, arguments: Arguments) -> Any:
    tuning = server.cluster.bucket.tuning
    tuning.antilag_items = arguments.get("antilag_items", tuning.antilag_items)
    return {"antilag_items": tuning.antilag_items}


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
    "slow": _on_connections(Faults.slow),
    "garble": _on_connections(Faults.garble),
    "silence": _on_connections(Faults.silence),
    "truncate": _on_connections(Faults.truncate),
    "stop-mid-snapshot": _on_connections(Faults.stop_mid_snapshot),
    "refuse-streams": _refuse_streams,
    "end-streams": _end_streams,
    "mute-streams": lambda server, said: server.cluster.faults.streams.mute(said.get("vbids"), node=said.get("node")),
    "withhold-noops": lambda server, _: setattr(server.cluster.faults.streams, "noops_withheld", True),
    "clear": lambda server, _: server.cluster.faults.clear(),
    "user": _user,
    "rotate-certificate": _rotate_certificate,
    "kill-node": lambda server, said: server.cluster.kill_node(said["node"]),
    "restart-node": lambda server, said: server.cluster.restart_node(said["node"], lose=said.get("lose")),
    "split-off": _split_off,
    "failover-node": lambda server, said: server.cluster.failover_node(said["node"], lose=said.get("lose", 0)),
    "failover": lambda server, said: {"base_seqno": server.cluster.failover(said["vbid"], lose=said.get("lose", 0))},
    "move": lambda server, said: server.cluster.move(said["vbid"], said["node"]),
    "add-node": lambda server, _: _named("node", server.cluster.add_node()),
    "rebalance": lambda server, said: _named("moved", server.cluster.rebalance(said.get("nodes"))),
    "to-disk": lambda server, said: server.cluster.bucket.to_disk(said.get("vbid")),
    "purge": lambda server, said: server.cluster.bucket.purge(said.get("vbid"), said.get("below_seqno")),
    "discard-history": lambda server, said: server.cluster.bucket.discard_history(
        said.get("vbid"), said.get("below_seqno")
    ),
    "set": lambda server, said: _written(server.cluster.set(said["key"], said["value"], **_where(said))),
    "delete": lambda server, said: _written(server.cluster.delete(said["key"], **_where(said))),
    "prepare": _prepare,
    "commit": lambda server, said: _written(server.cluster.bucket.commit(said["key"], **_where(said))),
    "abort": lambda server, said: _written(server.cluster.bucket.abort(said["key"], **_where(said))),
    "tune": _tune,
    "expire": lambda server, said: {"expired": server.cluster.bucket.expire_all(said.get("vbid"))},
    "create-scope": lambda server, said: {"scope_id": server.cluster.bucket.create_scope(said["scope"])},
    "create-collection": lambda server, said: {
        "collection_id": server.cluster.bucket.create_collection(
            said["scope"], said["collection"], max_ttl=said.get("max_ttl")
        )
    },
    "modify-collection": lambda server, said: server.cluster.bucket.modify_collection(
        said["path"], max_ttl=said.get("max_ttl"), history=said.get("history", False)
    ),
    "drop-scope": lambda server, said: server.cluster.bucket.drop_scope(said["scope"]),
    "drop-collection": lambda server, said: server.cluster.bucket.drop_collection(said["path"]),
    "flush-collection": lambda server, said: server.cluster.bucket.flush_collection(said["path"]),
    "recreate-bucket": lambda server, _: server.cluster.recreate_bucket(),
    "write": _write,
    "rate": lambda server, said: setattr(_workload(server), "rate", said["rate"]),
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
