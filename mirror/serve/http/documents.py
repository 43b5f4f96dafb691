"""A document by key, several by keys, and many by prefix or range in pages of results.

An ETag has the CAS and the requested form (body or stored), so answers with the same ETag have the same bytes. All
pages of results of a vbucket show the moment of the first. If that moment is lost, the next one is a problem.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from operator import attrgetter

from starlette.requests import Request
from starlette.responses import Response

from mirror.serve.access.auth import Reader
from mirror.serve.http.problems import Problem
from mirror.serve.http.requests import (
    PAGE_LIMIT_DEFAULT,
    PAGE_LIMIT_MAX,
    Page,
    Parameters,
    json_of,
    list_header,
    path_collection,
    path_key,
    requested_keys,
    vbucket,
)
from mirror.serve.http.service import (
    BUDGETED_BYTES,
    WAIT_PARAMETERS,
    Budgeted,
    Header,
    Memory,
    Plain,
    Service,
    refuse_gone,
)
from mirror.serve.objects import DATATYPE_JSON, document_json, dumps, key_fields
from mirror.server.turns import LARGE_BYTES
from storage.errors import AnswerTooLarge
from storage.format.tokens import check_as_of
from storage.model import DOCUMENT_FIELDS, Document
from storage.read.reading import BoundaryRead
from storage.read.scan import KeySelection

ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""Limit of the values in one multi-get: three of the largest documents."""
PAGE_BYTES_MAX = 8 * 1024 * 1024
PAGE_STEPS_MAX = 64
"""Limit of reads for one page. Among many deleted or expired keys, or many vbuckets without documents, a page ends
early, perhaps empty, with a token for more.
"""
KEY_ENCODINGS = ("utf8", "base64url")
HARMLESS = ("key_encoding", "timeout_ms")
"""Parameters that change nothing for a further page. Generated clients send their defaults with every request."""
IF_NONE_MATCH_LENGTH_MAX = 4096
"""Limit of the header's characters; a longer header is ignored."""
PRIVATE = ((b"cache-control", b"no-cache"), (b"x-content-type-options", b"nosniff"))
"""Headers that make clients revalidate each time by ETag, and never take a document for a web page."""
JSON = b"application/json"


_HEADERS = [f"mirror-{each.name.replace('_', '-')}".encode() for each in DOCUMENT_FIELDS]
_FORMAT = b" ".join([b"%d"] * len(DOCUMENT_FIELDS))
_numbers = attrgetter(*(each.name for each in DOCUMENT_FIELDS))


def entity_tag(document: Document, form: str) -> str:
    return f'"{document.cas:016x}{"" if form == "body" else "-stored"}"'


def matches(header: str | None, tag: str) -> bool:
    """Return True if If-None-Match names this tag (RFC 9110, section 13.1.2: weak comparison)."""
    if header is None or len(header) > IF_NONE_MATCH_LENGTH_MAX:
        return False
    return header.strip() == "*" or tag in (each.strip().removeprefix("W/") for each in header.split(","))


def headers_of(document: Document, tag: str, datatype: int) -> list[Header]:
    if datatype != document.datatype:
        document = document._replace(datatype=datatype)
    numbers = (_FORMAT % _numbers(document)).split()
    return [*PRIVATE, (b"etag", tag.encode()), *zip(_HEADERS, numbers, strict=True)]


async def get_document(request: Request) -> Response:
    """Answer once the writes of the request's tokens are published, and there is memory for the document."""
    service: Service = request.state.service
    memory: Memory = request.state.memory
    reader = await service.reader(request)
    parameters = Parameters(request, ("key_encoding", "form", "as_of", *WAIT_PARAMETERS))
    collection = path_collection(request)
    key = path_key(request, parameters.choice("key_encoding", *KEY_ENCODINGS))
    form = parameters.choice("form", "body", "stored")
    as_of = parameters.as_of()
    tokens, timeout_s = service.tokens(parameters)
    vbid = service.view.vbid_of(key)

    def read(bytes_max: int) -> Document | None:
        service.judge(reader, collection, (vbid,), as_of)
        return service.view.get(key, collection, as_of=as_of, raw=form == "stored", bytes_max=bytes_max)

    bytes_max, document = LARGE_BYTES, None
    while True:
        is_large = bytes_max > LARGE_BYTES
        try:
            document = await service.after(request, tokens, timeout_s, partial(read, bytes_max), in_bulk=is_large)
            break
        except AnswerTooLarge as error:
            bytes_max = error.byte_count
            memory.hold(bytes_max)
    if document is None:
        raise Problem("no-document", "no such document", vbid=int(vbid))
    tag = entity_tag(document, form)
    if matches(list_header(request, b"if-none-match"), tag):
        return Plain(304, headers_of(document, tag, document.datatype))
    service.requests.document_total += 1
    plain = form == "body" and document.datatype & DATATYPE_JSON
    media_type = JSON if plain else b"application/octet-stream"
    return Budgeted(memory, document.value, headers_of(document, tag, document.datatype), media_type)


async def get_documents(request: Request) -> Response:
    service: Service = request.state.service
    reader = await service.reader(request)
    parameters = Parameters(request, ("as_of", *WAIT_PARAMETERS))
    collection = path_collection(request)
    as_of = parameters.as_of()
    tokens, timeout_s = service.tokens(parameters)
    view = service.view
    async with service.body(request) as body:
        keys = await service.read_in_bulk(request, lambda: requested_keys(json_of(body)))
    vbids = {view.vbid_of(key) for key in keys}

    def read() -> tuple[bytes, int]:
        refuse_gone(request)
        service.judge(reader, collection, vbids, as_of)
        if not keys:  # no read asks for the collection
            view.reading().collection_id(collection)
        found = view.get_many(keys, collection, as_of=as_of, bytes_max=ANSWER_BYTES_MAX)
        missing = [key for key in keys if key not in found]
        rows = [document_json(found[key]) for key in keys if key in found]
        tail = b'"missing":' + dumps([key_fields(key) for key in missing]) + b"}"
        return _documents(rows, tail), len(found)

    answer, count = await service.after(request, tokens, timeout_s, read, in_bulk=True)
    service.requests.document_total += count
    return Budgeted(request.state.memory, answer, PRIVATE, JSON)


async def scan_documents(request: Request) -> Response:
    service: Service = request.state.service
    reader = await service.reader(request)
    first = ("prefix", "start", "end", "key_encoding", "vbid", "as_of", "deletions", *WAIT_PARAMETERS)
    parameters = Parameters(request, (*first, "limit", "page"))
    collection = path_collection(request)
    limit = parameters.integer("limit", PAGE_LIMIT_DEFAULT, 1, PAGE_LIMIT_MAX)
    view = service.view
    text = parameters.text("page")
    if text is not None:
        if extra := [name for name in first if name not in HARMLESS and parameters.all(name)]:
            raise Problem("bad-request", f"{extra[0]} with page", hint="a page's token holds the first parameters")
        parameters.choice("key_encoding", *KEY_ENCODINGS)
        service.tokens(parameters)
        page = Page.parse(text, view.identity.vbucket_count, collection)
    else:
        page = await _first_page(service, request, reader, parameters, collection)
    return await _answer_page(service, request, reader, page, limit)


async def _first_page(
    service: Service, request: Request, reader: Reader, parameters: Parameters, collection: str | int
) -> Page:
    encoding = parameters.choice("key_encoding", *KEY_ENCODINGS)
    prefix, start, end = (parameters.key(name, encoding) for name in ("prefix", "start", "end"))
    deletions = parameters.flag("deletions")
    as_of = parameters.as_of()
    only = parameters.text("vbid")
    tokens, timeout_s = service.tokens(parameters)
    view = service.view
    vbid = view.vbids[0] if only is None else vbucket(only, view.identity.vbucket_count)
    check_as_of(as_of, view.vbids if only is None else (vbid,))
    service.judge(reader, collection, (vbid,), as_of)
    pin = await service.after(request, tokens, timeout_s, lambda: view.pin(vbid, as_of))
    reading = view.reading(None if only is None else (vbid,), as_of=as_of, pins=(pin,))
    await service.read_in_bulk(request, partial(reading.collection_id, collection))
    first = start or b""
    return Page(pin, first, collection, prefix or b"", first, end, only is not None, deletions, as_of)


async def _answer_page(service: Service, request: Request, reader: Reader, page: Page, limit: int) -> Response:
    view = service.view
    memory: Memory = request.state.memory
    rows: list[bytes] = []
    byte_count = 0
    vbid, next_key = page.pin.vbid, page.next_key
    last_vbid = vbid if page.only_vbid else view.vbids[-1]
    more = True
    view.check_readable((vbid,))
    now_ms = page.pin.now_ms if page.as_of is None else None
    vbids = (vbid,) if page.only_vbid else None
    reading = view.reading(vbids, as_of=page.as_of, now_ms=now_ms, pins=(page.pin,))
    for _ in range(PAGE_STEPS_MAX):
        service.judge_at(reader, page.collection, reading, vbid, unknown=True)
        found, next_key = await service.read_in_bulk(
            request, partial(_read_page, request, reading, vbid, page, next_key, limit - len(rows))
        )
        rows += found
        byte_count += sum(map(len, found))
        if byte_count - memory.held_bytes > BUDGETED_BYTES:  # rows are held while other pages are read
            memory.hold(byte_count)
        if not next_key:  # no documents alone mean nothing: all keys of a step may be deleted or expired
            if vbid >= last_vbid:
                more = False
                break
            vbid += 1
            next_key = page.start
        if len(rows) >= limit or byte_count >= PAGE_BYTES_MAX:
            break
    following = replace(page, pin=reading.pin(vbid), next_key=next_key)
    at = {"vbid": page.pin.vbid, "branch": page.pin.branch, "seqno": page.pin.seqno}
    tail = dumps({"next": following.text() if more else None, "at": at})
    make = partial(_documents, rows, tail[1:])
    service.requests.document_total += len(rows)
    body = make() if byte_count <= LARGE_BYTES else await service.read_in_bulk(request, make)
    return Budgeted(memory, body, PRIVATE, JSON)


def _documents(rows: list[bytes], tail: bytes) -> bytes:
    """Return the body of an answer with the documents `rows`, and clear `rows`."""
    body = b"".join((b'{"documents":[', b",".join(rows), b"],", tail))
    rows.clear()
    return body


def _read_page(
    request: Request, reading: BoundaryRead, vbid: int, page: Page, next_key: bytes, keys_max: int
) -> tuple[list[bytes], bytes]:
    refuse_gone(request)
    selection = KeySelection(page.prefix, next_key, page.end, page.deletions)
    documents, following = reading.page(vbid, page.collection, selection, limit=keys_max)
    return [document_json(document) for document in documents], following
