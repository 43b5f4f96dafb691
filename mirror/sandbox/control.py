"""The source's control socket: faults and topology changes on request, from another process.

Knows commands as JSON and what of the cluster they call; must never know documents or clients. One JSON object a line
on a Unix socket, answered by one line: `{"ok": true, "result": ...}` or `{"ok": false, "error": "..."}`. A command is
`{"command": NAME, ...}` with the arguments below; numbers of nodes begin at 0. Invariant: a bad command changes
nothing and ends nothing.

    status                                           nodes, vbuckets, documents, connection string
    vbucket       vbid                               seqnos, failover log, accepted stream requests
    fault         kind, [node, name, dcp_only, future, bytes_per_second, pieces, after_pieces]
                  kind: cut slow garble silence truncate stop-mid-snapshot clear
                  kind: refuse-streams  status, [vbids, times, seqno]      requests are answered with a status
                  kind: end-streams     reason, [vbids, node]              open streams end
                  kind: mute-streams    [vbids, node]                      they fall silent, until clear
                  kind: withhold-noops                                     until clear
                  a status or reason is a name (ROLLBACK, lost-privileges) or its number
    rotate-certificate  [cert, key]                  another certificate (by default: the old files read again)
    user          user, [password, lacks]            made or changed; lacks: privileges, with commas between
    kill-node     node                               its process dies
    restart-node  node, [lose]                       and comes back; with lose it crashed
    failover-node node, [lose]                       others take its vbuckets
    failover      vbid, [lose]                       a vbucket fails over, its newest changes are lost
    move          vbid, node                         a vbucket moves
    add-node                                         a node joins (without vbuckets)
    rebalance     [nodes]                            vbuckets are spread over these nodes, or all
    to-disk, purge, expire   [vbid]                  forget memory; compact; run the expiry pager
    create-scope  scope
    create-collection  scope, collection, [max_ttl]
    drop-scope    scope
    drop-collection, flush-collection  path          scope.collection
    recreate-bucket                                  deleted and made anew, empty
    write         count                              the workload's next operations, at once
    rate          rate                               operations per second of the workload from now on
"""

from __future__ import annotations

import asyncio
import contextlib
import json
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
from mirror.sandbox.faults import Faults
from mirror.sandbox.manifest import ManifestError
from mirror.sandbox.users import ALL_PRIVILEGES
from mirror.sandbox.workload import Workload
from mirror.wire import codec_dcp
from mirror.wire.constants import Status, StreamEndReason

LINE_BYTES_MAX = 64 * 1024
ANSWER_TIMEOUT_SECONDS = 60.0

Arguments = dict[str, Any]
Code = TypeVar("Code", bound=IntEnum)
Command = Callable[["ControlServer", Arguments], Any | Awaitable[Any]]


def default_path(port: int) -> Path:
    """Where the control socket of a source lies, by the port of its first node."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    return folder / f"dcp-mirror-sandbox-{port}.sock"


class ControlServer:
    """The listening side."""

    def __init__(self, cluster: SandboxCluster, workload: Workload | None, path: Path) -> None:
        """The cluster runs in the same loop."""
        self.cluster = cluster
        self.workload = workload
        self.path = path
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen; a socket left behind by a source that is gone is replaced."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=LINE_BYTES_MAX)
        self.path.chmod(0o600)

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()

    async def answer(self, line: bytes) -> dict[str, Any]:
        """What a command's line is answered."""
        try:
            command = json.loads(line)
            handler = _COMMANDS[command.pop("command")]
        except (ValueError, KeyError, TypeError, AttributeError):
            return {"ok": False, "error": f"no such command; there are: {', '.join(_COMMANDS)}"}
        try:
            result = handler(self, command)
            if isinstance(result, Awaitable):
                result = await result
        except KeyError as error:
            return {"ok": False, "error": f"{error.args[0]} is missing"}
        except (TypeError, ValueError, IndexError, LookupError, ManifestError) as error:
            return {"ok": False, "error": str(error) or type(error).__name__}
        return {"ok": True, "result": result}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ValueError, asyncio.CancelledError):
            while line := await reader.readline():
                writer.write(json.dumps(await self.answer(line)).encode() + b"\n")
                await writer.drain()
        writer.close()


def ask(path: Path, command: str, /, **arguments: object) -> Any:
    """Give a command to the source whose control socket is at `path`; returns its result."""
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


def _status(server: ControlServer, _arguments: Arguments) -> Any:
    cluster = server.cluster
    owners = cluster.bucket.map.owners
    return {
        "connection_string": cluster.connection_string,
        "bucket_uuid": cluster.bucket.map.bucket_uuid,
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


def _vbucket(server: ControlServer, arguments: Arguments) -> Any:
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


def _fault(server: ControlServer, arguments: Arguments) -> Any:
    faults = server.cluster.faults
    kind = arguments.pop("kind")
    known: dict[str, Callable[..., int | None]] = {
        "cut": faults.cut,
        "slow": faults.slow,
        "garble": faults.garble,
        "silence": faults.silence,
        "truncate": faults.truncate,
        "stop-mid-snapshot": faults.stop_mid_snapshot,
        "refuse-streams": partial(_refuse_streams, faults),
        "end-streams": partial(_end_streams, faults),
        "mute-streams": partial(_mute_streams, faults),
        "withhold-noops": faults.withhold_noops,
        "clear": faults.clear,
    }
    if kind not in known:
        raise ValueError(f"no such fault: {kind}; there are: {', '.join(known)}")
    count = known[kind](**arguments)
    return {"streams" if kind == "end-streams" else "connections": count}


def _refuse_streams(
    faults: Faults, status: object, vbids: object = None, times: int | None = None, seqno: int | None = None
) -> None:
    value = None if seqno is None else codec_dcp.encode_rollback_seqno(seqno)
    faults.refuse_streams(_one_of(Status, status), _vbids(vbids), times=times, value=value)


def _end_streams(faults: Faults, reason: object, vbids: object = None, node: int | None = None) -> int:
    return faults.end_streams(_one_of(StreamEndReason, reason), _vbids(vbids), node=node)


def _mute_streams(faults: Faults, vbids: object = None, node: int | None = None) -> None:
    faults.mute_streams(_vbids(vbids), node=node)


def _one_of(kind: type[Code], said: object) -> Code:
    """A status or reason by its name or number. Raises ValueError with the names that there are."""
    for member in kind:
        if said == int(member) or str(said).upper().replace("-", "_") == member.name:
            return member
    raise ValueError(f"no such {kind.__name__}: {said}; there are: {', '.join(member.name for member in kind)}")


def _vbids(said: object) -> list[int] | None:
    """A number, several, or none for all."""
    if said is None:
        return None
    vbids = [vbid for vbid in (said if isinstance(said, list) else [said]) if isinstance(vbid, int)]
    if said != vbids and [said] != vbids:
        raise ValueError(f"vbids are numbers with commas between, not {said!r}")
    return vbids


def _user(server: ControlServer, arguments: Arguments) -> Any:
    users = server.cluster.bucket.users
    name, lacks = arguments["user"], frozenset(str(arguments.get("lacks", "")).split(",")) - {""}
    if not lacks <= ALL_PRIVILEGES:
        raise ValueError(
            f"no such privilege: {min(lacks - ALL_PRIVILEGES)}; there are: {', '.join(sorted(ALL_PRIVILEGES))}"
        )
    known = users.by_name.get(name)
    password = arguments.get("password", known.password if known else None)
    if password is None:
        raise KeyError("password")
    return {"privileges": sorted(users.add(name, str(password), ALL_PRIVILEGES - lacks).privileges)}


def _rotate_certificate(server: ControlServer, arguments: Arguments) -> Any:
    tls = server.cluster.tls
    if tls is None:
        raise ValueError("the source speaks no TLS")
    files = [Path(arguments[name]) if name in arguments else None for name in ("cert", "key")]
    tls.rotate(*files)
    return {"cert": str(tls.cert_file)}


async def _kill(server: ControlServer, arguments: Arguments) -> None:
    await server.cluster.kill_node(arguments["node"])


async def _restart(server: ControlServer, arguments: Arguments) -> None:
    await server.cluster.restart_node(arguments["node"], lose=arguments.get("lose"))


async def _failover_node(server: ControlServer, arguments: Arguments) -> None:
    await server.cluster.failover_node(arguments["node"], lose=arguments.get("lose", 0))


def _failover(server: ControlServer, arguments: Arguments) -> Any:
    return {"base_seqno": server.cluster.failover(arguments["vbid"], lose=arguments.get("lose", 0))}


def _move(server: ControlServer, arguments: Arguments) -> None:
    server.cluster.move(arguments["vbid"], arguments["node"])


async def _add_node(server: ControlServer, _arguments: Arguments) -> Any:
    return {"node": await server.cluster.add_node()}


async def _rebalance(server: ControlServer, arguments: Arguments) -> Any:
    return {"moved": await server.cluster.rebalance(arguments.get("nodes"))}


def _to_disk(server: ControlServer, arguments: Arguments) -> None:
    server.cluster.bucket.to_disk(arguments.get("vbid"))


def _purge(server: ControlServer, arguments: Arguments) -> None:
    server.cluster.bucket.purge(arguments.get("vbid"))


def _expire(server: ControlServer, arguments: Arguments) -> Any:
    return {"expired": server.cluster.bucket.expire_all(arguments.get("vbid"))}


def _create_scope(server: ControlServer, arguments: Arguments) -> Any:
    return {"scope_id": server.cluster.bucket.create_scope(arguments["scope"])}


def _create_collection(server: ControlServer, arguments: Arguments) -> Any:
    id_ = server.cluster.bucket.create_collection(
        arguments["scope"], arguments["collection"], max_ttl=arguments.get("max_ttl")
    )
    return {"collection_id": id_}


def _drop_scope(server: ControlServer, arguments: Arguments) -> None:
    server.cluster.bucket.drop_scope(arguments["scope"])


def _drop_collection(server: ControlServer, arguments: Arguments) -> None:
    server.cluster.bucket.drop_collection(arguments["path"])


def _flush_collection(server: ControlServer, arguments: Arguments) -> None:
    server.cluster.bucket.flush_collection(arguments["path"])


async def _recreate(server: ControlServer, _arguments: Arguments) -> None:
    await server.cluster.recreate_bucket()


def _write(server: ControlServer, arguments: Arguments) -> Any:
    if server.workload is None:
        raise ValueError("there is no workload")
    server.workload.write(arguments["count"])
    return {"written": server.workload.written}


def _rate(server: ControlServer, arguments: Arguments) -> None:
    if server.workload is None:
        raise ValueError("there is no workload")
    server.workload.set_rate(float(arguments["rate"]))


_COMMANDS: dict[str, Command] = {
    "status": _status,
    "vbucket": _vbucket,
    "fault": _fault,
    "user": _user,
    "rotate-certificate": _rotate_certificate,
    "kill-node": _kill,
    "restart-node": _restart,
    "failover-node": _failover_node,
    "failover": _failover,
    "move": _move,
    "add-node": _add_node,
    "rebalance": _rebalance,
    "to-disk": _to_disk,
    "purge": _purge,
    "expire": _expire,
    "create-scope": _create_scope,
    "create-collection": _create_collection,
    "drop-scope": _drop_scope,
    "drop-collection": _drop_collection,
    "flush-collection": _flush_collection,
    "recreate-bucket": _recreate,
    "write": _write,
    "rate": _rate,
}
