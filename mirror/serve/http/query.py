"""SQL: `POST /v1/query`.

A query runs in a separate process. An answer is sent once it is complete, so it is whole or a problem. A query ends
when its client hangs up or its time is over.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mirror.serve.http.problems import Problem
from mirror.serve.http.query_pool import Queries
from mirror.serve.http.requests import Parameters, accepts, json_of, moment
from mirror.serve.http.service import Header, Service, leaves_line, owner_of

SQL_LENGTH_MAX = 64 * 1024
JSON, ARROW = "application/json", "application/vnd.apache.arrow.stream"
MEMBERS = ("sql", "as_of", "limit_rows")
EXAMPLE = '{"sql": "SELECT count(*) FROM documents"}'


class QueryAnswer(Response):
    def __init__(self, request: Request, queries: Queries, query: dict[str, Any], owner: str) -> None:
        super().__init__(None, 200)
        self._request, self._queries, self._query, self._owner = request, queries, query, owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the query, and send its answer. Raises Problem only before anything was sent."""
        timeout_s = self._queries.settings.sql_timeout_s
        began = False
        try:
            async with asyncio.timeout(timeout_s):
                with leaves_line(self._request):
                    child = await self._queries.take(self._owner)
                try:
                    with leaves_line(self._request):
                        head = await child.ask(self._query)
                    self._request.state.service.requests.document_total += head["rows"]
                    await send({"type": "http.response.start", "status": 200, "headers": self._head(head)})
                    began = True
                    async for piece in child.pieces():
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                finally:
                    self._queries.give_back(child)
        except TimeoutError:
            if not began:
                hint = "ask for less, or raise sql_timeout_s"
                raise Problem("query-timeout", f"no answer within {timeout_s:g} s", hint=hint) from None
            scope["state"]["transport"].abort()

    def _head(self, head: dict[str, Any]) -> list[Header]:
        return [
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
            (b"content-type", (ARROW if self._query["arrow"] else JSON).encode()),
            (b"content-length", b"%d" % head["bytes"]),
            (b"mirror-truncated", json.dumps(head["truncated"]).encode()),
        ]


def parse(body: bytes, rows_max: int) -> dict[str, Any]:
    found = json_of(body)
    if not isinstance(found, dict) or not isinstance(found.get("sql"), str):
        raise Problem("bad-request", "the body is not an object with a string `sql`", hint=EXAMPLE)
    if unknown := set(found) - set(MEMBERS):
        raise Problem("bad-request", f"unknown member {min(unknown)!r}", hint=f"known here: {', '.join(MEMBERS)}")
    if len(found["sql"]) > SQL_LENGTH_MAX:
        raise Problem("bad-request", f"a query has {SQL_LENGTH_MAX} characters at most")
    limit, as_of = found.get("limit_rows"), found.get("as_of")
    if limit is not None and (type(limit) is not int or not 0 <= limit <= rows_max):
        raise Problem("bad-request", f"limit_rows is not a number from 0 to {rows_max}")
    if as_of is not None and not isinstance(as_of, str):
        raise Problem("bad-request", "as_of is not a string", hint="2026-01-31T12:00:00Z")
    as_of_ms = None if as_of is None else moment(as_of).ms
    return {"sql": found["sql"], "as_of_ms": as_of_ms, "rows_max": rows_max if limit is None else limit}


async def post_query(request: Request) -> Response:
    service: Service = request.state.service
    reader = await service.reader(request)
    Parameters(request, ())
    queries = service.queries
    if queries is None:
        raise Problem("not-found", "this service answers no SQL", hint="set sql = true")
    # Queries of a reader who may read no collection would only take places.
    manifests = () if reader.reads_all else map(service.view.manifest, service.mirror.manifest_vbids())
    if not reader.reads_all and not any(reader.may_read(name) for each in manifests for name in each.ids):
        raise Problem("forbidden", f"{reader.name or 'anonymous'} may not read any collection")
    settings = queries.settings
    async with service.body(request) as body:
        query = await service.read_in_bulk(request, partial(parse, body, settings.sql_rows_max))
    query |= {
        "arrow": accepts(request, ARROW, rather_than=JSON),
        "data": str(settings.data),
        "verify_reads": settings.verify_reads,
        "memory_bytes": settings.sql_memory_bytes,
        "patterns": sorted(reader.patterns),
    }
    return QueryAnswer(request, queries, query, owner_of(request))
