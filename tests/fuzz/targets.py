"""Each function that reads untrusted bytes: what it may raise, and what must hold of its result.

A target takes any bytes and returns; an exception that is not the reader's own error, a hang or a large allocation is
a finding. `corpus/<target>/` holds where mutation begins, and what was once found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request

from mirror.document import values
from mirror.document.jsonpath import PathError, parse_path
from mirror.errors import MirrorError
from mirror.feed.connection.connection_string import parse as parse_connection_string
from mirror.ingest.topology import MalformedClusterMap, parse_cluster_map
from mirror.serve.http import requests as http_requests
from mirror.serve.http.problems import Problem
from mirror.serve.kv import scan_request as kv_scan_request
from mirror.server.errors import Refused
from mirror.supervise.listeners.control import ControlServer
from mirror.wire import codec_dcp, codec_kv, frame, stream_filter, system_events, xattr
from mirror.wire.constants import BODY_LENGTH_MAX, Opcode
from mirror.wire.errors import LocalProtocolError, RemoteProtocolError
from mirror.wire.events import SystemEvent
from mirror.wire.scan import Row, Run, normalise, scan
from storage.errors import CorruptedError
from storage.format import records
from storage.history import chain
from storage.model import Branch
from storage.read.view import Token
from storage.read.wait import MutationToken

ROUTES = dict.fromkeys(range(8), b"\0\0\0\1")
VBUCKETS = 1024


def wire_scan(data: bytes) -> None:
    """However the bytes are cut, the same comes out; what is stored is a document's row."""
    try:
        items, pos = scan(data, 0, ROUTES)
    except RemoteProtocolError:
        return
    assert 0 <= pos <= len(data)
    rows = _rows_of_streams(items)
    for row_key, stored in [row for each in rows.values() for row in each]:
        records.key_rows([(row_key, stored)])
        with suppress(CorruptedError):
            records.decode_row(0, Branch(1), stored)
    half = len(data) // 2
    with suppress(RemoteProtocolError):
        first, at = scan(data[:half], 0, ROUTES)
        second, _ = scan(data[at:], 0, ROUTES)
        assert _rows_of_streams(first + second) == rows


def _rows_of_streams(items: Iterable[Run | frame.Frame]) -> dict[int, list[Row]]:
    """By opaque: between streams there is no order."""
    rows: dict[int, list[Row]] = {}
    for item in items:
        if isinstance(item, Run):
            rows.setdefault(item.opaque, []).extend(item.rows)
    return rows


def _frames(data: bytes) -> Iterable[frame.Frame]:
    pos = 0
    with suppress(RemoteProtocolError):
        while frame.frame_size(data, pos, BODY_LENGTH_MAX):
            found, pos = frame.decode(data, pos)
            yield found


def dcp_codec(data: bytes) -> None:
    for found in _frames(data):
        with suppress(RemoteProtocolError):
            event = codec_dcp.decode(found)
            if isinstance(event, SystemEvent):
                system_events.decode_system_event(event)
        with suppress(RemoteProtocolError, LocalProtocolError):
            normalise(found)
    for read in (codec_dcp.decode_failover_log, codec_dcp.decode_rollback_seqno, codec_dcp.decode_all_vb_seqnos):
        with suppress(RemoteProtocolError):
            read(data)
    with suppress(RemoteProtocolError):
        stream_filter.parse_filter(data, has_stream_ids=True)


_KV_FRAMES: tuple[Callable[[frame.Frame], Any], ...] = (
    codec_kv.decode_hello, codec_kv.decode_sasl, codec_kv.decode_error_map_request,
    codec_kv.decode_cluster_config_request,
    codec_kv.decode_observe_seqno_request, codec_kv.decode_subdoc, codec_dcp.decode_all_vb_seqnos_request,
)  # fmt: skip
_KV_BYTES: tuple[Callable[[bytes], Any], ...] = (
    codec_kv.decode_features,
    codec_kv.decode_store,
    codec_kv.decode_observe_seqno,
    codec_kv.decode_lookup_specs,
    codec_kv.decode_scan_continue,
    lambda data: kv_scan_request.parse(data, takes_xattrs=True),
)


def kv_codec(data: bytes) -> None:
    for found in _frames(data):
        for read in _KV_FRAMES:
            with suppress(RemoteProtocolError):
                read(found)
    for read_bytes in _KV_BYTES:
        with suppress(RemoteProtocolError, Refused):
            read_bytes(data)


def xattrs(data: bytes) -> None:
    datatype, value = (data[0] & 7, data[1:]) if data else (0, b"")
    with suppress(RemoteProtocolError):
        if not datatype & 2:
            xattr.split(value, datatype)
    for read in (values.split, values.inflate, values.without_xattrs, values.without_body, values.tombstone_value):
        with suppress(ValueError):
            read(value, datatype)
    with suppress(PathError):
        parse_path(value.decode(errors="replace"))


def cluster_map(data: bytes) -> None:
    with suppress(MalformedClusterMap):
        found = parse_cluster_map(data, "host")
        for vbid in range(min(found.vbucket_count, 70_000)):
            found.node_of(vbid)
            found.copies_of(vbid)


def stored_records(data: bytes) -> None:
    for read in (
        records.decode_branch,
        records.decode_state,
        records.decode_manifest,
        partial(records.decode_rollback, 0),
        records.decode_pub,
    ):
        with suppress(CorruptedError):
            read(data)
    for raw in (False, True):
        with suppress(CorruptedError):
            records.decode_row(0, Branch(1), data, raw=raw)
    with suppress(CorruptedError):
        chain.boundary_of(b"\0" * 13, data, 0)


def tokens(data: bytes) -> None:
    text = data.decode(errors="replace")
    for parse in (Token.parse, MutationToken.parse):
        with suppress(ValueError):
            found = parse(text)
            assert parse(str(found)) == found
    with suppress(MirrorError):
        parse_connection_string(text)


def http_parameters(data: bytes) -> None:
    text = data.decode(errors="replace")
    with suppress(Problem):
        http_requests.Page.parse(text, VBUCKETS, 0)
    with suppress(Problem):
        http_requests.parse_position(text, VBUCKETS)
    for encoding in ("utf-8", "base64url"):
        with suppress(Problem):
            http_requests.key_bytes(text, encoding, bytes_min=1)
    with suppress(Problem):
        http_requests.collection_name(text)
    with suppress(Problem):
        http_requests.vbucket(text, VBUCKETS)
    body = _json_body(data)
    with suppress(Problem):
        http_requests.requested_keys(body)
    request = Request({"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": data})
    with suppress(Problem):
        known = http_requests.Parameters(request, {"as_of", "limit", "key", "deletions"})
        known.integer("limit", 10, 1, 1000)
        known.flag("deletions")
        known.key("key", "base64url")
        known.as_of()


def _json_body(data: bytes) -> Any:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data, "more_body": False}

    async def read() -> Any:
        return http_requests.json_of(await http_requests.read_body(Request(scope, receive), lambda _: None))

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
    try:
        return _LOOP.run_until_complete(read())
    except Problem:
        return None


_LOOP = asyncio.new_event_loop()


def control_socket(data: bytes) -> None:
    """Every line is answered, whatever it says."""

    async def handler(request: dict[str, Any]) -> dict[str, Any]:
        return {"known": sorted(map(str, request))}

    async def answer() -> dict[str, Any]:
        return await ControlServer(Path("/nonexistent"), handler)._answer(data.split(b"\n")[0])

    assert isinstance(_LOOP.run_until_complete(answer())["ok"], bool)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        wire_scan,
        dcp_codec,
        kv_codec,
        xattrs,
        cluster_map,
        stored_records,
        tokens,
        http_parameters,
        control_socket,
    )
}

OPCODES = [int(opcode) for opcode in Opcode]
"""What a mutator puts where an opcode may be."""
