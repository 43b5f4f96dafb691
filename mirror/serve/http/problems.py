"""RFC 9457 problem details: one shape for every error over HTTP. Paths and tracebacks are never sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from mirror.serve.objects import dumps
from storage.errors import (
    AnswerTooLarge,
    CorruptedError,
    NoSuchBoundary,
    NotAMirror,
    NotHeld,
    NotPublished,
    SeveralVbuckets,
    StorageError,
    UnknownCollection,
    ViewInvalidated,
    WriteLost,
)

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:dcp-mirror:"
"""A problem's `type` is this prefix and the problem's name."""
DETAIL_LENGTH_MAX = 1_000

COLLECTIONS_HINT = "GET /v1/collections lists them"

TITLES: dict[str, tuple[int, str]] = {
    "bad-request": (400, "Invalid request"),
    "not-authenticated": (401, "Log in first"),
    "forbidden": (403, "This user may not read that"),
    "not-found": (404, "No such path"),
    "no-document": (404, "No such document"),
    "no-collection": (404, "No such collection"),
    "no-vbucket": (404, "No such vbucket"),
    "not-held": (421, "Another mirror of the bucket holds that vbucket"),
    "method-not-allowed": (405, "This cannot be done here"),
    "timeout": (408, "The request came too slowly"),
    "write-lost": (409, "The write was rolled back at the source"),
    "history-gone": (410, "That point of history is not kept"),
    "view-invalidated": (410, "A rollback or the purger passed the position of this read"),
    "too-large": (413, "Too much at once"),
    "damaged": (500, "Stored data is damaged"),
    "internal": (500, "Internal error"),
    "unavailable": (503, "Not available now"),
    "too-busy": (503, "Too many readers"),
    "query-timeout": (504, "The query took too long"),
    "not-published-in-time": (504, "The write was not published within the deadline"),
}
"""Name -> status and title. The OpenAPI description lists these."""


class Problem(Exception):
    def __init__(
        self, name: str, detail: str, *, hint: str = "", headers: Mapping[str, str] | None = None, **more: Any
    ) -> None:
        """`name` is one of TITLES; `more` are further members of the object."""
        super().__init__(detail)
        self.name = name
        self.status, self.title = TITLES[name]
        self.detail = detail[:DETAIL_LENGTH_MAX]
        self.hint = hint[:DETAIL_LENGTH_MAX]
        self.more = more
        self.headers = dict(headers or {})
        if self.status == 503:
            self.headers.setdefault("Retry-After", "1")
        if self.status == 401:
            self.headers.setdefault("WWW-Authenticate", 'Basic realm="dcp-mirror", charset="UTF-8"')

    def object(self) -> dict[str, object]:
        found = {"type": TYPE_PREFIX + self.name, "title": self.title, "status": self.status, "detail": self.detail}
        return found | ({"hint": self.hint} if self.hint else {}) | self.more

    def response(self) -> Response:
        headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"} | self.headers
        return Response(dumps(self.object()), self.status, headers, MEDIA_TYPE)


_OF_STORAGE: dict[type[StorageError], str] = {
    UnknownCollection: "no-collection",
    NoSuchBoundary: "history-gone",
    ViewInvalidated: "view-invalidated",
    SeveralVbuckets: "bad-request",
    AnswerTooLarge: "too-large",
    WriteLost: "write-lost",
    NotPublished: "not-published-in-time",
    NotHeld: "not-held",
    CorruptedError: "damaged",
}


def of_storage(error: StorageError) -> Problem:
    name = _OF_STORAGE.get(type(error), "unavailable")
    if isinstance(error, NotAMirror):
        return Problem(name, "this mirror is still empty", hint="retry once it has reached its source")
    hint = COLLECTIONS_HINT if name == "no-collection" else error.hint  # the store's hint lists all collections
    problem = Problem(name, error.message, hint=hint)
    if error.vbid is not None:
        problem.more["vbid"] = int(error.vbid)
    return problem


def internal() -> Problem:
    return Problem("internal", "internal error; the log of the service has details")


def of_http(error: HTTPException) -> Problem:
    if error.status_code == 405:
        allowed = dict(error.headers or {})
        hint = "a mirror is only read; write to its source"
        return Problem("method-not-allowed", "method not allowed on this path", hint=hint, headers=allowed)
    if error.status_code == 404:
        return Problem("not-found", "unknown path", hint="GET /openapi.json lists them all")
    return Problem("bad-request", str(error.detail))
