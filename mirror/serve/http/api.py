"""The HTTP application: its routes, and the guard around each of them.

An unexpected error is logged here with its traceback, and the client gets only "internal".
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from importlib import resources
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mirror import __version__
from mirror.log import get_logger
from mirror.serve.access.auth import Reader
from mirror.serve.http.changes import get_changes
from mirror.serve.http.documents import get_document, get_documents, scan_documents
from mirror.serve.http.problems import MEDIA_TYPE, TITLES, TYPE_PREFIX, Problem, internal, of_http, of_storage
from mirror.serve.http.query import post_query
from mirror.serve.http.requests import Parameters, header, routed, vbucket
from mirror.serve.http.service import Memory, Service, refuse_websites
from mirror.serve.http.status import Report
from mirror.serve.metrics import CONTENT_TYPE, STATES, exposition
from mirror.serve.objects import dumps, rollback_object
from storage.errors import StorageError
from storage.model import DOCUMENT_FIELDS

BOUNDARIES_SHOWN = 100
FRESH = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}
PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}

log = get_logger("http")


async def _reader(request: Request) -> tuple[Service, Reader]:
    service: Service = request.state.service
    reader = await service.reader(request)
    Parameters(request, ())
    return service, reader


def _answer(value: Any) -> Response:
    return _json(dumps(value))


def _json(body: bytes) -> Response:
    return Response(body, 200, FRESH, "application/json")


async def get_collections(request: Request) -> Response:
    service, reader = await _reader(request)
    return _json(await service.read_in_bulk(request, partial(_collections, service, reader)))


def _collections(service: Service, reader: Reader) -> bytes:
    found: dict[int, object] = {}
    for vbid in service.mirror.manifest_vbids():
        manifest = service.view.manifest(vbid)
        for entry in manifest.collections.values():
            scope = manifest.scopes.get(entry.scope_id, "?")
            if reader.may_read(f"{scope}.{entry.name}"):
                row = {"collection_id": entry.collection_id, "scope": scope, "name": entry.name}
                found[entry.collection_id] = row | {"max_ttl": entry.max_ttl}
    return dumps({"collections": [found[each] for each in sorted(found)]})


async def _overseer(request: Request) -> Service:
    """Return the service if the reader reads everything: the status names paths, users and other readers."""
    service, reader = await _reader(request)
    if not reader.reads_all:
        raise Problem("forbidden", "the status is for readers of everything", hint="/readyz and /metrics are for all")
    return service


async def get_status(request: Request) -> Response:
    return _json(await (await _overseer(request)).status.rendered(dumps))


async def get_vbuckets(request: Request) -> Response:
    return _json(await (await _overseer(request)).status.rendered(_rows))


def _rows(report: Report) -> bytes:
    return dumps({"vbuckets": report["vbuckets"]})


async def get_vbucket(request: Request) -> Response:
    service = await _overseer(request)
    view = service.view
    vbid = vbucket(request.path_params["vbid"], view.identity.vbucket_count)
    report = await service.status.report()
    rows = [row for row in report["vbuckets"] if row["vbid"] == vbid]
    state = view.state(vbid)
    boundaries = view.boundaries(vbid)
    return _answer(
        {
            "status": rows[0] if rows else None,
            "failover_log": [{"vbuuid": f"{entry.vbuuid:012x}", "seqno": entry.seqno} for entry in state.failover_log],
            "boundaries": [
                {
                    "branch": each.branch,
                    "seqno": each.seqno,
                    "snap_start_seqno": each.snap_start_seqno,
                    "vbuuid": f"{each.vbuuid:012x}",
                    "time_ms": each.time_ms,
                }
                for each in boundaries[:BOUNDARIES_SHOWN]
            ],
            "boundary_count": len(boundaries),
            "history_floor_seqno": state.history_floor_seqno,
            "local_purge_seqno": state.local_purge_seqno,
            "source_purge_seqno": state.source_purge_seqno,
            "stale": view.stale(vbid),
            "rollbacks": [rollback_object(each) for each in view.rollbacks(vbid)[-BOUNDARIES_SHOWN:]],
        }
    )


async def get_metrics(request: Request) -> Response:
    service: Service = request.state.service
    await service.reader(request)
    text = await service.status.rendered(exposition)
    return Response(text, 200, FRESH | {"Content-Type": CONTENT_TYPE})


async def get_livez(request: Request) -> Response:
    Parameters(request, ())
    return _answer({"status": "alive"})


async def get_readyz(request: Request) -> Response:
    """Ready: `mirror.health` finds no reason against it. Only readers of everything get the reasons in detail."""
    service: Service = request.state.service
    try:
        reads_all = (await service.reader(request)).reads_all
    except Problem:
        if header(request, b"authorization") is not None:
            raise
        reads_all = False
    Parameters(request, ())
    try:
        report = await service.status.report()
        reasons = report["reasons"] if reads_all or not report["reasons"] else [report["state"]]
    except StorageError as error:
        problem = of_storage(error)
        reasons = [problem.detail if reads_all else problem.title]
    if service.stopping.is_set():
        reasons = ["this process stops"]
    if reasons:
        raise Problem("unavailable", "not ready: " + "; ".join(reasons), reasons=reasons)
    return _answer({"status": "ready"})


async def get_openapi(request: Request) -> Response:
    Parameters(request, ())
    headers = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
    return Response(description(), 200, headers, "application/json")


def page_file(name: str) -> bytes:
    return resources.files("mirror.serve").joinpath("page", name).read_bytes()


@cache
def description() -> bytes:
    """Return `page/openapi.json`, completed with version, fields of a document, states, problems and HEAD."""
    found: dict[str, Any] = json.loads(page_file("openapi.json"))
    found["info"]["version"] = __version__
    components = found["components"]
    schemas = components["schemas"]
    number = {"type": "integer", "minimum": 0}
    members = {each.name: number | {"description": each.meaning} for each in DOCUMENT_FIELDS if each.in_json}
    schemas["Document"]["properties"] = members | schemas["Document"]["properties"]
    schemas["Document"]["required"] += members
    schemas["Vbucket"]["properties"]["state"]["enum"] = list(STATES)
    schemas["Problem"]["properties"]["type"]["enum"] = [TYPE_PREFIX + name for name in TITLES]
    titles: dict[str, list[str]] = {}
    for status, title in TITLES.values():
        titles.setdefault(str(status), []).append(title)
    bodyless = {code: {"description": " / ".join(each)} for code, each in titles.items()}
    problem = {"content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}
    components["responses"] = {code: answer | problem for code, answer in bodyless.items()}
    for each in DOCUMENT_FIELDS:
        name = f"Mirror-{each.name.replace('_', '-').title()}"
        components["headers"][name] = {"description": each.meaning, "required": True, "schema": number}
    answers = found["paths"]["/v1/collections/{collection}/documents/{key}"]["get"]["responses"]
    for code in ("200", "304"):
        answers[code]["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in components["headers"]}
    for path in found["paths"].values():
        if (get := path.get("get")) is None:
            continue
        heads = {code: bodyless.get(code, answer) for code, answer in get["responses"].items()}
        heads = {code: {name: answer[name] for name in answer if name != "content"} for code, answer in heads.items()}
        named = {"operationId": f"head_of_{get['operationId']}", "summary": f"Headers of: {get['summary']}"}
        path["head"] = get | named | {"responses": heads}
    return dumps(found)


def _page(name: str, media_type: str) -> Callable[[Request], Any]:
    body = page_file(name)

    async def get_page(_: Request) -> Response:
        return Response(body, 200, PAGE_HEADERS, media_type)

    return get_page


class GuardedApp:
    """Counts requests, turns errors into problems, and refuses an answer if its reader's rights changed meanwhile."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "there are no websockets, and no lifespan"
        started = self._service.clock.monotonic()
        status = byte_count = 0
        scope["path"] = routed(scope["raw_path"])
        scope["app"] = self._app  # else starlette itself would answer paths without a route
        state = scope.setdefault("state", {})
        state["service"] = self._service
        memory = state["memory"] = Memory(self._service.budget)

        async def counted(message: Message) -> None:
            nonlocal status, byte_count
            if message["type"] == "http.response.start":
                reader = state.pop("reader", None)  # else the refusal would be refused
                if reader is not None:
                    if refusal := self._service.rights_changed(reader):
                        raise refusal
                    state["reader"] = reader
                status = message["status"]
            else:
                byte_count += len(message.get("body", b""))
            await send(message)

        try:
            refuse_websites(Request(scope))
            await self._app(scope, receive, counted)
        except Exception as error:
            response = _problem_of(error, scope).response()  # no variable has the error: its frames hold the request
            if status:
                raise
            reader = state.pop("reader", None)
            if reader is not None and (refusal := self._service.rights_changed(reader)):
                response = refusal.response()
            await response(scope, receive, counted)
        finally:
            memory.hold(0)
            seconds = None if _route(scope) == "get_changes" else self._service.clock.monotonic() - started
            self._service.requests.answered(seconds, byte_count)


def _route(scope: Scope) -> str:
    return getattr(scope.get("endpoint"), "__name__", "none")


def _problem_of(error: Exception, scope: Scope) -> Problem:
    if isinstance(error, Problem):
        return error
    if isinstance(error, HTTPException):
        return of_http(error)
    if isinstance(error, StorageError):
        problem = of_storage(error)
        if problem.status == 500:
            log.error("read-failed", error=str(error))
        return problem
    log.exception("internal error", route=_route(scope))
    return internal()


def make_app(service: Service) -> GuardedApp:
    collection = "/v1/collections/{collection}"
    get = ["GET"]
    routes = [
        Route(f"{collection}/documents/{{key:path}}", get_document, methods=get),
        Route(f"{collection}/documents", scan_documents, methods=get),
        Route(f"{collection}/multi-get", get_documents, methods=["POST"]),
        Route("/v1/collections", get_collections, methods=get),
        Route("/v1/changes", get_changes, methods=get),
        Route("/v1/query", post_query, methods=["POST"]),
        Route("/v1/vbuckets", get_vbuckets, methods=get),
        Route("/v1/vbuckets/{vbid}", get_vbucket, methods=get),
        Route("/v1/status", get_status, methods=get),
        Route("/metrics", get_metrics, methods=get),
        Route("/livez", get_livez, methods=get),
        Route("/readyz", get_readyz, methods=get),
        Route("/openapi.json", get_openapi, methods=get),
        *(Route(path, _page(*file), methods=get) for path, file in PAGE_FILES.items()),
    ]
    return GuardedApp(Router(routes, redirect_slashes=False), service)
