"""The OpenAPI description of the HTTP API: requests, answers, and every way it can fail.

Knows the routes' shapes as data, and the bounds of `requests`; never how an answer is made. Invariant: the test
suite asks the API what this document allows, and what it does not, and holds each answer against it.
"""

from __future__ import annotations

from typing import Any

from mirror.serve.http import problems as http_problems
from mirror.serve.http import requests as http_requests
from mirror.serve.metrics import STATES
from storage.model import SEQNO_MAX

Schema = dict[str, Any]

INT = {"type": "integer", "minimum": 0}
NULLABLE_INT = {"type": ["integer", "null"]}
NULLABLE_NUMBER = {"type": ["number", "null"]}
NULLABLE_TEXT = {"type": ["string", "null"]}
TEXT = {"type": "string"}
FLAG = {"type": "string", "enum": ["true", "false"]}
EVENTS = (
    "mutation", "deletion", "expiration", "system_event", "rollback", "retraction", "restoration", "reset",
    "problem", "end",
)  # fmt: skip
DECIMAL_64 = "(0|[1-9][0-9]{0,18})"
"""Numbers below 10^19: all that any source ever counts to."""
SINCE = "^(now|[0-9]{1,4}:[0-9]{1,9}:[0-9]{1,18}|z[A-Za-z0-9_-]+)$"
POSITION = f"^([0-9]{{1,4}}:[0-9]{{1,9}}:{DECIMAL_64})?$"


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None, *, closed: bool = True) -> Schema:
    found = {"type": "object", "properties": required | (optional or {}), "required": sorted(required)}
    return found | {"additionalProperties": False} if closed else found


KEY = {"key": TEXT, "key_b64": {"type": "string", "format": "byte"}}
SCHEMAS: dict[str, Schema] = {
    "Problem": {
        "description": "RFC 9457 problem details.",
        **_object(
            {
                "type": {"type": "string", "enum": [http_problems.TYPE_PREFIX + name for name in http_problems.TITLES]},
                "title": TEXT,
                "status": {"type": "integer", "minimum": 400, "maximum": 599},
                "detail": TEXT,
            },
            {"hint": TEXT, "vbid": INT, "token": TEXT, "reasons": {"type": "array", "items": TEXT}},
        ),
    },
    "Document": {
        "description": "`key_b64` stands for `key` where the key is not UTF-8, `value_b64` for `value` where the value "
        "is not JSON. A JSON value stands as it was stored. `problem` says why `value_b64` is the value as it is "
        "stored, compressed or with its xattrs.",
        **_object(
            {
                "vbid": INT, "collection_id": INT, "seqno": INT, "rev_seqno": INT, "cas": INT, "flags": INT,
                "expiry": INT, "datatype": INT, "deleted": {"type": "boolean"},
            },
            KEY | {"value": {}, "value_b64": {"type": "string", "format": "byte"}, "problem": TEXT},
        ),
    },
    "Documents": _object(
        {
            "documents": {"type": "array", "items": {"$ref": "#/components/schemas/Document"}},
            "missing": {"type": "array", "items": _object({}, KEY)},
        }
    ),
    "Page": _object(
        {
            "documents": {"type": "array", "items": {"$ref": "#/components/schemas/Document"}},
            "next": NULLABLE_TEXT,
            "at": _object({"vbid": INT, "branch": INT, "seqno": INT}),
        }
    ),
    "Keys": _object(
        {},
        {
            "keys": {
                "type": "array",
                "items": {"type": "string", "minLength": 1, "maxLength": http_requests.KEY_LENGTH_MAX},
                "maxItems": http_requests.KEYS_MAX // 2,
            },
            "keys_b64": {
                "type": "array",
                "items": {
                    "type": "string",
                    "pattern": "^([A-Za-z0-9_-]{4}){0,83}[A-Za-z0-9_-]{2,4}$",
                    "maxLength": 334,
                },
                "maxItems": http_requests.KEYS_MAX // 2,
            },
        },
    ),
    "Collections": _object(
        {
            "collections": {
                "type": "array",
                "items": _object({"collection_id": INT, "scope": TEXT, "name": TEXT, "max_ttl": NULLABLE_INT}),
            }
        }
    ),
    "Vbucket": _object(
        {
            "vbid": INT, "group": INT, "branch": INT, "state": {"type": "string", "enum": list(STATES)},
            "published_seqno": INT, "staged_seqno": INT, "source_high_seqno": NULLABLE_INT,
            "lag_seqnos": NULLABLE_INT, "lag_s": NULLABLE_NUMBER, "documents": NULLABLE_INT, "detail": NULLABLE_TEXT,
            "last_error": NULLABLE_TEXT, "node": NULLABLE_TEXT, "vbuuid": NULLABLE_TEXT, "rollback_count": INT,
            "last_rollback_ms": NULLABLE_INT, "resync_count": NULLABLE_INT, "last_resync_ms": NULLABLE_INT,
        },
        closed=False,
    ),
    "Vbuckets": _object({"vbuckets": {"type": "array", "items": {"$ref": "#/components/schemas/Vbucket"}}}),
    "VbucketHistory": _object(
        {
            "status": {"anyOf": [{"$ref": "#/components/schemas/Vbucket"}, {"type": "null"}]},
            "failover_log": {"type": "array", "items": _object({"vbuuid": TEXT, "seqno": INT})},
            "boundaries": {
                "type": "array",
                "items": _object(
                    {"branch": INT, "seqno": INT, "snap_start_seqno": INT, "vbuuid": TEXT, "time_ms": INT}
                ),
            },
            "boundary_count": INT,
            "history_floor_seqno": INT,
            "local_purge_seqno": INT,
            "source_purge_seqno": INT,
            "stale": {"type": "boolean"},
            "rollbacks": {"type": "array", "items": {"type": "object"}},
        }
    ),
    "Status": {
        "description": "As `dcp-mirror status --json` prints it (cli/JSON.md), with disk and history.",
        **_object(
            {
                "service": {"type": "string", "enum": ["up", "down"]}, "state": TEXT, "totals": {"type": "object"},
                "workers": {"type": "array"}, "lag_limit_s": {"type": "number"},
                "disk": _object({"mirror_bytes": INT, "free_bytes": INT, "total_bytes": INT}),
                "history": {"type": "object"},
                "vbuckets": {"type": "array", "items": {"$ref": "#/components/schemas/Vbucket"}},
            },
            closed=False,
        ),
    },
    "Samples": _object(
        {
            "samples": {
                "type": "array",
                "items": _object(
                    {
                        "time_ms": INT, "documents_per_s": NULLABLE_NUMBER, "bytes_per_s": NULLABLE_NUMBER,
                        "reads_per_s": NULLABLE_NUMBER, "lag_seqnos": NULLABLE_INT, "lag_s": NULLABLE_NUMBER,
                    }
                ),
            }
        }
    ),
    "Event": {
        "description": "An event of the stream; `data` is a JSON object in the shape of `dcp-mirror changes --json`.",
        **_object({"event": {"type": "string", "enum": list(EVENTS)}, "data": TEXT}, {"id": TEXT, "retry": INT}),
    },
    "Health": _object({"status": {"type": "string", "enum": ["alive", "ready"]}}),
}  # fmt: skip


def _parameter(name: str, where: str, schema: Schema, text: str) -> Schema:
    found: Schema = {"name": name, "in": where, "schema": schema, "description": text}
    if where == "path":
        found["required"] = True
    if schema.get("type") == "array":
        found |= {"style": "form", "explode": True}
    return found


def _query(name: str, schema: Schema, text: str) -> Schema:
    return _parameter(name, "query", schema, text)


KEY_SCHEMA = {"type": "string", "maxLength": http_requests.KEY_LENGTH_MAX}
COLLECTION = _parameter(
    "collection", "path", {"type": "string", "minLength": 1, "maxLength": 200, "pattern": r"^[A-Za-z0-9_.%-]+$"},
    "`scope.collection`, a name in the scope `_default`, or a collection's number.",
)  # fmt: skip
VBID = {"type": "integer", "minimum": 0, "maximum": 65_535}
TOKEN = _query(
    "token",
    {
        "type": "array",
        "items": {"type": "string", "pattern": f"^[0-9]{{1,4}}:{DECIMAL_64}:{DECIMAL_64}$"},
        "maxItems": http_requests.TOKENS_MAX,
    },
    "Mutation tokens `vbid:vbuuid:seqno` (decimal) of writes to see: the read waits until they are published.",
)
TIMEOUT = _query(
    "timeout_ms",
    {"type": "integer", "minimum": 0, "maximum": http_requests.WAIT_MS_MAX, "default": http_requests.WAIT_MS_DEFAULT},
    "How long to wait for the tokens.",
)
AS_OF = _query(
    "as_of",
    {
        "anyOf": [
            {"type": "integer", "minimum": 0, "maximum": SEQNO_MAX},
            {"type": "string", "format": "date-time"},
        ]
    },
    "Read as of the newest kept boundary not after this seqno of the vbucket, or this time.",
)
ENCODING = _query(
    "key_encoding", {"type": "string", "enum": ["utf8", "base64url"], "default": "utf8"}, "How keys are written here."
)


def _header(text: str, schema: Schema = TEXT) -> Schema:
    return {"description": text, "schema": schema}


DOCUMENT_HEADERS = {
    "ETag": _header("The CAS, and the form."),
    **{
        f"Mirror-{name}": _header(text, {"type": "integer"})
        for name, text in (
            ("Vbid", "The vbucket."),
            ("Collection-Id", "The collection."),
            ("Seqno", "The version's seqno."),
            ("Rev-Seqno", "How many versions there were."),
            ("Cas", "The CAS."),
            ("Flags", "The writer's flags."),
            ("Expiry", "Seconds since 1970; 0: never."),
            ("Datatype", "Bits of the body as sent: 1 JSON, 2 Snappy, 4 xattrs in front."),
            ("Branch", "The local line of history that it is on."),
        )
    },
}


def _json(name: str, text: str) -> Schema:
    return {"description": text, "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}}


def _problems(*statuses: int) -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    for status in sorted({400, 401, 403, 500, 503, *statuses}):
        names = [name for name, (code, _) in http_problems.TITLES.items() if code == status]
        found[str(status)] = {
            "description": " / ".join(http_problems.TITLES[name][1] for name in names),
            "content": {http_problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
    return found


def _operation(
    name: str, summary: str, answers: dict[str, Schema], parameters: list[Schema] | None = None, **more: Any
) -> Schema:
    return {"operationId": name, "summary": summary, "parameters": parameters or [], "responses": answers} | more


def _paths() -> dict[str, Schema]:
    bytes_body = {"schema": {"type": "string", "format": "binary"}}
    document_answers = {
        "200": {
            "description": "The document's bytes.",
            "headers": DOCUMENT_HEADERS,
            "content": {"application/json": {"schema": {}}, "application/octet-stream": bytes_body},
        },
        "304": {"description": "If-None-Match names this version.", "headers": DOCUMENT_HEADERS},
        **_problems(404, 409, 410, 421, 504),
    }
    document_parameters = [
        COLLECTION,
        _parameter("key", "path", {"minLength": 1} | KEY_SCHEMA, "At most 250 bytes."),
        ENCODING,
        _query(
            "form", {"type": "string", "enum": ["body", "stored"], "default": "body"},
            "`stored`: as the source sent it, maybe compressed and with xattrs; Mirror-Datatype says which.",
        ),
        AS_OF, TOKEN, TIMEOUT,
        _parameter("If-None-Match", "header", {"type": "string"}, "ETags, or `*` (RFC 9110, 13.1.2)."),
    ]  # fmt: skip
    ranges = [
        _query("prefix", KEY_SCHEMA, "Keys that begin so."),
        _query("start", KEY_SCHEMA, "From this key on."),
        _query("end", KEY_SCHEMA, "Below this key."),
    ]
    changes = {
        "200": {
            "description": "Events `mutation`, `deletion`, `expiration`, `system_event`, `rollback`, `retraction` and "
            "`restoration` with the objects of `dcp-mirror changes --json`; `reset` (a problem) when the stream cannot "
            "go on without a gap; `problem` when it ends for another reason and can be resumed; `end` with the "
            "position when it does not follow.",
            "content": {"text/event-stream": {"schema": {"$ref": "#/components/schemas/Event"}}},
        },
        **_problems(404, 409, 410, 421, 504),
    }
    plain = {"content": {"text/plain": {"schema": TEXT}}, "description": "The text format."}
    return {
        "/v1/collections": {"get": _operation("get_collections", "Collections", {
            "200": _json("Collections", "Those that this user may read."), **_problems()})},
        "/v1/collections/{collection}/documents/{key}": {
            "get": _operation("get_document", "One document", document_answers, document_parameters),
            "head": _operation(
                "head_document", "Its headers alone",
                {code: {k: v for k, v in each.items() if k != "content"} for code, each in document_answers.items()},
                document_parameters,
            ),
        },
        "/v1/collections/{collection}/documents": {
            "get": _operation(
                "scan_documents", "A page of a collection, in key order within each vbucket",
                {"200": _json("Page", "A page may hold fewer than `limit`; the end is where `next` is null."),
                 **_problems(404, 409, 410, 421, 504)},
                [COLLECTION, *ranges, ENCODING, _query("vbid", VBID, "Of one vbucket alone."),
                 _query("deletions", FLAG, "With tombstones."), AS_OF, TOKEN, TIMEOUT,
                 _query("limit", {"type": "integer", "minimum": 1, "maximum": http_requests.PAGE_LIMIT_MAX,
                                  "default": http_requests.PAGE_LIMIT_DEFAULT}, "Documents in a page at most."),
                 _query("page", {"type": "string", "maxLength": 4096},
                        "`next` of the page before; besides it only `limit`.")],
            ),
        },
        "/v1/collections/{collection}/multi-get": {
            "post": _operation(
                "get_documents", "Several documents; those of one group of vbuckets as of one moment",
                {"200": _json("Documents", "What was found, in the order of the request."),
                 **_problems(404, 408, 409, 410, 413, 421, 504)},
                [COLLECTION, AS_OF, TOKEN, TIMEOUT],
                requestBody={"required": True, "content": {
                    "application/json": {"schema": {"$ref": "#/components/schemas/Keys"}}}},
            ),
        },
        "/v1/changes": {"get": _operation("get_changes", "Changes as server-sent events", changes, [
            _query("vbid", {"type": "array", "items": VBID, "maxItems": 64}, "Of these vbuckets alone."),
            _query("since", {"type": "string", "maxLength": 16_384, "pattern": SINCE}, "An event's id, or `now`."),
            _query("follow", FLAG, "false: end with what is there."),
            _query("collection", COLLECTION["schema"], "Of this collection alone."),
            TOKEN, TIMEOUT,
            _parameter("Last-Event-ID", "header", {"type": "string", "pattern": POSITION},
                       "What a browser sends when it connects again; goes before `since`."),
        ])},
        "/v1/vbuckets": {"get": _operation("get_vbuckets", "Vbuckets", {
            "200": _json("Vbuckets", "One row each."), **_problems()})},
        "/v1/vbuckets/{vbid}": {"get": _operation("get_vbucket", "One vbucket and its history", {
            "200": _json("VbucketHistory", "What is kept."), **_problems(404, 421)},
            [_parameter("vbid", "path", VBID, "The vbucket.")])},
        "/v1/status": {"get": _operation("get_status", "How the mirror stands", {
            "200": _json("Status", "All of it."), **_problems()})},
        "/v1/status/samples": {"get": _operation("get_samples", "The last quarter of an hour", {
            "200": _json("Samples", "Oldest first."), **_problems()})},
        "/metrics": {"get": _operation("get_metrics", "For Prometheus", {"200": plain, **_problems()})},
        "/livez": {"get": _operation("get_livez", "Whether this process answers",
                                     {"200": _json("Health", "It does.")}, security=[])},
        "/readyz": {"get": _operation(
            "get_readyz", "Whether every vbucket is published and the lag below its limit",
            {"200": _json("Health", "It is."), **_problems()})},
    }  # fmt: skip


def description(version: str) -> Schema:
    """The document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dcp-mirror",
            "version": version,
            "description": "A local, durable read replica of a Couchbase bucket. Everything here only reads. "
            "Parameters that are not described are refused.",
        },
        "paths": _paths(),
        "components": {"schemas": SCHEMAS, "securitySchemes": {"basic": {"type": "http", "scheme": "basic"}}},
        "security": [{"basic": []}, {}],
    }
