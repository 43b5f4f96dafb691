"""Conversion of request texts to values of the store. Invalid texts raise Problem with the reason.

An unknown parameter is an error, so a misspelt one is never ignored.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, unquote_to_bytes

from starlette.requests import ClientDisconnect, Request

from mirror import units
from mirror.serve.http.problems import Problem
from storage.model import SEQNO_MAX, Branch, Seqno, collection_named
from storage.read.view import TOKEN_LENGTH_MAX, AsOf, Pin, Time, Token

KEY_LENGTH_MAX = 250
BODY_BYTES_MAX = 1024 * 1024
BODY_TIMEOUT_S = 15.0
KEYS_MAX = 1_000
PAGE_LIMIT_MAX = 1_000
PAGE_LIMIT_DEFAULT = 100
WAIT_MS_MAX = 60_000
WAIT_MS_DEFAULT = 2_500
PAGE_VERSION = 4
PAGE_LENGTH_MAX = 4096
PARAMETERS_MAX = 2_048
"""Limit of parameters in a URL: one for each vbucket of a bucket, and all others."""
TOKENS_MAX = 64
WEIGHT = re.compile(r"[01](\.\d{0,3})?")
NAME_LENGTH_MAX = 251 * 2 + 1
"""Characters of scope.collection, 251 for each name."""


def _bad(detail: str, hint: str = "") -> Problem:
    return Problem("bad-request", detail, hint=hint)


def header(request: Request, name: bytes) -> str | None:
    for each, value in request.scope["headers"]:
        if each == name:
            return str(value, "latin-1")
    return None


def routed(raw_path: bytes) -> str:
    """Return the path for the routes: still percent-encoded, because a key may have any bytes, and each part in one
    spelling. A decoded line feed would end the match of a route.
    """
    if b"%" not in raw_path and raw_path.isascii():
        return raw_path.decode()
    return "/".join(quote(unquote_to_bytes(part), safe="") for part in raw_path.split(b"/"))


def path_key(request: Request, encoding: str) -> bytes:
    return _url_key(unquote_to_bytes(request.path_params["key"]), encoding, "key", bytes_min=1)


def _url_key(found: bytes, encoding: str, name: str, *, bytes_min: int = 0) -> bytes:
    if encoding == "utf8":
        return bounded_key(found, name, bytes_min=bytes_min)
    return key_bytes(found.decode("latin-1"), encoding, name, bytes_min=bytes_min)


def path_collection(request: Request) -> str | int:
    return collection_name(unquote(request.path_params["collection"]))


def list_header(request: Request, name: bytes) -> str | None:
    """Return a header that is a list: all its lines, joined (RFC 9110, section 5.3)."""
    found = [str(value, "latin-1") for each, value in request.scope["headers"] if each == name]
    return ", ".join(found) if found else None


def accepts(request: Request, media_type: str, rather_than: str) -> bool:
    """Return True if Accept names `media_type`, and not `rather_than` with a higher weight (RFC 9110, 12.5.1)."""
    weights = {}
    for each in (list_header(request, b"accept") or "").lower().split(","):
        name, *parameters = (part.strip() for part in each.split(";"))
        given = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        weights[name] = float(given) if WEIGHT.fullmatch(given) else 0.0
    return weights.get(media_type, 0.0) > 0 and weights[media_type] >= weights.get(rather_than, 0.0)


class Parameters:
    def __init__(self, request: Request, known: Iterable[str]) -> None:
        self._found: dict[str, list[str]] = {}
        query = request.scope["query_string"]
        if not query:
            return
        if query.count(b"&") >= PARAMETERS_MAX:
            raise _bad(f"a query has {PARAMETERS_MAX} parameters at most")
        if not query.isascii():
            raise _bad("the query is not ASCII", "percent-encode other bytes")
        for name, value in parse_qsl(query.decode(), keep_blank_values=True, errors="surrogateescape"):
            self._found.setdefault(name, []).append(value)
        unknown = set(self._found) - set(known)
        if unknown:
            raise _bad(f"unknown parameter {min(unknown)!r}", f"known here: {', '.join(sorted(known)) or 'none'}")

    def all(self, name: str) -> list[str]:
        return self._found.get(name, [])

    def text(self, name: str) -> str | None:
        found = self._bytes(name)
        try:
            return None if found is None else found.decode()
        except UnicodeDecodeError:
            raise _bad(f"{name} is not UTF-8") from None

    def _bytes(self, name: str) -> bytes | None:
        found = self._found.get(name, [])
        if len(found) > 1:
            raise _bad(f"{name} is given {len(found)} times")
        return found[0].encode(errors="surrogateescape") if found else None

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        text = self.text(name)
        return default if text is None else integer(name, text, low, high)

    def flag(self, name: str, default: bool = False) -> bool:
        text = self.text(name)
        if text is None:
            return default
        if text not in ("true", "false"):
            raise _bad(f"{name} is {text!r}, neither true nor false")
        return text == "true"

    def choice(self, name: str, *choices: str) -> str:
        text = self.text(name)
        if text is not None and text not in choices:
            raise _bad(f"{name} is {text!r}, not one of {', '.join(choices)}")
        return text or choices[0]

    def key(self, name: str, encoding: str) -> bytes | None:
        found = self._bytes(name)
        return None if found is None else _url_key(found, encoding, name)

    def as_of(self) -> AsOf:
        """Return a seqno, or a time in ISO 8601 with its zone."""
        text = self.text("as_of")
        if text is None:
            return None
        if text.isascii() and text.isdigit():
            return integer("as_of", text, 0, SEQNO_MAX)
        return moment(text)


def moment(text: str) -> Time:
    try:
        return Time(units.moment_ms(text, needs_zone=True))
    except ValueError:
        hint = "2026-01-31T12:00:00Z, with a zone"
        raise _bad(f"as_of is {text[:60]!r}, neither a seqno nor a time", hint) from None


def integer(name: str, text: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and low <= int(text) <= high):
        raise _bad(f"{name} is {text[:60]!r}, not a number from {low} to {high}")
    return int(text)


def key_bytes(text: str, encoding: str, name: str = "key", *, bytes_min: int = 0) -> bytes:
    try:
        key = text.encode() if encoding == "utf8" else from_base64url(text)
    except ValueError:
        raise _bad(f"{name} is not {'UTF-8' if encoding == 'utf8' else 'base64url'}") from None
    return bounded_key(key, name, bytes_min=bytes_min)


def bounded_key(key: bytes, name: str = "key", *, bytes_min: int = 1) -> bytes:
    if len(key) < bytes_min:
        raise _bad(f"the {name} is empty")
    if len(key) > KEY_LENGTH_MAX:
        raise _bad(f"{name} has {len(key)} bytes; a key has {KEY_LENGTH_MAX} at most")
    return key


def from_base64url(text: str) -> bytes:
    """Decode base64url, with or without padding. Raises ValueError."""
    bare = text.encode("ascii").rstrip(b"=")
    return base64.b64decode(bare + b"=" * (-len(bare) % 4), b"-_", validate=True)


def to_base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def collection_name(text: str) -> str | int:
    if not text or len(text) > NAME_LENGTH_MAX:
        raise _bad("invalid collection name", "scope.collection, or the number of one")
    found = collection_named(text)
    return found if isinstance(found, str) else integer("collection", text, 0, 2**32 - 1)


def vbucket(text: str, count: int) -> int:
    vbid = integer("vbid", text, 0, 0xFFFF)
    if vbid >= count:
        raise Problem("no-vbucket", f"there is no vbucket {vbid}; this bucket has {count}")
    return vbid


async def read_body(request: Request, hold: Callable[[int], None]) -> bytes:
    """Return a request's body. `hold` counts its bytes as they come, and raises Problem if there is no memory."""
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > BODY_BYTES_MAX:
        raise _too_large()
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                if len(data) + len(chunk) > BODY_BYTES_MAX:
                    raise _too_large()
                hold(len(chunk))
                data += chunk
    except TimeoutError:
        raise Problem("timeout", f"the body was not there within {BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise _bad("the body ended too early") from None
    return bytes(data)


def json_of(body: bytes) -> Any:
    """Parse a body. Call this in a thread: a megabyte may take 30 ms."""
    try:
        return json.loads(body.decode())
    except (ValueError, RecursionError):
        raise _bad("the body is not JSON in UTF-8") from None


def _too_large() -> Problem:
    return Problem("too-large", f"a body has {BODY_BYTES_MAX} bytes at most", hint="ask for fewer keys at once")


def requested_keys(body: Any) -> list[bytes]:
    """Return the keys of a multi-get: `keys` as text, `keys_b64` as base64url; in order, without duplicates."""
    if not isinstance(body, dict):
        raise _bad("the body is not an object", '{"keys": ["a", "b"]}')
    unknown = set(body) - {"keys", "keys_b64"}
    if unknown:
        raise _bad(f"unknown member {min(unknown)!r}", "known here: keys, keys_b64")
    found: dict[bytes, None] = {}
    count = 0
    for name, encoding in (("keys", "utf8"), ("keys_b64", "base64url")):
        texts = body.get(name, [])
        if not isinstance(texts, list):
            raise _bad(f"{name} is not a list of strings")
        count += len(texts)
        if count > KEYS_MAX:
            raise Problem("too-large", f"{count} keys; {KEYS_MAX} at most are read at once", hint="ask for fewer")
        if not all(isinstance(text, str) for text in texts):
            raise _bad(f"{name} is not a list of strings")
        found |= dict.fromkeys(key_bytes(text, encoding, bytes_min=1) for text in texts)
    return list(found)


@dataclass(frozen=True, slots=True)
class Page:
    """The state needed to resume a scan: its request, current vbucket and the key to continue from."""

    pin: Pin
    next_key: bytes
    """The key to continue from in the pin's vbucket."""
    collection: str | int
    """Each vbucket knows its id of a name at its boundary: a collection that is created again has another id, and
    vbuckets learn of it at different times.
    """
    prefix: bytes
    start: bytes
    """The requested first key, with which each further vbucket begins."""
    end: bytes | None
    only_vbid: bool
    deletions: bool
    as_of: AsOf

    def text(self) -> str:
        pin = self.pin
        at = [pin.vbid, pin.branch, pin.seqno, pin.history_id, pin.now_ms]
        end = None if self.end is None else to_base64url(self.end)
        texts = [to_base64url(key) for key in (self.next_key, self.prefix, self.start)]
        keys = [texts[0], self.collection, *texts[1:], end]
        as_of = ["t", self.as_of.ms] if isinstance(self.as_of, Time) else self.as_of
        fields = [PAGE_VERSION, *at, *keys, int(self.only_vbid), int(self.deletions), as_of]
        return to_base64url(json.dumps(fields, separators=(",", ":")).encode())

    @staticmethod
    def parse(text: str, vbucket_count: int, collection: str | int) -> Page:
        try:
            if len(text) > PAGE_LENGTH_MAX:
                raise ValueError("it is too long")
            fields = json.loads(from_base64url(text))
            if fields[0] != PAGE_VERSION:
                raise ValueError("it is of another version")
            _, vbid, branch, seqno, history_id, pin_now, next_key, name, *keys, end, only, deletions, as_of = fields
            if name != collection:
                raise ValueError("it is of another collection")
            numbers = (vbid, branch, seqno, history_id, pin_now, only, deletions)
            limits = (vbucket_count - 1, 2**32 - 1, SEQNO_MAX, 2**64 - 1, 2**53, 1, 1)
            bounded = zip(numbers, limits, strict=True)
            if any(type(number) is not int or not 0 <= number <= high for number, high in bounded):
                raise ValueError("a number is out of range")
            if isinstance(as_of, list):
                word, moment = as_of
                if word != "t" or type(moment) is not int or abs(moment) > 2**53:
                    raise ValueError("invalid as_of")
                at: AsOf = Time(moment)
            elif as_of is None or (type(as_of) is int and 0 <= as_of <= SEQNO_MAX):
                at = as_of
            else:
                raise ValueError("invalid as_of")
            following, prefix, start = (from_base64url(key) for key in (next_key, *keys))
            stop = None if end is None else from_base64url(end)
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            raise _bad(f"invalid page token: {error}", "give `next` of the last page unchanged") from None
        pin = Pin(vbid, Branch(branch), Seqno(seqno), history_id, pin_now)
        return Page(pin, following, collection, prefix, start, stop, bool(only), bool(deletions), at)


def position_text(tokens: Mapping[int, Token]) -> str:
    """Return the position of a reader of changes: a single token as it is, several compressed into one word."""
    if len(tokens) == 1:
        return str(next(iter(tokens.values())))
    packed = ",".join(str(tokens[vbid]) for vbid in sorted(tokens))
    return "z" + to_base64url(zlib.compress(packed.encode(), 3))


def parse_position(text: str, vbucket_count: int) -> dict[int, Token]:
    """Parse a result of `position_text`. For any text, the number of vbuckets bounds work and memory."""
    bytes_max = vbucket_count * (TOKEN_LENGTH_MAX + 1)
    try:
        if text.startswith("z"):
            unpacker = zlib.decompressobj()
            data = unpacker.decompress(from_base64url(text[1:]), bytes_max)
            if unpacker.unconsumed_tail or not unpacker.eof:
                raise ValueError("it is cut off or too long")
            text = data.decode()
        if text.count(",") >= vbucket_count:
            raise ValueError(f"it has more tokens than the bucket has vbuckets ({vbucket_count})")
        parts = text.split(",")
        tokens = [Token.parse(part) for part in parts]
    except (ValueError, zlib.error) as error:
        raise _bad(f"invalid position: {error}", "give an id of the stream unchanged") from None
    found = {int(token.vbid): token for token in tokens}
    if len(found) != len(tokens):
        raise _bad("invalid position: a vbucket is named twice")
    for vbid in found:
        vbucket(str(vbid), vbucket_count)
    return found
